"""DynamicEmbeddings, for the Keras that TF_USE_LEGACY_KERAS chooses.

tests/integration/legacy_keras_test.py runs this file with tf_keras.
"""

import gc
import re

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch.keras._backend import IS_LEGACY, keras

DynamicEmbedding = tsw.keras.DynamicEmbedding
DynamicEmbeddings = tsw.keras.DynamicEmbeddings
SGD = tsw.optimizers.SGD

only_keras3 = pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")


pytestmark = pytest.mark.usefixtures("fresh_keras")


# The features of the model below.
FEATURES = {
    "user": {
        "output_dim": 4,
        "optimizer": "adam",
        "mask_zero": True,
        "seed": 0,
    },
    "item": {
        "output_dim": 3,
        "optimizer": tsw.optimizers.Adagrad(0.5),
        "combiner": "sqrtn",
        "embeddings_initializer": "normal",
        "seed": 0,
    },
    "words": {
        "output_dim": 2,
        "optimizer": SGD(0.5),
        "combiner": "mean",
        "admission": tsw.admission.MinCount(3),
        "seed": 7,
    },
}


def make_data(count=64, seed=0):
    draw = np.random.default_rng(seed)
    features = {
        "user": draw.integers(0, 20, (count, 3)) * 10**12,
        "item": draw.integers(0, 30, (count, 4)),
        "words": draw.integers(0, 10, (count, 2)).astype(str).astype(object),
    }
    labels = (features["item"][:, :1] % 2).astype(np.float32)
    return features, labels


def make_inputs():
    return {
        "user": keras.Input((3,), dtype="int64", name="user"),
        "item": keras.Input((4,), dtype="int64", name="item"),
        "words": keras.Input((2,), dtype="string", name="words"),
    }


def make_head(inputs, outputs, **options):
    parts = [keras.layers.Flatten()(outputs["user"])]
    parts += [outputs["item"], outputs["words"]]
    x = keras.layers.Concatenate()(parts)
    output = keras.layers.Dense(1, activation="sigmoid", dtype="float32")(x)
    model = keras.Model(inputs, output)
    model.compile(**{"optimizer": "adam", "loss": "mse"} | options)
    return model


def make_model(**options):
    layer = DynamicEmbeddings(FEATURES, name="many")
    inputs = make_inputs()
    return make_head(inputs, layer(inputs), **options), layer


def make_separate(**options):
    layers = {
        name: DynamicEmbedding(name=f"one_{name}", **arguments)
        for name, arguments in FEATURES.items()
    }
    inputs = make_inputs()
    outputs = {name: layer(inputs[name]) for name, layer in layers.items()}
    return make_head(inputs, outputs, **options), layers


def as_dataset(features, labels, batch=16):
    features = {k: tf.constant(v.tolist()) for k, v in features.items()}
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch)


def rows_of(table):
    ids, values = table.export_rows()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def assert_same_rows(one, other):
    a, b = rows_of(one), rows_of(other)
    assert sorted(a) == sorted(b)
    for key, row in a.items():
        np.testing.assert_allclose(row, b[key], rtol=1e-5, atol=1e-6)


def make_small(**kwargs):
    """Two features whose rows begin with ones; a step takes the gradient."""
    common = {"optimizer": SGD(1.0), "embeddings_initializer": "ones"}
    return DynamicEmbeddings(
        {
            "a": {"output_dim": 2, **common},
            "b": {"output_dim": 3, "combiner": "sum", **common},
        },
        name="small",
        **kwargs,
    )


def train_step_of_one(layer, ids, **kwargs):
    with tf.GradientTape() as tape:
        output = layer(ids, training=True, **kwargs)
        loss = tf.reduce_sum(output)
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    return output


def train_step(layer, inputs, loss_fn=None, **kwargs):
    def total(outputs):
        return tf.add_n(
            [tf.reduce_sum(tf.cast(x, tf.float32)) for x in outputs.values()]
        )

    with tf.GradientTape() as tape:
        outputs = layer(inputs, training=True, **kwargs)
        loss = (loss_fn or total)(outputs)
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    return outputs


A, B = tf.constant([1, 2, 1]), tf.constant([[5, 5], [6, 7]])

# --- The same as layers of their own ------------------------------------------


