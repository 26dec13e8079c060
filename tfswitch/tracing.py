"""Spans of this process's pulls, pushes and calls to servers.

The spans are OpenTelemetry's, so `opentelemetry-sdk` must be installed. Tracing
is off until `start`. docs/traces.md shows a trace.
"""

import atexit
import collections
import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfswitch import _native
from tfswitch._connection._control_calls import call, integers

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context

__all__ = ["span", "start", "stop"]

_INTERVAL_SECS = 0.5
# A span may end after its parent, but only a few steps later.
_MAX_PARENTS = 1000

_lock = threading.Lock()
_recorder: "_Recorder | None" = None
_numbers = itertools.count(1)


def start(tracer_provider: "trace.TracerProvider | None" = None) -> None:
    """Begins to make spans.

    Each pull and each push of this process becomes a span, and each call to a
    server a span inside it. A thread makes the spans when they have ended, at
    most half a second later. If tracing is on already, its former settings are
    replaced.

    ```python
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tsw.tracing.start(provider)
    ```

    Args:
        tracer_provider: Receives the spans. None means that of
            `opentelemetry.trace.get_tracer_provider()`.

    Raises:
        ImportError: If OpenTelemetry is not installed.
    """
    global _recorder
    try:
        from opentelemetry import context, trace
    except ImportError as error:
        raise ImportError(
            "tfswitch.tracing.start needs OpenTelemetry; install it with "
            "`pip install opentelemetry-sdk`"
        ) from error
    stop()
    tracer = trace.get_tracer(
        "tfswitch", _native.version(), tracer_provider=tracer_provider
    )
    with _lock:
        _recorder = _Recorder(tracer, context.get_current())


def stop() -> None:
    """Ends tracing, after the spans that have ended were made."""
    global _recorder
    with _lock:
        recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


@contextlib.contextmanager
def span(
    name: str, attributes: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Makes a span that contains the spans of the calls in the `with` block.

    Calls of all threads count, because TensorFlow runs ops in threads of its
    own. The span is OpenTelemetry's current span, and does nothing while
    tracing is off.

    ```python
    for batch in data:
        with tsw.tracing.span("step"):
            train_step(batch)
    ```

    Args:
        name: The name of the span.
        attributes: The attributes of the span.
    """
    recorder = _recorder
    if recorder is None:
        yield
        return
    with recorder.span(name, attributes):
        yield


class _Recorder:
    """Takes spans from the core, and hands them to a tracer. Thread-safe."""

    def __init__(self, tracer: "trace.Tracer", root: "Context") -> None:
        self._tracer = tracer
        self._root = root
        self._parents: collections.OrderedDict[int, Context] = (
            collections.OrderedDict()
        )
        self._parent = 0
        self._is_on = True
        self._lock = threading.Lock()
        self._ended = threading.Event()
        call(_native, "TakeTraces")  # Those that ended after a former `stop`.
        call(_native, "SetTracing", is_on=True)
        self._thread = threading.Thread(
            target=self._run, name="tfswitch_traces", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_on = False
            call(_native, "SetTracing", is_on=False)
        self._ended.set()
        self._thread.join()
        self._take()

    @contextlib.contextmanager
    def span(
        self, name: str, attributes: Mapping[str, Any] | None
    ) -> Iterator[None]:
        from opentelemetry import context

        with self._tracer.start_as_current_span(name, attributes=attributes):
            number = next(_numbers)
            with self._lock:
                self._parents[number] = context.get_current()
                if len(self._parents) > _MAX_PARENTS:
                    self._parents.popitem(last=False)
                former = self._parent
                self._set_parent(number)
            try:
                yield
            finally:
                with self._lock:
                    self._set_parent(former)

    def _set_parent(self, number: int) -> None:
        self._parent = number
        if self._is_on:
            call(_native, "SetTracing", is_on=True, parent=number)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECS):
            self._take()

    def _take(self) -> None:
        taken = call(_native, "TakeTraces")
        for record in taken["spans"]:
            with self._lock:
                parent = self._parents.get(int(record["parent"]), self._root)
            self._make(record, parent)
        if int(taken["num_dropped"]) > 0:
            warnings.warn(
                f"tracing has dropped {taken['num_dropped']} spans that came "
                "faster than they were taken",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make(self, record: Mapping[str, Any], parent: "Context") -> None:
        from opentelemetry import trace

        times = integers(record, ("begin_ns", "end_ns"))
        is_call = bool(record["address"])
        made = self._tracer.start_span(
            record["name"].lstrip("/")
            if is_call
            else f"tfswitch.{record['name']}",
            parent,
            kind=trace.SpanKind.CLIENT if is_call else trace.SpanKind.INTERNAL,
            attributes=_of_call(record) if is_call else _of_batches(record),
            start_time=times["begin_ns"],
        )
        inside = trace.set_span_in_context(made, parent)
        if record["error"]:
            made.set_status(
                trace.Status(trace.StatusCode.ERROR, record["error"])
            )
        if int(record["work_begin_ns"]) > 0:
            wait, work, answer = _server_times(record)
            made.set_attributes(
                {
                    "tfswitch.wait_ns": wait,
                    "tfswitch.work_ns": work,
                    "tfswitch.answer_ns": answer,
                }
            )
            begin = times["begin_ns"] + wait
            self._tracer.start_span(
                "tfswitch-server",
                inside,
                kind=trace.SpanKind.SERVER,
                attributes={"tfswitch.shard": record["shard"]},
                start_time=begin,
            ).end(begin + work)
        for inner in record["calls"]:
            self._make(inner, inside)
        made.end(times["end_ns"])


def _of_batches(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tfswitch.tables": record["tables"],
        "tfswitch.ids": int(record["num_ids"]),
        "tfswitch.keys": int(record["num_keys"]),
    }


def _of_call(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes, by OpenTelemetry's names for RPCs."""
    _, service, method = record["name"].split("/")
    host, colon, port = record["address"].rpartition(":")
    sizes = integers(record, ("request_bytes", "response_bytes"))
    return {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": record["grpc_code"],
        "server.address": host
        if colon and port.isdigit()
        else record["address"],
        **({"server.port": int(port)} if colon and port.isdigit() else {}),
        "tfswitch.shard": record["shard"],
        **{f"tfswitch.{name}": value for name, value in sizes.items()},
    }


def _server_times(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """Divides the time of a call into wait, work and answer.

    The work has the length that the server has measured. Its begin is of the
    server's clock, which may be wrong, so it is moved into the call.
    """
    begin, end, work_begin, work = integers(
        record, ("begin_ns", "end_ns", "work_begin_ns", "work_ns")
    ).values()
    work = max(0, min(work, end - begin))
    wait = max(0, min(work_begin - begin, end - begin - work))
    return wait, work, end - begin - wait - work


def _forget() -> None:
    # The child of a fork has no thread that takes spans.
    global _recorder
    _recorder = None


os.register_at_fork(after_in_child=_forget)
atexit.register(stop)
