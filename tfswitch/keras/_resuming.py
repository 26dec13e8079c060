"""Makes `fit` of a restarted worker continue where its job is.

A process counts its calls of `fit`. With its steps it sends the group a mark:
this number and the epoch (`mark` in `protos/tfswitch/v1/coordination.proto`).
A new process gets the mark when it joins, and so learns in which `fit` its job
is, in which epoch, and after how many steps.
"""

import collections
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch.keras import _backend
from tfswitch.keras.parameter_server_optimizer import ParameterServerOptimizer
from tfswitch.train.worker import Worker

# The number of low bits of a mark that contain the epoch. The higher bits
# contain the number of the `fit`, from 1.
_EPOCH_BITS = 32

# How often this process has called `fit`, by group and job.
_num_fits: collections.Counter[tuple[str, str]] = collections.Counter()
# The jobs that are in a later `fit` than this process.
_behind: set[tuple[str, str]] = set()


def install() -> None:
    """Wraps `fit` of all models. Call it once."""
    original = _backend.Model.fit
    signature = inspect.signature(original)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = optimizer_of(self)
        worker = None
        if isinstance(optimizer, ParameterServerOptimizer):
            worker = optimizer.worker_of_job()
        # In a loop over a work queue nothing is resumed here, because the queue
        # on the server has the epoch.
        if worker is None or worker._num_loops:
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        return _fit(original, bound, optimizer, worker)

    fit.__doc__ = original.__doc__
    fit.__signature__ = signature  # type: ignore[attr-defined]
    _backend.Model.fit = fit


def optimizer_of(model: Any) -> Any:
    """Returns the model's optimizer, without a wrapper for mixed precision."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _fit(
    original: Callable[..., Any],
    bound: inspect.BoundArguments,
    optimizer: ParameterServerOptimizer,
    worker: Worker,
) -> Any:
    model = bound.arguments["self"]
    key = (worker.group, str(worker.job))
    _num_fits[key] += 1
    number = _num_fits[key]
    if number == 1 and worker._position()[0]:
        _behind.add(key)
    elif key in _behind and worker.stats()["left"]:
        worker._set_mark(0, join_again=True)
    present, _ = worker._position() if key in _behind else (0, 0)
    if present >> _EPOCH_BITS > number:
        _say(worker, f"has ended fit {number}, which ends here at once")
        worker.leave()
        history = _backend.keras.callbacks.History()
        history.set_model(model)
        history.on_train_begin()
        model.history = history
        return history
    optimizer._servers.has_restored = False
    epochs = int(bound.arguments.get("epochs", 1))
    goes_on = _GoOn(worker, number, epochs, key in _behind)
    # Keras does not call `set_model` for callbacks that are added to a
    # CallbackList.
    goes_on.set_model(model)
    _behind.discard(key)
    callbacks: Any = bound.arguments.get("callbacks")
    if hasattr(callbacks, "append") and hasattr(callbacks, "on_train_begin"):
        callbacks.append(goes_on)  # A CallbackList.
    else:
        given = [] if callbacks is None else tf.nest.flatten(callbacks)
        bound.arguments["callbacks"] = [*given, goes_on]
    return original(*bound.args, **bound.kwargs)


def _say(worker: Worker, text: str) -> None:
    print(
        f"tfswitch: worker {worker.worker_id} was started again: job "
        f"'{worker.job}' {text}",
        file=sys.stderr,
        flush=True,
    )


class _GoOn(_backend.Callback):
    """Continues where the job is, unless a `BackupAndRestore` has restored.

    This callback runs after all others, so it knows whether another callback
    has restored a checkpoint.
    """

    def __init__(
        self, worker: Worker, number: int, epochs: int, is_behind: bool
    ) -> None:
        super().__init__()
        self._epochs = epochs
        self._worker = worker
        self._number = number
        self._is_behind = is_behind

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = optimizer_of(self.model)
        if not self._is_behind or optimizer._servers.has_restored:
            return
        if self._worker.stats()["left"]:  # BackupAndRestore may have left.
            self._worker._set_mark(0, join_again=True)
        mark, num_steps = self._worker._position()
        if mark >> _EPOCH_BITS != self._number:
            return
        epoch = mark & ((1 << _EPOCH_BITS) - 1)
        if epoch >= self._epochs:
            _say(self._worker, f"has ended all epochs of fit {self._number}")
        else:
            _say(
                self._worker,
                f"goes on in epoch {epoch + 1} of {self._epochs}, after "
                f"{num_steps} steps",
            )
        _backend.begin_fit_at(self.model, epoch)
        leave_out(self.model, num_steps, [])
        # Learning-rate schedules continue from the step of the other workers.
        clock = self._worker.stats()["clock"]
        if clock > int(optimizer.iterations.numpy()):
            optimizer.iterations.assign(clock)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        _backend.begin_fit_at(self.model, None)
        self._worker._set_mark((self._number << _EPOCH_BITS) + epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        leave_out(self.model, 0, [])

    def on_train_end(self, logs: Any = None) -> None:
        _backend.begin_fit_at(self.model, None)


def leave_out(model: Any, num_batches: int, metrics: list[np.ndarray]) -> None:
    """Reads the first batches of the first epoch without training them.

    Args:
        model: A model whose `fit` has begun.
        num_batches: How many batches. 0 means that all batches are trained.
        metrics: The values of the metrics after these batches.
    """
    train = getattr(model.train_function, "train", model.train_function)
    model.train_function = train
    if not num_batches:
        return
    left = num_batches
    per_call = _backend.steps_per_execution(model)

    def read_or_train(iterator: Any) -> Any:
        nonlocal left
        if left <= 0:
            model.train_function = train
            return train(iterator)
        is_first = left == num_batches
        left -= per_call
        for _ in range(per_call):
            batch = next(iterator)
        if is_first:  # After Keras has reset the metrics.
            present = _backend.metric_variables(model, batch)
            if list(map(np.shape, metrics)) == [v.shape for v in present]:
                for variable, value in zip(present, metrics, strict=True):
                    variable.assign(value)
        return model.get_metrics_result()

    read_or_train.train = train  # type: ignore[attr-defined]
    model.train_function = read_or_train
