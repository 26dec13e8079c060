"""Values that the workers of a group tell each other.

A worker writes what it has to tell to rows of a table, and reads those of the
others. Three barriers keep apart what is told at one time from that of another:
after the first nobody reads any more what was told before, after the second all
have read how often something was told, after the third all have written. So a
worker that was started again, or rows of a job of before, confuse nobody.

Rows are floats, and what is told may be anything: each float has 16 bits of it.
All read the same bytes, in the order of the workers, and so what they compute
of them is the same to the last bit.
"""

import io
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfswitch._control import call
from tfswitch.optimizers import SGD
from tfswitch.table import EmbeddingTable
from tfswitch.train.worker import Worker

_DIM = 512
# A worker's first row says which time it is, which one was the first of the
# run, and how many bytes follow.
_HEADER = np.dtype([("time", "<i8"), ("run", "<i8"), ("size", "<i8")])
# As the longest message of a server.
_MAX_BYTES = 1 << 30

Arrays = dict[str, np.ndarray]


class Exchange:
    """A place where all workers of a group tell each other arrays.

    A run begins when a worker makes this, if no other has made it before and is
    still there.

    Args:
        name: All workers use the same.
        worker: This process's place among them.
    """

    def __init__(self, name: str, worker: Worker) -> None:
        self._name = name
        self._worker = worker
        self._run: int | None = None
        self._table = EmbeddingTable(
            f"{name}.{worker.group}",
            _DIM,
            initializer="zeros",
            optimizer=SGD(1.0),  # Has no state.
            cluster=worker.cluster,
        )

    def tell(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        with_left: bool = False,
        timeout_secs: float | None = None,
    ) -> dict[int, Arrays]:
        """Waits until all workers tell something, and returns it all.

        Args:
            arrays: What this worker tells: numbers and booleans.
            with_left: Whether to return also what those who have left, or were
                given up, have told last in this run.
            timeout_secs: As for `Worker.wait_at_barrier`, for each barrier.

        Returns:
            The arrays by worker, in the order of their numbers.

        Raises:
            ValueError: If the arrays have more than 1 GiB.
            TimeoutError, RuntimeError, ConnectionError: As
                `Worker.wait_at_barrier`; RuntimeError also if the others have
                gone on without this worker.
        """
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        if buffer.tell() > _MAX_BYTES:
            raise ValueError(
                f"arrays of {buffer.tell()} bytes are more than the "
                f"{_MAX_BYTES} that workers can tell each other"
            )

        me = self._worker.worker_id
        place = call(self._worker._native, "GetWorker")
        num_counted = place["workers"]["num_steps"].get(str(me), 0)
        if int(place["num_steps"]) < int(num_counted):
            # It repeats steps, at barriers that have opened long ago.
            return {me: dict(arrays)}

        def wait(what: str) -> None:
            self._worker.wait_at_barrier(
                f"{self._name}: {what}", timeout_secs=timeout_secs
            )

        wait("all are here")
        now = 1 + max(int(h["time"]) for h in self._headers().values())
        wait("all know when")
        self._write(now, buffer.getvalue())
        wait("all have told")
        headers = self._headers()
        told = {w: h for w, h in headers.items() if h["time"] == now}
        if me not in told or any(h["time"] > now for h in headers.values()):
            raise RuntimeError(
                f"{self._worker!r}: what it told others ({self._name}) does "
                "not count. Either it was not heard of for longer than its "
                "lease, and they have gone on without it, or a server was "
                "started again. Call it again on all workers"
            )
        self._run = min(int(h["run"]) for h in told.values())
        if with_left:
            told = {w: h for w, h in headers.items() if h["time"] >= self._run}
        return {w: self._read(w, h) for w, h in sorted(told.items())}

    def _headers(self) -> dict[int, Any]:
        """The first rows by worker; zeros for one without a row."""
        known = call(self._worker._native, "GetWorker")["workers"]["num_steps"]
        workers = sorted(
            {*range(self._worker.num_workers), *(int(w) for w in known)}
        )
        rows = self._table.lookup([w << 32 for w in workers]).numpy()
        return {
            worker: _to_bytes(row)[: _HEADER.itemsize].view(_HEADER)[0]
            for worker, row in zip(workers, rows, strict=True)
        }

    def _ids(self, worker: int, size: int) -> np.ndarray:
        count = -(-(_HEADER.itemsize + size) // (2 * _DIM))
        return (worker << 32) + np.arange(count)

    def _write(self, now: int, told: bytes) -> None:
        run = now if self._run is None else self._run
        header = np.array([(now, run, len(told))], _HEADER).tobytes()
        ids = self._ids(self._worker.worker_id, len(told))
        whole = (header + told).ljust(len(ids) * 2 * _DIM, b"\0")
        halves = np.frombuffer(whole, "<u2").astype(np.float32)
        self._table.assign(ids, halves.reshape(-1, _DIM))

    def _read(self, worker: int, header: Any) -> Arrays:
        size = int(header["size"])
        if not 0 <= size <= _MAX_BYTES:
            raise RuntimeError(
                f"{self._table.name}: worker {worker} tells {size} bytes, and "
                f"at most {_MAX_BYTES} are possible: another program has "
                "written to this table"
            )
        rows = self._table.lookup(self._ids(worker, size)).numpy()
        told = _to_bytes(rows)[_HEADER.itemsize :][:size].tobytes()
        with np.load(io.BytesIO(told), allow_pickle=False) as arrays:
            return dict(arrays)


def _to_bytes(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1).astype("<u2").view(np.uint8)


_exchanges: weakref.WeakKeyDictionary[Worker, dict[str, Exchange]] = (
    weakref.WeakKeyDictionary()
)


def exchange_of(worker: Worker, name: str) -> Exchange:
    """Returns the worker's exchange of that name."""
    known = _exchanges.setdefault(worker, {})
    if name not in known:
        known[name] = Exchange(name, worker)
    return known[name]


def merge(told: Mapping[int, Arrays], op: str) -> Arrays:
    """Reduces the arrays of all workers; those that have none are left out.

    Args:
        told: What `Exchange.tell` has returned.
        op: "sum", "mean", "max" or "min".

    Raises:
        ValueError: If the workers' arrays differ in number, shape or dtype.
    """
    told = {worker: arrays for worker, arrays in told.items() if arrays}
    if not told:
        return {}
    first = next(iter(told))
    forms = {
        worker: {k: (v.dtype.name, v.shape) for k, v in arrays.items()}
        for worker, arrays in told.items()
    }
    for worker, form in forms.items():
        if form != forms[first]:
            raise ValueError(
                "all workers must give arrays of the same dtypes and shapes. "
                f"Received: {list(forms[first].values())} from worker {first}, "
                f"{list(form.values())} from worker {worker}"
            )
    return {
        key: _reduce([arrays[key] for arrays in told.values()], op)
        for key in told[first]
    }


def _reduce(values: list[np.ndarray], op: str) -> Any:
    dtype = values[0].dtype
    if op in ("max", "min"):
        return getattr(np, op)(values, axis=0)
    # So many summands as there are workers must not cost digits.
    is_float = dtype.kind == "f"
    sums = np.sum(values, axis=0, dtype=np.float64 if is_float else None)
    if op == "mean":
        sums = sums / len(values)
    return sums.astype(dtype) if is_float else sums
