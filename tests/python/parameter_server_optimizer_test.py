"""ParameterServerOptimizer, for the Keras that TF_USE_LEGACY_KERAS chooses.

tests/integration/legacy_keras_test.py runs this file with tf_keras.
"""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.python.worker_threads import Call, join_workers, running_clients
from tfswitch.keras import batch_size
from tfswitch.keras._backend import IS_LEGACY, keras

Consistency = tsw.train.Consistency
ParameterServerOptimizer = tsw.keras.ParameterServerOptimizer
Worker = tsw.train.Worker

only_keras3 = pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")

# Sums of floats in another order, over several steps.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

OPTIMIZERS = {
    "sgd": lambda **kwargs: keras.optimizers.SGD(0.1, **kwargs),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.8, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.02),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, weight_decay=0.02),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
}
NUM_SERVERS = {"embedded": 0, "one_server": 1, "two_servers": 2}
KINDS = {"asp": "asp", "ssp": Consistency.ssp(2), "bsp": "bsp"}

# Batches of 4, 4 and 2.
BATCH_SIZE = 4
RNG = np.random.default_rng(7)
FEATURES = RNG.normal(size=(10, 3)).astype(np.float32)
IDS = RNG.integers(0, 6, size=(10, 2))
TARGETS = RNG.normal(size=(10, 1)).astype(np.float32)

_names = itertools.count()


@contextlib.contextmanager
def training_cluster(where):
    with running_cluster(NUM_SERVERS[where]) as cluster:
        yield cluster
        leave_all(cluster)


@pytest.fixture(params=["embedded", "two_servers"])
def cluster(request):
    with training_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def embedded():
    with training_cluster("embedded") as cluster:
        yield cluster


def leave_all(cluster):
    """Ends the worker of this process while there is a server to hear it."""
    if not cluster.closed:
        Worker(cluster=cluster, group="the end").leave()


def on_servers(optimizer, consistency="asp", **kwargs):
    kwargs.setdefault("table", f"dense_{next(_names)}")
    return ParameterServerOptimizer(
        optimizer, consistency=consistency, **kwargs
    )


def make_variable():
    if IS_LEGACY:
        return tf.Variable([0.0], name="v")
    return keras.Variable([0.0], name="v")


def make_model(optimizer, units=4, seed=5, compiled=None, **dense):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(units, activation="tanh", **dense),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", **(compiled or {}))
    return model


def make_normalized_model(optimizer, seed=8, **compiled):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, trainable=False),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5),  # Has a seed, of integers.
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def make_embedding_model(optimizer, consistency="asp"):
    keras.utils.set_random_seed(6)
    layer = tsw.keras.DynamicEmbedding(
        3,
        table=f"rows_{next(_names)}",
        optimizer=tsw.optimizers.Adagrad(0.3),
        seed=0,
        consistency=consistency,
    )
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int64"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model, layer


def fit(model, inputs=FEATURES, epochs=2, **kwargs):
    history = model.fit(
        inputs,
        TARGETS,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **kwargs,
    )
    return history.history["loss"]


def steps(model):
    """Does the same as `fit`, in a third of its time."""
    for _ in range(2):
        for i in range(0, len(FEATURES), BATCH_SIZE):
            batch = slice(i, i + BATCH_SIZE)
            model.train_on_batch(FEATURES[batch], TARGETS[batch])


def assert_same_weights(model, expected):
    if not isinstance(expected, list):
        expected = expected.get_weights()
    for one, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


# --- Equal to Keras ---------------------------------------------------------


@functools.cache
def fit_with_keras(name):
    """Losses and weights after a fit with Keras's own optimizer."""
    model = make_model(OPTIMIZERS[name]())
    return fit(model), model.get_weights()


