"""GlobalMetrics, for the Keras that TF_USE_LEGACY_KERAS chooses."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python.worker_threads import (
    in_threads,
    join_workers,
    running_clients,
)
from tfswitch.keras._backend import IS_LEGACY, keras

MEAN = tf.VariableAggregation.MEAN if IS_LEGACY else "mean"

# Scores, and labels, of two workers' samples.
FEATURES = [np.arange(-4.0, 4.0)[:, None], np.arange(4.0, 10.0)[:, None]]
LABELS = [np.arange(8) % 2, np.ones(6)]


class Recorder(keras.callbacks.Callback):
    """Keeps the logs that callbacks see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(dict(logs))


def make_model(worker=None, **kwargs):
    optimizer = keras.optimizers.SGD(0.0)
    if worker is not None:
        optimizer = tsw.keras.ParameterServerOptimizer(
            optimizer, consistency="bsp", worker=worker, batch_weight=2
        )
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(
                1, activation="sigmoid", kernel_initializer="ones"
            ),
        ]
    )
    kwargs.setdefault("metrics", [keras.metrics.AUC(name="auc"), "accuracy"])
    model.compile(optimizer, "binary_crossentropy", run_eagerly=True, **kwargs)
    return model


def test_logs_are_of_the_samples_of_all():
    """Also of one that has left, and for one that validates nothing."""
    with running_clients(1) as client:
        models = [
            make_model(worker)
            for worker in join_workers(client, 2, consistency="bsp")
        ]
        recorders = [Recorder(), Recorder()]

        def train(i):
            return (
                models[i]
                .fit(
                    FEATURES[i],
                    LABELS[i],
                    batch_size=2,
                    epochs=2 - i,
                    validation_data=(FEATURES[i], LABELS[i])
                    if i == 0
                    else None,
                    verbose=0,
                    callbacks=[
                        tsw.keras.callbacks.GlobalMetrics(),
                        recorders[i],
                    ],
                )
                .history
            )

        histories = in_threads(*(functools.partial(train, i) for i in (0, 1)))

    plain = make_model()
    of_all = plain.evaluate(
        np.concatenate(FEATURES),
        np.concatenate(LABELS),
        return_dict=True,
        verbose=0,
    )
    validated = plain.evaluate(
        FEATURES[0], LABELS[0], return_dict=True, verbose=0
    )
    expected = {**of_all, **{f"val_{k}": v for k, v in validated.items()}}
    assert [len(recorder.seen) for recorder in recorders] == [2, 1]
    for logs in (*recorders[0].seen, *recorders[1].seen):
        assert logs == pytest.approx(expected, rel=1e-6)
    assert recorders[0].seen[0] == recorders[1].seen[0]  # To the last bit.
    assert histories[0]["auc"] == [recorders[0].seen[0]["auc"]] * 2


class Peak(keras.metrics.Metric):
    """The greatest prediction, which no sum of states gives."""

    def __init__(self):
        super().__init__(name="peak")
        add = self.add_weight if IS_LEGACY else self.add_variable
        self.most = add(
            shape=(), initializer="zeros", aggregation=MEAN, name="most"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        return self.most


def test_a_metric_whose_states_cannot_be_summed_is_named():
    with running_clients(0) as client:
        (worker,) = join_workers(client, 1, consistency="bsp")
        model = make_model(worker, metrics=[Peak()])

        with pytest.raises(ValueError, match=r"'peak'.*'most.*'mean'"):
            model.fit(
                FEATURES[0],
                LABELS[0],
                verbose=0,
                callbacks=[tsw.keras.callbacks.GlobalMetrics()],
            )
