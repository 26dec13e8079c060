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


def make_weight():
    return tf.Variable(tf.zeros([0, DIM]))


def training_lookup(table, ids, weight, **more):
    (rows,) = ops.lookup_many(
        [table.handle], [ids], dims=[DIM], insert_missing=True
    )
    return ops.tie_to_weight(table.handle, ids, rows, weight, **more)


def push(table, gradient, **more):
    return ops.push_many(
        [
            ops.TablePush(
                table.handle,
                gradient.indices,
                gradient.values,
                tf.constant(1.0),
                **more,
            )
        ],
        of_lookups=True,
    )


def gradient_of(table, ids, **more):
    """Ones for each id of a training lookup."""
    weight = tf.zeros([0, DIM])
    with tf.GradientTape() as tape:
        tape.watch(weight)
        rows = training_lookup(
            table, tf.constant(ids, tf.int64), weight, **more
        )
    return tape.gradient(rows, weight)


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


# --- The gradient of a weight -------------------------------------------------


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
def test_the_gradient_has_values_for_each_id_that_was_looked_up(
    mode, dtype, shape
):
    table = make_table(initializer="ones")
    weight = make_weight()
    count = int(np.prod(shape, dtype=int))
    ids = np.resize([9, 4, 9], count)
    factors = np.arange(count * DIM, dtype=np.float32)

    @mode
    def step():
        with tf.GradientTape() as tape:
            rows = training_lookup(
                table, tf.constant(ids.reshape(shape), dtype), weight
            )
            loss = tf.reduce_sum(rows * factors.reshape(*shape, DIM))
        return rows, tape.gradient(loss, weight)

    rows, gradient = step()

    np.testing.assert_array_equal(rows, np.ones((*shape, DIM)))
    assert ops.is_of_rows(gradient)
    assert gradient.indices.dtype == tf.int64
    np.testing.assert_array_equal(gradient.indices, ids)
    np.testing.assert_array_equal(gradient.values, factors.reshape(count, DIM))
    np.testing.assert_array_equal(gradient.dense_shape, [0, DIM])
    assert table.size() == min(count, 2)


def two_lookups(look_up):
    return tf.reduce_sum(look_up([1, 2])) + 2.0 * tf.reduce_sum(look_up([2]))


def in_a_branch(is_taken):
    return lambda look_up: tf.cond(
        tf.constant(is_taken),
        lambda: tf.reduce_sum(look_up([1])),
        lambda: tf.constant(0.0),
    )


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        (
            lambda look_up: tf.reduce_sum(
                look_up([[1, 2], [1, 1]])
                * [[[1.0, 2.0], [1.0, 2.0]], [[3.0, 4.0], [3.0, 4.0]]]
            ),
            {1: [-7, -10], 2: [-1, -2]},
        ),
        (
            lambda look_up: tf.reduce_sum(
                tf.gather(look_up([1, 2, 3]), [0, 2, 2])
            ),
            {1: [-1, -1], 2: [0, 0], 3: [-2, -2]},
        ),
        (two_lookups, {1: [-1, -1], 2: [-3, -3]}),
        (
            lambda look_up: tf.reduce_sum(
                tf.function(lambda: look_up([1, 2, 1]))()
            ),
            {1: [-2, -2], 2: [-1, -1]},
        ),
        (in_a_branch(True), {1: [-1, -1]}),
        (
            lambda look_up: tf.reduce_sum(
                tf.map_fn(lambda row: row * 2.0, look_up([1, 2]))
            ),
            {1: [-2, -2], 2: [-2, -2]},
        ),
    ],
    ids=[
        "repeated_ids",
        "gather",
        "two_lookups",
        "function",
        "branch",
        "map_fn_of_rows",
    ],
)
def test_a_push_steps_by_the_sum_of_the_gradients_of_an_id(mode, loss, rows):
    table = make_table()
    weight = make_weight()

    @mode
    def gradient():
        with tf.GradientTape() as tape:
            value = loss(
                lambda ids: training_lookup(table, tf.constant(ids), weight)
            )
        return tape.gradient(value, weight)

    found = gradient()
    # The gradient alone moves nothing.
    np.testing.assert_array_equal(
        table.lookup(list(rows)), np.zeros((len(rows), DIM))
    )
    mode(lambda: push(table, found))()

    assert table.size() == len(rows)
    np.testing.assert_array_equal(table.lookup(list(rows)), list(rows.values()))


