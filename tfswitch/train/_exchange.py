"""Exchanges values between the workers of a group.

A worker writes its values to rows of a table, and reads those of the others.
Three barriers separate one exchange from the next. After the first barrier, no
worker still reads the last exchange. After the second, all workers have read
how many exchanges there were. After the third, all workers have written their
values. So a restarted worker, or rows of an earlier job, cause no confusion.

Values of any dtype are stored in rows of floats: each float has 16 bits of the
values. All workers read the same bytes, in the order of the workers, so they
compute the same results to the last bit.
"""

import io
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfswitch._connection._control_calls import call
from tfswitch.optimizers import SGD
from tfswitch.table import EmbeddingTable
from tfswitch.train.worker import Worker

_DIM = 512
# The header in a worker's first row: the number of this exchange, the number of
# the first exchange of the run, and how many bytes follow.
_HEADER = np.dtype([("time", "<i8"), ("run", "<i8"), ("size", "<i8")])
# The most bytes of all arrays of one worker. This is also the limit of a
# message to a server.
_MAX_BYTES = 1 << 30

Arrays = dict[str, np.ndarray]


class Exchange:
    """An object by which all workers of a group exchange arrays.

    The first exchange of a worker begins a run, unless other workers that are
    still in the group have begun a run; then the exchange belongs to that run.

    Args:
        name: A name that is the same in all workers.
        worker: This process's worker.
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
        """Waits for all workers, and returns the arrays of each.

        Args:
            arrays: This worker's arrays: numbers and booleans.
            with_left: Whether to return also the last arrays of workers that
                have left, or were given up, in this run.
            timeout_secs: As for `Worker.wait_at_barrier`, for each barrier.

        Returns:
            The arrays by worker, in the order of their numbers.

        Raises:
            ValueError: If the arrays have more than 1 GiB.
            TimeoutError, RuntimeError, ConnectionError: As
                `Worker.wait_at_barrier`; RuntimeError also if the others have
                continued without this worker.
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
            # This worker repeats steps, and all barriers of these steps opened
            # long ago.
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
        """Returns the header of each worker; zeros if it has written no row."""
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
    """Reduces the arrays of all workers that have arrays.

    Args:
        told: The result of `Exchange.tell`.
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
    # Sums floats as float64, so that the sum over workers loses no digits.
    is_float = dtype.kind == "f"
    sums = np.sum(values, axis=0, dtype=np.float64 if is_float else None)
    if op == "mean":
        sums = sums / len(values)
    return sums.astype(dtype) if is_float else sums
