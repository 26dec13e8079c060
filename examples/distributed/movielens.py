"""MovieLens latest-small for several workers, and a small model of it.

Common parts of the examples in this folder. `examples/deepfm_movielens.py` has
a better model and more fields.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

import tfswitch as tsw

SEED = 1
DIM = 8  # Floats of a vector; each row has one more, its linear weight.
LEARNING_RATE = 0.01

_RATINGS = (
    pathlib.Path(__file__).parents[1]
    / "data"
    / "ml_latest_small"
    / "ratings.csv.gz"
)


class Ratings(NamedTuple):
    """Users and movies, int64 `(rows, 2)`, and whether liked, `(rows, 1)`."""

    ids: np.ndarray
    labels: np.ndarray

    def rows(self, which: Any) -> "Ratings":
        return Ratings(self.ids[which], self.labels[which])


def read(max_ratings: int | None) -> tuple[Ratings, Ratings]:
    """Returns ratings to train with, and a fifth that is held out.

    The order is random, and the same in every process.
    """
    table = np.loadtxt(_RATINGS, delimiter=",", skiprows=1)
    order = np.random.default_rng(SEED).permutation(len(table))[:max_ratings]
    table = table[order]
    everything = Ratings(
        table[:, :2].astype(np.int64),
        (table[:, 2:3] >= 4.0).astype(np.float32),
    )
    held_out = np.arange(len(table)) % 5 == 4
    return everything.rows(~held_out), everything.rows(held_out)


def share(ratings: Ratings, worker: int, num_workers: int) -> Ratings:
    """Returns a worker's part of the data; the parts are uneven on purpose.

    Three workers get three sixths, two sixths and one sixth.
    """
    parts = np.arange(num_workers, 0, -1)
    ends = np.cumsum(parts) * len(ratings.ids) // parts.sum()
    begin = ends[worker - 1] if worker else 0
    return ratings.rows(slice(begin, ends[worker]))


def my_share(ratings: Ratings, worker: tsw.train.Worker) -> Ratings:
    """Returns this worker's part of the data, and prints a line about it."""
    mine = share(ratings, worker.worker_id, worker.num_workers)
    print(
        f"worker {worker.worker_id} of {worker.num_workers}: {len(mine.ids)} "
        f"of {len(ratings.ids)} ratings, servers at {worker.cluster.address}"
    )
    return mine


def batches(
    ratings: Ratings, order: np.ndarray, size: int
) -> Iterator[Ratings]:
    """Gives the ratings in batches."""
    for begin in range(0, len(order), size):
        yield ratings.rows(order[begin : begin + size])


def train_together(
    worker: tsw.train.Worker,
    step: Callable[[Any, Any], tuple[Any, Any]],
    mine: Ratings,
    *,
    epochs: int,
    batch_size: int,
) -> None:
    """Trains in steps of all workers together, until all data is used.

    Args:
        worker: This process.
        step: Maps ids and labels of a batch, which may be empty, to the mean
            loss and the number of samples of all workers.
        mine: This worker's part of the data.
        epochs: How often to see it.
        batch_size: Ratings per step and worker.
    """
    draw = np.random.default_rng(worker.worker_id)
    for epoch in range(epochs):
        total_loss = total_samples = 0.0
        order = draw.permutation(len(mine.ids))
        for batch in tsw.train.uneven_batches(batches(mine, order, batch_size)):
            loss, samples = step(*batch)
            if not samples:  # Nobody has any left.
                break
            worker.end_step(weight=len(batch.ids))
            total_loss += float(loss) * float(samples)
            total_samples += float(samples)
        print(
            f"epoch {epoch + 1}: loss {total_loss / total_samples:.4f}, "
            f"{total_samples:.0f} samples of all workers"
        )


def build_model(consistency: tsw.train.Consistency | None = None) -> Any:
    """Maps ids `(batch, 2)` to the chance that the user likes the movie."""
    ids = keras.Input((2,), dtype="int64")
    user, movie = (
        tsw.keras.DynamicEmbedding(
            1 + DIM,
            name=name,
            optimizer=tsw.optimizers.Adam(LEARNING_RATE),
            consistency=consistency,
            seed=SEED,
        )(ids[:, i])
        for i, name in enumerate(("user", "movie"))
    )
    deep = keras.layers.concatenate([user[:, 1:], movie[:, 1:]])
    for i, units in enumerate((32, 16)):
        deep = keras.layers.Dense(
            units,
            "relu",
            kernel_initializer=keras.initializers.GlorotUniform(SEED + i),
        )(deep)
    parts = [
        user[:, :1] + movie[:, :1],
        keras.layers.Dot(axes=-1)([user[:, 1:], movie[:, 1:]]),
        keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(SEED)
        )(deep),
    ]
    outputs = keras.layers.Activation("sigmoid")(keras.layers.add(parts))
    return keras.Model(ids, outputs)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The probability that a liked movie has a higher score than another."""
    order = np.argsort(scores.reshape(-1), kind="stable")
    liked = labels.reshape(-1)[order] > 0.5
    # For each liked movie, the number of movies not liked that come before it.
    pairs = np.cumsum(~liked)[liked].sum()
    return float(pairs / (liked.sum() * (~liked).sum()))


def report_auc(held_out: Ratings, scores: np.ndarray) -> None:
    """Prints how good the scores of the held-out ratings are."""
    value = auc(held_out.labels, scores)
    print(f"AUC on {len(held_out.ids)} ratings that were held out: {value:.4f}")
