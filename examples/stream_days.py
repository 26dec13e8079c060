"""Trains on a stream of days in which most ids occur once and never again.

    python examples/stream_days.py
    python examples/stream_days.py --plot=stream_days.png

The stream is MovieLens latest-small in the order of its timestamps, where a
month counts as a day. Besides users and movies it has pairs, such as a movie
and the movie that the user rated before it. As in a stream of advertisements,
most ids are too rare to be worth a row. A factorisation machine is trained with
three settings for rows:

    keep        a row for each id, never evicted
    count       a row from the third occurrence on; out if not seen for 60 days
    two_stage   a weight first, the whole row once shows and clicks score 2; out
                if the score falls below 0.1, or if not seen for 60 days

Every batch is predicted before it is learnt from, and ids without a row read as
the table's admission says. So the AUC is that of ratings that the model had not
seen. After each day the table is shrunk.
"""

import csv
import datetime
import gzip
import pathlib
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfswitch as tsw

_ARMS = flags.DEFINE_list(
    "arms", ["keep", "count", "two_stage"], "Which of them to train."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Ratings per step.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the first values of rows.")
_DATA = flags.DEFINE_string(
    "data",
    str(pathlib.Path(__file__).parent / "data" / "ml_latest_small"),
    "Folder with ratings.csv.gz and movies.csv.gz.",
)
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many of the oldest ratings."
)
_PLOT = flags.DEFINE_string(
    "plot", None, "Draw rows, memory and AUC there; needs matplotlib."
)

DIM = 8  # Floats of a vector; each row has one more, its linear weight.
LEARNING_RATE = 0.1
MAX_GENRES = 5
SLOT_BITS = 5  # The bits of an id for the number of its feature.

# One number per rating: its label and features, and its day in the stream.
Stream = tuple[np.ndarray, np.ndarray, np.ndarray]


