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

# Replicas have no id in common: they do not wait for each other, so one may
# read what another has just pushed.
NUM_IDS = 48
IDS = np.arange(NUM_IDS).reshape(16, 3)
TARGETS = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(16, 1)


@pytest.fixture(autouse=True)
def _embedded():
    with running_cluster(0):
        yield


@pytest.fixture(scope="module")
def strategy():
    # One per process: TensorFlow numbers the reductions of each anew, and two
    # that have the same number and another shape collide.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def make_model(policy="float32", optimizer=None, normalize=False, scale=None):
    keras.utils.set_random_seed(4)
    keras.mixed_precision.set_global_policy(policy)
    layer = tsw.keras.DynamicEmbedding(
        4, optimizer=optimizer or tsw.optimizers.SGD(0.5), seed=0
    )
    layers = [keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten()]
    if normalize:
        layers.append(keras.layers.BatchNormalization(dtype="float32"))
    layers.append(keras.layers.Dense(1, dtype="float32"))
    model = keras.Sequential(layers)
    model_optimizer = keras.optimizers.SGD(0.1)
    if scale is not None:
        model_optimizer = keras.mixed_precision.LossScaleOptimizer(
            model_optimizer, initial_scale=scale
        )
    model.compile(model_optimizer, "mse")
    keras.mixed_precision.set_global_policy("float32")
    return model, layer


def fit(model, epochs=4):
    dataset = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(16)
    return model.fit(dataset, epochs=epochs, verbose=0)


def rows(layer):
    return layer.table.lookup(np.arange(NUM_IDS)).numpy()


@pytest.mark.parametrize(
    ("policy", "scale"), [("float32", None), ("mixed_float16", 2.0**9)]
)
def test_two_replicas_learn_what_one_learns(strategy, policy, scale):
    one, one_layer = make_model()
    fit(one)
    with strategy.scope():
        two, two_layer = make_model(policy, scale=scale)
    if not IS_LEGACY and VERSION < (3, 8):
        # Keras takes the sum of the replicas' losses, not the mean.
        two.optimizer.learning_rate = 0.05

    fit(two)

    # float16 has 11 significant bits.
    tolerance = 1e-5 if policy == "float32" else 4e-3
    np.testing.assert_allclose(rows(two_layer), rows(one_layer), atol=tolerance)
    assert two_layer.table.size() == NUM_IDS


def test_an_overflow_leaves_the_table(strategy):
    with strategy.scope():
        model, layer = make_model("mixed_float16", scale=2.0**40)
    layer.table.lookup_or_create(np.arange(NUM_IDS))
    before = rows(layer)

    fit(model, epochs=1)

    np.testing.assert_array_equal(rows(layer), before)


def test_a_layer_that_joins_replicas_leaves_loss_scales_apart(strategy):
    """Batch normalisation lets replicas take turns inside the forward pass."""
    with strategy.scope():
        plain, plain_layer = make_model(normalize=True)
        scaled, scaled_layer = make_model(normalize=True, scale=2.0**9)

    fit(plain, epochs=2)
    fit(scaled, epochs=2)

    np.testing.assert_allclose(rows(scaled_layer), rows(plain_layer), atol=1e-5)


def test_a_schedule_counts_each_step_once(strategy):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [1], [0.5, 0.0]
    )
    with strategy.scope():
        model, layer = make_model(optimizer=tsw.optimizers.SGD(schedule))

    fit(model, epochs=2)
    before = rows(layer)
    fit(model, epochs=2)

    assert layer.table.iterations == 4
    np.testing.assert_array_equal(rows(layer), before)


def test_a_custom_loop_pushes_from_each_replica(strategy):
    with strategy.scope():
        layer = tsw.keras.DynamicEmbedding(
            2,
            embeddings_initializer="zeros",
            optimizer=tsw.optimizers.SGD(1.0),
        )
        layer.build((None,))

    @tf.function
    def step(ids):
        def replica_step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids, training=True))
                loss += tf.nn.scale_regularization_loss(sum(layer.losses))
            tape.gradient(loss, layer.trainable_variables)

        strategy.run(replica_step, args=(ids,))

    dataset = tf.data.Dataset.from_tensors(np.array([1, 2, 1, 3]))
    dataset = strategy.experimental_distribute_dataset(
        dataset.unbatch().batch(4)
    )
    for ids in dataset:
        step(ids)

    np.testing.assert_array_equal(
        layer.table.lookup([1, 2, 3]),
        [[-2.0, -2.0], [-1.0, -1.0], [-1.0, -1.0]],
    )


def test_evaluate_and_predict_leave_the_table(strategy):
    with strategy.scope():
        model, layer = make_model()

    model.evaluate(IDS, TARGETS, verbose=0)
    assert model.predict(IDS, verbose=0).shape == (16, 1)

    assert layer.table.size() == 0


def test_both_devices_are_there(strategy):
    assert strategy.num_replicas_in_sync == 2
    assert IS_LEGACY == ("tf_keras" in keras.__name__)