@pytest.mark.parametrize(
    ("name", "kind", "where"),
    [
        ("nesterov", "bsp", "embedded"),
        ("adagrad", "asp", "two_servers"),
        ("adamw", "ssp", "embedded"),
        ("rmsprop", "bsp", "embedded"),
        ("amsgrad", "ssp", "two_servers"),
    ],
)
def test_fit_equals_keras(name, kind, where):
    their_losses, their_weights = fit_with_keras(name)
    with training_cluster(where):
        model = make_model(on_servers(OPTIMIZERS[name](), KINDS[kind]))

        losses = fit(model)
        values = model.optimizer.table.pull()

    np.testing.assert_allclose(losses, their_losses, rtol=1e-4)
    assert_same_weights(model, their_weights)
    for variable, value in zip(model.trainable_variables, values, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert int(model.optimizer.iterations) == 6


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("asp", "embedded"),
        ("bsp", "two_servers"),
    ],
)
def test_fit_of_a_model_with_rows_equals_keras(kind, where):
    kind = KINDS[kind]
    with training_cluster(where):
        plain, plain_layer = make_embedding_model(OPTIMIZERS["adam"]())
        model, layer = make_embedding_model(
            on_servers(OPTIMIZERS["adam"](), kind), kind
        )

        losses = fit(model, IDS)

        np.testing.assert_allclose(losses, fit(plain, IDS), rtol=1e-4)
        # The weight of a layer with rows stands for these, by any number.
        assert len(model.get_weights()) == len(plain.get_weights()) == 3
        assert_same_weights(model.layers[-1], plain.layers[-1])
        np.testing.assert_allclose(
            layer.table.lookup(range(6)),
            plain_layer.table.lookup(range(6)),
            **TOLERANCE,
        )
        assert layer.table.size() == len(np.unique(IDS))


def test_fit_builds_a_model_as_keras_does(embedded):
    """One that does not know its inputs before the first step is traced."""
    models = []
    for optimizer in ("adam", on_servers("adam", "bsp")):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        model.compile(optimizer, "mse")
        models.append((model, fit(model)))

    (plain, their_losses), (model, losses) = models
    np.testing.assert_allclose(losses, their_losses, rtol=1e-4)
    assert_same_weights(model, plain)
    assert model.optimizer.worker.stats()["clock"] == 6


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("momentum", lambda: keras.optimizers.SGD(momentum=0.9)),
        (
            tsw.optimizers.AdamW(0.1, weight_decay=0.1),
            lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
        ),
    ],
    ids=["name", "object"],
)
def test_names_and_objects_stand_for_those_of_keras(embedded, ours, theirs):
    plain, model = make_model(theirs()), make_model(on_servers(ours))

    steps(plain), fit(model)

    assert_same_weights(model, plain)


@pytest.mark.parametrize("kind", ["asp", "bsp"])
def test_several_steps_per_execution_are_as_many_steps(embedded, kind):
    _, their_weights = fit_with_keras("adam")
    model = make_model(
        on_servers(OPTIMIZERS["adam"](), kind),
        compiled={"steps_per_execution": 2},
    )

    fit(model)

    assert_same_weights(model, their_weights)
    assert int(model.optimizer.iterations) == 6
    assert model.optimizer.worker.stats()["clock"] == 6


def test_a_schedule_is_followed_step_by_step(embedded):
    def schedule():
        return keras.optimizers.schedules.PiecewiseConstantDecay(
            [1, 3], [0.2, 0.05, 0.01]
        )

    plain = make_model(keras.optimizers.SGD(schedule()))
    model = make_model(on_servers(keras.optimizers.SGD(schedule())))

    steps(plain), fit(model)

    assert_same_weights(model, plain)


def test_the_end_of_the_data_is_no_step_of_a_schedule(embedded):
    """If the length of the data is unknown, the last call finds nothing."""
    model = make_model(on_servers("sgd", "bsp"))
    batches = tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).batch(4)
    batches = batches.filter(lambda *_: True)

    model.fit(batches, verbose=0)

    num_steps = model.optimizer.worker.stats()["clock"]
    assert int(model.optimizer.iterations.numpy()) == num_steps > 0


def test_the_learning_rate_changes_between_and_during_fits(embedded):
    plain = make_model(OPTIMIZERS["adam"]())
    model = make_model(on_servers(OPTIMIZERS["adam"]()))
    rates = keras.callbacks.LearningRateScheduler(
        lambda epoch: 0.1 / (1 + epoch)
    )

    for each in (plain, model):
        fit(each)
        each.optimizer.learning_rate = 0.01
        fit(each)
        fit(each, callbacks=[rates])

    assert_same_weights(model, plain)


