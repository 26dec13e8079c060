"""Makes the text of `EmbeddingTable.describe`, and reads samples of rows."""

import contextlib
import datetime
from typing import TYPE_CHECKING

import numpy as np

from tfswitch._connection._reports import format_bytes

if TYPE_CHECKING:
    from tfswitch.table import EmbeddingTable

_EPOCH = datetime.date(1970, 1, 1)


class _EnoughError(Exception):
    """Ends the stream of a table's rows."""


def sample_rows(
    table: "EmbeddingTable", size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and values of the first rows that a table sends.

    Rows come in the order of hashes of their ids, so the sample does not depend
    on their age. The first of several servers sends its rows first. The stream
    ends with the message that completes the sample.
    """
    ids = [np.zeros(0, np.int64)]
    values = [np.zeros((0, table.dim), np.float32)]

    def keep(some: np.ndarray, rows: np.ndarray, slots: object) -> None:
        ids.append(some)
        values.append(rows)
        if sum(map(len, ids)) >= size:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        table._native.visit_rows(False, keep)
    return np.concatenate(ids)[:size], np.concatenate(values)[:size]


def describe(table: "EmbeddingTable", sample: int) -> str:
    """Returns the text of `EmbeddingTable.describe`."""
    stats = table.stats()
    ids, values = sample_rows(table, sample)
    memory = ", ".join(
        f"{what} {format_bytes(stats[f'{what}_bytes'])}"
        for what in ("row", "index", "reserved", "admission", "change")
    )
    parts = {
        "rows": f"{stats['num_rows']:,} ({stats['inserted_rows']:,} made, "
        f"{stats['erased_rows']:,} removed)",
        "row": f"{table.dim} x {table.storage_dtype.embeddings}, "
        f"{stats['slot_floats']} floats of state and statistics, "
        f"{stats['row_stride_bytes']} bytes",
        "wire": table.wire_dtype
        if table.cluster.is_remote and table.wire_dtype != "float32"
        else "",
        "memory": f"{format_bytes(stats.memory_bytes)}: {memory}",
        "lost": stats["lost"],
        "initializer": repr(table.initializer),
        "optimizer": f"{table.optimizer!r}, {table.update} updates"
        + (", not chosen yet" if table._spec.is_open else ""),
        "admission": f"{table.admission!r}, {stats['num_candidates']:,} ids "
        "wait",
        "eviction": repr(table.eviction),
        "statistics": repr(table.statistics),
        "prefetch": ", ".join(
            f"{stats[f'prefetch_{name}']:,} {name}"
            for name in ("hits", "late", "misses", "unused")
            if stats["prefetch_hits"] or stats["prefetch_misses"]
        ),
        "sample": f"{len(ids):,} rows",
    }
    if len(ids):
        parts["norm"] = _spread(np.linalg.norm(values, axis=1))
    if len(ids) and table.statistics is not None:
        usage = table.usage(ids)
        for name in [n for n in ("count", "show", "click") if n in usage]:
            parts[name] = _spread(usage[name])
        day = float(usage["last_seen_day"].max())
        date = _EPOCH + datetime.timedelta(days=int(min(day, 1e6)))
        parts["last use"] = f"day {day:.1f} ({date})"
    lines = [f"{name:12}{text}" for name, text in parts.items() if text]
    return "\n".join([repr(table), *lines])


def _spread(numbers: np.ndarray) -> str:
    low, median, high, most = np.percentile(numbers, [0, 50, 99, 100])
    return f"min {low:.4g}, median {median:.4g}, p99 {high:.4g}, max {most:.4g}"
