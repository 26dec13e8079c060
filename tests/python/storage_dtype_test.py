"""Rows in 16 bits, on servers mostly."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tfswitch import storage_dtype


@pytest.fixture
def cluster(make_cluster):
    """A cluster of servers: a table's config carries the type of rows."""
    return make_cluster(2)


def rounded(values, dtype):
    return tf.cast(tf.cast(values, dtype), tf.float32).numpy()


def make_table(of_rows, **kwargs):
    kwargs.setdefault("optimizer", tsw.optimizers.Adagrad(0.5))
    kwargs.setdefault("seed", 0)
    name = kwargs.pop("name", "word")
    return tsw.EmbeddingTable(name, 5, storage_dtype=of_rows, **kwargs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_those_of_float32_rounded_to_nearest(cluster, dtype):
    table = make_table(dtype)
    full = tsw.EmbeddingTable("full", 5, seed=0)
    ids = np.arange(-50, 50)

    first = table.lookup_or_create(ids).numpy()
    np.testing.assert_array_equal(
        first, rounded(full.lookup_or_create(ids), dtype)
    )
    values = np.random.default_rng(1).normal(size=(100, 5)).astype(np.float32)
    table.assign(ids, values)
    np.testing.assert_array_equal(table.lookup(ids), rounded(values, dtype))


def test_a_checkpoint_brings_the_same_rows_back_and_other_types_take_them(
    make_cluster, tmp_path
):
    cluster = make_cluster(2)
    halves = tsw.StorageDtype("bfloat16", slots="float16")
    table = make_table(halves, cluster=cluster)
    ids = np.arange(300)
    table.push(ids, np.full((300, 5), 0.3, np.float32))
    before = table.lookup(ids).numpy()
    cluster.save(tmp_path / "saved")

    other = make_cluster(3)
    same = make_table(halves, cluster=other)
    other.restore(tmp_path / "saved")
    np.testing.assert_array_equal(same.lookup(ids), before)
    for rows in (table, same):
        rows.push(ids, np.full((300, 5), 0.2, np.float32))
    # With the same state steps are the same, but for the draws.
    np.testing.assert_allclose(same.lookup(ids), table.lookup(ids), 2**-7)

    third = make_cluster(1)
    full = make_table(None, cluster=third)
    third.restore(tmp_path / "saved")
    np.testing.assert_array_equal(full.lookup(ids), before)


def test_stats_show_the_memory_of_a_row(cluster):
    def stride(name, of_rows):
        table = tsw.EmbeddingTable(
            name, 16, storage_dtype=of_rows, optimizer="adagrad"
        )
        return table.stats()["row_stride_bytes"]

    assert stride("full", None) == 128
    assert stride("half", "bfloat16") == 96
    assert stride("halves", tsw.StorageDtype("float16", slots="bfloat16")) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings": "float64"}, "`embeddings` must be one of .*'float64'"),
        ({"slots": "int8"}, "`slots` must be one of .*'int8'"),
        ({"rounding": "up"}, "`rounding` must be one of .*'up'"),
    ],
)
def test_impossible_storage_dtypes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.StorageDtype(**arguments)


def test_what_is_no_storage_dtype_is_refused():
    with pytest.raises(ValueError, match=r"`storage_dtype` must be .*int8"):
        make_table("int8")
    with pytest.raises(
        ValueError, match="what is kept in memory is `storage_dtype`"
    ):
        tsw.EmbeddingTable("word", 5, dtype="bfloat16")


