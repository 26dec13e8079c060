"""A span for each training step."""

from typing import TYPE_CHECKING, Any

from tfswitch import tracing
from tfswitch._types import Logs
from tfswitch.keras import _backend

if TYPE_CHECKING:
    import contextlib

    from opentelemetry import trace


class TraceSteps(_backend.Callback):
    """Traces `fit`: each step is a span that contains its pulls and pushes.

    Tracing is on from the begin to the end of `fit`; see
    `tfswitch.tracing.start`. If `fit` ends by an exception, it stays on until
    `tfswitch.tracing.stop` or the next `fit`, and so does its last step. The
    spans are named "step", and the attribute
    "tfswitch.step" counts the steps of an epoch. With `steps_per_execution` a
    span contains so many steps.

    Args:
        tracer_provider: As for `tfswitch.tracing.start`.

    Raises:
        ImportError: When `fit` begins, if OpenTelemetry is not installed.

    Example:

    >>> model.fit(data, callbacks=[tsw.keras.callbacks.TraceSteps(provider)])
    """

    def __init__(
        self, tracer_provider: "trace.TracerProvider | None" = None
    ) -> None:
        super().__init__()
        self._tracer_provider = tracer_provider
        self._step: contextlib.AbstractContextManager[None] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins to trace."""
        self._end_step()
        tracing.start(self._tracer_provider)

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Begins the span of the step."""
        self._end_step()
        step: Any = tracing.span("step", {"tfswitch.step": int(batch)})
        step.__enter__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends the span of the step."""
        self._end_step()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Ends tracing."""
        self._end_step()
        tracing.stop()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