@pytest.mark.parametrize(
    ("clip", "kind"),
    [
        ({"clipnorm": 0.1}, "asp"),
        ({"clipvalue": 0.05}, "ssp"),
        ({"global_clipnorm": 0.1}, "asp"),
    ],
    ids=["clipnorm", "clipvalue", "global_clipnorm"],
)
def test_gradients_are_clipped_as_keras_does(embedded, clip, kind):
    _, unclipped = fit_with_keras("sgd")
    plain = make_model(OPTIMIZERS["sgd"](**clip))
    model = make_model(on_servers(OPTIMIZERS["sgd"](**clip), KINDS[kind]))

    steps(plain), fit(model)

    assert_same_weights(model, plain)
    with pytest.raises(AssertionError):
        assert_same_weights(model, unclipped)


def test_a_variable_without_gradient_stays(embedded):
    keras.utils.set_random_seed(9)
    layers = [keras.layers.Dense(1) for _ in range(2)]
    for layer in layers:
        layer.build((None, 3))
    variables = [v for layer in layers for v in layer.trainable_variables]
    before = [v.numpy() for v in variables]
    optimizer = on_servers(OPTIMIZERS["adam"](), "bsp")

    optimizer.apply_gradients(
        [(tf.ones((3, 1)), variables[0])] + [(None, v) for v in variables[1:]]
    )

    assert not np.any(variables[0].numpy() == before[0])
    for variable, value in zip(variables[1:], before[1:], strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize(
    ("kind", "in_graph"),
    [("bsp", False), ("asp", True)],
    ids=["eager", "graph"],
)
def test_a_custom_loop_equals_keras(embedded, kind, in_graph):
    def train(optimizer):
        model = make_model("sgd")

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )

        # Keras makes its variables before the first trace.
        optimizer.build(model.trainable_variables)
        if in_graph:
            step = tf.function(step, reduce_retracing=True)
        for i in range(0, 10, 4):
            step(
                tf.constant(FEATURES[i : i + 4]),
                tf.constant(TARGETS[i : i + 4]),
            )
        return model

    plain = train(OPTIMIZERS["adam"]())
    optimizer = on_servers(OPTIMIZERS["adam"](), kind)
    model = train(optimizer)

    assert_same_weights(model, plain)
    assert int(optimizer.iterations) == 3
    assert optimizer.worker.stats()["clock"] == 3


@only_keras3  # There an optimizer may be built inside of the first trace.
def test_the_first_trace_builds_an_optimizer(embedded):
    model = make_model("sgd")
    before = [v.numpy() for v in model.trainable_variables]
    optimizer = on_servers(tsw.optimizers.SGD(1.0), "bsp")

    @tf.function
    def step():
        variables = model.trainable_variables
        optimizer.apply_gradients([(tf.ones(v.shape), v) for v in variables])

    step()
    step()

    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_allclose(variable, value - 2.0, rtol=1e-6)


@only_keras3
def test_a_float16_policy_scales_and_unscales(embedded):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        plain = make_normalized_model(OPTIMIZERS["sgd"]())
        model = make_normalized_model(on_servers(OPTIMIZERS["sgd"](), "bsp"))
    finally:
        keras.mixed_precision.set_global_policy("float32")

    fit(plain), fit(model)

    assert_same_weights(model, plain)


# --- Workers ----------------------------------------------------------------


def test_a_fit_leaves_the_group_and_a_second_one_joins_again(embedded):
    plain = make_model(OPTIMIZERS["adam"]())
    model = make_model(on_servers(OPTIMIZERS["adam"](), "bsp"))

    steps(plain), fit(model)
    first = model.optimizer.worker.stats()
    steps(plain), fit(model)
    second = model.optimizer.worker.stats()

    assert first["workers"]["active"] == second["workers"]["active"] == 0
    assert (first["clock"], first["workers"]["rounds"]) == (6, 6)
    assert second["workers"]["rounds"] == 12
    assert second["workers"]["rejoined"] == 1
    assert_same_weights(model, plain)


