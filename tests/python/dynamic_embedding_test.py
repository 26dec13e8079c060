"""DynamicEmbedding, for the Keras that TF_USE_LEGACY_KERAS chooses.

tests/integration/legacy_keras_test.py runs this file with tf_keras.
"""

import gc
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch.keras._backend import IS_LEGACY, VERSION, keras
from tfswitch.optimizers import _conversion

DynamicEmbedding = tsw.keras.DynamicEmbedding
SGD = tsw.optimizers.SGD

only_keras3 = pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")
with_ragged_inputs = pytest.mark.skipif(
    not IS_LEGACY and VERSION < (3, 9), reason="of Keras 3.9"
)

pytestmark = pytest.mark.usefixtures("embedded", "fresh_keras")


def make_layer(dim=2, **kwargs):
    kwargs.setdefault("embeddings_initializer", "ones")
    kwargs.setdefault("optimizer", SGD(1.0))
    return DynamicEmbedding(dim, **kwargs)


def ids_of(table):
    return sorted(table.export_rows()[0].tolist())


def train_step(layer, *args, loss_fn=tf.reduce_sum, **kwargs):
    """One custom-loop step on the layer alone; returns its output."""
    with tf.GradientTape() as tape:
        output = layer(*args, training=True, **kwargs)
        loss = loss_fn(output)
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    return output


# --- Calls ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3,), "int32"),
        ((2, 3), "int64"),
        ((2, 1, 3), "uint8"),
        ((0,), "int64"),
        ((2, 0), "int32"),
    ],
)
def test_output_is_the_input_shape_plus_dim(shape, dtype):
    layer = make_layer(dim=5)
    ids = tf.zeros(shape, dtype)

    output = layer(ids, training=True)

    assert output.shape == (*shape, 5)
    assert output.dtype == tf.float32
    assert tuple(layer.compute_output_shape(shape)) == (*shape, 5)


def test_training_creates_rows_and_inference_does_not():
    layer = make_layer()

    np.testing.assert_array_equal(layer(tf.constant([1])), [[0.0, 0.0]])
    assert layer.table.size() == 0
    np.testing.assert_array_equal(
        layer(tf.constant([1]), training=True), [[1.0, 1.0]]
    )
    np.testing.assert_array_equal(
        layer(tf.constant([1, 2])), [[1.0, 1.0], [0.0, 0.0]]
    )
    assert ids_of(layer.table) == [1]


def test_a_tape_pushes_sums_per_id():
    layer = make_layer(optimizer=SGD(0.5))

    train_step(layer, tf.constant([[7, 8], [7, 7]]))

    np.testing.assert_array_equal(
        layer.table.lookup([7, 8]), [[-0.5, -0.5], [0.5, 0.5]]
    )


def test_training_may_be_a_tensor():
    layer = make_layer()
    layer.build((None,))

    @tf.function
    def step(training):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([1]), training=training))
        gradients = tape.gradient(loss, layer.trainable_variables)
        return layer.apply_gradients(gradients)

    step(tf.constant(False))
    assert layer.table.size() == 0
    step(tf.constant(True))
    np.testing.assert_array_equal(layer.table.lookup([1]), [[0.0, 0.0]])


def test_layers_share_a_table():
    table = tsw.EmbeddingTable(
        "shared", 2, initializer="ones", optimizer=SGD(1.0)
    )
    one, two = (
        DynamicEmbedding(2, table=table),
        DynamicEmbedding(2, table=table),
    )
    three = DynamicEmbedding(
        2, table="shared", embeddings_initializer="ones", optimizer=SGD(1.0)
    )

    for layer in (one, two, three):
        train_step(layer, tf.constant([5]))

    assert one.table is two.table is table
    np.testing.assert_array_equal(table.lookup([5]), [[-2.0, -2.0]])
    assert three.table.size() == 1


# --- Combiners --------------------------------------------------------------

# Rows of ids 1, 2, 3; id 9 has none.
ROWS = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], np.float32)


def make_pooling_layer(combiner, **kwargs):
    layer = make_layer(combiner=combiner, **kwargs)
    layer.table.assign([1, 2, 3], ROWS)
    return layer


