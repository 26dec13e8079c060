"""Trains on a table of four times the memory that it may use.

Two processes' worth of tables are in this one: `plain` has all rows in memory,
`tiered` has `when_full="disk"` and a ceiling of a quarter of plain's memory. A
model of 26 ids is trained on both in turn, with prefetch, on batches of 2,048
samples with zipf-distributed ids. Prints the steps a second of tiered over
those of plain, and for the slower distribution the time of a step over the
longer of a step in memory and the time of its reads at the random reads a
second that fio measures in this run.

    python benchmarks/tiered_bench.py --folder=/nvme/cold
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import report

import tfswitch as tsw

_ROWS = flags.DEFINE_integer("rows", 8_000_000, "Rows of the table.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds of each table.")
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of a round.")
_WARM_UP = flags.DEFINE_integer("warm_up", 1000, "Steps before the rounds.")
_FOLDER = flags.DEFINE_string("folder", None, "For rows on disk.")
_ALPHAS = flags.DEFINE_multi_float("alpha", [1.2, 1.05], "Of the zipf law.")

_DIM = 16
_IDS = 26
_BATCH = 2048
_RECORD = 12 + 4 * 2 * _DIM  # Key, stamp, embedding and Adagrad's slots.


def _random_reads(folder: str) -> float:
    """The 4 KiB reads a second of the disk at depth 32, by fio."""
    path = os.path.join(folder, "fio")
    out = subprocess.run(
        (
            f"fio --name=reads --filename={path} --size=1G --bs=4k"
            " --rw=randread --direct=1 --ioengine=libaio --iodepth=32"
            " --runtime=10 --time_based --output-format=json"
        ).split(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    os.remove(path)
    return float(json.loads(out)["jobs"][0]["read"]["iops"])


class _Model:
    """A model on a table of a cluster of its own in this process."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.cluster = tsw.connect(f"local://{name}")
        self.table = tsw.EmbeddingTable(
            name, _DIM, optimizer="adagrad", seed=1, **settings
        )
        keras.utils.set_random_seed(1)
        self.layer = tsw.keras.DynamicEmbedding(_DIM, table=self.table)
        self._model = keras.Sequential(
            [
                keras.Input((_IDS,), dtype="int64"),
                self.layer,
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        self._model.compile("adagrad", "mse")

    def fill(self) -> None:
        """Makes all rows, the most popular last, as long use would."""
        for ids in np.array_split(_by_rank()[::-1], _ROWS.value // 50_000):
            self.table.lookup_or_create(ids)

    def train(self, ids: np.ndarray) -> float:
        """Returns the seconds of a step."""
        data = tf.data.Dataset.from_tensor_slices(
            (
                ids.reshape(-1, _BATCH, _IDS),
                np.ones((len(ids) // _BATCH, _BATCH)),
            )
        )
        data = tsw.data.prefetch_embeddings(data, self.layer, depth=4)
        begin = time.perf_counter()
        self._model.fit(data, verbose=0)
        return (time.perf_counter() - begin) / (len(ids) // _BATCH)


def _by_rank() -> np.ndarray:
    """All ids, the most popular first; they are anywhere in the table."""
    return np.random.default_rng(2).permutation(_ROWS.value)


def _sampler(alpha: float) -> Any:
    weights = np.arange(1, _ROWS.value + 1, dtype=np.float64) ** -alpha
    bounds = np.cumsum(weights)
    random = np.random.default_rng(1)
    ids = _by_rank()

    def sample(steps: int) -> np.ndarray:
        draws = random.random((steps * _BATCH, _IDS)) * bounds[-1]
        return ids[np.searchsorted(bounds, draws).clip(max=_ROWS.value - 1)]

    return sample


def _compare(alpha: float, plain: _Model, tiered: _Model, reads: float) -> None:
    sample = _sampler(alpha)
    for _ in range(_WARM_UP.value // 100):
        ids = sample(100)
        for model in (plain, tiered):
            model.train(ids)
    before = tiered.table.stats()
    times: dict[str, list[float]] = {"plain": [], "tiered": []}
    for _ in range(_ROUNDS.value):
        ids = sample(_STEPS.value)
        times["plain"].append(plain.train(ids))
        times["tiered"].append(tiered.train(ids))
    after = tiered.table.stats()
    count = {
        name: after[name] - before[name]
        for name in after
        if isinstance(after[name], int)
    }
    steps = _ROUNDS.value * _STEPS.value
    in_memory = statistics.median(times["plain"])
    on_disk = statistics.median(times["tiered"])
    by_reads = count["cold_block_reads"] / steps / reads
    hot = np.concatenate([sample(1).ravel()] * 4)
    hottest = np.unique(hot)[:20_000]
    lookups: dict[str, list[float]] = {"plain": [], "tiered": []}
    for _ in range(21):
        for name, model in (("plain", plain), ("tiered", tiered)):
            begin = time.perf_counter()
            model.table.lookup_or_create(hottest)
            lookups[name].append(time.perf_counter() - begin)
    written = count["cold_written_bytes"] / max(
        1, count["demoted_rows"] * _RECORD
    )
    figures = {
        "random reads/s of the disk": (reads, ""),
        "step in memory, ms": (in_memory * 1e3, ""),
        "step with rows on disk, ms": (on_disk * 1e3, ""),
        "steps/s over those in memory": (
            in_memory / on_disk,
            "at least 0.5" if alpha > 1.1 else "",
        ),
        "step over max(step in memory, its reads)": (
            on_disk / max(in_memory, by_reads),
            "at most 1.3" if alpha < 1.1 else "",
        ),
        "reads of a step": (count["cold_block_reads"] / steps, ""),
        "rows promoted in a step": (count["promoted_rows"] / steps, ""),
        "bytes written / bytes of demoted rows": (written, "at most 4"),
        "memory of a row on disk, bytes": (
            after["cold_memory_bytes"] / max(1, after["cold_rows"]),
            "at most 2.5",
        ),
        "rows on disk, M": (after["cold_rows"] / 1e6, ""),
        "lookups of hot rows over those of plain": (
            statistics.median(lookups["plain"])
            / statistics.median(lookups["tiered"]),
            "at least 0.95",
        ),
    }
    row = f"zipf {alpha:g}"
    for name, (value, bar) in figures.items():
        print(f"{row}: {name} {value:.2f}", flush=True)
        report(f"tiered | {name} | {row}", "", [value], bar)
    assert after["refused_keys"] == 0


def main(argv: list[str]) -> None:
    """Compares the two tables."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    folder = tempfile.mkdtemp(dir=_FOLDER.value)
    try:
        reads = _random_reads(folder)
        print(f"random reads/s of the disk {reads:,.0f}", flush=True)
        plain = _Model("plain")
        plain.fill()
        ceiling = plain.table.stats().memory_bytes // 4
        tsw.connect("local://tiered", max_memory=ceiling, cold_dir=folder)
        tiered = _Model("tiered", when_full="disk")
        tiered.fill()
        print(f"ceiling {ceiling / 2**20:,.0f} MiB", flush=True)
        for alpha in _ALPHAS.value:
            _compare(alpha, plain, tiered, reads)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    app.run(main)
