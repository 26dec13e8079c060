"""Rules and options that read counts, shows and steps of a push.

The client counts how often an id is in a push; `table.push` takes shows, and
`table.iterations` is the step that pushes carry. `optimizer_references.py` is
the NumPy side.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python import optimizer_references as references
from tests.python.worker_threads import (
    in_threads,
    join_workers,
    running_clients,
)
from tfswitch import optimizers

TOLERANCE = {"rtol": 5e-6, "atol": 5e-7}


def test_cowclip_counts_the_ids_of_a_push(cluster):
    rng = np.random.default_rng(31)
    ids = np.arange(5)
    counts = np.arange(1, 6)
    start = rng.normal(size=(5, 4)).astype(np.float32)
    start[0] = 0.0  # Its threshold is the floor.
    # Far above the thresholds of rare ids, far below those of frequent ones.
    gradients = rng.normal(size=(6, 5, 4)).astype(np.float32) * 2
    table = tsw.EmbeddingTable(
        "t",
        4,
        optimizer=optimizers.Adagrad(
            0.1, l2=0.01, cowclip=optimizers.CowClip(0.5, 0.25)
        ),
    )
    table.assign(ids, start)

    for gradient in gradients:
        places = rng.permutation(np.repeat(ids, counts))
        table.push(ids[places], gradient[places] / counts[places][:, None])

    expected, _ = references.run(
        references.with_options(
            references.adagrad(), l2=0.01, cowclip_r=0.5, cowclip_zeta=0.25
        ),
        start.astype(np.float64),
        gradients,
        [references.Step(0.1, count=counts[:, None])] * len(gradients),
    )
    np.testing.assert_allclose(table.lookup(ids), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("w", "gradient", "count", "clipped"),
    [
        ([0.003, 0.004], [0.3, 0.4], 2, [0.006, 0.008]),
        ([0.003, 0.004], [0.003, 0.004], 2, [0.003, 0.004]),
        ([0.0, 0.0], [0.3, 0.4], 3, [2.5456e-5, 3.3941e-5]),
    ],
)
def test_cowclip_golden_vectors(cluster, w, gradient, count, clipped):
    table = tsw.EmbeddingTable(
        "t", 2, optimizer=optimizers.SGD(1.0, cowclip=optimizers.CowClip())
    )
    table.assign([7], [w])

    table.push([7] * count, np.tile(gradient, (count, 1)) / count)

    np.testing.assert_allclose(
        table.lookup([7])[0], np.subtract(w, clipped), rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (optimizers.PaddleAdagrad(0.05), references.paddle_adagrad()),
        (optimizers.PaddleStdAdagrad(0.05), references.paddle_std_adagrad()),
    ],
    ids=["paddle_adagrad", "paddle_std_adagrad"],
)
def test_shows_scale_paddles_adagrads(cluster, ours, reference):
    rng = np.random.default_rng(32)
    ids = np.arange(5)
    start = rng.normal(size=(5, 4)).astype(np.float32)
    gradients = rng.normal(size=(6, 5, 4)).astype(np.float32)
    # 0 shows are a scale of 1.
    shows = rng.integers(0, 5, size=(6, 5)).astype(np.float32)
    table = tsw.EmbeddingTable("t", 4, optimizer=ours)
    table.assign(ids, start)

    for gradient, shown in zip(gradients, shows, strict=True):
        table.push(ids, gradient, shows=shown)

    expected, _ = references.run(
        reference,
        start.astype(np.float64),
        gradients,
        [references.Step(0.05, shows=shown[:, None]) for shown in shows],
    )
    np.testing.assert_allclose(table.lookup(ids), expected, **TOLERANCE)


def test_paddle_golden_vectors(cluster):
    table = tsw.EmbeddingTable("t", 2, optimizer=optimizers.PaddleAdagrad(0.05))
    table.assign([7], [[0.01, -0.02]])

    table.push([7], [[0.4, -0.2]], shows=[2.0])
    first = table.lookup([7])[0].numpy()
    table.push([7], [[0.3, 0.6]], shows=[1.0])

    np.testing.assert_allclose(first, [0.0, -0.015], atol=1e-6)
    np.testing.assert_allclose(
        table.lookup([7])[0], [-0.0149379, -0.0448758], atol=1e-6
    )


@pytest.mark.parametrize("compat", [False, True])
def test_adagrad_decays_with_the_tables_iterations(cluster, compat):
    rng = np.random.default_rng(33)
    ids = np.arange(3)
    start = rng.normal(size=(3, 4)).astype(np.float32)
    steps = [1, 9, 35, 36, 37, 38, 90]
    gradients = rng.normal(size=(len(steps), 3, 4)).astype(np.float32)
    table = tsw.EmbeddingTable(
        "t",
        4,
        optimizer=optimizers.AdagradDecay(0.1, decay_step=10, compat=compat),
    )
    table.assign(ids, start)

    for gradient, step in zip(gradients, steps, strict=True):
        table.iterations = step
        table.push(ids, gradient)

    expected, _ = references.run(
        references.adagrad_decay(decay_step=10, compat=compat),
        start.astype(np.float64),
        gradients,
        [references.Step(0.1, global_step=step) for step in steps],
    )
    np.testing.assert_allclose(table.lookup(ids), expected, **TOLERANCE)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_restored_table_goes_on_if_it_is_told_its_steps(
    cluster, tmp_path, is_told
):
    """No checkpoint has them: both the rate and the decay go by them."""

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
                # Of a row of zeros the threshold is the count.
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


@pytest.mark.parametrize("num_workers", [1, 2, 4])
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
