"""Measures large tables in one process.

Without flags a table grows to 150M rows of 16 bfloat16 floats with row-wise
Adagrad. At each of `--millions` it prints the memory of a row, the times of
inserts since the last size and of lookups, and the longest batch of inserts
over the median one. At the first and last size it also saves and restores the
table; the last save of 150M rows takes 11 GB of disk.

With `--full` a table that evicts meets its `--max_memory`: for so many
`--secs`, batches of zipf-distributed ids, of which many are new, are looked up
and pushed. Prints the most resident memory over the ceiling.

    python benchmarks/scale_bench.py
    python benchmarks/scale_bench.py --full --secs=3600
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import report

import tfswitch as tsw

_MILLIONS = flags.DEFINE_multi_integer(
    "millions", [10, 50, 100, 150], "Sizes of the growing table."
)
_BATCH = flags.DEFINE_integer("batch", 65_536, "Ids of a batch.")
_FOLDER = flags.DEFINE_string("folder", None, "For saves; a temporary one.")
_FULL = flags.DEFINE_bool("full", False, "Measure a full table instead.")
_MAX_MEMORY = flags.DEFINE_integer("max_memory", 1 << 30, "In bytes.")
_SECS = flags.DEFINE_integer("secs", 3600, "How long a full table is used.")

_DIM = 16
_LOOKUPS = 40
_MIB = 2**20


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ids(numbers: np.ndarray) -> tf.Tensor:
    """Distinct ids, in no order, of the numbers 0, 1, 2 and so on."""
    odd = np.uint64(0x9E3779B97F4A7C15)
    return tf.constant((numbers.astype(np.uint64) * odd).view(np.int64))


def _seconds(call: Callable[..., object], *args: object) -> float:
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


def _make_table() -> tsw.EmbeddingTable:
    table = tsw.EmbeddingTable(
        "t",
        _DIM,
        seed=1,
        optimizer="rowwise_adagrad",
        storage_dtype="bfloat16",
        when_full="evict" if _FULL.value else None,
    )
    table.size()  # Makes the table.
    return table


def _save_and_restore(
    cluster: tsw.Cluster, table: tsw.EmbeddingTable, row: str
) -> tsw.EmbeddingTable:
    rows = table.size()
    folder = tempfile.mkdtemp(dir=_FOLDER.value)
    try:
        saving = _seconds(cluster.save, folder)
        # Both tables together may be more than the memory of the machine.
        cluster.drop(table.name)
        restoring = _seconds(cluster.restore, folder)
    finally:
        shutil.rmtree(folder)
    table = _make_table()
    assert table.size() == rows
    for name, secs in (("save", saving), ("restore", restoring)):
        print(f"{row}: {name} {secs:.1f} s", flush=True)
        report(f"growth | {row} | {name} per row", "ns", [secs / rows * 1e9])
    return table


def _grow() -> None:
    cluster = tsw.connect("local://")
    table = _make_table()
    before = _resident_bytes()
    random = np.random.default_rng(1)
    rows = 0
    per_lookup: dict[int, float] = {}
    sizes = sorted(_MILLIONS.value)
    for size in sizes:
        times = []
        while rows < size * 1_000_000:
            ids = _ids(np.arange(rows, rows + _BATCH.value))
            times.append(_seconds(table.lookup_or_create, ids))
            rows += _BATCH.value
        lookups = []
        for _ in range(_LOOKUPS):
            ids = _ids(random.integers(0, rows, _BATCH.value))
            lookups.append(_seconds(table.lookup, ids))
        per_lookup[size] = statistics.median(lookups) / _BATCH.value * 1e9
        row = f"{size}M rows"
        figures = {
            "bytes/row": (_resident_bytes() - before) / rows,
            "insert, ns": statistics.median(times) / _BATCH.value * 1e9,
            "lookup, ns": per_lookup[size],
            "longest / median batch": max(times) / statistics.median(times),
            "lookups/s over those at the first size": per_lookup[sizes[0]]
            / per_lookup[size],
        }
        bars = {
            "bytes/row": "at most 72",
            "longest / median batch": "at most 3",
            "lookups/s over those at the first size": "at least 0.4",
        }
        for name, value in figures.items():
            print(f"{row}: {name} {value:.2f}", flush=True)
            report(f"growth | {row} | {name}", "", [value], bars.get(name, ""))
        if size in (sizes[0], sizes[-1]):
            table = _save_and_restore(cluster, table, row)


def _fill() -> None:
    tsw.connect("local://", max_memory=_MAX_MEMORY.value)
    table = _make_table()
    random = np.random.default_rng(1)
    before = _resident_bytes()
    most, times, stats = 0, [], table.stats()
    end = time.monotonic() + _SECS.value
    while time.monotonic() < end:
        ids = random.zipf(1.05, _BATCH.value) % 2**40
        gradients = np.full((_BATCH.value, _DIM), 1e-3, np.float32)
        times.append(_seconds(table.lookup_or_create, ids))
        table.push(ids, gradients)
        most = max(most, _resident_bytes() - before)
        stats = table.stats()
    allowed = 1.05 * _MAX_MEMORY.value + 256 * _MIB
    figures = {
        "evicted rows, M": stats["evicted_by_max_memory"] / 1e6,
        "refused ids": stats["refused_keys"],
        "rows, M": stats["num_rows"] / 1e6,
        "resident memory, MiB": most / _MIB,
        "over 1.05 x ceiling + 256 MiB": most / allowed,
        "lookup of a batch, ms": statistics.median(times) * 1e3,
        "longest lookup of a batch, ms": max(times) * 1e3,
    }
    row = f"{_SECS.value} s at {_MAX_MEMORY.value / _MIB:,.0f} MiB"
    for name, value in figures.items():
        print(f"{row}: {name} {value:.2f}", flush=True)
        bar = "at most 1" if name.startswith("over") else ""
        report(f"full | {row} | {name}", "", [value], bar)


def main(argv: list[str]) -> None:
    """Measures a growing table, or a full one."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if _FULL.value:
        _fill()
    else:
        _grow()


if __name__ == "__main__":
    app.run(main)
