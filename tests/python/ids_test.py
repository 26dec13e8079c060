"""Ids of strings, packed ids, and the count of collisions."""

import concurrent.futures
import doctest

import hypothesis
import hypothesis.extra.numpy
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfswitch as tsw
from tfswitch import ids as ids_lib
from tfswitch.ops.string_ops import hash_strings as hash_op

STRINGS = [
    b"",
    b"a",
    b"hello world",
    "žluťoučký kůň".encode(),
    b"\0",
    b"with a zero\0",
    b"x" * 17,
    b"x" * 33,
    b"x" * 65,
    bytes(range(256)) * 5,
]

# Test vectors of farmhash packages for Go, Rust and Python; the last one is of
# FARM_FINGERPRINT in the documentation of BigQuery.
PUBLISHED = {
    b"": 0x9AE16A3B2F90404F,
    b"a": 0xB3454265B6DF75E3,
    b"abc": 0x24A5B3A074E7F369,
    b"hello world": 0x588FB7478BD6B01B,
    b"1footrue": -1541654101129638711 % 2**64,
}

int64s = st.integers(-(2**63), 2**63 - 1)


def fingerprint(strings):
    """The same hash by TensorFlow's op."""
    return tf.bitcast(tf.fingerprint(tf.constant(strings)), tf.int64).numpy()


# --- hash_strings -------------------------------------------------------------


def test_hash_has_the_published_values():
    got = {s: int(tsw.ids.hash_strings(s)) % 2**64 for s in PUBLISHED}

    assert got == PUBLISHED


@hypothesis.given(
    st.lists(st.binary(max_size=100), min_size=1), st.integers(1, 2**63 - 1)
)
def test_salt_is_hashed_before_the_string_in_little_endian(strings, salt):
    salted = [salt.to_bytes(8, "little") + string for string in strings]

    got = tsw.ids.hash_strings(tf.constant(strings), salt=salt)

    np.testing.assert_array_equal(got, fingerprint(salted))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (1, 2, 3)])
def test_hash_keeps_the_shape(shape):
    strings = tf.fill(shape, "a")

    ids = tsw.ids.hash_strings(strings)

    assert ids.dtype == tf.int64
    assert ids.shape == shape


def test_hash_of_many_strings_is_that_of_each():
    # Enough for several threads.
    strings = tf.strings.as_string(tf.range(100_000))

    np.testing.assert_array_equal(
        tsw.ids.hash_strings(strings),
        tf.bitcast(tf.fingerprint(strings), tf.int64),
    )


@pytest.mark.parametrize(
    "strings",
    [
        STRINGS,
        tuple(STRINGS),
        np.array(STRINGS, object),
        tf.constant(STRINGS),
    ],
    ids=["list", "tuple", "array", "tensor"],
)
def test_hash_of_lists_arrays_and_tensors_is_tensorflows_fingerprint(strings):
    np.testing.assert_array_equal(
        tsw.ids.hash_strings(strings), fingerprint(STRINGS)
    )


@pytest.mark.parametrize("dtype", ["U", "S", object])
def test_hash_of_an_array_is_an_array_and_of_text_that_of_its_utf8(dtype):
    texts = ["a", "b"] if dtype == "S" else ["a", "ž"]

    ids = tsw.ids.hash_strings(np.array([texts], dtype))

    assert isinstance(ids, np.ndarray)
    np.testing.assert_array_equal(ids, [fingerprint(texts)])


def test_hash_keeps_ragged_and_sparse_structure():
    ragged = tf.ragged.constant([["a"], [], ["b", "a"]])
    sparse = ragged.to_sparse()

    ragged_ids = tsw.ids.hash_strings(ragged)
    sparse_ids = tsw.ids.hash_strings(sparse)

    a, b = (int(tsw.ids.hash_strings(s)) for s in "ab")
    assert ragged_ids.to_list() == [[a], [], [b, a]]
    np.testing.assert_array_equal(sparse_ids.indices, sparse.indices)
    np.testing.assert_array_equal(sparse_ids.values, [a, b, a])


