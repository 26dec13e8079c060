"""Reads and sets many rows, in calls that each server accepts."""

from typing import NamedTuple

import numpy as np

from tfswitch.table import EmbeddingTable

# The bytes of rows in one call. Larger calls are hardly faster, and servers may
# refuse too large ones.
_CALL_BYTES = 1 << 20


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        ids: int64, `[num_rows]`.
        values: float32, `[num_rows, dim]`.
        slots: float32, `[num_rows, slot_floats]`, or None.
    """

    ids: np.ndarray
    values: np.ndarray
    slots: np.ndarray | None = None


def rows_per_call(floats_per_row: int) -> int:
    """Returns how many rows one call should take, given the floats per row."""
    return max(1, _CALL_BYTES // (8 + 4 * floats_per_row))


def assign_rows(table: EmbeddingTable, rows: Rows) -> None:
    """Sets any number of rows, as `EmbeddingTable.assign`.

    Without slots, present rows keep their optimizer state. If an id is
    repeated, its last row is used.
    """
    floats = rows.values.shape[1]
    if rows.slots is not None:
        floats += rows.slots.shape[1]
    step = rows_per_call(floats)
    for begin in range(0, len(rows.ids), step):
        part = slice(begin, begin + step)
        table._native.assign(
            rows.ids[part],
            rows.values[part],
            None if rows.slots is None else rows.slots[part],
        )


def find_not_finite(values: np.ndarray) -> tuple[int, int] | None:
    """Returns the row and the column of the first NaN or Inf, or None."""
    finite = np.isfinite(values)
    if finite.all():
        return None
    row, place = np.argwhere(~finite)[0]
    return int(row), int(place)
