"""Each rule and option through tables, and their knobs.

That the kernels follow their formulas on any input is for the tests of C++.
Rules that read counts, shows or steps of a push are in
`optimizer_counts_test.py`.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tfswitch import optimizers
from tfswitch.optimizers import _conversion
from tfswitch.optimizers._base import CLASSES

# Float32 sums and powers in another order than Keras's, over 20 steps.
TOLERANCE = {"rtol": 5e-6, "atol": 5e-7}

KERAS = keras.optimizers
FTRL_KNOBS = {
    "learning_rate_power": -0.4,
    "initial_accumulator_value": 0.2,
    "l1_regularization_strength": 0.05,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.02,
    "beta": 0.3,
}


def pair(name, ours, theirs):
    return pytest.param(ours, theirs, id=name)


def alike(rule, *args, **kwargs):
    """A rule of Keras that has the same name and arguments here."""
    return pair(
        "_".join(map(str, (rule, *args[1:], *kwargs))),
        getattr(optimizers, rule)(*args, **kwargs),
        lambda: getattr(KERAS, rule)(*args, **kwargs),
    )


KERAS_PAIRS = [
    alike("SGD", 0.1),
    alike("SGD", 0.1, momentum=0.8, nesterov=True),
    alike("SGD", 0.1, momentum=0.5, weight_decay=0.2),
    alike("Adagrad", 0.1),
    alike("Adagrad", 0.1, initial_accumulator_value=0.0, epsilon=1e-3),
    alike("Adagrad", 0.1, clipvalue=0.3),
    alike("Adam", 0.1),
    alike("Adam", 0.1, 0.8, 0.95, 1e-3),
    alike("AdamW", 0.1, 0.05),
    alike("RMSprop", 0.01),
    alike("RMSprop", 0.01, 0.8, 0.7, 1e-3),
    alike("RMSprop", 0.01, epsilon=1e-2, centered=True),
    alike("RMSprop", 0.01, 0.8, 0.9, 1e-2, centered=True),
    alike("Adadelta", 1.0),
    alike("Adadelta", 1.0, 0.5, 1e-3),
    alike("Ftrl", 0.1),
    alike("Ftrl", 0.1, **FTRL_KNOBS),
    alike("Lion", 0.01),
    alike("Lion", 0.01, 0.5, 0.7),
    pair(
        "momentum",
        optimizers.Momentum(0.1),
        lambda: KERAS.SGD(0.1, momentum=0.9),
    ),
    pair(
        "amsgrad",
        optimizers.AMSGrad(0.1, 0.5, 0.6, 1e-3),
        lambda: KERAS.Adam(0.1, 0.5, 0.6, 1e-3, amsgrad=True),
    ),
    pair(
        "amsgrad_with_decay",
        optimizers.AMSGrad(0.1, weight_decay=0.1),
        lambda: KERAS.AdamW(0.1, weight_decay=0.1, amsgrad=True),
    ),
]


def train(table, ids, gradients, *, seed=5):
    """Pushes each matrix of gradients, in parts that sum to it."""
    rng = np.random.default_rng(seed)
    for gradient in gradients:
        # Each id twice, in any order; halves are exact.
        places = rng.permutation(np.r_[0 : len(ids), 0 : len(ids)])
        table.push(ids[places], gradient[places] / 2)


@pytest.mark.parametrize(("ours", "theirs"), KERAS_PAIRS)
def test_rows_and_dense_variables_equal_those_of_keras(embedded, ours, theirs):
    rng = np.random.default_rng(21)
    ids = np.array([3, -9, 2**40, 0, 17, 5])
    start = rng.normal(size=(6, 5)).astype(np.float32)
    gradients = rng.normal(size=(20, 6, 5)).astype(np.float32)
    table = tsw.EmbeddingTable("t", 5, optimizer=ours)
    table.assign(ids, start)
    dense = tsw.DenseTable("mlp", {"kernel": (6, 5)}, optimizer=ours)
    dense.initialize([start])
    variable = keras.Variable(start)
    optimizer = theirs()

    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [variable])
        dense.push([gradient])
    train(table, ids, gradients)

    np.testing.assert_allclose(table.lookup(ids), variable, **TOLERANCE)
    np.testing.assert_allclose(dense.pull()[0], variable, **TOLERANCE)


def test_clipnorm_equals_keras_on_a_variable_per_row(embedded):
    rng = np.random.default_rng(22)
    ids = np.arange(4)
    start = rng.normal(size=(4, 5)).astype(np.float32)
    gradients = rng.normal(size=(10, 4, 5)).astype(np.float32)
    table = tsw.EmbeddingTable(
        "t", 5, optimizer=optimizers.Adagrad(0.1, clipnorm=0.7)
    )
    table.assign(ids, start)
    rows = [keras.Variable(row) for row in start]
    optimizer = KERAS.Adagrad(0.1, clipnorm=0.7)

    for gradient in gradients:
        optimizer.apply([tf.constant(g) for g in gradient], rows)
    train(table, ids, gradients)

    np.testing.assert_allclose(table.lookup(ids), np.stack(rows), **TOLERANCE)


OPTIONS = {
    "l2": 0.1,
    "clipvalue": 0.9,
    "clipnorm": 1.5,
    "weight_decay": 0.05,
    "min_weight": -0.8,
    "max_weight": 0.9,
    "min_norm": 0.5,
    "max_norm": 3.0,
}
# Two steps from [0.01, -0.02] with [0.4, -0.2] and [0.3, 0.6], in float64 from
# the formulas, to seven digits. No argument has its default: each must reach
# its place in the kernel.
GOLDENS = [
    pytest.param(
        optimizers.RowwiseAdagrad(0.1, 0.2, 1e-3),
        [[-0.0629083, 0.0164541], [-0.1042728, -0.0662750]],
        id="rowwise_adagrad",
    ),
    pytest.param(
        optimizers.GroupFtrl(0.1, **FTRL_KNOBS),
        [[-0.0347104, 0.0192676], [-0.0632597, -0.0296900]],
        id="group_ftrl",
    ),
    pytest.param(
        optimizers.PaddleAdagrad(0.1, 2.0, False),
        [[-0.03, 0.0], [-0.0592770, -0.0585540]],
        id="paddle_adagrad",
    ),
    pytest.param(
        optimizers.PaddleStdAdagrad(0.1, 2.0, False),
        [[-0.03, 0.0], [-0.0588675, -0.0594089]],
        id="paddle_std_adagrad",
    ),
    pytest.param(
        optimizers.PaddleSharedAdam(0.1, 0.8, 0.95, 1e-3),
        [[-0.0888943, 0.0778128], [-0.1567288, 0.0001205]],
        id="paddle_shared_adam",
    ),
    pytest.param(
        optimizers.SGD(0.1, min_weight=-0.025, max_weight=-0.005),
        [[-0.025, -0.005], [-0.025, -0.025]],
        id="min_weight_and_max_weight",
    ),
    pytest.param(
        optimizers.SGD(0.1, min_norm=0.05, max_norm=0.06),
        [
            [np.float64(-0.0499998), np.float64(0.0)],
            [np.float64(-0.0479999), np.float64(-0.036)],
        ],
        id="min_norm_and_max_norm",
    ),
]


@pytest.mark.parametrize(("ours", "expected"), GOLDENS)
def test_pushes_equal_golden_vectors(embedded, ours, expected):
    table = tsw.EmbeddingTable("t", 2, optimizer=ours)
    ids = np.array([7, -(2**62), 0])
    table.assign(ids, np.tile(np.float32([0.01, -0.02]), (3, 1)))

    for gradient, row in zip([[0.4, -0.2], [0.3, 0.6]], expected, strict=True):
        # Shows that count would change the row.
        table.push(ids, np.tile(gradient, (3, 1)), shows=[2.0] * 3)
        np.testing.assert_allclose(
            table.lookup(ids), np.tile(row, (3, 1)), rtol=0, atol=1.5e-7
        )


def test_the_learning_rate_of_segments_multiplies_those_of_parts(embedded):
    table = tsw.EmbeddingTable(
        "t",
        2,
        initializer="zeros",
        optimizer=optimizers.Segments(
            [(1, optimizers.SGD(0.5)), (1, optimizers.SGD(0.25))],
            learning_rate=KERAS.schedules.PiecewiseConstantDecay(
                [0], [1.0, 2.0]
            ),
        ),
    )

    table.push([1], [[1.0, 1.0]])
    table.push([1], [[1.0, 1.0]])

    np.testing.assert_array_equal(table.lookup([1]), [[-1.5, -0.75]])


def test_l2_decay_and_momentum_touch_rows_of_the_push_only(embedded):
    table = tsw.EmbeddingTable(
        "t",
        2,
        optimizer=optimizers.SGD(0.1, momentum=0.5, l2=0.5, weight_decay=0.5),
    )
    start = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    table.assign([1, 2], start)

    table.push([1], np.zeros((1, 2)))

    np.testing.assert_allclose(table.lookup([1]), start[:1] * 0.9, rtol=1e-6)
    np.testing.assert_array_equal(table.lookup([2]), start[1:])


def all_optimizers():
    """One of each class, with knobs and options that are no defaults."""
    options = {
        **OPTIONS,
        "cowclip": optimizers.CowClip(2.0, 1e-3),
    }
    made = []
    for cls in CLASSES.values():
        if cls is optimizers.Segments:
            made.append(cls([(2, "ftrl"), (None, "lion")]))
            continue
        made.append(cls(0.05, **options))
    return made


@pytest.mark.parametrize(
    "optimizer", all_optimizers(), ids=lambda o: type(o).__name__
)
def test_configs_come_back_equal(make_cluster, optimizer):
    make_cluster(1)
    config = optimizer.to_config()
    assert optimizers.get(config) == optimizer
    assert type(optimizer).from_config(optimizer.get_config()) == optimizer

    table = tsw.EmbeddingTable("t", 5, optimizer=optimizer)

    # A second one is refused unless the table's config came through equal.
    tsw.EmbeddingTable("t", 5, optimizer=optimizers.get(config))
    with pytest.raises(ValueError, match="optimizer"):
        tsw.EmbeddingTable("t", 5, optimizer=optimizers.SGD(0.05))
    assert table.learning_rate == pytest.approx(optimizer.learning_rate)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (KERAS.RMSprop(0.5, 0.25, 0.5, 1e-3, True), "RMSprop"),
        (KERAS.Adadelta(0.5, 0.25, 1e-3), "Adadelta"),
        (KERAS.Ftrl(0.5, **FTRL_KNOBS), "Ftrl"),
        (KERAS.Lion(0.5, 0.25, 0.5), "Lion"),
        (KERAS.Adam(0.5, amsgrad=True), "AMSGrad"),
        (KERAS.AdamW(0.5, 0.25, amsgrad=True), "AMSGrad"),
        (KERAS.SGD(0.5, weight_decay=0.25), "SGD"),
        (KERAS.SGD(0.5, momentum=0.9, nesterov=True), "SGD"),
        (KERAS.Adagrad(0.5, 0.25, 0.125), "Adagrad"),
        (KERAS.Adam(0.5, 0.25, 0.125, 0.0625), "Adam"),
        (KERAS.Adam(0.5, clipnorm=0.25), "Adam"),
        (KERAS.Adagrad(0.5, clipvalue=0.25), "Adagrad"),
    ],
    ids=lambda o: o if isinstance(o, str) else type(o).__name__,
)
def test_keras_optimizers_are_converted(theirs, ours):
    found = optimizers.get(theirs)

    assert type(found).__name__ == ours
    config = theirs.get_config()
    same = set(found.get_config()) & set(config)
    assert len(same) >= 4
    for name in same - {"l2"}:
        value = getattr(found, name)
        if name == "learning_rate":
            assert value == _conversion.KerasRate(theirs)
            value = float(value())
            assert optimizers.from_keras(theirs).learning_rate == value
        assert value == (
            pytest.approx(config[name]) if config[name] else config[name]
        ), name


def test_names_are_those_of_classes_and_of_the_wire():
    assert optimizers.get("rowwise_adagrad") == optimizers.RowwiseAdagrad()
    assert optimizers.get("RowwiseAdagrad") == optimizers.RowwiseAdagrad()
    assert optimizers.get("rmsprop") == optimizers.RMSprop()
    assert optimizers.get("ftrl") == optimizers.Ftrl()


RULES = [cls for cls in CLASSES.values() if cls is not optimizers.Segments]
WRONG = {
    "l2": [-1.0, float("nan"), None, True],
    "cowclip": [1.0, "yes"],
    "clipvalue": [0.0, -1.0, float("inf")],
    "clipnorm": [0.0, -1.0, "1"],
    "weight_decay": [-0.1, float("nan")],
    "min_weight": [float("-inf"), float("nan"), "0"],
    "max_weight": [float("inf"), float("nan"), True],
    "min_norm": [-1.0, float("inf"), "0"],
    "max_norm": [0.0, float("inf"), True],
    "learning_rate": [-1.0, float("nan"), "fast"],
    "momentum": [-0.1, 1.5, None, True],
    "nesterov": [1],
    "initial_accumulator_value": [-1.0, float("inf")],
    "epsilon": [0.0, -1.0],
    "decay_step": [0, -1, 1.5, 2**32, True],
    "decay_rate": [0.0, 1.5],
    "compat": [0],
    "beta_1": [1.0, -0.1],
    "beta_2": [1.0, -0.1],
    "rho": [1.0, -0.1],
    "centered": ["no"],
    "learning_rate_power": [0.5],
    "l1_regularization_strength": [-1.0],
    "l2_regularization_strength": [-1.0],
    "l2_shrinkage_regularization_strength": [-1.0],
    "beta": [-1.0],
    "initial_g2sum": [0.0, -1.0],
    "show_scale": [None],
}


@pytest.mark.parametrize("cls", RULES)
def test_every_impossible_knob_is_named(cls):
    for field in dataclasses.fields(cls):
        for value in WRONG[field.name]:
            with pytest.raises(ValueError, match=rf"`{field.name}` must be"):
                cls(**{field.name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optimizers.SGD(min_weight=1.0, max_weight=0.5),
            "min_weight=1.0, max_weight=0.5",
        ),
        (
            lambda: optimizers.SGD(min_norm=1.0, max_norm=0.5),
            "min_norm=1.0, max_norm=0.5",
        ),
        (lambda: optimizers.CowClip(r=0.0), "`r` of CowClip"),
        (lambda: optimizers.CowClip(zeta=-1.0), "`zeta` of CowClip"),
        (lambda: optimizers.AdamW(weight_decay=None), "weight_decay=None"),
        (lambda: optimizers.Segments([]), "parts"),
        (lambda: optimizers.Segments(3), "parts=3"),
        (lambda: optimizers.Segments([("sgd", 1)]), r"parts\[0\]"),
        (lambda: optimizers.Segments([(0, "sgd")]), r"parts\[0\]"),
        (
            lambda: optimizers.Segments([(None, "sgd"), (1, "sgd")]),
            r"parts\[0\]",
        ),
        (
            lambda: optimizers.Segments(
                [(1, optimizers.SGD(lambda step: 0.1))]
            ),
            "learning rate of a part",
        ),
        (
            lambda: optimizers.Segments(
                [(1, optimizers.Segments([(1, "sgd")]))]
            ),
            "no parts of its own",
        ),
        (lambda: optimizers.get("segments"), "'segments'"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("optimizer", "knob"),
    [
        (optimizers.RowwiseAdagrad(), "RowwiseAdagrad"),
        (optimizers.GroupFtrl(), "GroupFtrl"),
        (optimizers.PaddleAdagrad(), "PaddleAdagrad"),
        (optimizers.PaddleSharedAdam(), "PaddleSharedAdam"),
        (optimizers.SGD(clipnorm=1.0), "clipnorm=1.0"),
        (optimizers.SGD(cowclip=optimizers.CowClip()), "cowclip="),
        (optimizers.Segments([(None, "sgd")]), "Segments"),
    ],
    ids=lambda o: o if isinstance(o, str) else "",
)
def test_dense_variables_need_elementwise_optimizers(embedded, optimizer, knob):
    assert not optimizer.is_elementwise
    with pytest.raises(ValueError, match=f"a dense table.*{knob}"):
        tsw.DenseTable("mlp", {"kernel": (3, 4)}, optimizer=optimizer)
    with pytest.raises(ValueError, match=f"ParameterServerOptimizer.*{knob}"):
        tsw.keras.ParameterServerOptimizer(optimizer)


def test_options_of_a_servers_optimizer_survive_its_config(embedded):
    made = tsw.keras.ParameterServerOptimizer(
        optimizers.SGD(0.1, clipvalue=0.5, l2=0.25)
    )

    again = type(made).from_config(made.get_config())

    assert again._server_optimizer == optimizers.SGD(
        0.1, clipvalue=0.5, l2=0.25
    )
    assert again.clipvalue is None


# The figures of the paper's tables for Criteo: batch size, dense learning rate
# and L2.
@pytest.mark.parametrize(
    ("batch_size", "dense_learning_rate", "l2"),
    [
        (1024, 8e-4, 1e-5),
        (8192, 22.62e-4, 8e-5),
        (131072, 90.50e-4, 128e-5),
    ],
)
def test_scale_for_batch_gives_the_papers_settings(
    batch_size, dense_learning_rate, l2
):
    scaled = optimizers.scale_for_batch(
        batch_size,
        base_batch_size=1024,
        learning_rate=1e-4,
        l2=1e-5,
        dense_learning_rate=8e-4,
    )

    assert scaled.learning_rate == 1e-4
    assert scaled.l2 == pytest.approx(l2, rel=1e-9)
    assert scaled.dense_learning_rate == pytest.approx(
        dense_learning_rate, rel=1e-3
    )
    assert scaled.dense_schedule() == scaled.dense_learning_rate


@pytest.mark.parametrize(
    ("scale_l2", "times_as_much"), [(True, 4.0), (False, 1.0)]
)
def test_a_rare_id_decays_per_epoch_as_scale_l2_says(
    embedded, scale_l2, times_as_much
):
    """It is in one batch of the epoch, whatever the size of the batches."""

    def decay(name, l2):
        table = tsw.EmbeddingTable(
            name, 1, initializer="ones", optimizer=optimizers.SGD(1.0, l2=l2)
        )
        table.push([7], [[0.0]])
        return 1.0 - float(table.lookup([7]).numpy()[0, 0])

    scaled = optimizers.scale_for_batch(
        4096,
        base_batch_size=1024,
        learning_rate=1.0,
        l2=1 / 64,
        dense_learning_rate=1.0,
        scale_l2=scale_l2,
    )

    base = decay("base", 1 / 64)
    assert decay("scaled", scaled.l2) == times_as_much * base


def test_the_dense_learning_rate_warms_up_linearly():
    scaled = optimizers.scale_for_batch(
        4096,
        base_batch_size=1024,
        learning_rate=1e-4,
        l2=1e-5,
        dense_learning_rate=1e-3,
        warmup_steps=100,
    )

    schedule = scaled.dense_schedule()

    rates = [float(schedule(step)) for step in (0, 50, 100, 1000)]
    np.testing.assert_allclose(rates, [1e-8, 1e-3, 2e-3, 2e-3], rtol=2e-3)
    assert isinstance(schedule, KERAS.schedules.LearningRateSchedule)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("base_batch_size", 1.5),
        ("learning_rate", -1.0),
        ("l2", float("nan")),
        ("dense_learning_rate", "1"),
        ("warmup_steps", -1),
        ("scale_l2", 2),
    ],
)
def test_scale_for_batch_names_what_is_wrong(name, value):
    arguments = {
        "batch_size": 2048,
        "base_batch_size": 1024,
        "learning_rate": 1e-4,
        "l2": 1e-5,
        "dense_learning_rate": 1e-3,
        name: value,
    }
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        optimizers.scale_for_batch(**arguments)