def test_hash_works_in_functions_and_datasets():
    expected = fingerprint(STRINGS)
    dataset = tf.data.Dataset.from_tensor_slices(STRINGS).batch(4)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.string)])
    def function(strings):
        ids = tsw.ids.hash_strings(strings)
        assert ids.shape.as_list() == [None, 2]
        return ids

    in_function = function(tf.reshape(STRINGS, [-1, 2]))
    in_dataset = np.concatenate(list(dataset.map(tsw.ids.hash_strings)))

    np.testing.assert_array_equal(np.ravel(in_function), expected)
    np.testing.assert_array_equal(in_dataset, expected)


def test_hash_goes_with_a_saved_model(tmp_path):
    module = tf.Module()
    module.hash = tf.function(
        lambda strings: tsw.ids.hash_strings(strings, salt=7),
        input_signature=[tf.TensorSpec([None], tf.string)],
    )
    tf.saved_model.save(module, str(tmp_path))

    loaded = tf.saved_model.load(str(tmp_path))

    np.testing.assert_array_equal(
        loaded.hash(tf.constant(STRINGS)),
        tsw.ids.hash_strings(STRINGS, salt=7),
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "expected strings, got int"),
        (np.array([1.0]), "expected strings, got float"),
        (tf.constant([1]), "expected strings, got int"),
        (np.array(["a", None], object), r"None \(of type NoneType\)"),
    ],
    ids=["list", "array", "tensor", "missing value"],
)
def test_hash_refuses_what_is_no_string(value, message):
    with pytest.raises(ValueError, match=message):
        tsw.ids.hash_strings(value)


@pytest.mark.parametrize("salt", [-1, 2**63, 0.5, True, "a"])
def test_hash_refuses_a_salt_out_of_range(salt):
    with pytest.raises(ValueError, match=r"`salt` must be .*Received: salt="):
        tsw.ids.hash_strings("a", salt=salt)


def test_hash_op_takes_any_salt_of_its_dtype():
    salted = [(2**64 - 1).to_bytes(8, "little") + b"a"]

    np.testing.assert_array_equal(
        hash_op(tf.constant(["a"]), salt=-1), fingerprint(salted)
    )


# --- pack and unpack ----------------------------------------------------------


@hypothesis.given(st.integers(1, 32), st.data())
def test_unpack_gives_back_what_fits(slot_bits, data):
    slot = data.draw(st.integers(0, 2**slot_bits - 1))
    ids = data.draw(
        st.lists(st.integers(0, 2 ** (64 - slot_bits) - 1), min_size=1)
    )

    packed = tsw.ids.pack(slot, np.array(ids, np.int64), slot_bits)
    slots, low = tsw.ids.unpack(packed, slot_bits)

    assert packed.dtype == np.int64
    np.testing.assert_array_equal(slots, [slot] * len(ids))
    np.testing.assert_array_equal(low, ids)
    assert tsw.ids.unpack(int(packed[0]), slot_bits) == (slot, ids[0])


@hypothesis.given(st.integers(1, 32), st.lists(int64s, min_size=1), st.data())
def test_tensors_and_arrays_pack_the_same(slot_bits, ids, data):
    slot = data.draw(st.integers(0, 2**slot_bits - 1))

    in_numpy = tsw.ids.pack(slot, np.array(ids, np.int64), slot_bits)
    eager = tsw.ids.pack(slot, tf.constant(ids, tf.int64), slot_bits)

    assert isinstance(in_numpy, np.ndarray) and tf.is_tensor(eager)
    np.testing.assert_array_equal(in_numpy, eager)
    expected = [
        (slot << (64 - slot_bits)) | x % 2 ** (64 - slot_bits) for x in ids
    ]
    assert [int(x) % 2**64 for x in in_numpy] == expected
    for of_numpy, of_eager in zip(
        tsw.ids.unpack(in_numpy, slot_bits),
        tsw.ids.unpack(eager, slot_bits),
        strict=True,
    ):
        np.testing.assert_array_equal(of_numpy, of_eager)