def test_the_cluster_is_the_default_one_or_the_one_given(embedded):
    default = make_model(on_servers("sgd", table="a"))
    other = tsw.Cluster("local://another_cluster")
    given = make_model(on_servers("sgd", table="b", cluster=other))

    fit(default), fit(given)

    assert embedded.tables() == ["a"]
    assert other.tables() == ["b"]
    assert given.optimizer.table.cluster is other
    leave_all(other)
    other.drop("b")


def test_a_worker_that_comes_second_begins_with_the_first_ones_values(cluster):
    first = make_model(on_servers("sgd", table="shared"), seed=1)
    second = make_model(on_servers("sgd", table="shared"), seed=2)
    # They have running numbers, which differ from process to process.
    assert first.layers[0].name != second.layers[0].name
    values = first.get_weights()

    first.optimizer.build(first.trainable_variables)
    second.optimizer.build(second.trainable_variables)

    for one, other in zip(second.get_weights(), values, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "ids",
    [
        tf.constant([[1, 2, 3], [4, 5, 6]]),
        tf.ragged.constant([[1, 2, 3], [4]]),
        tf.sparse.from_dense([[1, 2, 3], [4, 0, 0]]),
    ],
    ids=["dense", "ragged", "sparse"],
)
def test_a_layer_tells_the_first_dimension_of_its_ids(embedded, ids):
    batch_size.start_recording()
    layer = tsw.keras.DynamicEmbedding(1, combiner="sum")

    layer(ids, training=True)

    assert batch_size.read() == 2.0


@contextlib.contextmanager
def weighed_steps(variable, others=(), **arguments):
    """Yields a worker's optimizer, and a function that takes a step of two.

    It calls the first worker's step. The second's gradient is 8, and weighs 2.
    """
    with running_clients(2) as client:
        workers = join_workers(client, 2, consistency="bsp")
        optimizer = on_servers(
            tsw.optimizers.SGD(1.0),
            "bsp",
            table="weighed",
            worker=workers[0],
            **arguments,
        )
        optimizer.build([variable, *others])
        peer = tsw.DenseTable(
            "weighed",
            optimizer.table.shapes,
            optimizer=tsw.optimizers.SGD(1.0),
            consistency="bsp",
            cluster=client(1),
        )

        def step_of_both(step, *inputs):
            peer.push([[8.0]], learning_rate=1.0)
            other = Call(workers[1].end_step, 2.0)
            Call(step, *inputs).result()
            other.result()

        yield optimizer, step_of_both


@pytest.mark.parametrize(
    ("weight", "in_graph", "expected"),
    [
        (None, True, 1.0),
        (2.5, False, 2.5),
        (0, True, 0.0),
        (lambda: 6, False, 6.0),
        (lambda: tf.constant(5, tf.int32), True, 5.0),
    ],
    ids=["none", "float", "zero", "function", "tensor"],
)
def test_bsp_weighs_a_batch_by_batch_weight(weight, in_graph, expected):
    # Another model's recorded size must not be used.
    batch_size.start_recording()
    batch_size._size.assign(99.0)
    variable = make_variable()
    with weighed_steps(variable, batch_weight=weight) as (optimizer, of_both):

        def step():
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])

        of_both(tf.function(step) if in_graph else step)

    mean = (expected * 1.0 + 2.0 * 8.0) / (expected + 2.0)
    np.testing.assert_allclose(variable.numpy(), [-mean], rtol=1e-6)


def test_bsp_weighs_a_batch_by_the_ids_that_layers_see():
    layer = tsw.keras.DynamicEmbedding(1, consistency="bsp", combiner="sum")
    layer.build((None, 2))
    variable = make_variable()
    with weighed_steps(variable, layer.trainable_variables) as (
        optimizer,
        of_both,
    ):

        @tf.function(reduce_retracing=True)
        def step(ids):
            (rows,) = layer.trainable_variables
            layer(ids, training=True)
            layer(ids[:1], training=False)  # Evaluation does not count.
            optimizer.apply_gradients(
                [(tf.constant([1.0]), variable), (None, rows)]
            )

        expected = 0.0
        for size in (3, 3, 1):
            of_both(step, tf.ones((size, 2), tf.int64))
            expected -= (size * 1.0 + 2.0 * 8.0) / (size + 2.0)

    np.testing.assert_allclose(variable.numpy(), [expected], rtol=1e-6)