def pooled(combiner, ids, weights):
    """The combiner's definition, one row at a time."""
    rows = {i + 1: row for i, row in enumerate(ROWS)}
    out = []
    for row_ids, row_weights in zip(ids, weights, strict=True):
        w = np.array(row_weights, np.float32)
        total = sum(
            (f * rows[i] for i, f in zip(row_ids, w, strict=True)),
            np.zeros(2, np.float32),
        )
        scale = {
            "sum": 1.0,
            "mean": w.sum(),
            "sqrtn": np.sqrt((w * w).sum()),
        }[combiner]
        out.append(total / scale if len(w) else total)
    return np.array(out)


IDS = [[1, 2, 3], [], [3, 3], [2]]
WEIGHTS = [[1.0, 0.5, 2.0], [], [0.25, 0.75], [3.0]]


def ragged(rows, dtype):
    return tf.ragged.constant(rows, dtype, ragged_rank=1)


def make_batch(kind):
    """Returns lists of ids and of weights, and both as tensors of a kind."""
    ids, weights = IDS, WEIGHTS
    if kind == "dense":
        ids, weights = [[1, 2], [3, 3]], [[1.0, 0.5], [2.0, 0.25]]
    tensors = ragged(ids, tf.int64), ragged(weights, tf.float32)
    if kind == "sparse":
        tensors = [each.to_sparse() for each in tensors]
    elif kind == "dense":
        tensors = [each.to_tensor() for each in tensors]
    return ids, weights, *tensors


@pytest.mark.parametrize(
    ("kind", "combiner"),
    [("ragged", "sum"), ("sparse", "mean"), ("dense", "sqrtn")],
)
def test_ids_are_pooled_over_the_last_axis(combiner, kind):
    layer = make_pooling_layer(combiner)
    ids, weights, id_tensor, weight_tensor = make_batch(kind)
    ones = [[1.0] * len(row) for row in ids]

    for factors, arguments in (
        (ones, {}),
        (weights, {"weights": weight_tensor}),
    ):
        output = layer(id_tensor, **arguments)
        assert output.shape == (len(ids), 2)
        np.testing.assert_allclose(
            output, pooled(combiner, ids, factors), rtol=1e-6
        )
    assert tuple(layer.compute_output_shape((1, 2, 2))) == (1, 2, 2)


@pytest.mark.parametrize(
    ("kind", "combiner"),
    [("ragged", "mean"), ("sparse", "sqrtn"), ("dense", "mean")],
)
def test_pooled_gradients_equal_those_of_tensorflow(combiner, kind):
    """Against tf.nn.embedding_lookup_sparse on a variable."""
    layer = make_pooling_layer(combiner)
    ids, weights, id_tensor, weight_tensor = make_batch(kind)
    factors = tf.random.normal([len(ids), 2], seed=1)
    variable = tf.Variable(np.concatenate([np.zeros((1, 2)), ROWS]))
    with tf.GradientTape() as tape:
        expected = tf.nn.embedding_lookup_sparse(
            variable,
            ragged(ids, tf.int64),
            ragged(weights, tf.float64),
            combiner=combiner,
        )
        loss = tf.reduce_sum(expected * tf.cast(factors, tf.float64))
    gradient = tf.convert_to_tensor(tape.gradient(loss, variable))

    output = train_step(
        layer,
        id_tensor,
        weights=weight_tensor,
        loss_fn=lambda output: tf.reduce_sum(output * factors),
    )

    np.testing.assert_allclose(output, expected, rtol=1e-6)
    np.testing.assert_allclose(
        layer.table.lookup([1, 2, 3]) - ROWS,
        -gradient[1:],
        rtol=1e-5,
        atol=1e-6,
    )


def test_ragged_ids_without_combiner_give_ragged_embeddings():
    layer = make_pooling_layer(None)

    output = layer(ragged(IDS, tf.int32))

    assert isinstance(output, tf.RaggedTensor)
    assert output.to_list() == [
        [ROWS[i - 1].tolist() for i in row] for row in IDS
    ]