def test_strings_pack_to_the_low_bits_of_their_hash():
    ids = np.array(["a", "b"])

    packed = tsw.ids.pack(4095, ids)

    slots, low = tsw.ids.unpack(packed)
    np.testing.assert_array_equal(slots, [4095, 4095])
    np.testing.assert_array_equal(low, tsw.ids.hash_strings(ids) & (2**52 - 1))
    np.testing.assert_array_equal(tsw.ids.pack(4095, ["a", "b"]), packed)
    np.testing.assert_array_equal(
        tsw.ids.pack(4095, tf.constant(["a", "b"])), packed
    )


def test_slots_broadcast_over_columns():
    ids = np.array([[7, 8], [7, 9]])

    packed = tsw.ids.pack(np.arange(1, 3), ids)

    np.testing.assert_array_equal(packed & 0xFFFF, ids)
    np.testing.assert_array_equal(packed >> 52, [[1, 2], [1, 2]])
    np.testing.assert_array_equal(
        tsw.ids.pack(tf.constant([1, 2]), tf.constant(ids)), packed
    )


def test_pack_keeps_ragged_and_sparse_structure():
    ragged = tf.ragged.constant([[1], [], [2, 3]], dtype=tf.int64)

    packed = tsw.ids.pack(5, ragged)
    slots, low = tsw.ids.unpack(packed)
    sparse = tsw.ids.pack(5, ragged.to_sparse())

    assert low.to_list() == [[1], [], [2, 3]]
    assert slots.to_list() == [[5], [], [5, 5]]
    np.testing.assert_array_equal(sparse.values, packed.flat_values)


def test_pack_works_in_functions_and_datasets():
    expected = tsw.ids.pack(9, np.arange(4), slot_bits=5)
    dataset = tf.data.Dataset.range(4)

    in_function = tf.function(tsw.ids.pack)(
        tf.constant(9), tf.range(4), slot_bits=5
    )
    in_dataset = list(dataset.map(lambda x: tsw.ids.pack(9, x, slot_bits=5)))

    np.testing.assert_array_equal(in_function, expected)
    np.testing.assert_array_equal(in_dataset, expected)


@pytest.mark.parametrize("slot", [-1, 16, [1, 16], np.array(-1)])
def test_pack_refuses_a_slot_out_of_range(slot):
    with pytest.raises(
        ValueError, match=r"`slot` must be from 0 to 15, .* slot=(-1|16)"
    ):
        tsw.ids.pack(slot, [1, 2], slot_bits=4)


def test_pack_refuses_a_slot_out_of_range_in_a_graph():
    function = tf.function(lambda slot: tsw.ids.pack(slot, [1, 2], slot_bits=4))

    for slot in (-1, 16):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="`slot` must be from 0 to 15"
        ):
            function(tf.constant(slot))


@pytest.mark.parametrize("slot_bits", [0, 33, -1, 1.5, True])
def test_pack_refuses_slot_bits_out_of_range(slot_bits):
    for function in (
        lambda: tsw.ids.pack(0, [1], slot_bits),
        lambda: tsw.ids.unpack(np.array([1]), slot_bits),
    ):
        with pytest.raises(ValueError, match=r"`slot_bits` .* from 1 to 32"):
            function()


@pytest.mark.parametrize(
    ("slot", "ids", "message"),
    [
        (0, [1.5], "pack: ids must be integers"),
        (0, tf.constant([1.5]), "pack: ids must be integers"),
        (0, np.array([True]), "pack: ids must be integers"),
        (0.5, [1], "`slot` must be an integer"),
        (
            [1, 2],
            tf.ragged.constant([[1], [2]]),
            "single number for ragged",
        ),
    ],
    ids=["floats", "tensor", "bools", "slot", "slots"],
)
def test_pack_refuses_what_it_cannot_pack(slot, ids, message):
    with pytest.raises(ValueError, match=message):
        tsw.ids.pack(slot, ids)