def test_it_trains_as_separate_layers_do(cluster):
    features, labels = make_data()

    def train(make):
        keras.utils.set_random_seed(1)
        model, layer = make()
        model.fit(
            as_dataset(features, labels), epochs=2, shuffle=False, verbose=0
        )
        return model, layer

    model, layer = train(make_model)
    expected_model, layers = train(make_separate)

    for name, expected in layers.items():
        assert_same_rows(layer.features[name].table, expected.table)
    # Admission: words need three occurrences, so some ids have no row yet.
    assert layer.features["words"].table.size() > 0
    assert layer.features["user"].table.size() == 19  # 0 is padding.
    for each in layer.features.values():
        assert each.table.iterations == 2 * 4
    data = as_dataset(features, labels)
    np.testing.assert_allclose(
        model.predict(data, verbose=0),
        expected_model.predict(data, verbose=0),
        rtol=1e-4,
    )


def test_an_eager_train_on_batch_pushes_once_per_feature(embedded):
    model, layer = make_model(run_eagerly=True)
    features, labels = next(iter(as_dataset(*make_data())))

    model.train_on_batch(features, labels)
    model.test_on_batch(features, labels)

    for each in layer.features.values():
        assert each.table.iterations == 1


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_ids_weights_and_observations(cluster, kind):
    def make(**names):
        return {
            name: {
                "output_dim": 2,
                "combiner": "mean",
                "embeddings_initializer": "ones",
                "optimizer": SGD(1.0),
                "statistics": tsw.statistics.ShowClick(),
                "table": table,
            }
            for name, table in names.items()
        }

    layer = DynamicEmbeddings(make(x="x", y="y"))
    alone = {
        name: DynamicEmbedding(**arguments)
        for name, arguments in make(x="x1", y="y1").items()
    }

    def of(rows, dtype):
        values = tf.ragged.constant(rows, dtype)
        return values.to_sparse() if kind == "sparse" else values

    ids = {
        "x": of([[1, 2], [], [3]], tf.int64),
        "y": of([["u"], ["v", "u"], ["w"]], tf.string),
    }
    weights = {"x": of([[1.0, 3.0], [], [2.0]], tf.float32)}
    shows = {"y": of([[2.0], [1.0, 4.0], [1.0]], tf.float32)}
    clicks = {"y": of([[1.0], [0.0, 1.0], [0.0]], tf.float32)}

    outputs = train_step(
        layer, ids, weights=weights, shows=shows, clicks=clicks
    )

    for name, one in alone.items():
        more = {
            what: given[name]
            for what, given in (
                ("weights", weights),
                ("shows", shows),
                ("clicks", clicks),
            )
            if name in given
        }
        expected = train_step_of_one(one, ids[name], **more)
        np.testing.assert_array_equal(outputs[name], expected)
        table = layer.features[name].table
        assert rows_of(table) == rows_of(one.table)
        every = one.table.export_rows()[0]
        usage, expected_usage = table.usage(every), one.table.usage(every)
        for what in ("count", "show", "click"):
            np.testing.assert_array_equal(usage[what], expected_usage[what])


# --- Training, evaluation, frozen ---------------------------------------------


def test_evaluation_reads_and_makes_no_rows(embedded):
    layer = make_small()
    layer.features["a"].table.assign([1], [[5.0, 6.0]])

    outputs = layer({"a": A, "b": B})

    np.testing.assert_array_equal(outputs["a"][0], [5.0, 6.0])
    np.testing.assert_array_equal(outputs["b"], np.zeros((2, 3)))
    assert layer.features["b"].table.size() == 0


def test_training_may_be_a_tensor(embedded):
    layer = make_small()
    layer.build()

    @tf.function
    def step(training):
        with tf.GradientTape() as tape:
            outputs = layer({"a": A, "b": B}, training=training)
            loss = tf.reduce_sum(outputs["a"]) + tf.reduce_sum(outputs["b"])
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    step(tf.constant(False))
    assert layer.features["a"].table.size() == 0
    step(tf.constant(True))
    np.testing.assert_array_equal(
        layer.features["a"].table.lookup([2]), [[0.0, 0.0]]
    )


def test_a_frozen_feature_is_read_beside_those_that_train(embedded):
    layer = make_small()
    layer.features["b"].trainable = False
    layer.features["b"].table.assign([5], [[2.0] * 3])

    outputs = train_step(layer, {"a": A, "b": B})

    np.testing.assert_array_equal(outputs["b"], [[4.0] * 3, [0.0] * 3])
    assert layer.features["a"].table.size() == 2
    assert rows_of(layer.features["b"].table) == {5: [2.0] * 3}

    layer.trainable = False
    train_step(layer, {"a": A + 1, "b": B})
    assert layer.trainable_weights == []
    assert rows_of(layer.features["a"].table).keys() == {1, 2}