def test_gradients_of_rows_and_weight_can_be_differentiated(mode):
    table = make_table(initializer="ones")
    weight = make_weight()

    @mode
    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                rows = training_lookup(table, tf.constant([1, 2]), weight)
                cubes = tf.reduce_sum(rows**3)
            slopes, slices = inner.gradient(cubes, [rows, weight])
            penalty = tf.reduce_sum(slopes**2 + slices.values**2)
        return outer.gradient(penalty, weight)

    gradient = step()

    np.testing.assert_array_equal(gradient.indices, [1, 2])
    np.testing.assert_allclose(gradient.values, np.full((2, DIM), 72.0))


def test_a_loss_without_the_embeddings_has_no_gradient(mode):
    table = make_table()
    weight, other = make_weight(), tf.Variable(1.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            rows = training_lookup(table, tf.constant([1]), weight)
            loss = other * tf.reduce_sum(tf.stop_gradient(rows) + 1.0)
        return tape.gradient(loss, [other, weight])

    gradients = step()

    assert gradients[0] == 2.0 and gradients[1] is None


def test_a_branch_that_is_not_taken_makes_and_pushes_no_row(servers):
    table = make_table()
    weight = make_weight()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = in_a_branch(False)(
                lambda ids: training_lookup(table, tf.constant(ids), weight)
            )
        return push(table, tape.gradient(loss, weight)).updated_rows

    assert step() == [0]
    assert table.size() == 0


def test_a_persistent_tape_gives_each_gradient_and_pushes_none(mode):
    table = make_table()
    weight = make_weight()

    @mode
    def step():
        with tf.GradientTape(persistent=True) as tape:
            rows = training_lookup(table, tf.constant([1]), weight)
            first, second = tf.reduce_sum(rows), tf.reduce_sum(rows * 3.0)
        push(table, tape.gradient(first, weight))
        return tape.gradient(second, weight)

    gradient = step()

    np.testing.assert_array_equal(gradient.values, [[3.0, 3.0]])
    np.testing.assert_array_equal(table.lookup([1]), [[-1.0, -1.0]])


@pytest.mark.parametrize(
    "lookups",
    [
        lambda look_up, ids: tf.while_loop(
            lambda i, total: i < 3,
            lambda i, total: (i + 1, total + tf.reduce_sum(look_up(ids))),
            (0, 0.0),
        )[1],
        lambda look_up, ids: tf.map_fn(
            look_up, ids, fn_output_signature=tf.float32
        ),
        lambda look_up, ids: tf.vectorized_map(look_up, ids),
        lambda look_up, ids: tf.recompute_grad(look_up)(ids),
    ],
    ids=["while_loop", "map_fn", "vectorized_map", "recompute_grad"],
)
def test_lookups_where_gradients_must_be_dense_are_told_where_to_be(
    embedded, lookups
):
    table = make_table()
    weight = make_weight()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            rows = lookups(
                lambda ids: training_lookup(table, ids, weight),
                tf.constant([1, 2]),
            )
        return tape.gradient(rows, weight)

    with pytest.raises(
        (TypeError, NotImplementedError), match=r"before tf\.while_loop"
    ):
        step()


# --- What a program does with a gradient --------------------------------------


@pytest.mark.parametrize(
    ("change", "ids", "values"),
    [
        (lambda g: g * 0.5, [1, 1], [0.5, 0.5]),
        (lambda g: 0.5 * g, [1, 1], [0.5, 0.5]),
        (lambda g: tf.constant(3.0) * g, [1, 1], [3.0, 3.0]),
        (lambda g: g * tf.Variable(3.0), [1, 1], [3.0, 3.0]),
        (lambda g: np.float32(3.0) * g, [1, 1], [3.0, 3.0]),
        (lambda g: g / 4, [1, 1], [0.25, 0.25]),
        (lambda g: -g, [1, 1], [-1.0, -1.0]),
        (lambda g: g + g * 2.0, [1, 1, 1, 1], [1.0, 1.0, 2.0, 2.0]),
        (lambda g: sum([g, g]), [1, 1, 1, 1], [1.0, 1.0, 1.0, 1.0]),
        (lambda g: g - g, [1, 1, 1, 1], [1.0, 1.0, -1.0, -1.0]),
        (lambda g: tf.clip_by_norm(g, 1.0), [1, 1], [0.5, 0.5]),
        (
            lambda g: tf.clip_by_global_norm([g], 1.0)[0][0],
            [1, 1],
            [0.5, 0.5],
        ),
        (
            lambda g: tf.IndexedSlices(g.values[1:], g.indices[1:], [0, DIM]),
            [1],
            [1.0],
        ),
    ],
)
def test_a_gradient_is_changed_as_slices(embedded, change, ids, values):
    table = make_table()

    changed = change(gradient_of(table, [1, 1]))

    assert ops.is_of_rows(changed)
    np.testing.assert_array_equal(changed.indices, ids)
    np.testing.assert_allclose(changed.values, np.repeat([values], DIM, 0).T)
    push(table, changed)
    np.testing.assert_allclose(table.lookup([1]), [[-sum(values)] * DIM])


@pytest.mark.parametrize(
    "make_dense",
    [
        tf.convert_to_tensor,
        tf.reduce_sum,
        lambda gradient: tf.add_n([gradient]),
        lambda gradient: tf.ones([2, DIM]) - gradient,
    ],
    ids=["convert_to_tensor", "reduce_sum", "add_n", "minus"],
)
def test_a_gradient_has_no_dense_form(embedded, make_dense):
    gradient = gradient_of(make_table(), [1, 1])

    with pytest.raises(TypeError, match=r"(?s)no dense form.*`g \* 0\.5`"):
        make_dense(gradient)
    with pytest.raises(TypeError, match="unsupported operand"):
        gradient * gradient


def test_other_gradients_are_as_tensorflow_has_them(embedded):
    variable = tf.Variable(tf.ones([3, DIM]))
    with tf.GradientTape() as tape:
        rows = tf.gather(variable, [1, 1])
    slices = tape.gradient(rows, variable)
    others = [slices, tf.IndexedSlices(slices.values, slices.indices)]
    others += [tf.zeros([0, DIM]), None]

    assert not any(map(ops.is_of_rows, others))
    np.testing.assert_array_equal(
        tf.convert_to_tensor(slices), [[0, 0], [2, 2], [0, 0]]
    )
    for operate in (lambda g: g * 2.0, lambda g: g + g, lambda g: g / 2.0):
        with pytest.raises(TypeError, match="unsupported operand"):
            operate(slices)


# --- What a lookup says to the push -------------------------------------------


@pytest.mark.parametrize(
    "poison", [float("nan"), 0.0], ids=["poisoned", "sound"]
)
def test_a_nan_for_poison_makes_the_rows_nan(mode, poison):
    table = make_table()
    weight = make_weight()

    rows = mode(
        lambda: training_lookup(
            table, tf.constant([[1], [2]]), weight, poison=tf.constant(poison)
        )
    )()

    np.testing.assert_array_equal(rows, np.full((2, 1, DIM), poison))


# Ids with their shows and clicks.
LOOKUPS = {
    "a": ([1, 2, 1], [3, 4, 5], [1, 0, 1]),
    "b": ([1], [3], [1]),
    "c": ([2, 1], [5, 7], [0, 2]),
    "d": ([2, 1], None, None),
    "e": ([1, 2], [9, 8], [7, 6]),
    "f": ([1, 2], [3, 4], [1, 0]),
    "g": ([1, 2], [3, 4], None),
    "h": ([1, 2], None, [1, 2]),
    "i": ([], [], []),
}


@pytest.mark.parametrize(
    ("lookups", "pushes", "shows", "clicks"),
    [
        ("a", "a", [8, 4], [2, 0]),
        ("g", "g", [3, 4], [0, 0]),
        ("h", "h", [1, 1], [1, 2]),
        ("bc", "c b", [10, 5], [3, 0]),
        ("bc", "bc", [10, 5], [3, 0]),  # As one gradient.
        ("bc", "cb", [10, 5], [3, 0]),
        ("bd", "bd", [4, 1], [1, 0]),
        ("ib", "ib", [3, 0], [1, 0]),
        ("ef", "f", [3, 4], [1, 0]),  # The newest of equal lookups.
        ("ef", "ef", [12, 12], [8, 6]),
        ("fb", "f", [3, 4], [1, 0]),  # The longest that fits.
    ],
)
def test_a_push_finds_the_shows_and_clicks_of_its_ids(
    mode, lookups, pushes, shows, clicks
):
    table = make_table(statistics=tsw.statistics.ShowClick())

    @mode
    def step():
        found = {}
        for name in lookups:
            ids, *numbers = LOOKUPS[name]
            more = dict(zip(("shows", "clicks"), numbers, strict=True))
            found[name] = gradient_of(table, ids, **more)
        for names in pushes.split():
            first, *others = (found[name] * 0.25 for name in names)
            push(table, sum(others, start=first))

    step()

    usage = table.usage([1, 2])
    assert usage["show"].tolist() == shows
    assert usage["click"].tolist() == clicks


def test_ids_of_no_lookup_and_those_that_a_push_tells_of_are_not_looked_for(
    embedded,
):
    table = make_table(statistics=tsw.statistics.ShowClick())
    gradient = gradient_of(table, [1, 2], shows=[5, 5], clicks=[2, 2])

    push(table, tf.IndexedSlices(gradient.values[1:], [2]))
    push(table, gradient, shows=[3.0, 4.0])

    usage = table.usage([1, 2])
    assert usage["show"].tolist() == [3, 5]
    assert usage["click"].tolist() == [0, 0]


def test_a_push_finds_the_last_64_lookups(embedded):
    table = make_table(statistics=tsw.statistics.ShowClick())

    gradients = [gradient_of(table, [i], shows=[5.0]) for i in range(65)]
    for gradient in gradients:
        push(table, gradient)

    assert table.usage(np.arange(65))["show"].tolist() == [1] + [5] * 64


def test_a_hundred_lookups_without_a_push_warn_once(embedded, capfd):
    learns, forgets = make_table(), tsw.EmbeddingTable("forgets", DIM)

    push(learns, gradient_of(learns, [1]))
    for _ in range(99):
        gradient_of(forgets, [1])
    assert "warning" not in capfd.readouterr().err
    for _ in range(150):
        gradient_of(learns, [1])
        gradient_of(forgets, [1])

    printed = capfd.readouterr().err
    assert printed.count("warning") == 1
    assert "table 'forgets' has had 100 training lookups" in printed
    assert "`optimizer.apply_gradients`" in printed


# --- Ops in graphs ------------------------------------------------------------


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
        lambda ids, handle=table.handle: ops.lookup_many(
            [handle], [ids], dims=[DIM], insert_missing=False
        )[0]
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


def test_lookups_and_pushes_of_a_function_run_in_order(servers):
    table = make_table()

    @tf.function
    def count_up(turns):
        before = table.lookup([0, 1, 50])
        for i in tf.range(turns):
            table.push(tf.stack([i, 50]), -tf.ones([2, DIM]))
        return before, table.lookup([0, 1, 50])

    before, after = count_up(tf.constant(5))

    np.testing.assert_array_equal(before, np.zeros((3, DIM)))
    np.testing.assert_array_equal(after, [[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]])


@pytest.mark.parametrize(
    "op",
    [
        lambda t, ids: ops.lookup_many(
            [t], [ids], dims=[DIM], insert_missing=True
        ),
        lambda t, ids: ops.push_many(
            [ops.TablePush(t, ids, tf.ones([1, DIM]), tf.constant(1.0))]
        ),
    ],
    ids=["lookup_many", "push_many"],
)
def test_xla_is_refused_with_what_to_do(embedded, op):
    table = make_table()

    @tf.function(jit_compile=True)
    def step(ids):
        return op(table.handle, ids)

    with pytest.raises(ValueError, match=r"XLA cannot.*`jit_compile=True`"):
        step(tf.constant([1]))
    assert table.size() == 0