def test_ids_of_three_axes_are_pooled_over_the_last():
    layer = make_pooling_layer("sum")
    deep = tf.ragged.constant([[[1, 2], []], [], [[3]]], tf.int64)
    uniform = tf.RaggedTensor.from_row_lengths(
        tf.constant([[1, 2], [3, 3]], tf.int64), [2, 0]
    )
    sparse = tf.sparse.from_dense([[[1, 2], [0, 0]], [[0, 0], [3, 0]]])

    assert layer(deep).to_list() == [
        [[3.0, 30.0], [0.0, 0.0]],
        [],
        [[4.0, 40.0]],
    ]
    assert layer(uniform).to_list() == [[[3.0, 30.0], [8.0, 80.0]], []]
    np.testing.assert_array_equal(
        layer(sparse), [[[3.0, 30.0], [0.0, 0.0]], [[0.0, 0.0], [4.0, 40.0]]]
    )


def test_pooling_an_empty_batch_gives_an_empty_batch():
    layer = make_pooling_layer("mean")

    empty = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [])
    assert layer(empty).shape == (0, 2)
    np.testing.assert_array_equal(
        layer(tf.zeros([2, 0], tf.int64)), np.zeros((2, 2))
    )


@pytest.mark.parametrize(
    "kind", [pytest.param("ragged", marks=with_ragged_inputs), "sparse"]
)
def test_pooled_ids_train_in_a_functional_model(kind):
    inputs = keras.Input((None,), dtype="int64", **{kind: True}, name="ids")
    layer = make_layer(combiner="mean")
    output = keras.layers.Dense(1)(layer(inputs))
    model = keras.Model(inputs, output)
    model.compile("sgd", "mse")
    ids = ragged([[1, 2], [], [3]], tf.int64)
    if kind == "sparse":
        ids = ids.to_sparse()
    dataset = tf.data.Dataset.from_tensors((ids, tf.ones([3, 1])))

    model.fit(dataset, epochs=2, verbose=0)

    assert ids_of(layer.table) == [1, 2, 3]
    assert not np.any(layer.table.lookup([1, 2, 3]).numpy() == 1.0)
    assert model.predict(dataset, verbose=0).shape == (3, 1)


# --- Masks ------------------------------------------------------------------


def test_id_zero_is_padding_with_mask_zero():
    layer = make_layer(mask_zero=True)
    ids = tf.constant([[1, 0], [0, 2]])

    output = train_step(layer, ids)

    np.testing.assert_array_equal(output[0, 1], [0.0, 0.0])
    assert ids_of(layer.table) == [1, 2]
    np.testing.assert_array_equal(
        layer.compute_mask(ids), [[True, False], [False, True]]
    )
    np.testing.assert_array_equal(layer.table.lookup([1, 2]), np.zeros((2, 2)))
    # Though it has a row.
    layer.table.assign([0], [[5.0, 5.0]])
    np.testing.assert_array_equal(layer(tf.constant([0])), [[0.0, 0.0]])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_padding_takes_no_part_in_pooling_whatever_it_weighs(combiner):
    layer = make_pooling_layer(combiner, mask_zero=True)

    output = layer(
        tf.constant([[1, 2, 0]]), weights=tf.constant([[1.0, 0.5, 8.0]])
    )

    np.testing.assert_allclose(
        output, pooled(combiner, [[1, 2]], [[1.0, 0.5]]), rtol=1e-6
    )
    np.testing.assert_allclose(
        layer(tf.constant([[1, 2, 0], [0, 0, 0]])),
        pooled(combiner, [[1, 2], []], [[1, 1], []]),
        rtol=1e-6,
    )
    assert layer.compute_mask(tf.constant([[1, 0]])) is None


def test_id_zero_is_ordinary_without_mask_zero():
    layer = make_layer()

    layer(tf.constant([0]), training=True)

    assert ids_of(layer.table) == [0]
    assert layer.compute_mask(tf.constant([0])) is None


# --- Training ---------------------------------------------------------------


def make_model(layer=None, **compile_options):
    layer = layer or make_layer(dim=4, embeddings_initializer="uniform", seed=0)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    options = {"optimizer": "adam", "loss": "binary_crossentropy"}
    model.compile(**(options | compile_options))
    return model, layer


