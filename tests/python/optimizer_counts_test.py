"""Rules and options that read counts, shows and steps of a push.

The client counts how often an id is in a push; `table.push` takes shows, and
`table.iterations` is the step that pushes carry.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python.worker_threads import (
    in_threads,
    join_workers,
    running_clients,
)
from tfswitch import optimizers


@pytest.mark.parametrize(
    ("w", "gradient", "count", "clipped"),
    [
        ([0.003, 0.004], [0.3, 0.4], 1, [0.003, 0.004]),
        ([0.003, 0.004], [0.3, 0.4], 2, [0.006, 0.008]),
        ([0.003, 0.004], [0.003, 0.004], 2, [0.003, 0.004]),
        ([0.0, 0.0], [0.3, 0.4], 3, [2.5456e-5, 3.3941e-5]),
    ],
)
def test_cowclip_counts_the_ids_of_a_push(cluster, w, gradient, count, clipped):
    table = tsw.EmbeddingTable(
        "t", 2, optimizer=optimizers.SGD(1.0, cowclip=optimizers.CowClip())
    )
    table.assign([7], [w])

    table.push([7] * count, np.tile(gradient, (count, 1)) / count)

    np.testing.assert_allclose(
        table.lookup([7])[0], np.subtract(w, clipped), rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize(
    ("rule", "second"),
    [
        (optimizers.PaddleAdagrad(0.05), [-0.0149379, -0.0448758]),
        (optimizers.PaddleStdAdagrad(0.05), [-0.0149010, -0.0449501]),
    ],
    ids=["paddle_adagrad", "paddle_std_adagrad"],
)
def test_shows_scale_paddles_adagrads(cluster, rule, second):
    table = tsw.EmbeddingTable("t", 2, optimizer=rule)
    table.assign([7, 8], [[0.01, -0.02]] * 2)

    # No shows are a scale of 1.
    table.push([7, 8], [[0.4, -0.2]] * 2, shows=[2.0, 0.0])
    np.testing.assert_allclose(
        table.lookup([7, 8]), [[0.0, -0.015], [-0.01, -0.01]], atol=1e-6
    )
    table.push([7], [[0.3, 0.6]], shows=[1.0])
    np.testing.assert_allclose(table.lookup([7])[0], second, atol=1e-7)


@pytest.mark.parametrize("together", [False, True])
def test_adagrad_decays_with_the_steps_of_a_layer(embedded, together):
    rule = optimizers.AdagradDecay(1.0, 0.01, decay_step=10, decay_rate=0.25)
    layer = embedding = tsw.keras.DynamicEmbedding(
        1, embeddings_initializer="zeros", optimizer=rule
    )
    if together:
        layer = tsw.keras.DynamicEmbeddings({"id": embedding})
    embedding.table.iterations = 8

    for _ in range(2):  # Steps 9 and 10.
        ids = tf.constant([7])
        with tf.GradientTape() as tape:
            rows = layer({"id": ids} if together else ids, training=True)
            loss = tf.reduce_sum(rows["id"] if together else rows)
        embedding.apply_gradients(
            tape.gradient(loss, layer.trainable_variables)
        )

    np.testing.assert_allclose(
        embedding.table.lookup([7]),
        [[-1 / np.sqrt(1.01) - 1 / np.sqrt(0.25 * 1.01 + 1.0)]],
        rtol=1e-6,
    )


@pytest.mark.parametrize("is_told", [True, False])
def test_a_restored_table_goes_on_if_it_is_told_its_steps(
    embedded, tmp_path, is_told
):
    """Rate and decay depend on the step count, which no checkpoint has."""

    def make(name):
        return tsw.EmbeddingTable(
            name,
            1,
            initializer="zeros",
            optimizer=optimizers.AdagradDecay(
                lambda step: 1.0 / (1.0 + tf.cast(step, tf.float32)),
                decay_step=10,
                decay_rate=0.5,
            ),
        )

    def push(table, steps):
        for _ in range(steps):
            table.push([7], [[1.0]])

    whole, first = make("whole"), make("parts")
    push(whole, 35)
    push(first, 15)
    first.save(tmp_path / "checkpoint")
    second = make("parts")
    second.restore(tmp_path / "checkpoint")

    if is_told:
        second.iterations = 15
    push(second, 20)

    is_same = np.array_equal(second.lookup([7]), whole.lookup([7]))
    assert is_same == is_told


@pytest.mark.parametrize("num_workers", [1, 3])
def test_counts_and_shows_of_all_workers_of_a_round_are_summed(num_workers):
    pushes = [
        ([1], [[100.0, 0.0]]),
        ([1, 1, 2], [[100.0, 0.0]] * 3),
        ([2, 1], [[100.0, 0.0]] * 2),
    ]
    if num_workers == 1:
        pushes = [
            (
                np.concatenate([ids for ids, _ in pushes]),
                np.concatenate([gradients for _, gradients in pushes]) / 3,
            )
        ]
    with running_clients(0) as client:
        workers = join_workers(client, num_workers, consistency="bsp")
        tables = [
            tsw.EmbeddingTable(
                "t",
                2,
                initializer="zeros",
                # For a row of zeros the threshold is the count.
                optimizer=optimizers.SGD(
                    1.0, cowclip=optimizers.CowClip(1.0, 0.5**0.5)
                ),
                statistics=tsw.statistics.ShowClick(),
                consistency="bsp",
                cluster=client(i),
            )
            for i in range(num_workers)
        ]
        for table, (ids, gradients) in zip(tables, pushes, strict=True):
            table.push(ids, gradients, clicks=np.full(len(ids), 0.5))
        in_threads(*(worker.end_step for worker in workers))

        np.testing.assert_allclose(
            tables[0].lookup([1, 2]), [[-4.0, 0.0], [-2.0, 0.0]], rtol=1e-6
        )
        usage = tables[0].usage([1, 2])
        assert usage["count"].tolist() == [4, 2]
        assert usage["show"].tolist() == [4, 2]
        assert usage["click"].tolist() == [2, 1]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_shows_of_dense_tables_do_not_depend_on_the_workers(num_workers):
    with running_clients(0) as client:
        workers = join_workers(client, num_workers, consistency="bsp")
        tables = [
            tsw.DenseTable(
                "t",
                {"kernel": (2,)},
                optimizer=optimizers.PaddleStdAdagrad(1.0),
                consistency="bsp",
                cluster=client(i),
            )
            for i in range(num_workers)
        ]
        tables[0].initialize([np.zeros(2, np.float32)])
        for table in tables:
            table.push([np.array([1.0, 2.0], np.float32)])
        in_threads(*(worker.end_step for worker in workers))

        np.testing.assert_allclose(tables[0].pull()[0], [-1.0, -2.0])


def test_adagrad_decays_in_dense_tables(cluster):
    rule = optimizers.AdagradDecay(0.1, decay_step=2, decay_rate=0.5)
    dense = tsw.DenseTable("d", {"kernel": (2,)}, optimizer=rule)
    dense.initialize([np.zeros(2, np.float32)])
    table = tsw.EmbeddingTable("t", 2, initializer="zeros", optimizer=rule)
    for _ in range(5):
        dense.push([np.array([3.0, 10.0], np.float32)])
        table.push([1], [[3.0, 10.0]])

    np.testing.assert_array_equal(dense.pull()[0], table.lookup([1])[0])