@pytest.mark.parametrize(
    "packed", [np.array([1], np.int32), tf.constant([1.0]), 2**63]
)
def test_unpack_refuses_what_pack_does_not_make(packed):
    with pytest.raises(ValueError, match="`packed` must be int64"):
        tsw.ids.unpack(packed)


# --- HashCollisions -----------------------------------------------------------


def low_bits(strings, bits):
    """A bad hash, so that there is something to count."""
    return tsw.ids.hash_strings(strings) & (2**bits - 1)


@hypothesis.given(
    st.lists(st.lists(st.text(max_size=3)), max_size=6), st.integers(1, 8)
)
def test_collisions_are_those_of_sets(batches, bits):
    collisions = tsw.ids.HashCollisions()
    inputs, ids = set(), set()

    for batch in batches:
        strings = np.array(batch, object)
        hashes = low_bits(strings, bits)
        collisions.count(strings, hashes)
        inputs.update(batch)
        ids.update(hashes.tolist())

    stats = collisions.stats()
    assert stats["inputs"] == len(inputs)
    assert stats["ids"] == len(ids)
    assert stats["collisions"] == len(inputs) - len(ids)
    assert not stats["is_full"]


def test_expected_collisions_of_64_bits_are_the_birthday_bound():
    collisions = tsw.ids.HashCollisions()
    strings = np.arange(1000).astype("U")
    collisions.count(strings, tsw.ids.hash_strings(strings))

    stats = collisions.stats()

    assert stats["inputs"] == stats["ids"] == 1000
    assert stats["expected_collisions"] == pytest.approx(
        1000 * 999 / 2 / 2**64, rel=1e-9
    )


@pytest.mark.parametrize("n", [0, 1, 2, 10, 1000, 10**6])
def test_expected_collisions_follow_the_formula(n):
    for bits in (4, 16, 32):
        got = ids_lib._expected_collisions(n, 2**bits)
        birthday_bound = n * max(n - 1, 0) / (2 * 2**bits)
        assert 0.0 <= got <= min(max(n - 1, 0), birthday_bound + 1e-9)

    if n <= 1000:  # By exact arithmetic, where it is cheap enough.
        m = 2**4
        exact = n - m * (1 - (m - 1) ** n / m**n)
        got = ids_lib._expected_collisions(n, m)
        assert got == pytest.approx(exact, rel=1e-9, abs=1e-9)


def test_expected_collisions_add_up_over_slots():
    collisions = tsw.ids.HashCollisions(slot_bits=32)
    names = np.arange(1000).astype("U")
    for slot in (1, 2**32 - 1):
        collisions.count(names, tsw.ids.pack(slot, names, slot_bits=32))

    stats = collisions.stats()

    assert stats["inputs"] == 2000
    assert stats["expected_collisions"] == pytest.approx(
        2 * 1000 * 999 / 2 / 2**32, rel=1e-5
    )


def test_integers_that_pack_cuts_are_counted_exactly():
    collisions = tsw.ids.HashCollisions(slot_bits=12)
    ids = np.array([5, 5 + 2**52, 6, 5 - 2**60])

    collisions.count(ids, tsw.ids.pack(1, ids))

    stats = collisions.stats()
    assert (stats["inputs"], stats["ids"], stats["collisions"]) == (4, 2, 2)


def test_count_gives_the_ids_back():
    collisions = tsw.ids.HashCollisions()
    ragged = tf.ragged.constant([["a"], ["b", "c"]])

    of_array = collisions.count(np.array(["a"]), np.array([1]))
    of_ragged = collisions.count(ragged, tsw.ids.hash_strings(ragged))

    np.testing.assert_array_equal(of_array, [1])
    assert of_ragged.shape.as_list() == [2, None]
    assert collisions.stats()["inputs"] == 4  # "a" has got two ids.