def make_data(count=256, vocabulary=50, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (count, 3)) * 10**12
    labels = (ids[:, :1] // 10**12 % 2).astype(np.float32)
    return ids, labels


def test_fit_learns_what_depends_on_the_ids():
    model, layer = make_model(
        make_layer(
            dim=4,
            embeddings_initializer="uniform",
            optimizer=tsw.optimizers.Adagrad(0.5),
        )
    )
    ids, labels = make_data(1024)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(ids, labels, batch_size=64, epochs=8, verbose=0)

    assert history.history["loss"][-1] < 0.4 * history.history["loss"][0]
    assert ids_of(layer.table) == sorted(set(ids.ravel().tolist()))
    assert model.evaluate(ids, labels, verbose=0) < 0.3
    assert [w.shape for w in layer.trainable_weights] == [(0, 4)]
    assert layer.non_trainable_weights == []
    # Neither of these makes rows.
    model.evaluate(ids + 1, labels, verbose=0)
    model.predict(ids + 1, verbose=0)
    assert ids_of(layer.table) == sorted(set(ids.ravel().tolist()))


def test_a_frozen_layer_neither_creates_nor_changes_rows():
    layer = make_layer(trainable=False)
    layer.table.assign([1], [[2.0, 2.0]])

    output = train_step(layer, tf.constant([1, 5]))

    np.testing.assert_array_equal(output, [[2.0, 2.0], [0.0, 0.0]])
    assert ids_of(layer.table) == [1]
    np.testing.assert_array_equal(layer.table.lookup([1]), [[2.0, 2.0]])
    assert layer.trainable_weights == []
    assert layer.losses == []


def test_freezing_and_thawing_after_build_takes_effect():
    model, layer = make_model(make_layer(dim=4))
    ids, labels = make_data(16)
    model.train_on_batch(ids, labels)
    rows = layer.table.lookup(ids).numpy()

    layer.trainable = False
    model.compile("adam", "binary_crossentropy")
    model.train_on_batch(ids, labels)
    model.train_on_batch(ids + 1, labels)
    np.testing.assert_array_equal(layer.table.lookup(ids), rows)
    assert layer.table.size() == len(np.unique(ids))

    layer.trainable = True
    model.compile("adam", "binary_crossentropy")
    model.train_on_batch(ids + 1, labels)
    assert layer.table.size() == 2 * len(np.unique(ids))


def test_freezing_a_model_freezes_its_layers():
    model, layer = make_model()
    model.trainable = False

    model(tf.constant(make_data(4)[0]), training=True)

    assert layer.table.size() == 0


@only_keras3
def test_jit_compile_is_left_out_with_a_warning():
    ids, labels = make_data(16)
    with pytest.warns(UserWarning, match="jit_compile"):
        model, layer = make_model(jit_compile=True)

    model.fit(ids, labels, verbose=0)

    assert layer.table.size() > 0
    assert not make_model(jit_compile="auto")[0].jit_compile


# --- Loss scaling and mixed precision ---------------------------------------


def make_regression(policy, scale=None):
    """A model in `policy` that fits a constant; returns it and its layer."""
    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(2)
    layer = make_layer(
        dim=4, embeddings_initializer="uniform", optimizer=SGD(0.5), seed=0
    )
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1)
    if scale is not None:
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            optimizer, initial_scale=scale
        )
    model.compile(optimizer, "mse")
    keras.mixed_precision.set_global_policy("float32")
    return model, layer


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_loss_scaling_does_not_reach_the_rows(policy):
    ids = np.arange(12).reshape(4, 3)
    targets = np.ones((4, 1), np.float32)
    plain_model, plain = make_regression("float32")
    model, layer = make_regression(policy, scale=2.0**10)
    assert layer.compute_dtype == policy.replace("mixed_", "")

    for _ in range(5):
        plain_model.train_on_batch(ids, targets)
        model.train_on_batch(ids, targets)

    # float16 has 11 significant bits.
    tolerance = 1e-6 if policy == "float32" else 4e-3
    np.testing.assert_allclose(
        layer.table.lookup(ids), plain.table.lookup(ids), atol=tolerance
    )
    start = layer.table.lookup(ids).numpy()
    assert np.abs(start).max() > 20 * tolerance  # It did learn.


def current_scale(optimizer):
    value = optimizer.dynamic_scale if not IS_LEGACY else optimizer.loss_scale
    return float(value)