# --- Variables without a gradient -------------------------------------------


@pytest.mark.parametrize(
    ("kind", "non_trainable", "is_shared", "eager"),
    [
        ("asp", None, False, False),
        ("asp", "mean", True, True),
        ("bsp", None, True, False),
    ],
)
def test_alone_variables_without_gradient_are_those_of_keras(
    embedded, kind, non_trainable, is_shared, eager
):
    plain = make_normalized_model(OPTIMIZERS["sgd"]())
    model = make_normalized_model(
        on_servers(
            OPTIMIZERS["sgd"](), kind, table="t", non_trainable=non_trainable
        ),
        run_eagerly=eager,
    )

    fit(plain), fit(model)

    # An eager step takes other numbers from TensorFlow's generator.
    if not (eager and IS_LEGACY):
        for one, other in zip(
            model.get_weights(), plain.get_weights(), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert embedded.tables() == ["t", *(["t_non_trainable"] * is_shared)]


def test_bsp_averages_what_steps_change_and_sends_nothing_else():
    """A frozen kernel is the first worker's, and no step fetches it."""
    batches = [np.full((size, 3), size, np.float32) for size in (6, 2)]
    with running_clients(2) as client:
        models = [
            make_normalized_model(
                on_servers(
                    "sgd",
                    "bsp",
                    table="t",
                    worker=Worker(i, 2, consistency="bsp", cluster=client(i)),
                    batch_weight=len(batch),
                ),
                seed=i,
            )
            for i, batch in enumerate(batches)
        ]
        frozen = models[0].layers[0].get_weights()
        for model in models:
            model.optimizer.build(model.trainable_variables)
            for one, other in zip(
                model.layers[0].get_weights(), frozen, strict=True
            ):
                np.testing.assert_array_equal(one, other)
        table = models[0].optimizer._servers.shared.table
        values = [value.numpy() for value in table.pull()]
        assert [list(value.shape) for value in values] == [
            [3, 2],
            [2],
            [2],
            [2],
        ]
        table.assign([values[0] + 7.0, *values[1:]])

        calls = [
            Call(model.train_on_batch, batch, np.ones((len(batch), 1)))
            for model, batch in zip(models, batches, strict=True)
        ]
        for call in calls:
            call.result()
        np.testing.assert_array_equal(table.pull()[0], values[0] + 7.0)

    means = [(batch @ frozen[0] + frozen[1]).mean(axis=0) for batch in batches]
    for model in models:
        np.testing.assert_array_equal(
            model.layers[0].get_weights()[0], frozen[0]
        )
        np.testing.assert_allclose(
            model.layers[1].moving_mean.numpy(),
            (6 * 0.5 * means[0] + 2 * 0.5 * means[1]) / 8,
            rtol=1e-5,
        )


def test_what_only_a_later_graph_writes_is_sent_too(embedded):
    model = make_normalized_model(on_servers("sgd", "bsp"))
    optimizer, average = model.optimizer, model.layers[1].moving_mean
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(training):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(FEATURES, training=training))
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )

    step(False)
    assert not average.numpy().any()
    step(True)
    optimizer.pull()

    assert average.numpy().all()
    np.testing.assert_array_equal(
        average.numpy(), optimizer._servers.shared.table.pull()[2]
    )


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_a_loop_names_variables_whose_changes_count_by_their_share(in_graph):
    def make_step(worker):
        variable = make_variable()
        mine = [tf.Variable([1.0 + worker.worker_id]), tf.Variable([0])]
        optimizer = on_servers(
            "sgd",
            table="t",
            worker=worker,
            non_trainable="mean",
            non_trainable_variables=mine,
        )
        optimizer.build([variable])

        def step(change):
            for each in mine:
                each.assign_add(tf.cast([change / 2.0], each.dtype))
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
            values = [tf.identity(each[0]) for each in mine]
            for each in mine:  # The next step sends it.
                each.assign_add(tf.cast([change / 2.0], each.dtype))
            return values

        in_steps = tf.function(step) if in_graph else step

        def step_and_pull(change):
            values = in_steps(change)
            optimizer.pull()
            return values

        return step_and_pull

    with running_clients(1) as client:
        steps = [make_step(Worker(i, 2, cluster=client(i))) for i in range(2)]
        values = [
            steps[i](tf.constant(change))
            for i, change in ((0, 4.0), (1, 8.0), (0, 2.0))
        ]

    # The first worker's value, and of each change the half. Integers stay.
    assert [float(shared) for shared, _ in values] == [2.0, 4.0, 5.5]
    assert [int(local) for _, local in values] == [2, 4, 5]


