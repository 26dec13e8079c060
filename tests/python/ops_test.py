"""The ops in eager mode, functions, datasets, loops and gradient tapes."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch import ops

DIM = 2


def make_table(**kwargs):
    kwargs.setdefault("initializer", "zeros")
    kwargs.setdefault("optimizer", tsw.optimizers.SGD(1.0))
    return tsw.EmbeddingTable("ops", DIM, **kwargs)


def training_lookup(table, ids, anchor, learning_rate=1.0):
    return ops.training_lookup(
        table.handle, ids, anchor, tf.constant(learning_rate), dim=DIM
    )


@pytest.fixture
def servers(make_cluster):
    """Where an op does not end in its turn of itself."""
    return make_cluster(2)


def run_eagerly(function):
    return function


@pytest.fixture(
    params=[(0, run_eagerly), (2, tf.function)],
    ids=["embedded_eager", "servers_in_a_function"],
)
def mode(request):
    """How ops are run; tables are in this process or on servers."""
    num_servers, mode = request.param
    with running_cluster(num_servers):
        yield mode


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), tf.int64),
        ((0,), tf.int32),
        ((3,), tf.int64),
        ((2, 0, 3), tf.int64),
        ((2, 3), tf.int32),
    ],
)
def test_training_lookup_makes_ids_unique_in_order(mode, dtype, shape):
    table = make_table(initializer="ones")
    count = int(np.prod(shape, dtype=int))
    ids = tf.constant(np.resize([9, 4, 9], count).reshape(shape), dtype)

    result = mode(lambda: training_lookup(table, ids, tf.constant(0.0)))()

    unique = np.array([9, 4][: min(count, 2)], np.int64)
    np.testing.assert_array_equal(result.unique_ids, unique)
    np.testing.assert_array_equal(result.inverse, np.resize([0, 1, 0], count))
    np.testing.assert_array_equal(result.embeddings, np.ones((*shape, DIM)))
    assert result.loss_scale_probe == 0.0
    assert table.size() == len(unique)


def test_the_gradient_pushes_sums_per_id(mode):
    table = make_table()
    anchor = tf.Variable(0.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            result = training_lookup(
                table, tf.constant([[1, 2], [1, 1]]), anchor
            )
            factors = tf.constant([[[1.0, 2.0]], [[3.0, 4.0]]])
            loss = tf.reduce_sum(result.embeddings * factors)
        return tape.gradient(loss, anchor)

    assert step() == 0.0
    np.testing.assert_array_equal(
        table.lookup([1, 2]), [[-7.0, -10.0], [-1.0, -2.0]]
    )


def test_a_gradient_outside_the_function_pushes_once(embedded):
    table = make_table()
    anchor = tf.Variable(0.0)
    forward = tf.function(
        lambda ids: training_lookup(table, ids, anchor).embeddings
    )

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(tf.constant([1, 2, 1])))
    tape.gradient(loss, anchor)

    np.testing.assert_array_equal(
        table.lookup([1, 2]), [[-2.0, -2.0], [-1.0, -1.0]]
    )


def test_a_loss_without_the_embeddings_pushes_nothing(mode):
    table = make_table()
    anchor, other = tf.Variable(0.0), tf.Variable(1.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            rows = training_lookup(table, tf.constant([1]), anchor).embeddings
            loss = other * tf.reduce_sum(tf.stop_gradient(rows) + 1.0)
        return tape.gradient(loss, [other, anchor])

    gradients = step()

    assert gradients[0] == 2.0 and gradients[1] is None
    np.testing.assert_array_equal(table.lookup([1]), [[0.0, 0.0]])


def test_a_backward_pass_pushes_whatever_it_is_asked_for(mode):
    # A tape walks back through all it recorded, not only towards the sources.
    table = make_table()
    anchor, other = tf.Variable(0.0), tf.Variable(1.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            rows = training_lookup(table, tf.constant([1]), anchor).embeddings
            loss = other * tf.reduce_sum(rows + 1.0)
        return tape.gradient(loss, other)

    assert step() == 2.0
    np.testing.assert_array_equal(table.lookup([1]), [[-1.0, -1.0]])


def test_a_gather_behind_the_lookup_gives_a_sparse_gradient(mode):
    table = make_table()
    anchor = tf.Variable(0.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            rows = training_lookup(table, tf.constant([1, 2, 3]), anchor)
            loss = tf.reduce_sum(tf.gather(rows.embeddings, [0, 2, 2]))
        return tape.gradient(loss, anchor)

    step()

    np.testing.assert_array_equal(
        table.lookup([1, 2, 3]), [[-1.0, -1.0], [0.0, 0.0], [-2.0, -2.0]]
    )


def test_a_persistent_tape_pushes_at_each_gradient(mode):
    table = make_table()
    anchor = tf.Variable(0.0)

    @mode
    def step():
        with tf.GradientTape(persistent=True) as tape:
            rows = training_lookup(table, tf.constant([1]), anchor).embeddings
            first, second = tf.reduce_sum(rows), tf.reduce_sum(rows * 3.0)
        return tape.gradient(first, anchor), tape.gradient(second, anchor)

    step()

    np.testing.assert_array_equal(table.lookup([1]), [[-4.0, -4.0]])


def test_two_lookups_of_one_table_both_push(mode):
    table = make_table()
    anchor = tf.Variable(0.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            one = training_lookup(table, tf.constant([1, 2]), anchor)
            two = training_lookup(table, tf.constant([2]), anchor)
            loss = tf.reduce_sum(one.embeddings)
            loss += 2.0 * tf.reduce_sum(two.embeddings)
        return tape.gradient(loss, anchor)

    step()

    np.testing.assert_array_equal(
        table.lookup([1, 2]), [[-1.0, -1.0], [-3.0, -3.0]]
    )


def test_each_turn_of_a_while_loop_pushes(servers):
    table = make_table()
    anchor = tf.Variable(0.0)

    @tf.function
    def step(turns):
        with tf.GradientTape() as tape:
            total = tf.zeros([])
            for i in tf.range(turns, dtype=tf.int64):
                ids = tf.stack([i, tf.constant(100, tf.int64)])
                rows = training_lookup(table, ids, anchor).embeddings
                total += tf.reduce_sum(rows) * 2.0
        return tape.gradient(total, anchor)

    step(tf.constant(3, tf.int64))

    np.testing.assert_array_equal(
        table.lookup([0, 1, 2, 100]),
        [[-2.0, -2.0], [-2.0, -2.0], [-2.0, -2.0], [-6.0, -6.0]],
    )


def test_lookups_and_pushes_run_in_a_while_loop(servers):
    table = make_table()

    @tf.function
    def count_up(turns):
        for i in tf.range(turns):
            table.push(tf.stack([i, 50]), -tf.ones([2, DIM]))
        return table.lookup(tf.constant([0, 1, 50]))

    np.testing.assert_array_equal(
        count_up(tf.constant(5)), [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]]
    )


def test_a_branch_not_taken_pushes_nothing(servers):
    table = make_table()
    anchor = tf.Variable(0.0)

    @tf.function
    def step(flag):
        with tf.GradientTape() as tape:
            loss = tf.cond(
                flag,
                lambda: tf.reduce_sum(
                    training_lookup(table, tf.constant([1]), anchor).embeddings
                ),
                lambda: anchor * 1.0,
            )
        return tape.gradient(loss, anchor)

    step(tf.constant(False))
    assert table.size() == 0
    step(tf.constant(True))
    np.testing.assert_array_equal(table.lookup([1]), [[-1.0, -1.0]])


def test_lookup_runs_in_a_dataset_map(servers):
    table = make_table()
    table.assign([0, 1, 2, 3], np.arange(8.0).reshape(4, 2))

    dataset = (
        tf.data.Dataset.range(5)
        .batch(2)
        .map(table.lookup, num_parallel_calls=2)
    )

    np.testing.assert_array_equal(
        np.concatenate(list(dataset.as_numpy_iterator())),
        [[0, 1], [2, 3], [4, 5], [6, 7], [0, 0]],
    )


def test_a_dataset_outlives_the_table_object(embedded):
    table = make_table()
    table.assign([1], [[1.0, 2.0]])
    dataset = tf.data.Dataset.from_tensors([1]).map(
        lambda ids, handle=table.handle: ops.lookup(
            handle, ids, dim=DIM, insert_missing=False
        )
    )

    del table
    gc.collect()

    np.testing.assert_array_equal(next(iter(dataset)), [[1.0, 2.0]])


def test_a_function_without_its_table_says_what_to_keep(embedded):
    def trace():
        table = make_table()
        return tf.function(lambda: table.lookup([1])).get_concrete_function()

    function = trace()
    gc.collect()

    with pytest.raises(tf.errors.NotFoundError, match="Keep that object"):
        function()


def test_size_is_an_op_too(mode):
    table = make_table()
    table.lookup_or_create([1, 2])

    assert mode(lambda: ops.size(table.handle))() == 2


def test_order_of_stateful_ops_in_a_function_is_that_of_the_program(
    servers,
):
    table = make_table()

    @tf.function
    def program():
        before = table.lookup([1])
        table.push([1], -tf.ones([1, DIM]))
        after = table.lookup([1])
        return before, after

    before, after = program()

    np.testing.assert_array_equal(before, [[0.0, 0.0]])
    np.testing.assert_array_equal(after, [[1.0, 1.0]])


def test_the_loss_scale_is_taken_out_of_the_push(mode):
    table = make_table()
    anchor = tf.Variable(0.0)

    @mode
    def step(scale):
        with tf.GradientTape() as tape:
            result = training_lookup(table, tf.constant([1]), anchor)
            loss = tf.reduce_sum(result.embeddings) + result.loss_scale_probe
            loss = loss * scale
        return tape.gradient(loss, anchor)

    assert step(tf.constant(1024.0)) == 0.0
    np.testing.assert_array_equal(table.lookup([1]), [[-1.0, -1.0]])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_of_a_scaled_loss_skips_the_push(mode, bad):
    table = make_table()
    anchor = tf.Variable(0.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            result = training_lookup(table, tf.constant([1, 2]), anchor)
            loss = tf.reduce_sum(result.embeddings * [[1.0, 1.0], [bad, 1.0]])
            loss = (loss + result.loss_scale_probe) * 1024.0
        return tape.gradient(loss, anchor)

    assert not np.isfinite(step())
    np.testing.assert_array_equal(table.lookup([1, 2]), np.zeros((2, 2)))


def test_xla_is_refused_with_what_to_do(embedded):
    table = make_table()

    @tf.function(jit_compile=True)
    def step(ids):
        return ops.lookup(table.handle, ids, dim=DIM, insert_missing=True) + 1.0

    with pytest.raises(ValueError, match=r"XLA cannot.*`jit_compile=True`"):
        step(tf.constant([1]))
    assert table.size() == 0