def read_stream(folder: str, max_ratings: int | None) -> Stream:
    """Reads the ratings in the order of their time.

    Returns:
        ids: int64, `(ratings, ids)`, 0 where there are fewer genres.
        labels: float32, `(ratings, 1)`: whether it is 4 or more.
        days: int64, `(ratings,)`, growing from 0.
    """
    genres: dict[int, list[int]] = {}
    decade: dict[int, int] = {}
    for movie in _read_csv(folder, "movies.csv.gz"):
        key = int(movie["movieId"])
        names = movie["genres"].split("|")[:MAX_GENRES]
        genres[key] = [zlib.crc32(name.encode()) for name in names]
        found = re.search(r"\((\d{3})\d\)\s*$", movie["title"])
        decade[key] = int(found[1]) if found else 0
    ratings = sorted(
        (
            int(rating["timestamp"]),
            int(rating["userId"]),
            int(rating["movieId"]),
            float(rating["rating"]),
        )
        for rating in _read_csv(folder, "ratings.csv.gz")
    )[:max_ratings]

    rows = []
    days = []
    last: dict[int, int] = {}  # Each user's.
    for seconds, user, movie, _ in ratings:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        month = moment.year * 12 + moment.month
        padding = [0] * (MAX_GENRES - len(genres[movie]))
        rows.append(
            [
                user,
                movie,
                _cross(user, decade[movie]),
                _cross(movie, month),
                _cross(user, seconds // 86400),  # This visit.
                _cross(movie, last.get(user, 0)),
                *genres[movie],
                *padding,
                *(_cross(genre, user) for genre in genres[movie]),
                *padding,
            ]
        )
        days.append(month)
        last[user] = movie
    labels = np.array([[rating[3] >= 4.0] for rating in ratings], np.float32)
    ids = np.array(rows, np.int64)
    features = np.array(
        [1, 2, 3, 4, 5, 6] + [7] * MAX_GENRES + [8] * MAX_GENRES
    )
    packed = tsw.ids.pack(features, ids, slot_bits=SLOT_BITS)
    return np.where(ids == 0, 0, packed), labels, np.array(days) - days[0]


def _cross(first: int, second: int) -> int:
    """One id for two that are below 2**32, and these to 2**27."""
    return (first << 27) + second


def _read_csv(folder: str, name: str) -> Iterator[dict[str, str]]:
    path = pathlib.Path(folder) / name
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def policies(arm: str) -> dict[str, Any]:
    """Returns the arguments of the layer for a setting."""
    if arm == "keep":
        return {}
    if arm == "count":
        return {
            "admission": tsw.admission.MinCount(3),
            "eviction": tsw.eviction.Ttl(60),
        }
    if arm == "two_stage":
        return {
            "admission": tsw.admission.ShowClick(2.0, not_admitted="weight"),
            "eviction": tsw.eviction.AnyOf(
                [tsw.eviction.ShowClickScore(0.1), tsw.eviction.Ttl(60)]
            ),
        }
    raise app.UsageError(f"--arms: keep, count or two_stage, not {arm!r}")


class Machine:
    """A factorisation machine on one table, in its own cluster."""

    def __init__(self, arm: str, cluster: tsw.Cluster) -> None:
        # Weight and vector learn separately: an id may have only a weight.
        rule = tsw.optimizers.Adagrad(LEARNING_RATE)
        self._layer = tsw.keras.DynamicEmbedding(
            1 + DIM,
            name=arm,
            optimizer=tsw.optimizers.Segments([(1, rule), (None, rule)]),
            mask_zero=True,
            seed=_SEED.value,
            cluster=cluster,
            **policies(arm),
        )
        self._bias = tf.Variable(0.0)
        self.predict = tf.function(self._predict, reduce_retracing=True)
        self.learn = tf.function(self._learn, reduce_retracing=True)

    @property
    def table(self) -> tsw.EmbeddingTable:
        return self._layer.table

    def _logits(self, rows: tf.Tensor) -> tf.Tensor:
        weights, vectors = rows[:, :, 0], rows[:, :, 1:]
        # Sum of the products of all pairs.
        pairs = tf.square(tf.reduce_sum(vectors, axis=1)) - tf.reduce_sum(
            tf.square(vectors), axis=1
        )
        return (
            self._bias
            + tf.reduce_sum(weights, axis=1, keepdims=True)
            + 0.5 * tf.reduce_sum(pairs, axis=1, keepdims=True)
        )

    def _predict(self, ids: tf.Tensor) -> tf.Tensor:
        return self._logits(self._layer(ids, training=False))

    def _learn(self, ids: tf.Tensor, labels: tf.Tensor) -> None:
        clicks = tf.broadcast_to(labels, tf.shape(ids))
        with tf.GradientTape() as tape:
            rows = self._layer(ids, training=True, clicks=clicks)
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(
                    labels=labels, logits=self._logits(rows)
                )
            )
        of_bias, of_rows = tape.gradient(
            loss, [self._bias, self._layer.trainable_variables]
        )
        self._bias.assign_sub(LEARNING_RATE * of_bias)
        self._layer.apply_gradients(of_rows)


def train(arm: str, stream: Stream) -> dict[str, np.ndarray]:
    """Goes through the stream once.

    Returns:
        "predictions" of each rating, made before it was learnt from; and per
        day, after its shrink: "rows", "waiting", "megabytes".
    """
    ids, labels, days = stream
    predictions = np.zeros(len(labels))
    life: list[tuple[float, ...]] = []
    with tsw.connect(f"local://{arm}") as cluster:
        machine = Machine(arm, cluster)
        for day in np.unique(days):
            cluster.day = day
            begin, end = np.searchsorted(days, [day, day + 1])
            for at in range(begin, end, _BATCH_SIZE.value):
                batch = slice(at, min(at + _BATCH_SIZE.value, end))
                predictions[batch] = machine.predict(ids[batch])[:, 0]
                machine.learn(ids[batch], labels[batch])
            if machine.table.eviction is not None:
                machine.table.shrink()
            stats = machine.table.stats()
            used = ("index_bytes", "row_bytes", "admission_bytes")
            megabytes = sum(stats[name] for name in used) / 1e6
            life.append((stats["num_rows"], stats["num_candidates"], megabytes))
        cluster.day = None
    columns = np.array(life).T
    names = ("rows", "waiting", "megabytes")
    return {
        "predictions": predictions,
        **dict(zip(names, columns, strict=True)),
    }