def test_a_loop_that_names_no_variables_is_warned():
    with running_clients(0) as client:
        worker = Worker(0, 2, consistency="bsp", cluster=client(0))
        optimizer = on_servers("sgd", "bsp", worker=worker)
        with pytest.warns(UserWarning, match="`non_trainable_variables=model"):
            optimizer.build([make_variable()])


# --- Config and saving ------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: "adam",
        lambda: tsw.optimizers.AdamW(0.1, weight_decay=0.2),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.5),
        lambda: keras.optimizers.SGD(clipvalue=0.5),
        lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        ),
    ],
)
def test_config_round_trip_keeps_every_argument(optimizer):
    first = ParameterServerOptimizer(
        optimizer(),
        consistency=Consistency.ssp(3),
        table="mine",
        batch_weight=7.0,
        non_trainable="mean",
        name="named",
    )

    config = first.get_config()
    second = keras.optimizers.deserialize(keras.optimizers.serialize(first))

    assert isinstance(second, ParameterServerOptimizer)
    assert second.get_config() == config
    assert second.consistency == Consistency.ssp(3)
    assert second.name == "named"
    assert config["table"] == "mine"
    assert config["batch_weight"] == 7.0


def test_a_compiled_model_is_saved_and_loaded(embedded, tmp_path):
    plain = make_model(OPTIMIZERS["adam"]())
    model = make_model(on_servers(OPTIMIZERS["adam"](), "bsp"))
    steps(plain), fit(model)
    model.save(tmp_path / "model.keras")

    loaded = keras.models.load_model(tmp_path / "model.keras")

    assert isinstance(loaded.optimizer, ParameterServerOptimizer)
    assert loaded.optimizer.consistency == Consistency.bsp()
    assert_same_weights(loaded, model)
    # On the same servers it goes on where the first one was.
    steps(plain), fit(loaded)
    assert_same_weights(loaded, plain)


def test_a_loaded_model_joins_at_its_first_step_with_its_weights(tmp_path):
    plain = make_model(OPTIMIZERS["sgd"]())
    model = make_model(on_servers(OPTIMIZERS["sgd"](), "bsp"))
    with training_cluster("one_server"):
        steps(plain), fit(model)
        model.save(tmp_path / "model.keras")

    with training_cluster("one_server") as cluster:
        loaded = keras.models.load_model(tmp_path / "model.keras")
        loaded.predict(FEATURES, verbose=0)
        assert cluster.tables() == []
        with pytest.raises(ValueError, match="no worker yet"):
            _ = loaded.optimizer.worker
        with pytest.raises(ValueError, match="no table yet"):
            _ = loaded.optimizer.table

        steps(plain), fit(loaded)
        assert_same_weights(loaded, plain)


def test_weights_that_are_set_count_once_they_are_pushed(embedded):
    model = make_model(on_servers("sgd"))
    fit(model)
    values = [np.full_like(w, 0.25) for w in model.get_weights()]
    model.set_weights(values)
    model.optimizer.push_values()

    model.optimizer.pull()

    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, 0.25)


# --- What is refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (lambda: keras.optimizers.Adam(use_ema=True), "asp", "`use_ema`"),
        (lambda: keras.optimizers.Nadam(), "asp", "Nadam"),
        (lambda: "nadam", "asp", "'nadam'"),
        (lambda: "rowwise_adagrad", "asp", "RowwiseAdagrad"),
        (lambda: 0.1, "asp", "0.1"),
        *(
            (
                lambda name=name: keras.optimizers.SGD(**{name: 1.0}),
                "bsp",
                f"`bsp`.*{name}.*asp",
            )
            for name in ("clipnorm", "clipvalue", "global_clipnorm")
        ),
    ],
)
def test_what_servers_cannot_do_is_named(optimizer, kind, message):
    with pytest.raises(ValueError, match=message):
        on_servers(optimizer(), kind)


