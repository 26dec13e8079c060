"""SyncGroup: epochs of uneven length, exact averages, and what may go wrong."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python.worker_threads import (
    HANG_SECS,
    Call,
    in_threads,
)

Worker = tsw.train.Worker
SyncGroup = tsw.train.SyncGroup

DIM = 2


def make_group(client, worker, count, variables, optimizer="sgd", **kwargs):
    return SyncGroup(
        variables,
        optimizer,
        worker=Worker(
            worker, count, consistency="bsp", cluster=client(worker), **kwargs
        ),
    )


def make_table(cluster, optimizer):
    return tsw.EmbeddingTable(
        "rows",
        DIM,
        initializer="zeros",
        optimizer=optimizer,
        consistency="bsp",
        cluster=cluster,
    )


# --- Exact averages ---------------------------------------------------------


def account(client, counts, epochs):
    """Trains one weight per sample; returns weights and rounds per epoch.

    The loss is the mean of the weights of a batch, with a learning rate of 1:
    each sample's weight becomes minus the weight with which it was trained.
    """
    total = sum(map(sum, counts)) * epochs
    names = iter(range(total))
    batches = [
        [
            [[next(names) for _ in range(size)] for size in epoch]
            for epoch in [sizes] * epochs
        ]
        for sizes in counts
    ]

    def train(worker):
        weights = tf.Variable(np.zeros(max(total, 1), np.float32))
        group = make_group(
            client, worker, len(counts), [weights], tsw.optimizers.SGD(1.0)
        )
        table = make_table(client(worker), tsw.optimizers.SGD(1.0))
        seen = []
        for epoch in batches[worker]:
            with group.epoch() as steps:
                for ids in epoch:
                    gradient = np.zeros(max(total, 1), np.float32)
                    gradient[ids] = 1.0 / len(ids)
                    rows = np.full((len(ids), DIM), 1.0 / len(ids))
                    steps.step(
                        [gradient], [(table, ids, rows)], weight=len(ids)
                    )
            # All workers have the same, complete values here.
            seen.append(weights.numpy().copy())
            assert group.worker.stats()["dropped_steps"] == 0
        rows = table.lookup(np.arange(total)).numpy()
        np.testing.assert_allclose(rows[:, 0], seen[-1][:total], rtol=1e-6)
        np.testing.assert_array_equal(rows[:, 0], rows[:, 1])
        return seen

    results = in_threads(*(lambda w=w: train(w) for w in range(len(counts))))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)

    expected = np.zeros(max(total, 1))
    for epoch in range(epochs):
        for step in range(max(map(len, counts))):
            present = [b[epoch][step] for b in batches if step < len(b[epoch])]
            ids = [i for batch in present for i in batch]
            expected[ids] = -1.0 / len(ids)
        np.testing.assert_allclose(
            results[0][epoch], expected, rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize(
    "counts",
    [
        [[4], [4, 4, 4, 4, 2]],
        [[2, 2], [], [1]],
    ],
    ids=str,
)
def test_every_sample_is_trained_once_with_its_weight(client, counts):
    account(client, counts, epochs=2)


# --- Who comes, goes, fails -------------------------------------------------


def test_what_the_chief_saves_is_complete(tmp_path, client):
    """It has ended long before the others, and saves what they have trained."""

    def train(worker):
        weights = tf.Variable(np.zeros(4, np.float32))
        group = make_group(
            client, worker, 2, [weights], tsw.optimizers.SGD(1.0)
        )
        for epoch in range(2):
            with group.epoch() as steps:
                for _ in range(1 + 9 * worker):
                    steps.step([np.ones(4, np.float32)], weight=1)
            if group.is_chief:
                group.worker.cluster.save(tmp_path / str(epoch))
            group.barrier("saved")
        return weights.numpy()

    in_threads(*(lambda w=w: train(w) for w in range(2)))

    for epoch in range(2):
        with tsw.Cluster(f"local://{tmp_path}-{epoch}") as other:
            other.restore(tmp_path / str(epoch))
            table = tsw.DenseTable(
                "dense_variables",
                {"0": (4,)},
                optimizer="sgd",
                consistency="bsp",
                cluster=other,
            )
            np.testing.assert_array_equal(
                table.pull()[0], np.full(4, -10.0 * (epoch + 1))
            )


def test_changes_without_a_gradient_are_averaged_by_samples(client):
    averages = [tf.Variable([2.0, 0.0]), tf.Variable([9.0, 9.0])]

    def train(worker, change, weight):
        group = SyncGroup(
            worker=Worker(worker, 2, consistency="bsp", cluster=client(worker)),
            non_trainable=[averages[worker]],
        )
        if worker == 0:
            first.set()
        with group.epoch() as steps:
            averages[worker].assign_add(change)
            steps.step(weight=weight)
        group.leave()

    first = threading.Event()
    zero = Call(train, 0, [1.0, 4.0], 3.0)
    assert first.wait(HANG_SECS)
    in_threads(zero.result, lambda: train(1, [1.0, 8.0], 1.0))

    for average in averages:
        np.testing.assert_allclose(average, [3.0, 5.0], rtol=1e-6)


def test_a_layers_weight_may_be_among_the_variables(client):
    def train(worker):
        layer = tsw.keras.DynamicEmbedding(
            1,
            table="layer",
            embeddings_initializer="zeros",
            optimizer=tsw.optimizers.SGD(1.0),
            consistency="bsp",
            cluster=client(worker),
        )
        layer.build()
        variables = [*layer.trainable_variables, tf.Variable([0.0])]
        group = make_group(client, worker, 2, variables)
        with group.epoch() as steps:
            for size in (2, 1)[: 2 - worker]:
                ids = tf.range(size, dtype=tf.int64)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(layer(ids, training=True))
                steps.step(tape.gradient(loss, variables), weight=size)
        return layer.table.lookup([0, 1]).numpy()

    for rows in in_threads(lambda: train(0), lambda: train(1)):
        # Step 1: two workers of two samples each; step 2: one sample alone.
        np.testing.assert_allclose(rows, [[-0.5 - 1.0], [-0.5]])


def test_an_end_that_takes_too_long_leaves_the_group(client):
    one = make_group(client, 0, 2, [tf.Variable([1.0])])
    two = make_group(client, 1, 2, [tf.Variable([1.0])])

    with (
        pytest.raises(TimeoutError, match=r"end of epoch.*worker 1"),
        one.epoch(timeout_secs=0.05),
    ):
        pass

    with two.epoch() as steps:  # Nobody waits for the one that has given up.
        steps.step([[1.0]], weight=1)
    assert two.worker.stats()["workers"]["active"] == 1


def test_schedules_count_the_steps_of_all(client):
    def train(worker):
        optimizer = tsw.optimizers.SGD(
            lambda step: 1.0 / (1.0 + tf.cast(step, tf.float32))
        )
        group = make_group(client, worker, 2, [tf.Variable([0.0])], optimizer)
        with group.epoch() as steps:
            for _ in range(1 + 4 * worker):
                steps.step([[1.0]], weight=1)
        return group.table.learning_rate

    rates = in_threads(*(lambda w=w: train(w) for w in range(2)))

    np.testing.assert_allclose(rates, [1.0 / 6.0] * 2, rtol=1e-6)


def test_a_late_worker_takes_up_the_schedule(client):
    def make(worker):
        optimizer = tsw.optimizers.SGD(
            lambda step: 1.0 / (1.0 + tf.cast(step, tf.float32))
        )
        return make_group(
            client, worker, 2, [tf.Variable([0.0])], optimizer, join_secs=0.01
        )

    one = make(0)
    with one.epoch() as steps:
        for _ in range(4):
            steps.step([[1.0]], weight=1)

    np.testing.assert_allclose(make(1).table.learning_rate, 0.2)


# --- Bad input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradients", "rows", "message"),
    [
        ([[1.0]], np.full((2, DIM), np.nan), "'rows': a gradient is NaN"),
        ([[1.0]], np.ones((1, DIM)), r"'rows': gradients of ids.*must have"),
        ([[np.inf]], np.ones((2, DIM)), "NaN or Inf|Inf"),
    ],
    ids=["rows", "shape", "variables"],
)
def test_a_bad_gradient_pushes_nothing(client, gradients, rows, message):
    variable = tf.Variable([0.0])
    group = make_group(client, 0, 1, [variable], tsw.optimizers.SGD(1.0))
    table = make_table(client(0), tsw.optimizers.SGD(1.0))

    with group.epoch() as steps:
        with pytest.raises(ValueError, match=message):
            steps.step(gradients, [(table, [1, 2], rows)], weight=2)
        with pytest.raises(ValueError, match="Received: weight=nan"):
            steps.step([[1.0]], [(table, [1], [[1.0] * DIM])], weight=np.nan)
        assert not group.worker.stats()["in_step"]
        steps.step([[3.0]], weight=1)

    assert variable.numpy() == [-3.0]
    assert table.size() == 0


def test_a_step_outside_the_epoch_is_refused(client):
    group = make_group(client, 0, 1, [tf.Variable([1.0])])
    with group.epoch() as steps:
        with pytest.raises(RuntimeError, match="an epoch has begun already"):
            group.epoch().__enter__()
        steps.step([[1.0]], weight=1)

    with pytest.raises(RuntimeError, match="the epoch is over"):
        steps.step([[1.0]], weight=1)


def test_gradients_without_variables_are_refused(client):
    group = make_group(client, 0, 1, [])

    with group.epoch() as steps:
        with pytest.raises(ValueError, match=r"without variables.*1 gradients"):
            steps.step([[1.0]], weight=1)
        steps.step(weight=1)
    with pytest.raises(ValueError, match="without variables"):
        _ = group.table


def test_the_worker_must_train_in_rounds(client):
    with pytest.raises(ValueError, match=r"consistency bsp\. Received.*asp"):
        SyncGroup([], worker=Worker(cluster=client(0)))
    with pytest.raises(ValueError, match="Received: worker=3"):
        SyncGroup([], worker=3)


def test_a_bad_gradient_is_refused_and_nobody_is_left_waiting(client):
    group = make_group(client, 0, 2, [tf.Variable([1.0])], join_secs=0.01)

    with pytest.raises(ValueError, match="NaN"), group.epoch() as steps:
        steps.step([[np.nan]], weight=1)

    assert group.worker.stats()["workers"]["active"] == 0
