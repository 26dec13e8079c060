"""SyncEpochs, for the Keras that TF_USE_LEGACY_KERAS chooses.

tests/integration has it in processes of their own, and with tf_keras.
"""

import numpy as np
import pytest

import tfswitch as tsw
from tests.python.worker_threads import Call
from tfswitch.keras._backend import keras

Worker = tsw.train.Worker

FEATURES = np.ones((8, 1), np.float32)
TARGETS = np.zeros((8, 1), np.float32)


def make_model(worker, consistency="bsp"):
    optimizer = tsw.keras.ParameterServerOptimizer(
        tsw.optimizers.SGD(0.1), consistency=consistency, worker=worker
    )
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile(optimizer, "mse")
    return model


class Recorder(keras.callbacks.Callback):
    """Calls a function at hooks, by their names."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def on_epoch_begin(self, epoch, logs=None):
        self._note("begin")

    def on_test_begin(self, logs=None):
        self._note("test")

    def on_epoch_end(self, epoch, logs=None):
        self._note("end")


@pytest.mark.parametrize(
    ("consistency", "validates"), [("asp", True), ("bsp", False)]
)
def test_an_epoch_ends_when_it_has_ended_for_all(
    client, consistency, validates
):
    """And before it is validated; the next one begins after it."""
    worker = Worker(0, 2, consistency=consistency, cluster=client(0))
    peer = Worker(1, 2, consistency=consistency, cluster=client(1))
    model = make_model(worker, consistency)
    log = []

    def others():
        table = tsw.DenseTable(
            "dense_variables",
            model.optimizer.table.shapes,
            optimizer=tsw.optimizers.SGD(0.1),
            consistency=consistency,
            cluster=client(1),
        )
        for _ in range(2):
            for _ in range(5):  # The model has 2 batches.
                table.push([[[1.0]], [1.0]])
                peer.end_step()
            log.append("others")
            peer.wait_at_barrier("end of epoch")
        peer.leave()

    model.optimizer.build(model.trainable_variables)
    training = Call(
        lambda: model.fit(
            FEATURES,
            TARGETS,
            batch_size=4,
            epochs=2,
            verbose=0,
            validation_data=(FEATURES, TARGETS) if validates else None,
            callbacks=[tsw.keras.SyncEpochs(), Recorder(log.append)],
        )
    )
    Call(others).result()
    training.result()

    def places(event):
        return [i for i, logged in enumerate(log) if logged == event]

    for event in ("test", "end") if validates else ("end",):
        assert len(places(event)) == 2
        for others_ended, mine in zip(
            places("others"), places(event), strict=True
        ):
            assert others_ended < mine
    # Schedules go on where the others are.
    assert int(model.optimizer.iterations) == 10
    assert worker.stats()["clock"] == 10


def test_the_last_values_are_in_the_model(client):
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    model = make_model(worker)

    model.fit(FEATURES, TARGETS, verbose=0, callbacks=[tsw.keras.SyncEpochs()])

    for variable, value in zip(
        model.trainable_variables, model.optimizer.table.pull(), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(variable), value)


def test_an_epoch_ends_with_what_others_have_trained_since(client):
    worker = Worker(0, 2, consistency="asp", cluster=client(0))
    peer = Worker(1, 2, consistency="asp", cluster=client(1))
    model = make_model(worker, "asp")
    model.optimizer.build(model.trainable_variables)
    peers_table = tsw.DenseTable(
        "dense_variables",
        model.optimizer.table.shapes,
        optimizer=tsw.optimizers.SGD(0.1),
        cluster=client(1),
    )
    waits, values = [], []

    def others(event):
        if event == "end":  # After this worker's last step.
            peers_table.push([[[1.0]], [1.0]])
            waits.append(Call(peer.wait_at_barrier, "end of epoch"))

    def note(event):
        if event == "end":
            values.extend(np.array(v) for v in model.trainable_variables)

    model.fit(
        FEATURES,
        TARGETS,
        verbose=0,
        callbacks=[Recorder(others), tsw.keras.SyncEpochs(), Recorder(note)],
    )
    waits[0].result()

    for mine, value in zip(values, peers_table.pull(), strict=True):
        np.testing.assert_array_equal(mine, value)


def test_others_that_do_not_come_are_named(client):
    worker = Worker(0, 2, consistency="asp", cluster=client(0))
    peer = Worker(1, 2, consistency="asp", cluster=client(1))
    model = make_model(worker, "asp")

    with pytest.raises(TimeoutError, match=r"end of epoch.*worker 1"):
        model.fit(
            FEATURES,
            TARGETS,
            verbose=0,
            callbacks=[tsw.keras.SyncEpochs(timeout_secs=0.05)],
        )
    del peer


@pytest.fixture
def mixed_float16():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


def test_a_model_of_mixed_precision_ends_its_epochs(client, mixed_float16):
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    model = make_model(worker)
    assert hasattr(model.optimizer, "inner_optimizer")

    model.fit(
        FEATURES,
        TARGETS,
        epochs=2,
        verbose=0,
        callbacks=[tsw.keras.SyncEpochs()],
    )

    assert worker.stats()["clock"] > 0


def test_a_step_that_has_not_ended_counts_for_nothing(client):
    """As when the loss of an epoch's last batch has overflowed."""
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    model = make_model(worker)
    table = tsw.EmbeddingTable(
        "pushed",
        1,
        initializer="zeros",
        consistency="bsp",
        cluster=client(0),
    )

    class Push(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            table.push([1], [[1.0]])

    model.fit(
        FEATURES,
        TARGETS,
        verbose=0,
        callbacks=[tsw.keras.SyncEpochs(), Push()],
    )

    assert table.size() == 0


def test_another_optimizer_is_refused():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    with pytest.raises(ValueError, match=r"ParameterServerOptimizer.*SGD"):
        model.fit(FEATURES, TARGETS, callbacks=[tsw.keras.SyncEpochs()])
