"""EmbeddingTable, on each kind of cluster.

With table_model_test.py it is the suite that shows that tables in this process
and on servers are the same; tests of other files need not repeat it.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def make_table(**kwargs):
    kwargs.setdefault("initializer", "zeros")
    kwargs.setdefault("optimizer", tsw.optimizers.SGD(0.5))
    return tsw.EmbeddingTable(
        kwargs.pop("name", "user"), kwargs.pop("dim", 2), **kwargs
    )


def rows_of(table):
    ids, values = table.export_rows()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def test_lookup_reads_zeros_and_lookup_or_create_gives_each_id_one_row(cluster):
    table = make_table(initializer="ones")

    np.testing.assert_array_equal(table.lookup([5, 6]), np.zeros((2, 2)))
    assert table.size() == 0
    values = table.lookup_or_create([5, 6, 5])

    np.testing.assert_array_equal(values, np.ones((3, 2)))
    assert table.size() == 2
    np.testing.assert_array_equal(table.lookup([6]), [[1.0, 1.0]])


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3), (1, 2, 3)])
def test_lookup_keeps_the_shape_of_ids(cluster, shape):
    table = make_table(dim=5)
    ids = np.arange(np.prod(shape, dtype=int)).reshape(shape)

    assert table.lookup(ids).shape == (*shape, 5)
    assert table.lookup_or_create(ids).shape == (*shape, 5)
    assert table.size() == ids.size


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int32])
def test_ids_of_all_integer_types_mean_the_same_rows(cluster, dtype):
    table = make_table()
    table.assign([3], [[1.0, 2.0]])

    np.testing.assert_array_equal(
        table.lookup(np.array([3], dtype)), [[1.0, 2.0]]
    )
    np.testing.assert_array_equal(
        table.lookup(tf.constant([3], dtype)), [[1.0, 2.0]]
    )


def test_push_sums_duplicate_ids_and_steps_once(cluster):
    table = make_table()

    updated = table.push(
        [[7, 8], [7, 7]], [[[1.0, 0.0], [2.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]]]
    )

    assert int(updated) == 2
    np.testing.assert_array_equal(
        table.lookup([7, 8]), [[-2.0, -1.0], [-1.0, -1.0]]
    )


def test_push_takes_a_learning_rate_of_its_own(cluster):
    table = make_table()

    table.push([1], [[1.0, 1.0]], learning_rate=0.25)

    np.testing.assert_array_equal(table.lookup([1]), [[-0.25, -0.25]])


def test_setting_the_learning_rate_reaches_traced_functions(cluster):
    table = make_table()
    traces = []

    @tf.function
    def push():
        traces.append(1)
        table.push(tf.constant([1]), tf.constant([[1.0, 0.0]]))

    push()
    table.learning_rate = 0.25
    push()

    assert table.learning_rate == 0.25
    assert len(traces) == 1
    np.testing.assert_array_equal(table.lookup([1]), [[-0.75, 0.0]])


def test_a_schedule_gets_the_number_of_steps_so_far(embedded):
    table = make_table(
        optimizer=tsw.optimizers.SGD(lambda step: tf.where(step < 2, 1.0, 0.25))
    )

    for _ in range(4):
        table.push([1], [[1.0, 0.0]])

    np.testing.assert_array_equal(table.lookup([1]), [[-2.5, 0.0]])
    assert table.iterations == 4
    with pytest.raises(TypeError, match="cannot be set"):
        table.learning_rate = 0.1


@pytest.mark.parametrize("kind", ["variable", "function"])
def test_a_variable_learning_rate_is_read_at_each_push(embedded, kind):
    rate = tf.Variable(1.0)
    source = rate if kind == "variable" else lambda: rate * 1.0
    table = make_table(optimizer=tsw.optimizers.SGD(source))
    push = tf.function(lambda: table.push([1], [[1.0, 0.0]]))

    push()
    rate.assign(0.5)
    push()

    assert table.learning_rate == 0.5
    np.testing.assert_array_equal(table.lookup([1]), [[-1.5, 0.0]])


def test_assign_takes_eager_tensors_and_any_shape(cluster):
    table = make_table()

    table.assign(tf.constant([[1], [2]]), tf.constant([[[1.0, 2.0]]] * 2))

    assert rows_of(table) == {1: [1.0, 2.0], 2: [1.0, 2.0]}


def test_a_row_starts_the_same_in_any_order_on_any_cluster(make_cluster):
    ids = np.random.default_rng(1).integers(INT64_MIN, INT64_MAX, 100)

    def values(num_servers, ids):
        make_cluster(num_servers)
        table = make_table(initializer="normal", seed=7, dim=4)
        table.lookup_or_create(ids[:30])
        return table.lookup_or_create(ids).numpy()

    expected = values(0, ids)
    np.testing.assert_array_equal(values(3, ids[::-1])[::-1], expected)


def test_the_same_name_and_arguments_attach_to_one_table(cluster):
    table = make_table(optimizer=tsw.optimizers.SGD(0.5))
    table.push([1], [[1.0, 1.0]])

    # The learning rate belongs to who pushes, not to the table.
    again = make_table(optimizer=tsw.optimizers.SGD(0.25))
    again.push([1], [[1.0, 1.0]])

    np.testing.assert_array_equal(table.lookup([1]), [[-0.75, -0.75]])


def test_capacity_reserves_memory_and_makes_no_other_table(cluster):
    table = make_table(name="large", capacity=300_000)
    reserved = table.stats()["index_bytes"]
    table.lookup_or_create(np.arange(300_000))

    assert table.stats()["index_bytes"] == reserved
    assert reserved > 2 * make_table(name="small").stats()["index_bytes"]
    again = make_table(name="large", capacity=1)
    assert again.size() == make_table(name="large").size() == 300_000


def test_names_may_hold_any_text(cluster):
    table = make_table(name="Größe/1 ' \" 表")
    table.assign([1], [[1.0, 2.0]])

    assert cluster.tables() == ["Größe/1 ' \" 表"]
    assert table.stats()["num_rows"] == 1


def test_stats_count_rows_and_bytes(cluster):
    table = make_table(optimizer="adam", dim=8)
    table.lookup_or_create(np.arange(1000))
    table.remove(np.arange(10))

    stats = table.stats()

    assert stats["num_rows"] == 990
    assert stats["inserted_rows"] == 1000
    assert stats["erased_rows"] == 10
    assert stats["row_bytes"] >= 990 * 8 * 4
    assert stats["index_bytes"] > 0
    assert cluster.stats() == {"user": stats}


def test_repr_names_table_and_cluster(embedded):
    assert repr(make_table()) == (
        f"<tfswitch.EmbeddingTable 'user', dim 2, on '{embedded.address}'>"
    )


def test_the_example_of_the_docstring(embedded):
    table = tsw.EmbeddingTable(
        "user", 2, initializer="zeros", optimizer=tsw.optimizers.SGD(0.5)
    )
    table.push([7, 7], [[1.0, 1.0], [1.0, 0.0]])

    np.testing.assert_array_equal(
        table.lookup([7, 8]), [[-1.0, -0.5], [0.0, 0.0]]
    )


def test_an_error_says_nothing_of_how_ops_are_run(cluster):
    table = tsw.EmbeddingTable("t", 2)

    with pytest.raises(ValueError, match=r"^table 't': .*got \[1,3\]$"):
        table.push([1], [[1.0, 2.0, 3.0]])