def auc(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Returns the share of pairs, of a label 1 and a 0, in the right order."""
    _, inverse, counts = np.unique(
        predictions, return_inverse=True, return_counts=True
    )
    # Equal predictions share the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    ones = labels.sum()
    zeros = len(labels) - ones
    if not ones or not zeros:
        return float("nan")
    sum_of_ranks = ranks[labels > 0].sum()
    return float((sum_of_ranks - ones * (ones + 1) / 2) / (ones * zeros))


def by_parts(
    stream: Stream, results: dict[str, dict[str, np.ndarray]], parts: int
) -> list[dict[str, Any]]:
    """Cuts the stream into parts of whole days, with equally many ratings each.

    Returns:
        Per part: "ratings", "day", its last one, and by arm "auc", and "rows",
        "waiting" and "megabytes" after it.
    """
    _, labels, days = stream
    numbers = np.unique(days)
    ends = np.searchsorted(days, numbers, side="right")
    cuts = [
        int(np.searchsorted(ends, len(days) * (part + 1) // parts))
        for part in range(parts)
    ]
    report = []
    begin = 0
    for cut in sorted(set(cuts)):
        end = int(ends[cut])
        entry: dict[str, Any] = {"ratings": end, "day": int(numbers[cut])}
        for arm, result in results.items():
            entry[arm] = {
                name: float(result[name][cut])
                for name in ("rows", "waiting", "megabytes")
            }
            entry[arm]["auc"] = auc(
                labels[begin:end, 0], result["predictions"][begin:end]
            )
        report.append(entry)
        begin = end
    return report


def print_report(
    report: Sequence[dict[str, Any]],
    arms: Sequence[str],
    overall: Callable[[str], float],
) -> None:
    head = f"{'rows':>8}{'waiting':>9}{'MB':>7}{'AUC':>8}"
    print(" " * 14 + "".join(f"{arm:>32}" for arm in arms))
    print(f"{'day':>5}{'ratings':>9}" + head * len(arms))
    for entry in report:
        cells = "".join(
            f"{entry[arm]['rows']:8.0f}{entry[arm]['waiting']:9.0f}"
            f"{entry[arm]['megabytes']:7.1f}{entry[arm]['auc']:8.4f}"
            for arm in arms
        )
        print(f"{entry['day']:5}{entry['ratings']:9}{cells}")
    for arm in arms:
        at_end = report[-1][arm]
        most = max(entry[arm]["megabytes"] for entry in report)
        print(
            f"{arm}: AUC {overall(arm):.4f} of the whole stream, "
            f"{at_end['rows']:.0f} rows and {at_end['megabytes']:.1f} MB at "
            f"its end, {most:.1f} MB at most"
        )


def plot(path: str, report: Sequence[dict[str, Any]], arms: list[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    ratings = [entry["ratings"] / 1000 for entry in report]
    panels = (
        ("rows", "rows, thousands", 1e-3),
        ("megabytes", "memory in use, MB", 1.0),
        ("auc", "AUC of ratings not seen yet", 1.0),
    )
    for place, (name, title, scale) in enumerate(panels):
        axes = figure.add_subplot(1, 3, place + 1)
        for arm, style in zip(arms, ("-", "--", ":"), strict=False):
            values = [entry[arm][name] * scale for entry in report]
            axes.plot(ratings, values, style, label=arm)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("ratings so far, thousands")
        axes.grid(alpha=0.3)
        if name != "auc":
            axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=72)
    print(f"drawn to {path}")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"what is {argv[1]!r}? All settings are flags")
    arms = _ARMS.value
    for arm in arms:
        policies(arm)
    stream = read_stream(_DATA.value, _MAX_RATINGS.value)
    ids, labels, days = stream
    keras.utils.set_random_seed(_SEED.value)
    print(
        f"{len(labels)} ratings in {len(np.unique(days))} days, "
        f"{len(np.unique(ids)) - 1} ids"
    )
    results = {}
    for arm in arms:
        start = time.monotonic()
        results[arm] = train(arm, stream)
        print(f"{arm}: {time.monotonic() - start:.1f} s")
    print_report(
        by_parts(stream, results, 12),
        arms,
        lambda arm: auc(labels[:, 0], results[arm]["predictions"]),
    )
    if _PLOT.value:
        plot(_PLOT.value, by_parts(stream, results, 40), arms)


if __name__ == "__main__":
    app.run(main)
