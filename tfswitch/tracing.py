"""Spans of this process's pulls, pushes and calls to servers.

The spans are OpenTelemetry's, so `opentelemetry-sdk` must be installed. Tracing
is off until `start`. docs/traces.md shows a trace.
"""

import atexit
import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from tfswitch import _native
from tfswitch._connection._control_calls import call, integers

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context

__all__ = ["span", "start", "stop"]

_INTERVAL_SECS = 0.5
# How long `stop` waits for an exporter.
_PATIENCE_SECS = 30.0
# A pull or push may end after its parent, but only a few steps later.
_MAX_ENDED = 1000

# Signal handlers may trace, too, so locks are reentrant.
_lock = threading.RLock()
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
    tracer = trace.get_tracer(
        "tfswitch", _native.version(), tracer_provider=tracer_provider
    )
    with _lock:
        stop()
        _recorder = _Recorder(tracer, context.get_current())
        # Python runs the last one first, and the provider ends itself at exit.
        atexit.unregister(stop)
        atexit.register(stop)


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
    own. The span is OpenTelemetry's current span. Without tracing there is no
    span.

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
        # The contexts of spans of `span`, by their numbers in the core.
        self._open: dict[int, Context] = {}
        self._ended: dict[int, Context] = {}
        self._is_on = True
        self._has_failed = False
        self._lock = threading.RLock()
        self._stops = threading.Event()
        call(_native, "TakeTraces")  # Spans that ended after a former `stop`.
        call(_native, "SetTracing", is_on=True)
        self._thread = threading.Thread(
            target=self._run, name="tfswitch_traces", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_on = False
            call(_native, "SetTracing", is_on=False)
        self._stops.set()
        self._thread.join(_PATIENCE_SECS)
        if self._thread.is_alive():
            logging.warning(
                "tfswitch: the exporter of traces needs over %d s; spans may "
                "be lost",
                int(_PATIENCE_SECS),
            )

    def forget(self) -> None:
        """Ends in the child of a fork, which has no thread that takes spans."""
        self._lock = threading.RLock()
        self._is_on = False
        # If the parent has used tables, the child cannot call the core.
        with contextlib.suppress(RuntimeError):
            call(_native, "SetTracing", is_on=False)

    @contextlib.contextmanager
    def span(
        self, name: str, attributes: Mapping[str, Any] | None
    ) -> Iterator[None]:
        from opentelemetry import context

        with self._tracer.start_as_current_span(name, attributes=attributes):
            number = next(_numbers)
            with self._lock:
                self._open[number] = context.get_current()
                self._tell_parent()
            try:
                yield
            finally:
                with self._lock:
                    self._ended[number] = self._open.pop(number)
                    if len(self._ended) > _MAX_ENDED:
                        del self._ended[next(iter(self._ended))]
                    self._tell_parent()

    def _tell_parent(self) -> None:
        if self._is_on:
            newest = next(reversed(self._open), 0)
            call(_native, "SetTracing", is_on=True, parent=newest)

    def _run(self) -> None:
        while not self._stops.wait(_INTERVAL_SECS):
            self._take()
        self._take()

    def _take(self) -> None:
        try:
            taken = call(_native, "TakeTraces")
        except Exception as error:
            self._log_failure(error)
            return
        for record in taken["spans"]:
            number = int(record["parent"])
            with self._lock:
                parent = self._open.get(
                    number, self._ended.get(number, self._root)
                )
            try:
                self._make(record, parent)
            except Exception as error:  # The program's own processor.
                self._log_failure(error)
        if int(taken["num_dropped"]) > 0:
            logging.warning(
                "tfswitch: %s spans were dropped, because they came faster "
                "than the exporter takes them",
                taken["num_dropped"],
            )

    def _log_failure(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logging.error(
                "tfswitch: spans are lost: %s: %s; this is said once",
                type(error).__name__,
                error,
            )

    def _make(self, record: Mapping[str, Any], parent: "Context") -> None:
        from opentelemetry import trace

        name = record["name"]
        times = integers(record, ("begin_ns", "end_ns"))
        is_call = bool(record["address"])
        made = self._tracer.start_span(
            name.lstrip("/") if is_call else f"tfswitch.{name}",
            parent,
            kind=trace.SpanKind.CLIENT if is_call else trace.SpanKind.INTERNAL,
            attributes=_of_call(record) if is_call else _of_batches(record),
            start_time=times["begin_ns"],
        )
        inside = trace.set_span_in_context(made, parent)
        if record["error"] or record["grpc_code"]:
            made.set_status(
                trace.Status(trace.StatusCode.ERROR, record["error"])
            )
        if int(record["work_begin_ns"]) > 0:
            wait, work, answer = _parts_of(record)
            made.set_attribute("tfswitch.wait_ns", wait)
            made.set_attribute("tfswitch.work_ns", work)
            made.set_attribute("tfswitch.answer_ns", answer)
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
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": record["grpc_code"],
        "tfswitch.shard": record["shard"],
        "tfswitch.request_bytes": int(record["request_bytes"]),
        "tfswitch.response_bytes": int(record["response_bytes"]),
    }
    address = record["address"]
    if address.startswith("unix:"):
        return attributes | {"server.address": address.removeprefix("unix:")}
    host, _, port = address.rpartition(":")
    return attributes | {
        "server.address": host.strip("[]"),
        "server.port": int(port),
    }


def _parts_of(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """Divides the time of a call into wait, work and answer.

    The server has measured how long it worked. By its own clock it also says
    when it began. If this clock differs, the work is moved into the call.
    """
    begin, end, work_begin, work = integers(
        record, ("begin_ns", "end_ns", "work_begin_ns", "work_ns")
    ).values()
    work = max(0, min(work, end - begin))
    wait = max(0, min(work_begin - begin, end - begin - work))
    return wait, work, end - begin - wait - work


def _forget() -> None:
    global _lock, _recorder
    recorder, _recorder, _lock = _recorder, None, threading.RLock()
    if recorder is not None:
        recorder.forget()


os.register_at_fork(after_in_child=_forget)
