"""Rules and options that read counts, shows and steps of a push.

The client counts how often an id is in a push; `table.push` takes shows, and
`table.iterations` is the step that pushes carry. `optimizer_references.py` is
the NumPy side.
"""

import numpy as np
import pytest

import tfswitch as tsw
from tests.python import optimizer_references as references
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
