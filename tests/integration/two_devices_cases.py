"""MirroredStrategy on two logical CPUs.

Not collected by default: a process has to be told of its devices before
TensorFlow starts. mirrored_strategy_test.py runs this file.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch.keras._backend import IS_LEGACY, VERSION, keras

_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    _CPU, [tf.config.LogicalDeviceConfiguration()] * 2
)

# Each replica has ids that it has twice, and ids of the other one.
NUM_IDS, DIM = 20, 4
IDS = np.arange(48).reshape(16, 3) * 7 % NUM_IDS
TARGETS = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(16, 1)
ROWS = np.random.default_rng(1).normal(size=(NUM_IDS, DIM)).astype(np.float32)


@pytest.fixture(autouse=True)
def _embedded():
    with running_cluster(0):
        yield


@pytest.fixture(scope="module")
def strategy():
    # One per process: TensorFlow numbers the reductions of each strategy from
    # the start, and two with the same number and another shape collide.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def make_model(optimizer, layer, shape, loss="mse"):
    model = keras.Sequential(
        [
            keras.Input(shape, dtype="int64"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(
                1,
                kernel_initializer=keras.initializers.GlorotUniform(seed=4),
                dtype="float32",
            ),
        ]
    )
    model.compile(optimizer, loss)
    return model


def make_replicated(optimizer, rule="auto"):
    """A model of rows, and its layer."""
    layer = tsw.keras.DynamicEmbedding(
        DIM, weights=[ROWS], optimizer=rule, name="rows"
    )
    # Keras took the sum of the replicas' losses, not the mean.
    factor = 0.5 if not IS_LEGACY and VERSION < (3, 8) else 1.0

    def loss(targets, outputs):
        return factor * keras.losses.mean_squared_error(targets, outputs)

    return make_model(optimizer, layer, (3,), loss), layer


def fit(model, ids=IDS, steps=4):
    dataset = tf.data.Dataset.from_tensor_slices((ids, TARGETS)).batch(16)
    model.fit(dataset.repeat(steps), verbose=0)


def fit_alone(optimizer, steps=4):
    """Keras's result on one device, with gradients summed by id."""
    dense = keras.layers.Dense(DIM, use_bias=False)
    model = make_model(optimizer, dense, (3, NUM_IDS))
    dense.set_weights([ROWS])
    fit(model, np.eye(NUM_IDS, dtype=np.int64)[IDS], steps)
    return [v.numpy() for v in model.trainable_variables]


def rows(layer):
    return layer.table.lookup(np.arange(NUM_IDS)).numpy()


def learnt(model, layer):
    """As of `fit_alone`: the rows, then the variables of other layers."""
    return [rows(layer), *(v.numpy() for v in model.trainable_variables[1:])]


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adam(0.05),
    ],
    ids=["sgd", "adam"],
)
@pytest.mark.parametrize("where", [0, 2], ids=["embedded", "two_servers"])
def test_two_replicas_learn_what_one_learns(strategy, make_optimizer, where):
    with running_cluster(where):
        with strategy.scope():
            model, layer = make_replicated(make_optimizer())
        fit(model)
        assert layer.table.iterations == 4
        both = learnt(model, layer)

    for one, other in zip(both, fit_alone(make_optimizer()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_an_overflow_skips_the_step_of_both_replicas(strategy):
    with strategy.scope():
        keras.mixed_precision.set_global_policy("mixed_float16")
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**24
        )
        model, layer = make_replicated(optimizer)
        keras.mixed_precision.set_global_policy("float32")

    fit(model, steps=12)

    steps = layer.table.iterations
    assert 0 < steps < 12
    for one, other in zip(
        learnt(model, layer),
        fit_alone(keras.optimizers.SGD(0.1), steps),
        strict=True,
    ):
        # float16 has 11 significant bits.
        np.testing.assert_allclose(one, other, atol=4e-3)


def test_a_schedule_counts_each_step_once(strategy):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [1], [0.5, 0.0]
    )
    with strategy.scope():
        model, layer = make_replicated("sgd", tsw.optimizers.SGD(schedule))

    fit(model, steps=2)
    before = rows(layer)
    fit(model, steps=2)

    assert layer.table.iterations == 4
    np.testing.assert_array_equal(rows(layer), before)


@pytest.mark.parametrize("applies", ["optimizer", "layer"])
def test_a_custom_loop_takes_one_step_with_the_sum_of_replicas(
    strategy, applies
):
    with strategy.scope():
        layer = tsw.keras.DynamicEmbedding(
            2,
            embeddings_initializer="zeros",
            optimizer="auto"
            if applies == "optimizer"
            else tsw.optimizers.SGD(1.0, momentum=0.5),
        )
        layer.build((None,))
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build(layer.trainable_variables)

    @tf.function
    def step(ids):
        def replica_step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids, training=True))
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            if applies == "layer":
                layer.apply_gradients(gradients)
                return
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        strategy.run(replica_step, args=(ids,))

    dataset = tf.data.Dataset.from_tensor_slices(np.array([1, 2, 1, 3] * 2))
    for ids in strategy.experimental_distribute_dataset(dataset.batch(4)):
        step(ids)

    assert layer.table.iterations == 2
    # One step has the sum 2, and the next one 2 + 0.5 * 2.
    np.testing.assert_array_equal(
        layer.table.lookup([1, 2, 3]),
        [[-5.0, -5.0], [-2.5, -2.5], [-2.5, -2.5]],
    )


def test_evaluate_and_predict_leave_the_table(strategy):
    with strategy.scope():
        model, layer = make_replicated("sgd")
    layer.table.remove(np.arange(NUM_IDS))

    model.evaluate(IDS, TARGETS, verbose=0)
    assert model.predict(IDS, verbose=0).shape == (16, 1)

    assert layer.table.size() == 0


def test_both_devices_are_there(strategy):
    assert strategy.num_replicas_in_sync == 2
    assert IS_LEGACY == ("tf_keras" in keras.__name__)