def test_count_works_in_a_parallel_pipeline():
    collisions = tsw.ids.HashCollisions()
    dataset = tf.data.Dataset.range(5000).map(
        lambda x: tf.strings.as_string(x % 1000)
    )

    def count(strings):
        ids = tsw.ids.hash_strings(strings) & 63
        return strings, collisions.count(strings, ids)

    seen = list(dataset.batch(64).map(count, num_parallel_calls=4))

    for strings, ids in seen:
        np.testing.assert_array_equal(ids, low_bits(strings, 6))
    stats = collisions.stats()
    assert (stats["inputs"], stats["ids"]) == (1000, 64)


def test_count_from_several_threads_loses_nothing():
    collisions = tsw.ids.HashCollisions()

    def count(start):
        for i in range(start, start + 20):
            strings = np.arange(i * 50, (i + 2) * 50).astype("U")
            collisions.count(strings, tsw.ids.hash_strings(strings))
            collisions.stats()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(count, [0, 10, 20, 30]))

    assert collisions.stats()["inputs"] == 51 * 50


def test_count_stays_within_its_bound_and_says_so():
    collisions = tsw.ids.HashCollisions(max_inputs=100)

    collisions.count(np.arange(60), np.arange(60))
    assert not collisions.stats()["is_full"]
    collisions.count(np.arange(200), np.arange(200))
    collisions.count(np.arange(500), np.arange(500))

    stats = collisions.stats()
    assert stats["is_full"]
    assert (stats["inputs"], stats["ids"]) == (100, 100)


