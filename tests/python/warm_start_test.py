"""keras.layers.Embedding to DynamicEmbedding and back, for both Keras.

tests/integration/legacy_keras_test.py runs this file with tf_keras.
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.support import examples
from tfswitch.keras import warm_start
from tfswitch.keras._backend import IS_LEGACY, keras

from_embedding = tsw.keras.from_embedding
to_embedding = tsw.keras.to_embedding

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


pytestmark = pytest.mark.usefixtures("fresh_keras")


def make_embedding(num_rows=10, dim=3, **kwargs):
    kwargs.setdefault("name", "word")
    embedding = keras.layers.Embedding(num_rows, dim, **kwargs)
    embedding.build((None,))
    return embedding


def make_dynamic(dim=3, **kwargs):
    """A layer with rows of the ids 0 to 5."""
    kwargs.setdefault("name", "word")
    layer = tsw.keras.DynamicEmbedding(dim, **kwargs)
    layer.build()
    draw = np.random.default_rng(2)
    layer.table.assign(range(6), draw.normal(size=(6, dim)))
    return layer


def matrix_of(embedding):
    return np.asarray(
        tf.cast(tf.convert_to_tensor(embedding.embeddings), "float32")
    )


def assert_same(actual, expected):
    actual, expected = (tf.convert_to_tensor(x) for x in (actual, expected))
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.numpy().tobytes() == expected.numpy().tobytes()


# --- From keras.layers.Embedding --------------------------------------------


@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_trained_model_gives_the_same_with_the_new_layer(
    make_cluster, num_servers
):
    make_cluster(num_servers)
    draw = np.random.default_rng(1)
    ids = draw.integers(0, 30, (64, 4))
    inputs = keras.Input((4,), dtype="int64")
    model = keras.Sequential(
        [
            inputs,
            keras.layers.Embedding(30, 4, name="word"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    model.train_on_batch(ids, draw.integers(0, 2, 64))

    layer = from_embedding(model.layers[0])
    warm = keras.Sequential([inputs, layer, *model.layers[1:]])

    assert layer.name == "word"
    assert layer.table.size() == 30
    assert_same(warm(ids), model(ids))
    back = keras.Sequential([inputs, to_embedding(layer), *model.layers[1:]])
    assert_same(back(ids), model(ids))
    assert_same(back.layers[0].embeddings, model.layers[0].embeddings)


def test_training_goes_on_with_new_ids(embedded):
    embedding = make_embedding()
    layer = from_embedding(
        embedding, optimizer=tsw.optimizers.SGD(0.5), name="warm"
    )

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([3, 77]), training=True))
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    assert layer.table.size() == 11
    np.testing.assert_array_equal(
        layer.table.lookup([3])[0], matrix_of(embedding)[3] - 0.5
    )
    assert_same(layer(tf.constant([2])), embedding(tf.constant([2])))


@pytest.mark.parametrize("kind", ["list", "array", "tensor", "bytes"])
def test_ids_may_be_the_vocabulary_of_a_string_lookup(embedded, kind):
    lookup = keras.layers.StringLookup(vocabulary=["b", "a"], mask_token="")
    embedding = make_embedding(4, mask_zero=True)
    words = tf.constant([["a", "b", ""]])
    vocabulary = lookup.get_vocabulary()
    assert vocabulary == ["", "[UNK]", "b", "a"]
    ids = {
        "list": list,
        "array": np.array,
        "tensor": tf.constant,
        "bytes": lambda words: [word.encode() for word in words],
    }[kind](vocabulary)

    layer = from_embedding(embedding, ids=ids)

    expected = embedding(lookup(words))
    assert_same(layer(words)[:, :2], expected[:, :2])
    assert layer.compute_mask(words).numpy().tolist() == [[True, True, False]]
    assert_same(
        to_embedding(layer, ids=ids)(lookup(words))[:, :2], expected[:, :2]
    )


def test_padding_has_no_row_and_stays_masked(embedded):
    embedding = make_embedding(mask_zero=True)
    pool = keras.layers.GlobalAveragePooling1D()
    inputs = keras.Input((3,), dtype="int64")
    model = keras.Model(inputs, pool(embedding(inputs)))
    ids = np.array([[4, 9, 0], [1, 0, 0]])

    layer = from_embedding(embedding)
    warm = keras.Model(inputs, pool(layer(inputs)))

    assert layer.mask_zero
    assert layer.table.size() == 9
    np.testing.assert_array_equal(layer(tf.constant([0])), [[0.0] * 3])
    assert_same(warm(ids), model(ids))
    back = keras.Model(inputs, pool(to_embedding(layer)(inputs)))
    assert_same(back(ids), model(ids))
    # Where nothing is padding, row 0 is a row.
    layer = from_embedding(embedding, mask_zero=False)
    assert layer.table.size() == 10
    assert_same(layer(tf.constant([0])), embedding(tf.constant([0])))


@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float64"]
)
def test_the_dtype_is_taken_over(embedded, policy):
    embedding = make_embedding(dtype=policy)
    if policy == "float64":  # Rows are float32.
        embedding.set_weights([matrix_of(embedding)])
    ids = tf.constant([[1, 2], [3, 0]])

    layer = from_embedding(embedding)

    assert layer.compute_dtype == embedding.compute_dtype
    assert_same(layer(ids), embedding(ids))
    assert_same(to_embedding(layer)(ids), embedding(ids))


def test_a_frozen_layer_stays_frozen(embedded):
    embedding = make_embedding(trainable=False)

    assert not from_embedding(embedding).trainable
    layer = from_embedding(embedding, trainable=True)
    assert layer.trainable
    layer.trainable = False
    assert not to_embedding(layer).trainable


def test_other_arguments_are_those_of_the_new_layer(embedded):
    layer = from_embedding(
        make_embedding(),
        combiner="sum",
        optimizer=tsw.optimizers.Adam(0.25),
        admission=tsw.admission.MinCount(3, not_admitted=0.5),
        storage_dtype="bfloat16",
        seed=4,
    )

    embedding = to_embedding(
        make_dynamic(), name="dense", embeddings_regularizer="l2"
    )
    assert embedding.name == "dense"
    assert embedding.embeddings_regularizer is not None
    assert layer.combiner == "sum"
    assert layer.table.optimizer == tsw.optimizers.Adam(0.25)
    assert layer.table.seed == 4
    # Rows need no admission; new ids do.
    assert layer.table.size() == 10
    np.testing.assert_array_equal(layer(tf.constant([[99]])), [[0.5] * 3])


def test_a_table_that_is_there_keeps_what_else_it_has(embedded):
    table = tsw.EmbeddingTable("rows", 3, optimizer="adagrad")
    table.push([3, 50], np.ones((2, 3)))
    _, _, before = table._export_with_slots()
    other = table.lookup([50]).numpy()
    embedding = make_embedding()

    layer = from_embedding(embedding, table=table)

    assert layer.table is table
    assert table.size() == 11
    assert_same(table.lookup(range(10)), embedding.embeddings)
    assert_same(table.lookup([50]), other)
    ids, _, slots = table._export_with_slots()
    np.testing.assert_array_equal(slots[np.isin(ids, [3, 50])], before)


@pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")
def test_an_embedding_with_lora_gives_its_sum(embedded):
    embedding = make_embedding(lora_rank=2)
    embedding.lora_embeddings_b.assign(np.ones((2, 3)))

    layer = from_embedding(embedding)

    assert_same(layer(tf.constant([5])), embedding(tf.constant([5])))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], r"one id for each of the 3 rows of layer 'word'. .* 2 ids"),
        ([5, 7, 5], r"must differ.* 5 for row 0 and for row 2"),
        ([[1, 2, 3]], r"rank 1. Received: ids of shape \(1, 3\)"),
        ([0.0, 1.0, 2.0], r"layer 'word': ids must be integers"),
        ([0, "a", "b"], r"layer 'word': ids must be integers or strings"),
    ],
)
def test_ids_that_do_not_fit_the_rows_are_refused(embedded, ids, message):
    with pytest.raises(ValueError, match=message):
        from_embedding(make_embedding(3), ids=ids)


def test_padding_must_be_the_first_id(embedded):
    embedding = make_embedding(2, mask_zero=True)

    for ids in ([4, 0], ["a", ""]):
        with pytest.raises(ValueError, match=r"first of `ids` must be padding"):
            from_embedding(embedding, ids=ids)
    layer = from_embedding(embedding, ids=[4, 0], mask_zero=False)
    assert layer.table.size() == 2


def test_weights_that_no_row_can_have_are_refused_before_a_table_is_made(
    embedded,
):
    embedding = make_embedding(2)
    embedding.set_weights([np.array([[1.0, 2.0, 3.0], [1.0, np.inf, 2.0]])])

    with pytest.raises(ValueError, match=r"layer 'word': row 1 .* has inf"):
        from_embedding(embedding)

    assert embedded.tables() == []


def test_what_is_no_trained_embedding_is_refused(embedded):
    with pytest.raises(ValueError, match=r"'word' has no weights yet"):
        from_embedding(keras.layers.Embedding(2, 2, name="word"))
    with pytest.raises(ValueError, match=r"Embedding of .*core\.dense\.Dense"):
        from_embedding(keras.layers.Dense(2))


def test_embeddings_of_the_other_keras_are_refused(embedded):
    if IS_LEGACY:
        import keras as other
    else:
        other = pytest.importorskip("tf_keras")

    with pytest.raises(ValueError, match="TF_USE_LEGACY_KERAS chooses"):
        from_embedding(other.layers.Embedding(2, 2))


@pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")
def test_quantized_embeddings_are_refused(embedded):
    embedding = make_embedding(4)
    embedding.quantize("int8")

    with pytest.raises(ValueError, match="quantized to int8"):
        from_embedding(embedding)


# --- To keras.layers.Embedding ----------------------------------------------


def test_an_embedding_gives_what_the_layer_gives(embedded):
    layer = make_dynamic()
    layer.table.remove([2])
    ids = tf.constant([[0, 1], [2, 5]])

    embedding = to_embedding(layer)

    assert isinstance(embedding, keras.layers.Embedding)
    assert embedding.name == "word"
    assert embedding.input_dim == 6
    assert_same(embedding(ids), layer(ids))
    np.testing.assert_array_equal(embedding(ids)[1, 0], [0.0] * 3)


def test_ids_without_a_row_read_as_admission_says(embedded):
    layer = make_dynamic(admission=tsw.admission.MinCount(2, not_admitted=0.25))

    embedding = to_embedding(layer, ids=[77, 3])

    np.testing.assert_array_equal(matrix_of(embedding)[0], [0.25] * 3)
    assert_same(embedding(tf.constant([1])), layer(tf.constant([3])))


@settings(max_examples=examples(20))
@given(
    ids=st.lists(
        st.integers(INT64_MIN, INT64_MAX), min_size=1, max_size=8, unique=True
    )
)
def test_any_ids_go_there_and_back(ids):
    with running_cluster(0):
        embedding = make_embedding(len(ids))

        layer = from_embedding(embedding, ids=ids)

        assert layer.table.size() == len(ids)
        assert_same(layer(tf.constant(ids, tf.int64)), embedding.embeddings)
        back = to_embedding(layer, ids=ids)
        assert_same(back.embeddings, embedding.embeddings)


def test_padding_reads_as_zeros_though_id_0_has_a_row(embedded):
    layer = make_dynamic(mask_zero=True)

    embedding = to_embedding(layer)

    assert embedding.mask_zero
    assert_same(embedding(tf.constant([0, 3])), layer(tf.constant([0, 3])))
    with pytest.raises(ValueError, match=r"first of `ids` must be padding"):
        to_embedding(layer, ids=[3, 0])
    assert not to_embedding(layer, ids=[3], mask_zero=False).mask_zero


def test_a_layer_of_many_features_is_converted_by_feature(embedded):
    layers = tsw.keras.DynamicEmbeddings({"user": {"output_dim": 2}})
    layers({"user": tf.constant([0, 1])}, training=True)

    embedding = to_embedding(layers.features["user"])

    assert_same(
        embedding(tf.constant([1])), layers.features["user"].table.lookup([1])
    )
    with pytest.raises(ValueError, match="`features`"):
        to_embedding(layers)


def test_ids_that_are_no_row_numbers_are_refused(embedded, monkeypatch):
    layer = make_dynamic()
    monkeypatch.setattr(warm_start, "_FEW_ROWS", 100)
    layer.table.assign([99], np.ones((1, 3)))
    assert to_embedding(layer).input_dim == 100

    layer.table.assign([100], np.ones((1, 3)))
    with pytest.raises(
        ValueError, match=r"has 8 rows with ids up to 100; .*with `ids`"
    ):
        to_embedding(layer)
    layer.table.assign([-7], np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"ids below 0, such as -7.*`ids`"):
        to_embedding(layer)
    assert to_embedding(layer, ids=[-7, 100]).input_dim == 2


def test_a_matrix_may_be_ten_times_as_long_as_the_table(embedded, monkeypatch):
    layer = make_dynamic()
    monkeypatch.setattr(warm_start, "_FEW_ROWS", 0)

    layer.table.assign([69], np.ones((1, 3)))
    assert to_embedding(layer).input_dim == 70
    layer.table.remove([69])
    layer.table.assign([70], np.ones((1, 3)))
    with pytest.raises(ValueError, match="7 rows with ids up to 70"):
        to_embedding(layer)


def test_layers_without_rows_or_with_a_combiner_are_refused(embedded):
    empty = tsw.keras.DynamicEmbedding(2)
    with pytest.raises(ValueError, match=r"no rows, .*`ids`"):
        to_embedding(empty)
    with pytest.raises(ValueError, match="must not be empty"):
        to_embedding(empty, ids=[])
    pooled = tsw.keras.DynamicEmbedding(2, combiner="mean")
    with pytest.raises(
        ValueError, match=r"combiner 'mean'.*table=layer\.table"
    ):
        to_embedding(pooled)
    with pytest.raises(ValueError, match=r"must be a tfswitch\.keras\.Dyn"):
        to_embedding(make_embedding())
