"""Predicts the movie that a user rates next, on MovieLens latest-small.

    python examples/next_item_movielens.py
    python examples/next_item_movielens.py --loss=nce --epochs=5
    python examples/next_item_movielens.py --address=grpc://ps0:7077,ps1:7077

The input is the last movies that the user has rated, and the classes are all
movies: one row of an output table for each. Training reads and pushes the rows
of a batch's labels and of some sampled movies, and never all of them. The last
ratings of each user are held out; movies are ranked for each, without those
that the user has rated before. The model must be better than popularity, which
ranks the same movies first for everybody.
"""

import contextlib
import csv
import gzip
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
from absl import app, flags

import tfswitch as tsw

_ADDRESS = flags.DEFINE_string(
    "address",
    None,
    "Where the tables live, as tfswitch.connect takes it; default: here.",
)
_EPOCHS = flags.DEFINE_integer("epochs", 8, "How often to see all ratings.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Ratings per step.")
_NUM_SAMPLED = flags.DEFINE_integer(
    "num_sampled", 500, "Sampled movies per step."
)
_LOSS = flags.DEFINE_enum(
    "loss", "softmax", ["softmax", "nce"], "Which sampled loss."
)
_SAMPLER = flags.DEFINE_enum(
    "sampler", "unigram", ["unigram", "log_uniform"], "What draws movies."
)
_DATA = flags.DEFINE_string(
    "data",
    str(pathlib.Path(__file__).parent / "data" / "ml_latest_small"),
    "Folder with ratings.csv.gz.",
)
_MAX_USERS = flags.DEFINE_integer("max_users", None, "Take only so many users.")

SEED = 1
DIM = 32
HISTORY = 10  # Movies from which a prediction is made.
HELD_OUT = 5  # Ratings of each user.
LEARNING_RATE = 0.003
TOP = 10


class Examples(NamedTuple):
    """Histories, int64 `(n, HISTORY)`, padded with 0; and the next movies."""

    history: np.ndarray
    label: np.ndarray


def read_movies_by_user(folder: str, max_users: int | None) -> list[list[int]]:
    """Returns the movies of each user in the order of the ratings."""
    ratings: dict[int, list[tuple[int, int]]] = {}
    path = pathlib.Path(folder) / "ratings.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            ratings.setdefault(int(row["userId"]), []).append(
                (int(row["timestamp"]), int(row["movieId"]))
            )
    users = list(ratings.values())[:max_users]
    return [[movie for _, movie in sorted(user)] for user in users]


def make_examples(
    users: list[list[int]],
) -> tuple[Examples, Examples, list[list[int]]]:
    """Returns examples for training and testing, and what testers know."""
    train: list[tuple[list[int], int]] = []
    test: list[tuple[list[int], int]] = []
    seen: list[list[int]] = []
    for movies in users:
        for i in range(1, len(movies)):
            example = (movies[max(0, i - HISTORY) : i], movies[i])
            if i < len(movies) - HELD_OUT:
                train.append(example)
            else:
                test.append(example)
                seen.append(movies[:i])
    return _to_arrays(train), _to_arrays(test), seen


def _to_arrays(examples: list[tuple[list[int], int]]) -> Examples:
    history = np.zeros((len(examples), HISTORY), np.int64)
    for row, (movies, _) in zip(history, examples, strict=True):
        row[: len(movies)] = movies
    return Examples(history, np.array([label for _, label in examples]))


def build_models(
    sampler: tsw.nn.Sampler,
) -> tuple[keras.Model, keras.Model, tsw.keras.SampledSoftmax]:
    """Returns the model that trains, the one of users, and the loss layer."""
    history = keras.Input((HISTORY,), dtype="int64", name="history")
    label = keras.Input((), dtype="int64", name="label")
    optimizer = tsw.optimizers.Adam(LEARNING_RATE)
    seen = tsw.keras.DynamicEmbedding(
        DIM, name="seen", optimizer=optimizer, combiner="mean", mask_zero=True
    )(history)
    hidden = keras.layers.Dense(4 * DIM, "relu")(seen)
    user = keras.layers.Dense(DIM)(keras.layers.Dropout(0.2)(hidden))

    next_movie = tsw.keras.DynamicEmbedding(
        DIM, name="next", optimizer=optimizer
    )
    popularity = tsw.keras.DynamicEmbedding(
        1, name="popularity", optimizer=optimizer
    )
    kind = tsw.keras.NCE if _LOSS.value == "nce" else tsw.keras.SampledSoftmax
    loss = kind(
        next_movie, sampler, _NUM_SAMPLED.value, biases=popularity, seed=SEED
    )
    model = keras.Model([history, label], loss(user, label))
    model.compile(keras.optimizers.Adam(LEARNING_RATE))
    return model, keras.Model(history, user), loss


def ranks(
    scores: np.ndarray, movies: np.ndarray, test: Examples, seen: list
) -> np.ndarray:
    """Returns the rank of each label, from 1; infinite if it is no candidate.

    Args:
        scores: `(examples, movies)`.
        movies: The candidates.
        test: The examples.
        seen: Which movies cannot be the answer, for each example.
    """
    column = {movie: i for i, movie in enumerate(movies)}
    scores = scores.copy()
    result = np.full(len(test.label), np.inf)
    for i, (label, known) in enumerate(zip(test.label, seen, strict=True)):
        if label not in column:
            continue
        scores[i, [column[m] for m in known if m in column]] = -np.inf
        result[i] = 1 + np.sum(scores[i] > scores[i, column[label]])
    return result


def report(name: str, rank: np.ndarray) -> None:
    print(
        f"{name}: hit rate@{TOP} {np.mean(rank <= TOP):.4f}, "
        f"MRR {np.mean(1 / rank):.4f}"
    )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    keras.utils.set_random_seed(SEED)
    users = read_movies_by_user(_DATA.value, _MAX_USERS.value)
    train, test, seen = make_examples(users)
    # The most frequent movie comes first, as the log-uniform sampler needs it.
    movies, counts = np.unique(train.label, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    movies, counts = movies[order], counts[order]
    print(
        f"{len(train.label)} ratings to train with, {len(test.label)} held "
        f"out; {len(movies)} movies"
    )
    sampler: tsw.nn.Sampler
    if _SAMPLER.value == "unigram":
        sampler = tsw.nn.UnigramSampler((movies, counts))
    else:
        sampler = tsw.nn.LogUniformSampler(len(movies), ids=movies)

    with _connected():
        model, user_model, loss = build_models(sampler)
        # So the model begins like popularity, and NCE with probabilities that
        # sum to 1.
        loss.biases.table.assign(
            movies, np.log(counts / counts.sum())[:, np.newaxis]
        )
        model.fit(
            list(train),
            epochs=_EPOCHS.value,
            batch_size=_BATCH_SIZE.value,
            verbose=1 if sys.stdout.isatty() else 2,
        )
        user = user_model.predict(test.history, batch_size=1024, verbose=0)
        scores = loss.score(user, movies).numpy()
    popularity = np.broadcast_to(counts.astype(np.float32), scores.shape)
    report("popularity", ranks(popularity, movies, test, seen))
    report(f"sampled {_LOSS.value}", ranks(scores, movies, test, seen))


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    if not _ADDRESS.value:
        yield
        return
    with tsw.connect(_ADDRESS.value):
        yield


if __name__ == "__main__":
    app.run(main)