def test_a_layer_trains_saves_and_loads_16_bit_rows(embedded, tmp_path):
    layer = tsw.keras.DynamicEmbedding(
        8,
        storage_dtype=tsw.StorageDtype("bfloat16", slots="bfloat16"),
        optimizer=tsw.optimizers.Adagrad(0.1),
        combiner="sum",
        name="word",
    )
    model = keras.Sequential(
        [keras.Input((2,), dtype="int64"), layer, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    ids = np.arange(64).reshape(32, 2)
    model.fit(ids, np.ones((32, 1)), epochs=2, verbose=0)
    assert layer.table.storage_dtype.slots == "bfloat16"
    assert layer.table.stats()["row_stride_bytes"] == 32
    model.save(tmp_path / "model.keras")

    loaded = keras.models.load_model(tmp_path / "model.keras")

    assert loaded.layers[0].table.storage_dtype == layer.table.storage_dtype
    np.testing.assert_array_equal(
        loaded.predict(ids, verbose=0), model.predict(ids, verbose=0)
    )


def test_a_layer_of_another_table_cannot_have_a_storage_dtype(embedded):
    table = make_table("float16")
    with pytest.raises(ValueError, match="`storage_dtype` belongs to"):
        tsw.keras.DynamicEmbedding(5, table=table, storage_dtype="bfloat16")
    config = tsw.keras.DynamicEmbedding(5, table=table).get_config()
    assert config["storage_dtype"]["config"]["embeddings"] == "float16"


def test_admitted_and_evicted_rows_may_have_16_bits(cluster):
    table = make_table(
        "bfloat16",
        admission=tsw.admission.MinCount(2),
        statistics=tsw.statistics.Usage(),
    )
    ids = np.arange(20)
    gradients = np.ones((20, 5), np.float32)
    table.push(ids, gradients)
    assert table.size() == 0
    table.push(ids, gradients)
    assert table.size() == 20
    policy = tsw.eviction.MaxRows(10)
    evicted = table.shrink(policy=policy)["evicted_rows"]
    assert evicted >= 8  # Each server has its share of the limit.
    assert table.size() == 20 - evicted
    assert np.count_nonzero(table.lookup(ids).numpy().any(axis=1)) == (
        20 - evicted
    )


@pytest.mark.parametrize(
    ("of_rows", "optimizer", "message"),
    [
        (("float16", "float16"), "adam", r"of Adam underflows in float16"),
        (
            ("float16", "float16"),
            tsw.optimizers.Segments([(1, "ftrl"), (None, "adam")]),
            r"of Adam underflows in float16",
        ),
        (
            ("float32", "bfloat16"),
            tsw.optimizers.RMSprop(centered=True),
            r"RMSprop with centered=True .* lost in bfloat16",
        ),
    ],
)
def test_slots_that_are_too_short_for_the_optimizer_are_warned_of(
    embedded, of_rows, optimizer, message
):
    with pytest.warns(
        UserWarning, match=rf"table 'word': .*{message}"
    ) as caught:
        for name in ("word", "other"):  # It is said once.
            dtype = tsw.StorageDtype(*of_rows)
            make_table(dtype, optimizer=optimizer, name=name)
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize(
    ("of_rows", "optimizer"),
    [
        (("float16", "float16"), "adagrad"),
        (("float16", "bfloat16"), "adam"),
        (("bfloat16", "bfloat16"), "rmsprop"),
        (("float16", "float16"), tsw.optimizers.PaddleSharedAdam()),
    ],
)
def test_other_slots_are_not_warned_of(embedded, of_rows, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_table(tsw.StorageDtype(*of_rows), optimizer=optimizer)


def test_a_storage_dtype_is_made_of_what_users_have(embedded):
    half = tsw.StorageDtype("bfloat16", slots="float16")
    assert tsw.StorageDtype(tf.bfloat16, np.dtype("float16")) == half
    assert storage_dtype.get(half.get_config()) == half
    assert storage_dtype.get(half.to_config()) == half
    assert storage_dtype.get(tf.float16) == tsw.StorageDtype("float16")
    assert tsw.StorageDtype(rounding="nearest") == tsw.StorageDtype()
    make_table(None)
    make_table(tsw.StorageDtype(rounding="nearest"))  # The same table.
    for wrong in ({"foo": 1}, np.float16, ["float16"]):
        with pytest.raises(ValueError, match="`storage_dtype` must be"):
            storage_dtype.get(wrong)