def test_empty_batches(embedded):
    layer = make_small()
    empty = {"a": tf.zeros([0], tf.int64), "b": tf.zeros([0, 2], tf.int64)}

    outputs = train_step(layer, empty)

    assert outputs["a"].shape == (0, 2) and outputs["b"].shape == (0, 3)
    outputs = train_step(layer, {"a": A, "b": tf.zeros([2, 0], tf.int64)})
    np.testing.assert_array_equal(outputs["b"], np.zeros((2, 3)))
    assert layer.features["a"].table.size() == 2
    assert layer.features["b"].table.size() == 0


def test_masks_of_features_reach_later_layers(embedded):
    layer = DynamicEmbeddings(
        {"a": {"output_dim": 2, "mask_zero": True}, "b": {"output_dim": 2}}
    )
    inputs = {
        name: keras.Input((3,), dtype="int64", name=name) for name in "ab"
    }
    outputs = layer(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(outputs["a"])
    model = keras.Model(inputs, [pooled, outputs["b"]])
    layer.features["a"].table.assign([1, 2], [[1.0] * 2, [2.0] * 2])
    ids = tf.constant([[1, 2, 0]])

    np.testing.assert_allclose(model({"a": ids, "b": ids})[0], [[1.5, 1.5]])


# --- Shared tables ------------------------------------------------------------


def shared_features(table):
    return {
        "seen": {"output_dim": 2, "combiner": "sum", "table": table},
        "next": {"output_dim": 2, "table": table},
        "other": {"output_dim": 3},
    }


def test_features_of_one_table_take_one_step_per_id(cluster):
    table = tsw.EmbeddingTable(
        "item", 2, initializer="ones", optimizer=tsw.optimizers.Adagrad(1.0)
    )
    together = tsw.EmbeddingTable(
        "item1", 2, initializer="ones", optimizer=tsw.optimizers.Adagrad(1.0)
    )
    layer = DynamicEmbeddings(shared_features(table), name="many")
    alone = DynamicEmbedding(2, table=together)
    inputs = {
        "seen": tf.constant([[1, 2], [3, 1]]),
        "next": tf.constant([1, 4], tf.int32),
        "other": tf.constant([1]),
    }

    for _ in range(3):
        outputs = train_step(layer, inputs)
        rows = train_step_of_one(alone, tf.constant([1, 2, 3, 1, 1, 4]))
        np.testing.assert_allclose(
            outputs["seen"], [rows[0] + rows[1], rows[2] + rows[3]], rtol=1e-6
        )
        np.testing.assert_array_equal(outputs["next"], rows[4:])

    assert table.iterations == 3
    assert_same_rows(table, together)


def test_a_layer_that_was_used_keeps_its_table(embedded):
    used = DynamicEmbedding(2, table="item", optimizer=SGD(1.0))
    train_step_of_one(used, tf.constant([1, 2]))
    table = used.table
    layer = DynamicEmbeddings(
        {
            "new": {"output_dim": 2, "table": "item", "optimizer": SGD(1.0)},
            "used": used,
        }
    )

    train_step(layer, {"new": tf.constant([1]), "used": tf.constant([2])})
    train_step_of_one(used, tf.constant([3]))

    assert used.table is table
    assert layer.features["new"].table is table
    assert table.iterations == 3


@pytest.mark.parametrize("used", ["called", "made with a table"])
def test_two_tables_in_use_cannot_become_one(embedded, used):
    if used == "called":
        layers = [DynamicEmbedding(2, table="item") for _ in range(2)]
        for each in layers:
            each(tf.constant([1]))
    else:
        layers = [
            DynamicEmbedding(2, table=tsw.EmbeddingTable("item", 2))
            for _ in range(2)
        ]
    tables = [each.table for each in layers]
    layer = DynamicEmbeddings(dict(zip("ab", layers, strict=True)))

    with pytest.raises(
        ValueError, match=r"'a' and 'b' share table 'item'.* one EmbeddingTable"
    ):
        layer({name: tf.constant([1]) for name in "ab"})

    assert [each.table for each in layers] == tables


def test_features_of_one_table_name_share_it_also_when_loaded(
    embedded, tmp_path
):
    inputs = {
        "seen": keras.Input((2,), dtype="int64", name="seen"),
        "next": keras.Input((), dtype="int64", name="next"),
        "other": keras.Input((), dtype="int64", name="other"),
    }
    layer = DynamicEmbeddings(shared_features("item"), name="many")
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")

    loaded = keras.models.load_model(tmp_path / "model.keras")

    for of in (model, loaded):
        of(
            {
                "seen": tf.constant([[1, 2]]),
                "next": tf.constant([1]),
                "other": tf.constant([1]),
            }
        )
        features = of.get_layer("many").features
        assert features["seen"].table is features["next"].table
        assert features["other"].table is not features["seen"].table


def test_shows_of_a_shared_table_are_those_of_each_feature(embedded):
    features = {
        name: {
            "output_dim": 2,
            "table": "item",
            "statistics": tsw.statistics.ShowClick(),
        }
        for name in ("seen", "next")
    }
    layer = DynamicEmbeddings(features)
    inputs = {"seen": tf.constant([1, 2]), "next": tf.constant([1])}

    train_step(layer, inputs, shows={"seen": tf.constant([3.0, 4.0])})

    usage = layer.features["seen"].table.usage([1, 2])
    np.testing.assert_array_equal(usage["show"], [4.0, 4.0])


def test_another_learning_rate_for_a_shared_table_is_refused(embedded):
    layer = DynamicEmbeddings(
        {
            "a": {"output_dim": 2, "table": "t", "optimizer": SGD(1.0)},
            "b": {"output_dim": 2, "table": "t", "optimizer": SGD(0.5)},
        }
    )

    with pytest.raises(ValueError, match=r"'a' and 'b' share table 't'"):
        layer.build()


# --- What belongs together ----------------------------------------------------


def test_an_unused_feature_takes_no_step(embedded):
    layer = make_small()

    train_step(layer, {"a": A, "b": B}, lambda x: tf.reduce_sum(x["a"]))

    assert layer.features["a"].table.iterations == 1
    assert layer.features["b"].table.iterations == 0


# --- Mixed precision ----------------------------------------------------------


def test_an_overflow_in_one_feature_skips_the_step_of_all(cluster):
    layer = make_small(dtype="mixed_float16")
    assert layer.features["a"].compute_dtype == "float16"
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=256.0
    )

    def scaled_step(factor):
        with tf.GradientTape() as tape:
            outputs = layer({"a": A, "b": B}, training=True)
            a, b = (tf.cast(x, tf.float32) for x in outputs.values())
            loss = tf.reduce_sum(a) + tf.reduce_sum(b) * factor
            scale = "get_scaled_loss" if IS_LEGACY else "scale_loss"
            loss = getattr(optimizer, scale)(loss)
        variables = layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        if IS_LEGACY:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    scaled_step(1.0)
    tables = [each.table for each in layer.features.values()]
    np.testing.assert_array_equal(tables[0].lookup([2]), [[0.0, 0.0]])
    np.testing.assert_array_equal(tables[1].lookup([6]), [[0.0] * 3])
    before = [rows_of(table) for table in tables]

    scaled_step(np.inf)

    assert before == [rows_of(table) for table in tables]
    assert [table.iterations for table in tables] == [1, 1]