def test_an_overflow_leaves_the_table_and_lowers_the_scale():
    ids = np.arange(12).reshape(4, 3)
    targets = np.full((4, 1), 1e3, np.float32)
    model, layer = make_regression("mixed_float16", scale=2.0**30)
    layer.table.lookup_or_create(ids)
    before = layer.table.lookup(ids).numpy()

    model.train_on_batch(ids, targets)

    np.testing.assert_array_equal(layer.table.lookup(ids), before)
    assert current_scale(model.optimizer) == 2.0**29
    for _ in range(40):
        model.train_on_batch(ids, np.ones((4, 1), np.float32))
    assert np.all(np.isfinite(layer.table.lookup(ids)))
    assert np.all(layer.table.lookup(ids).numpy() != before)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("mixed_float16", tf.float16),
        ("mixed_bfloat16", tf.bfloat16),
        ("float64", tf.float64),
    ],
)
def test_outputs_have_the_compute_dtype(dtype, expected):
    layer = make_layer(dtype=dtype)

    assert layer(tf.constant([1]), training=True).dtype == expected


# --- Configs ----------------------------------------------------------------


def test_config_round_trip_keeps_every_argument():
    layer = DynamicEmbedding(
        7,
        name="emb",
        embeddings_initializer=tsw.initializers.RandomNormal(0.5, 0.25),
        optimizer=tsw.optimizers.Adam(0.5, 0.25, 0.125, 0.0625),
        combiner="sqrtn",
        mask_zero=True,
        update="dense",
        seed=2**63,
        capacity=1000,
        push_depth=2,
        trainable=False,
        dtype="mixed_bfloat16",
    )

    config = layer.get_config()
    again = DynamicEmbedding.from_config(config)

    assert again.get_config() == config
    assert again.output_dim == 7
    assert again.name == "emb"
    assert again.combiner == "sqrtn"
    assert again.mask_zero
    assert not again.trainable
    assert again.compute_dtype == "bfloat16"
    assert again.table.seed == 2**63
    assert again.table.optimizer == layer.table.optimizer
    assert again.table.initializer == layer.table.initializer
    assert again.table.name != layer.table.name


def test_config_keeps_a_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.25)
    layer = make_layer(optimizer=SGD(schedule))

    again = DynamicEmbedding.from_config(layer.get_config())

    found = again.table.optimizer.learning_rate
    assert type(found) is type(schedule)
    assert found.get_config() == schedule.get_config()
    # The config keeps the value of a variable.
    layer = make_layer(optimizer=SGD(tf.Variable(0.25)))
    again = DynamicEmbedding.from_config(layer.get_config())
    assert again.table.learning_rate == 0.25


def test_config_of_a_shared_table_attaches_to_it_by_name():
    table = tsw.EmbeddingTable(
        "shared", 2, initializer="zeros", optimizer=SGD(0.5), seed=3
    )
    layer = DynamicEmbedding(2, table=table)

    again = DynamicEmbedding.from_config(layer.get_config())
    table.assign([1], [[1.0, 2.0]])

    assert again.table.name == "shared"
    np.testing.assert_array_equal(again.table.lookup([1]), [[1.0, 2.0]])


def test_keras_optimizers_and_initializers_are_taken():
    optimizer = keras.optimizers.SGD(0.5, momentum=0.25)
    layer = DynamicEmbedding(
        2,
        embeddings_initializer=keras.initializers.Constant(3.0),
        optimizer=optimizer,
    )

    assert layer.table.initializer == tsw.initializers.Constant(3.0)
    rate = _conversion.KerasRate(optimizer)
    assert layer.table.optimizer == SGD(rate, momentum=0.25)
    assert layer.table.learning_rate == 0.5
    optimizer.learning_rate = 0.125
    assert layer.table.learning_rate == 0.125


# --- Private tables ---------------------------------------------------------


def test_layers_of_one_name_have_tables_of_their_own(embedded):
    one, two = make_layer(name="emb"), make_layer(name="emb")
    train_step(one, tf.constant([1]))

    assert (one.table.name, two.table.name) == ("emb", "emb_1")
    assert two.table.size() == 0
    assert embedded.tables() == ["emb", "emb_1"]