@only_keras3
def test_gradient_accumulation_is_named():
    with pytest.raises(ValueError, match="`gradient_accumulation_steps`"):
        on_servers(keras.optimizers.Adam(gradient_accumulation_steps=2))


def test_variables_excluded_from_weight_decay_are_refused():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=[make_variable()])

    with pytest.raises(ValueError, match="excluded from weight decay"):
        on_servers(optimizer)
    with pytest.raises(ValueError, match="on the servers all of them decay"):
        on_servers("adamw").exclude_from_weight_decay(var_names=["bias"])


def test_an_optimizer_is_for_one_model(embedded):
    optimizer = on_servers("sgd")
    fit(make_model(optimizer))

    with pytest.raises(ValueError, match="a new one for each model"):
        fit(make_model(optimizer))


def test_a_constraint_is_refused_with_its_variable(embedded):
    model = make_model(on_servers("sgd"), kernel_constraint="non_neg")

    with pytest.raises(ValueError, match=r"kernel' has a constraint"):
        fit(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"consistency": "ssp"}, "consistency='ssp'"),
        ({"batch_weight": -1.0}, "batch_weight=-1.0"),
        ({"batch_weight": float("nan")}, "batch_weight=nan"),
        ({"batch_weight": True}, "batch_weight=True"),
        ({"batch_weight": "many"}, "batch_weight='many'"),
        ({"batch_weight": [1.0]}, "batch_weight="),
        ({"non_trainable": "sum"}, "non_trainable='sum'"),
        ({"worker": 0}, "worker=0"),
        ({"worker": "chief"}, "worker='chief'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"Received: {message}"):
        ParameterServerOptimizer("sgd", **arguments)


def test_a_worker_of_another_consistency_or_cluster_is_refused(embedded):
    worker = Worker(consistency="asp")

    with pytest.raises(ValueError, match=r"one consistency.*asp.*bsp"):
        on_servers("sgd", "bsp", worker=worker)
    with (
        tsw.Cluster("local://elsewhere") as other,
        pytest.raises(ValueError, match=r"another cluster.*elsewhere"),
    ):
        on_servers("sgd", worker=worker, cluster=other)


def test_two_models_need_two_table_names(embedded):
    model = make_model(on_servers("sgd", table="shared"))
    fit(model)

    with pytest.raises(
        ValueError, match=r"(?s)'shared'.*0/kernel:3x4.*0/kernel:3x5"
    ):
        fit(make_model(on_servers("sgd", table="shared"), units=5))
    with pytest.raises(ValueError, match=r"(?s)'shared'.*sgd.*adam"):
        fit(make_model(on_servers("adam", table="shared")))


def test_xla_is_refused_with_what_to_do(embedded):
    model = make_model("sgd")
    model.compile(on_servers("sgd"), "mse", jit_compile=True)

    with pytest.raises(ValueError, match=r"XLA cannot.*`jit_compile=False`"):
        fit(model)


def test_a_model_without_dense_variables_is_refused(embedded):
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int64"),
            tsw.keras.DynamicEmbedding(1, combiner="sum"),
        ]
    )
    model.compile(on_servers("sgd"), "mse")

    with pytest.raises(ValueError, match="no dense variables"):
        fit(model, IDS)


def test_a_strategy_of_several_replicas_is_refused(embedded, monkeypatch):
    class Strategy:
        num_replicas_in_sync = 2

    model = make_model("sgd")
    optimizer = on_servers("sgd")
    monkeypatch.setattr(tf.distribute, "get_strategy", Strategy)

    with pytest.raises(ValueError, match="trategy of 2 replicas"):
        optimizer.build(model.trainable_variables)


def test_gradients_that_are_not_finite_stop_training(cluster):
    model = make_model(on_servers("sgd"))
    fit(model)
    before = model.get_weights()

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"gradient of '\d/(kernel|bias)'"
    ):
        fit(model, np.full_like(FEATURES, np.nan))

    for one, other in zip(model.optimizer.table.pull(), before, strict=True):
        np.testing.assert_array_equal(one, other)