# --- Configs and saving -------------------------------------------------------


def test_config_round_trip_keeps_the_features(embedded):
    _, layer = make_model()

    again = DynamicEmbeddings.from_config(layer.get_config())

    assert list(again.features) == list(FEATURES)
    for name, each in layer.features.items():
        other = again.features[name]
        assert other.table.name != each.table.name
        assert other.get_config() == each.get_config()
    assert again.supports_masking


def test_save_and_load_model_bring_rows_and_their_state_back(
    embedded, tmp_path
):
    model, layer = make_model()
    data = as_dataset(*make_data())
    model.fit(data, verbose=0)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")

    again = loaded.get_layer("many")
    for name, each in layer.features.items():
        assert rows_of(again.features[name].table) == rows_of(each.table)
    np.testing.assert_allclose(
        loaded.predict(data, verbose=0), model.predict(data, verbose=0)
    )
    model.fit(data, verbose=0, shuffle=False)
    loaded.fit(data, verbose=0, shuffle=False)
    for name, each in layer.features.items():
        assert_same_rows(again.features[name].table, each.table)


def test_rows_on_servers_stay_there_and_are_found_by_name(tmp_path):
    with running_cluster(2):
        model, layer = make_model()
        table = layer.features["item"].table
        table.lookup_or_create(range(10))
        for name in ("user", "words"):
            of_other = layer.features[name].table
            of_other.assign([1], np.ones((1, of_other.dim)))
        with pytest.warns(UserWarning) as caught:
            model.save(tmp_path / "model.keras")
        # The rows of one of the three layers.
        texts = "".join(str(each.message) for each in caught)
        assert len(re.findall("'many_.*do not go into", texts)) == 1
        loaded = keras.models.load_model(tmp_path / "model.keras")

        again = loaded.get_layer("many").features["item"]
        assert again.table.name == "many_item"
        assert rows_of(again.table) == rows_of(table)