def test_a_table_goes_with_what_refers_to_it(embedded):
    layer, held = make_layer(name="emb"), make_layer(name="held")
    named, traced = make_layer(table="named"), make_layer(table="traced")
    for each in (layer, held, named, traced):
        train_step(each, tf.constant([1]))
    table = held.table
    look_up = tf.function(traced.table.lookup)
    traced_rows = look_up([1]).numpy()
    assert embedded.tables() == ["emb", "held", "named", "traced"]

    del layer, held, named, traced, each
    gc.collect()

    assert embedded.tables() == ["held", "traced"]
    assert table.size() == 1
    np.testing.assert_array_equal(look_up([1]), traced_rows)


def test_a_restored_table_stays_without_an_object(embedded, tmp_path):
    table = tsw.EmbeddingTable("t", 2)
    table.assign([1], [[1.0, 2.0]])
    embedded.save(tmp_path / "c")
    table.drop()
    del table
    gc.collect()

    embedded.restore(tmp_path / "c")
    gc.collect()

    assert tsw.EmbeddingTable("t", 2).size() == 1


def test_private_tables_of_models_are_freed(embedded):
    ids, labels = make_data(16)
    model, layer = make_model()
    model.fit(ids, labels, verbose=0)
    del model, layer
    keras.backend.clear_session()
    gc.collect()

    assert embedded.tables() == []


# --- Saving -----------------------------------------------------------------


def adam_model(**kwargs):
    return make_model(
        make_layer(
            dim=4,
            embeddings_initializer="uniform",
            optimizer=tsw.optimizers.Adam(0.1),
            **kwargs,
        )
    )


def test_save_and_load_weights_replace_the_rows(tmp_path):
    ids, labels = make_data(64)
    model, layer = adam_model()
    model.fit(ids, labels, epochs=2, verbose=0)
    other, other_layer = adam_model()
    other.fit(ids + 5, labels, verbose=0)

    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")

    assert ids_of(other_layer.table) == ids_of(layer.table)
    np.testing.assert_array_equal(
        other_layer.table.lookup(ids), layer.table.lookup(ids)
    )
    every = np.unique(ids)
    for table in (layer.table, other_layer.table):
        table.push(every, np.ones((len(every), 4)))
    np.testing.assert_array_equal(
        other_layer.table.lookup(ids), layer.table.lookup(ids)
    )


def test_rows_without_optimizer_state_are_saved_and_loaded(tmp_path):
    model, layer = make_model(make_layer(dim=4, name="emb"))  # SGD.
    other, other_layer = make_model(make_layer(dim=4, name="emb"))
    layer.table.assign([1, 2], [[1.0] * 4, [2.0] * 4])

    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")

    np.testing.assert_array_equal(
        other_layer.table.lookup([1, 2, 3]), [[1.0] * 4, [2.0] * 4, [0.0] * 4]
    )
    # An empty table too.
    layer.table.remove([1, 2])
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert other_layer.table.size() == 0


def test_weights_of_another_optimizer_load_without_its_state(tmp_path):
    ids, labels = make_data(64)
    model, layer = adam_model(name="emb")
    model.fit(ids, labels, verbose=0)
    other, other_layer = make_model(
        make_layer(dim=4, name="emb", optimizer="adagrad")
    )
    model.save_weights(tmp_path / "model.weights.h5")

    with pytest.warns(UserWarning, match="starts from its initial"):
        other.load_weights(tmp_path / "model.weights.h5")

    np.testing.assert_array_equal(
        other_layer.table.lookup(ids), layer.table.lookup(ids)
    )


def two_inputs_one_table(table):
    inputs = [keras.Input((3,), dtype="int64") for _ in range(2)]
    parts = [
        keras.layers.Flatten()(DynamicEmbedding(4, table=table)(x))
        for x in inputs
    ]
    output = keras.layers.Dense(1)(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, output)
    model.compile("sgd", "mse")
    return model


def test_of_layers_that_share_a_table_one_stores_the_rows(tmp_path):
    import h5py

    table = tsw.EmbeddingTable("shared", 4, optimizer="adagrad")
    model = two_inputs_one_table(table)
    ids, labels = make_data(32)
    model.fit([ids, ids + 1], labels, verbose=0)
    path = tmp_path / "model.weights.h5"
    rows = table.lookup(ids).numpy()

    for _ in range(2):
        model.save_weights(path)
        stored = []
        with h5py.File(path) as file:
            file.visit(stored.append)
        assert sum(name.endswith("/ids") for name in stored) == 1

    table.remove(ids)
    model.load_weights(path)
    np.testing.assert_array_equal(table.lookup(ids), rows)
    model.save(tmp_path / "model.keras")
    with running_cluster(0) as beside:
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert beside.tables() == ["shared"]
        for layer in loaded.layers:
            if isinstance(layer, DynamicEmbedding):
                np.testing.assert_array_equal(layer.table.lookup(ids), rows)


