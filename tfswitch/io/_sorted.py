"""Sorts all rows of a table by id, in bounded memory."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfswitch.io._layout import Layout

# A few times this much memory is in use at once.
_RUN_BYTES = 64 << 20
# How many ids of a run are kept, to find out how ids are spread.
_SAMPLES = 4096

Batch = dict[str, np.ndarray]


class _Run(NamedTuple):
    """Rows by id in the file: all ids, then all values, then all slots."""

    offset: int
    num_rows: int


class SortedRows:
    """All rows of a table as of one export, sorted by id.

    Servers send rows in any order. Rows that fit in one run are sorted in
    memory. If there are more, the sorted runs are kept in an unnamed file,
    which is as large as the rows, until this object is closed. A read merges
    one range of ids of all runs at a time; a range has about as many rows as a
    run.

    Not thread-safe.

    Args:
        layout: The table's layout.
        folder: A folder with room for the file.

    Attributes:
        num_rows: The number of rows.

    Raises:
        OSError: If the file cannot be written.
        ConnectionError, TimeoutError: If a server does not answer.
    """

    def __init__(self, layout: Layout, folder: Path) -> None:
        # The dtype of each field of a row.
        self._dtypes: dict[str, np.dtype] = {"ids": np.dtype(np.int64)}
        for what, width in layout.widths.items():
            self._dtypes[what] = np.dtype((np.float32, (width,)))
        row_bytes = sum(dtype.itemsize for dtype in self._dtypes.values())
        self._run_rows = max(1, _RUN_BYTES // row_bytes)
        self._folder = folder
        self._file: Any = None
        self._runs: list[_Run] = []
        self._samples: list[np.ndarray] = []
        # The run, if there is only one; and rows that are not in a run yet.
        self._only: Batch | None = None
        self._waiting: list[Batch] = []
        self._num_waiting = 0
        self.num_rows = 0
        try:
            layout.table._native.visit_rows("slots" in layout.widths, self._add)
            if self._file is None:
                self._only = self._sort_waiting()
            elif self._num_waiting:
                self._spill(self._sort_waiting())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "SortedRows":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def batches(
        self, rows_per_batch: int, fields: Sequence[str] = ()
    ) -> Iterator[Batch]:
        """Yields rows by id, `rows_per_batch` at a time, the last ones fewer.

        May be called again, for the same rows.

        Args:
            rows_per_batch: The number of rows in a batch.
            fields: Fields of `Rows`; by default all that the layout has.
        """
        fields = fields or list(self._dtypes)
        waiting: list[Batch] = []
        num_waiting = 0
        for part in self._parts(fields):
            waiting.append(part)
            num_waiting += len(part[fields[0]])
            if num_waiting < rows_per_batch:
                continue
            rows = _join(waiting, fields)
            num_full = num_waiting - num_waiting % rows_per_batch
            for begin in range(0, num_full, rows_per_batch):
                end = begin + rows_per_batch
                yield {what: rows[what][begin:end] for what in fields}
            # Copies: a view would keep all of the rows.
            waiting = [{what: rows[what][num_full:].copy() for what in fields}]
            num_waiting -= num_full
        if num_waiting:
            yield _join(waiting, fields)

    def _add(
        self, ids: np.ndarray, values: np.ndarray, slots: np.ndarray | None
    ) -> None:
        rows = {"ids": ids, "values": values}
        if "slots" in self._dtypes:
            assert slots is not None
            rows["slots"] = slots
        self.num_rows += len(ids)
        begin = 0
        while begin < len(ids):
            end = min(len(ids), begin + self._run_rows - self._num_waiting)
            # One run may be enough, until more rows come.
            if end == begin:
                self._spill(self._sort_waiting())
                continue
            self._waiting.append(
                {what: array[begin:end] for what, array in rows.items()}
            )
            self._num_waiting += end - begin
            begin = end

    def _sort_waiting(self) -> Batch:
        """Returns the waiting rows by id, and empties the list."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return {w: np.empty(0, dtype) for w, dtype in self._dtypes.items()}
        order = np.argsort(np.concatenate([rows["ids"] for rows in waiting]))
        return {
            what: np.concatenate([rows.pop(what) for rows in waiting])[order]
            for what in self._dtypes
        }

    def _spill(self, run: Batch) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)
            offset = self._file.seek(0, os.SEEK_END)
            for what in self._dtypes:
                self._file.write(np.ascontiguousarray(run[what]).data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"rows cannot be sorted in '{self._folder}', where a file of "
                f"their size is needed besides the result: {error}"
            ) from error
        self._runs.append(_Run(offset, len(run["ids"])))
        step = max(1, self._run_rows // _SAMPLES)
        self._samples.append(run["ids"][::step].copy())

    def _parts(self, fields: Sequence[str]) -> Iterator[Batch]:
        """Yields all rows by id, a range of ids at a time."""
        if self._only is not None:
            yield {what: self._only[what] for what in fields}
            return
        samples = np.sort(np.concatenate(self._samples))
        num_parts = len(self._runs)
        limits = samples[
            [len(samples) * i // num_parts for i in range(1, num_parts)]
        ]
        # A part begins at its limit, the last one ends with the run.
        ends = []
        for run in self._runs:
            ids = self._read("ids", run, 0, run.num_rows)
            ends.append([*np.searchsorted(ids, limits), run.num_rows])
        begins = [0] * num_parts
        for part in range(num_parts):
            slices = [
                (run, begins[i], ends[i][part])
                for i, run in enumerate(self._runs)
            ]
            begins = [end for _, _, end in slices]
            ids = self._read_all("ids", slices)
            order = np.argsort(ids)
            yield {
                what: (ids if what == "ids" else self._read_all(what, slices))[
                    order
                ]
                for what in fields
            }

    def _read_all(
        self, what: str, slices: Sequence[tuple[_Run, int, int]]
    ) -> np.ndarray:
        return np.concatenate(
            [self._read(what, run, begin, end) for run, begin, end in slices]
        )

    def _read(self, what: str, run: _Run, begin: int, end: int) -> np.ndarray:
        offset = run.offset
        for field, dtype in self._dtypes.items():
            if field == what:
                break
            offset += run.num_rows * dtype.itemsize
        rows = np.empty(end - begin, dtype)
        self._file.seek(offset + begin * dtype.itemsize)
        if rows.size and self._file.readinto(rows.data.cast("B")) < rows.nbytes:
            raise OSError(
                f"the file of sorted rows in '{self._folder}' ends early"
            )
        return rows


def _join(parts: Sequence[Batch], fields: Sequence[str]) -> Batch:
    return {
        what: np.concatenate([part[what] for part in parts]) for what in fields
    }
