"""Workers of a job that are started again, in one process.

tests/integration/workers_test.py has processes that are killed.
"""

import numpy as np
import pytest

import tfswitch as tsw
from tests.python.worker_threads import Call, running_clients, wait_for_stderr
from tfswitch.keras import _resuming
from tfswitch.keras._backend import keras

Worker = tsw.train.Worker

NUM_EPOCHS, NUM_BATCHES = 3, 4
FEATURES = np.arange(8, dtype=np.float32).reshape(8, 1) / 8
TARGETS = FEATURES**2


class KilledError(Exception):
    """Ends a `fit` as a signal does: nothing is told to the group."""


class Kill(keras.callbacks.Callback):
    """Ends `fit` after a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self._when = (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._when:
            raise KilledError


@pytest.fixture
def client():
    with running_clients(1) as client:
        yield client


def fit(worker, *callbacks):
    """Trains in what stands for a new process; returns history and model."""
    _resuming._num_fits.clear()
    _resuming._behind.clear()
    keras.utils.set_random_seed(1)
    optimizer = tsw.keras.ParameterServerOptimizer(
        # Each step has a rate of its own.
        keras.optimizers.SGD(
            keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.5)
        ),
        consistency=worker.consistency,
        table=f"dense of {worker.group}",
        worker=worker,
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    history = model.fit(
        FEATURES,
        TARGETS,
        batch_size=2,
        epochs=NUM_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return history, model


@pytest.mark.parametrize(
    ("consistency", "callbacks"),
    [
        (tsw.train.Consistency.ssp(1), lambda: []),
        ("bsp", lambda: [tsw.keras.SyncEpochs()]),
    ],
    ids=["ssp", "bsp and SyncEpochs"],
)
def test_fit_goes_on_where_the_job_is_and_ends_if_that_has_ended(
    client, capfd, consistency, callbacks
):
    def worker(group, **kwargs):
        return Worker(
            0,
            1,
            consistency=consistency,
            group=group,
            cluster=client(0),
            **kwargs,
        )

    _, expected = fit(worker("whole"), *callbacks())
    with pytest.raises(KilledError):
        fit(worker("train", job="j"), *callbacks(), Kill(1, 1))

    history, model = fit(worker("train", job="j"), *callbacks())

    assert "goes on in epoch 2 of 3, after 2 steps" in wait_for_stderr(
        capfd, "goes on"
    )
    assert history.epoch == [1, 2]
    assert int(model.optimizer.iterations.numpy()) == NUM_EPOCHS * NUM_BATCHES
    for one, other in zip(
        model.get_weights(), expected.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)

    late = worker("train", job="j")
    history, _ = fit(late)
    assert history.history == {} and late.stats()["left"]
    assert late.stats()["num_steps"] == NUM_EPOCHS * NUM_BATCHES
    assert "has ended fit 1" in wait_for_stderr(capfd, "at once")

    # The next day.
    history, _ = fit(worker("train", job="k"))
    assert history.epoch == [0, 1, 2]


def test_steps_that_are_repeated_do_not_move_schedules(client):
    """With a checkpoint of one's own, and no job."""
    with pytest.raises(KilledError):
        fit(Worker(0, 1, consistency="bsp", cluster=client(0)), Kill(1, 1))

    worker = Worker(0, 1, consistency="bsp", first_step=0, cluster=client(0))
    _, model = fit(worker)

    assert int(model.optimizer.iterations.numpy()) == NUM_EPOCHS * NUM_BATCHES
    assert worker.stats()["num_steps"] == NUM_EPOCHS * NUM_BATCHES


def test_a_job_begins_when_the_former_one_has_ended(client, capfd):
    former = Worker(0, 1, cluster=client(0), job="j")
    call = Call(lambda: Worker(1, 1, cluster=client(1), job="k"))
    err = wait_for_stderr(capfd, "another job")
    assert "group 'train' trains job 'j', and worker 1 is of job 'k'" in err

    former.leave()

    assert call.result().stats()["workers"]["active"] == 1