def test_a_file_of_another_dim_is_refused_and_nothing_changes(tmp_path):
    layer = make_layer(dim=3)
    layer.build((None,))
    layer.table.assign([1], [[1.0, 2.0, 3.0]])
    store = {}
    other = make_layer(dim=2)
    train_step(other, tf.constant([5]))
    other.save_own_variables(store)

    with pytest.raises(ValueError, match="values"):
        layer.load_own_variables(store)

    np.testing.assert_array_equal(layer.table.lookup([1]), [[1.0, 2.0, 3.0]])


def test_a_save_to_h5_is_refused_and_leaves_an_older_file(tmp_path):
    model, _ = adam_model(name="emb")
    path = tmp_path / "model.h5"
    path.write_text("older")
    saves = [model.save]
    if IS_LEGACY:  # Keras 3 itself refuses such weights.
        saves.append(model.save_weights)

    for save in saves:
        with pytest.raises(ValueError, match=r"'emb'.*\.h5.*\.keras"):
            save(path)
        assert path.read_text() == "older"


# --- Bad input --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_dim": 0}, "Received: output_dim=0"),
        ({"output_dim": 4097}, "Received: output_dim=4097"),
        ({"output_dim": 2.5}, "Received: output_dim=2.5"),
        ({"combiner": "max"}, "Received: combiner='max'"),
        ({"table": 3}, "Received: table=3"),
        ({"seed": -1}, "Received: seed=-1"),
        ({"optimizer": "nadam"}, "Received: 'nadam'"),
        ({"embeddings_initializer": "he"}, "Received: 'he'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicEmbedding(**({"output_dim": 2} | arguments))


def test_what_does_not_fit_a_given_table_is_refused():
    table = tsw.EmbeddingTable("user", 3)

    with pytest.raises(ValueError, match=r"output_dim=2, but table 'user'"):
        DynamicEmbedding(2, table=table)
    for arguments in (
        {"optimizer": "sgd"},
        {"embeddings_initializer": "zeros"},
        {"seed": 1},
    ):
        with pytest.raises(ValueError, match=r"belongs to table 'user'"):
            DynamicEmbedding(3, table=table, **arguments)
    with pytest.raises(ValueError, match=r"'user'.*dim \(3 here, 2 asked\)"):
        DynamicEmbedding(2, table="user", optimizer="adam").build((None,))
    with pytest.raises(ValueError, match=r"'user'.*dim \(3 here, 2 asked\)"):
        DynamicEmbedding(2, table="user")(tf.constant([1]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (tf.constant([True]), "bool"),
        (tf.ragged.constant([[True]]), "bool"),
        (tf.sparse.from_dense([[True]]), "bool"),
    ],
)
def test_ids_that_are_neither_integers_nor_strings_are_named(ids, message):
    layer = make_layer(name="emb", combiner="sum")

    with pytest.raises(ValueError, match=f"(?s)emb.*{message}"):
        layer(ids)


@pytest.mark.parametrize(
    "ids",
    [
        tf.constant([0.5]),
        tf.constant([2.0**24]),
        tf.ragged.constant([[0.5]]),
        tf.sparse.from_dense([[0.5]]),
        tf.constant([2.0**11], tf.float16),
    ],
)
def test_floats_that_tell_no_ids_apart_are_named(ids):
    layer = make_layer(name="emb", combiner="sum")

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"(?s)emb.*float.*tf\.cast"
    ):
        layer(ids)