def test_count_sorts_large_numbers_in_as_it_goes():
    collisions = tsw.ids.HashCollisions()

    for start in range(0, 400_000, 10_000):
        ids = np.arange(start, start + 20_000)
        collisions.count(ids, ids // 2)

    stats = collisions.stats()
    assert (stats["inputs"], stats["ids"]) == (410_000, 205_000)


@pytest.mark.parametrize(
    "inputs, ids, message",
    [
        (["a"], np.array([1, 2]), "shape"),
        (["a"], np.array([1.0]), "`ids` must be int64"),
        (np.array([1.5]), np.array([1]), r"ids must be integers \(int32"),
    ],
)
def test_count_refuses_what_does_not_fit(inputs, ids, message):
    with pytest.raises(ValueError, match=message):
        tsw.ids.HashCollisions().count(inputs, ids)


@pytest.mark.parametrize(
    "arguments", [{"max_inputs": 0}, {"max_inputs": 1.5}, {"slot_bits": 33}]
)
def test_collisions_refuse_arguments_out_of_range(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(
        ValueError, match=f"`{name}` .*Received: {name}={value}"
    ):
        tsw.ids.HashCollisions(**arguments)


# --- Tables and layers --------------------------------------------------------


@pytest.mark.parametrize(
    "strings",
    [
        ["a", "b"],
        np.array(["a", "b"]),
        np.array([b"a", b"b"], object),
        tf.constant(["a", "b"]),
    ],
    ids=["list", "array", "objects", "tensor"],
)
def test_table_takes_strings_for_their_hashes(embedded, strings):
    ids = tsw.ids.hash_strings(["a", "b"])
    table = tsw.EmbeddingTable(
        "names", 2, initializer="ones", optimizer=tsw.optimizers.SGD(1.0)
    )

    created = table.lookup_or_create(strings)
    table.push(strings, [[1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_array_equal(created, np.ones((2, 2)))
    np.testing.assert_array_equal(table.lookup(strings), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(table.lookup(ids), [[0, 1], [1, 0]])
    table.assign(strings, [[5.0, 6.0], [7.0, 8.0]])
    np.testing.assert_array_equal(table.lookup(ids), [[5, 6], [7, 8]])
    assert table.remove(strings) == 2
    assert table.size() == 0


def test_table_does_not_cut_zeros_from_strings(embedded):
    table = tsw.EmbeddingTable("names", 1)

    table.assign([b"a\0"], [[1.0]])

    for string in (b"a\0", tf.constant(b"a\0"), np.array(b"a\0", object)):
        assert table.lookup(string) == [1.0]
        assert table.remove(string) == 1
        table.assign(tf.constant([b"a\0"]), [[1.0]])
    assert table.size() == 1


def test_table_refuses_objects_by_name(embedded):
    table = tsw.EmbeddingTable("names", 1)

    with pytest.raises(ValueError, match=r"table 'names': .* with None"):
        table.lookup(np.array(["a", None], object))


class Sum(keras.layers.Layer):
    """Sums the embeddings that the mask leaves."""

    supports_masking = True

    def call(self, inputs, mask=None):
        if mask is not None:
            inputs = inputs * tf.cast(mask[..., tf.newaxis], inputs.dtype)
        return tf.reduce_sum(inputs, axis=[1, 2])[:, tf.newaxis]

    def compute_mask(self, inputs, mask=None):
        return None


@pytest.mark.parametrize("mask_zero", [False, True])
def test_model_trains_on_strings_as_on_their_hashes(embedded, mask_zero):
    strings = np.array([["a", "b", ""], ["c", "", "a"]])
    hashes = tsw.ids.hash_strings(strings)
    if mask_zero:
        hashes = np.where(strings == "", 0, hashes)
    labels = np.array([[1.0], [2.0]], np.float32)

    predictions, tables = [], []
    for dtype, ids in (("string", strings), ("int64", hashes)):
        inputs = keras.Input((3,), dtype=dtype)
        layer = tsw.keras.DynamicEmbedding(
            2, mask_zero=mask_zero, optimizer=tsw.optimizers.SGD(0.1), seed=0
        )
        model = keras.Model(inputs, Sum()(layer(inputs)))
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(2)
        model.fit(data.repeat(3), verbose=0)
        predictions.append(model.predict(data, verbose=0))
        tables.append(layer.table)

    np.testing.assert_array_equal(*predictions)
    assert tables[0].size() == tables[1].size() == 4 - mask_zero


def test_sparse_ids_keep_the_static_shape_of_their_spec(embedded):
    layer = tsw.keras.DynamicEmbedding(2, combiner="sum")

    @tf.function(input_signature=[tf.SparseTensorSpec([None, 5, 3], tf.int64)])
    def call(ids):
        return layer(ids)

    assert call.get_concrete_function().output_shapes == [None, 5, 2]


def test_examples_of_the_docstrings():
    finder = doctest.DocTestFinder()
    # Integers are printed as tensors and arrays print them.
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(ids_lib, globs={"tsw": tsw, "np": np}):
        runner.run(test)

    assert runner.tries >= 6
    assert runner.failures == 0


def test_strings_that_are_known_hash_while_a_graph_is_made(embedded):
    table = tsw.EmbeddingTable("t", 2, initializer="ones")
    words = np.array(["Oslo", "Rome"])
    table.lookup_or_create(["Oslo"])

    @tf.function
    def in_graph(packed):
        return (
            tsw.ids.hash_strings(words),
            tsw.ids.pack(1, ["Oslo"]),
            tsw.ids.unpack(packed),
            table.lookup(["Oslo"]),
        )

    packed = tsw.ids.pack(3, np.array([5], np.int64))
    hashed, one, (slots, low), rows = in_graph(tf.constant(packed))
    np.testing.assert_array_equal(hashed, tsw.ids.hash_strings(words))
    np.testing.assert_array_equal(one, tsw.ids.pack(1, ["Oslo"]))
    np.testing.assert_array_equal((slots, low), ([3], [5]))
    np.testing.assert_array_equal(rows, [[1.0, 1.0]])
