"""Metrics of `fit` over the samples of all workers."""

from typing import Any

import numpy as np

from tfswitch._types import Logs
from tfswitch.keras import _backend
from tfswitch.keras.callbacks.sync_epochs import close_step, server_optimizer
from tfswitch.train._exchange import Exchange, merge
from tfswitch.train.barrier import EPOCH_SECS

_TRAINING, _VALIDATION = "", "val_"


class GlobalMetrics(_backend.Callback):
    """Computes the logs of an epoch from the samples of all workers.

    At the end of each epoch this callback sums the states of the model's loss
    and metrics over the workers, computes the results of the sums, and puts
    them into the epoch's logs. So an AUC is that of all samples, which is not
    the mean of the workers' AUCs. The metrics of validation data are merged in
    the same way: each worker may validate a part of the data, and a worker
    without data gets the results of the others.

    Put this callback before other callbacks, so that these see the merged logs.
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` then decide the
    same on all workers. Put `SyncEpochs` before this callback. Each worker
    keeps its own logs of single batches, and its own values that your
    `train_step` computes without metrics.

    All workers must have the same metrics, and the same number of epochs. A
    worker that has left, or was given up, counts with the states of its last
    epoch.

    Args:
        timeout_secs: Longest wait for other workers at the end of an epoch; by
            default a day.

    Raises:
        ValueError: When `fit` begins, or at the end of the first epoch: if the
            model's optimizer is no `ParameterServerOptimizer`, a metric has a
            state whose `aggregation` is not "sum", or the workers' metrics
            differ.
        TimeoutError: If other workers have not ended their epoch in time. The
            message names them.

    Example:

    >>> model.fit(
    ...     my_part_of_the_data,
    ...     validation_data=my_part_of_the_validation_data,
    ...     epochs=3,
    ...     callbacks=[
    ...         tsw.keras.callbacks.GlobalMetrics(),
    ...         keras.callbacks.EarlyStopping("val_auc", mode="max"),
    ...     ],
    ... )
    """

    def __init__(self, timeout_secs: float = EPOCH_SECS) -> None:
        super().__init__()
        self._timeout_secs = timeout_secs
        self._exchange: Exchange | None = None
        self._is_in_epoch = False
        self._trained: list[np.ndarray] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        server_optimizer(self)
        # Workers that left an earlier `fit` do not count.
        self._exchange = None
        self._states()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._is_in_epoch = True
        self._trained = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        # Validation resets the metrics, so the states of the training are
        # copied before.
        if self._is_in_epoch and self._trained is None:
            self._trained = self._states()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._is_in_epoch = False
        logs = {} if logs is None else logs
        present = self._states()
        mine = {_TRAINING: present}
        if self._trained is not None:
            mine = {_TRAINING: self._trained, _VALIDATION: present}
        worker = server_optimizer(self).worker
        close_step(worker)
        if self._exchange is None:
            self._exchange = Exchange("metrics", worker)
        told = self._exchange.tell(
            {
                f"{prefix}{i}": state
                for prefix, states in mine.items()
                for i, state in enumerate(states)
            },
            with_left=True,
            timeout_secs=self._timeout_secs,
        )
        for prefix in (_TRAINING, _VALIDATION):
            of_all = merge(
                {
                    other: {
                        k: v for k, v in arrays.items() if _is_of(k, prefix)
                    }
                    for other, arrays in told.items()
                },
                "sum",
            )
            # A worker whose epoch had no batch may have no metrics yet.
            if not of_all or len(of_all) != len(present):
                continue
            self._assign([of_all[f"{prefix}{i}"] for i in range(len(present))])
            for name, value in self.model.get_metrics_result().items():
                if prefix not in mine or f"{prefix}{name}" in logs:
                    value = np.asarray(value)
                    logs[f"{prefix}{name}"] = (
                        value.item() if value.size == 1 else value
                    )
        self._assign(present)

    def _variables(self) -> list[Any]:
        """The states of the model's metrics.

        Raises:
            ValueError: If a state cannot be summed.
        """
        found = []
        for metric in self.model.metrics:
            for inner in getattr(metric, "metrics", None) or [metric]:
                for variable in inner.variables:
                    _check_is_sum(inner, variable)
                    found.append(variable)
        return found

    def _states(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self._variables()]

    def _assign(self, states: list[np.ndarray]) -> None:
        for variable, state in zip(self._variables(), states, strict=True):
            variable.assign(state.astype(np.dtype(variable.numpy().dtype)))


def _is_of(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key[len(prefix) :].isdigit()


def _check_is_sum(metric: Any, variable: Any) -> None:
    rule = getattr(variable, "aggregation", "sum")  # Keras 3.6 has none.
    rule = str(getattr(rule, "name", rule)).lower()
    if rule != "sum":
        raise ValueError(
            f"metric '{metric.name}': its state '{variable.name}' has "
            f"aggregation={rule!r}, and GlobalMetrics sums the states of all "
            'workers. Make the metric of sums (aggregation="sum"), or leave it '
            "or GlobalMetrics out."
        )