@pytest.mark.parametrize(
    ("combiner", "ids", "weights", "message"),
    [
        (None, tf.sparse.from_dense([[1]]), None, "need a combiner"),
        (None, tf.constant([[1]]), tf.constant([[1.0]]), "need a combiner"),
        ("sum", tf.constant(1), None, "got a scalar id"),
        *(
            ("sum", ids, weights, "`weights` must be of the kind")
            for ids, weights in [
                (tf.constant([[1, 2]]), tf.constant([[1.0]])),
                (tf.ragged.constant([[1]]), tf.constant([[1.0]])),
                (tf.sparse.from_dense([[1]]), tf.constant([[1.0]])),
                (tf.constant([[1]]), tf.ragged.constant([[1.0]])),
            ]
        ),
    ],
)
def test_ids_and_weights_that_cannot_be_pooled_are_refused(
    combiner, ids, weights, message
):
    with pytest.raises(ValueError, match=message):
        make_layer(combiner=combiner)(ids, weights=weights)


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        # As many values in other rows, and a value for each row.
        (ragged([[1, 2], [3]], tf.int64), ragged([[1.0], [1.0, 5.0]], "float")),
        (ragged([[1, 2], [3]], tf.int64), ragged([[2.0], []], "float")),
        (
            tf.sparse.from_dense([[1, 2], [3, 0]]),
            tf.sparse.from_dense([[1.0, 0.0], [1.0, 5.0]]),
        ),
        (tf.constant([[1, 2, 3]]), tf.constant([[2.0]])),
        (tf.constant([[1, 2, 3], [3, 2, 1]]), tf.constant([[1.0, 2.0, 3.0]])),
    ],
    ids=["other_rows", "one_value", "other_places", "one_wide", "one_row"],
)
@pytest.mark.parametrize("features", [False, True], ids=["one", "many"])
def test_weights_of_another_structure_are_refused(ids, weights, features):
    layer = make_pooling_layer("sum")
    if features:
        layer = tsw.keras.DynamicEmbeddings({"x": layer})
        ids, weights = {"x": ids}, {"x": weights}

    # Where the shapes are not known before the function runs.
    @tf.function(reduce_retracing=True)
    def call(ids, weights):
        return layer(ids, weights=weights)

    def of_any_shape(tensor):
        spec = tf.type_spec_from_value(tensor)
        shape = [None] * spec.shape.rank
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, spec.dtype, 1)
        return type(spec)(shape, spec.dtype)

    specs = tf.nest.map_structure(
        of_any_shape, (ids, weights), expand_composites=False
    )
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError),
        match=r"`weights` must (be|have)",
    ):
        layer(ids, weights=weights)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="`weights` must have the shape"
    ):
        call.get_concrete_function(*specs)(ids, weights)


def test_gradients_that_are_not_finite_change_no_row_and_show_in_the_loss(
    capfd,
):
    model, layer = make_model(make_layer(name="emb"))
    ids, labels = make_data(8)
    model.train_on_batch(ids, labels)
    rows = layer.table.lookup(ids).numpy()

    for bad_or_good in (labels * np.nan, labels):
        loss = model.train_on_batch(ids, bad_or_good)
        assert np.isnan(np.asarray(loss)).any()

    np.testing.assert_array_equal(layer.table.lookup(ids), rows)
    assert layer.table.iterations == int(model.optimizer.iterations) == 3
    assert "table 'emb': the gradient of id" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("statistics", "clipvalue"),
    [(None, 5.0), (tsw.statistics.ShowClick(), None)],
)
def test_other_options_and_statistics_keep_the_state_of_loaded_rows(
    embedded, tmp_path, statistics, clipvalue
):
    def build(statistics, clipvalue):
        return keras.Sequential(
            [
                keras.Input((2,), dtype="int64"),
                tsw.keras.DynamicEmbedding(
                    3,
                    optimizer=tsw.optimizers.Adam(0.1, clipvalue=clipvalue),
                    statistics=statistics,
                ),
            ]
        )

    model = build(tsw.statistics.Usage(), None)
    other = build(statistics, clipvalue)
    tables = [m.layers[0].table for m in (model, other)]
    tables[0].push([1, 2, 1], np.ones((3, 3)))
    model.save_weights(tmp_path / "model.weights.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other.load_weights(tmp_path / "model.weights.h5")
    for table in tables:
        table.push([1, 2], np.full((2, 3), 0.5))

    np.testing.assert_array_equal(
        tables[0].lookup([1, 2]), tables[1].lookup([1, 2])
    )
    if statistics is not None:
        assert tables[1].usage([1, 2])["count"].tolist() == [3, 2]