def test_weights_go_to_the_features_of_their_names(embedded, tmp_path):
    def make(names):
        layer = DynamicEmbeddings({name: {"output_dim": 2} for name in names})
        inputs = {
            name: keras.Input((1,), dtype="int64", name=name.replace("/", "_"))
            for name in names
        }
        return keras.Model(inputs, layer(inputs)), layer

    model, layer = make(["b", "a", "c/d"])
    for i, each in enumerate(layer.features.values()):
        each.table.assign([i], [[float(i)] * 2])
    other_model, other = make(["c/d", "a", "b"])

    model.save_weights(tmp_path / "m.weights.h5")
    other_model.load_weights(tmp_path / "m.weights.h5")

    for name, each in layer.features.items():
        assert rows_of(other.features[name].table) == rows_of(each.table)


def test_private_tables_go_with_the_layer(embedded):
    layer = make_small()
    train_step(layer, {"a": A, "b": B})
    assert embedded.tables() == ["small_a", "small_b"]

    del layer
    gc.collect()

    assert embedded.tables() == []


def test_the_count_of_weights_prints_the_rows_of_all_features(embedded):
    _, layer = make_model()
    layer.features["user"].table.lookup_or_create([1, 2, 3])

    assert layer.count_params() == 0
    assert str(layer.count_params()).startswith("0 (and 3 rows, ")


def test_layers_may_be_given_instead_of_arguments(embedded):
    one = DynamicEmbedding(2, name="mine", embeddings_initializer="ones")
    layer = DynamicEmbeddings({"a": one, "b": {"output_dim": 1}})

    train_step(layer, {"a": A, "b": A})

    assert layer.features["a"] is one
    assert one.table.size() == 2


# --- Bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "at least one name"),
        ([], "at least one name"),
        ({"": {"output_dim": 2}}, "not empty"),
        ({3: {"output_dim": 2}}, "Received: 3"),
        ({"a": 3}, "feature 'a'.*Received: 3"),
        ({"a": {"output_dim": 0}}, "feature 'a'.*output_dim=0"),
        ({"a": {"output_dim": 2, "combiner": "max"}}, "feature 'a'.*'max'"),
        ({"a": {}}, "feature 'a'"),
        ({"a": {"output_dim": 2, "dims": 3}}, "feature 'a'"),
        (
            {f"f{i}": {"output_dim": 2} for i in range(257)},
            "257 entries.*at most 256",
        ),
    ],
)
def test_bad_features_are_named(embedded, features, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DynamicEmbeddings(features)


def test_one_layer_for_two_features_is_refused(embedded):
    layer = DynamicEmbedding(2, name="mine")

    with pytest.raises(ValueError, match=r"'a' and 'b' are the same.*'mine'"):
        DynamicEmbeddings({"a": layer, "b": layer})


@pytest.mark.parametrize(
    ("inputs", "more", "message"),
    [
        ({"a": A}, {}, "no ids of feature 'b'"),
        ({"a": A, "b": B, "c": A}, {}, "no feature 'c'"),
        (A, {}, "must be a dict"),
        ({"a": A, "b": B}, {"weights": {"x": B}}, "no feature 'x'"),
        ({"a": A, "b": B}, {"shows": A}, "`shows` must be a dict"),
        (
            {"a": A, "b": B},
            {"weights": {"a": tf.ones([3])}},
            "small_a.*need a combiner",
        ),
        ({"a": tf.ones([3], tf.bool), "b": B}, {}, "small_a.*bool"),
    ],
)
def test_bad_inputs_are_named(embedded, inputs, more, message):
    layer = make_small()

    with pytest.raises(ValueError, match=f"(?s){message}"):
        layer(inputs, **more)


@only_keras3
def test_missing_placeholders_are_refused_while_building_a_model(embedded):
    with pytest.raises(ValueError, match="no ids of feature 'b'"):
        make_small()({"a": keras.Input((3,), dtype="int64")})
