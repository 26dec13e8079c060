"""DenseTable: a model's dense variables on servers."""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.python.worker_threads import in_threads, running_clients

SGD = tsw.optimizers.SGD
Worker = tsw.train.Worker

# Float32 in another order than Keras's: 1e-6 of the value, or of the way that
# it has come, which is of the order of 1 here.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}

# Tiny, odd, scalar, empty, and of several blocks.
SHAPES = {
    "kernel": (37, 11),
    "bias": (11,),
    "scale": (),
    "none": (0, 3),
    "cube": (3, 5, 7),
    "wide": (1, 701),
    "one": (1,),
}


def make_table(shapes=None, name="dense", **kwargs):
    kwargs.setdefault("optimizer", SGD(1.0))
    return tsw.DenseTable(name, shapes or {"a": (2, 3), "b": (3,)}, **kwargs)


def random_values(rng, shapes):
    return [
        rng.normal(size=shape).astype(np.float32) for shape in shapes.values()
    ]


def assert_equal(found, expected, **tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert tuple(one.shape) == np.shape(other)
        if tolerance:
            np.testing.assert_allclose(one, other, **tolerance)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.fixture
def cluster(make_cluster):
    """A cluster of servers, each with a part of the values."""
    return make_cluster(3)


ZEROS = [np.zeros((2, 3)), np.zeros(3)]
ONES = [np.ones((2, 3)), np.ones(3)]


# --- Values -----------------------------------------------------------------


def test_pull_before_initialize_is_refused(cluster):
    table = make_table()

    with pytest.raises(
        RuntimeError, match=r"dense table 'dense'.*has not been initialised"
    ):
        table.pull()
    with pytest.raises(tf.errors.FailedPreconditionError, match="initialise"):
        tf.function(table.pull)()


def test_a_table_that_lost_a_part_is_not_read_as_zeros(make_cluster):
    cluster = make_cluster(2)
    table = make_table({"a": (5000,)})
    table.initialize([np.ones(5000)])
    native = table._table._native
    native.erase(table._keys[-1:])

    with pytest.raises(RuntimeError, match=r"on shard 1.* for 1 of \d+ blocks"):
        table.pull()
    assert cluster.num_shards == 2


def test_values_come_back_as_they_were_set(cluster):
    values = random_values(np.random.default_rng(1), SHAPES)
    table = make_table(SHAPES)

    assert table.initialize(values)

    assert_equal(table.pull(), values)
    table.assign([2 * value for value in values])
    assert_equal(table.pull(), [2 * value for value in values])
    assert table.shapes == SHAPES
    assert table.cluster is cluster
    assert table.name == "dense"
    assert repr(table.consistency.kind) == "'asp'"


@pytest.mark.parametrize(
    ("num_servers", "size"), [(0, 1), (3, 8), (0, 9), (3, 2049), (3, 70_001)]
)
def test_sizes_from_one_float_up(make_cluster, num_servers, size):
    make_cluster(num_servers)
    values = [np.random.default_rng(2).normal(size=size).astype(np.float32)]
    table = make_table({"a": (size,)})

    table.initialize(values)
    assert_equal(table.pull(), values)
    table.push(values, learning_rate=1.0)

    assert_equal(table.pull(), [np.zeros(size)])


def test_the_first_values_count(cluster):
    first, second = make_table(), make_table()

    assert first.initialize(ONES)
    assert not second.initialize(ZEROS)

    assert_equal(first.pull(), ONES)
    assert_equal(second.pull(), ONES)


@pytest.mark.parametrize("num_servers", [0, 3])
def test_of_workers_that_initialize_at_once_one_counts(num_servers):
    shapes = {"a": (30_000,)}
    with running_clients(num_servers) as client:
        tables = [make_table(shapes, cluster=client(i)) for i in range(4)]

        taken = in_threads(
            *(
                lambda i=i, t=t: t.initialize([np.full(30_000, i)])
                for i, t in enumerate(tables)
            )
        )

        assert sorted(taken) == [False, False, False, True]
        for table in tables:
            assert_equal(table.pull(), [np.full(30_000, taken.index(True))])


def test_others_wait_for_the_one_that_initializes():
    table = make_table()
    assert not table.is_initialized()
    with pytest.raises(TimeoutError, match="has not come or has died"):
        table.wait_until_initialized(timeout_secs=0.05)
    table.initialize(ONES)
    table.wait_until_initialized()
    assert table.is_initialized()


@pytest.mark.parametrize("begin_at", [0, 3])
def test_initialize_does_not_fill_a_gap(embedded, begin_at):
    """The worker that initialised it has died, or a server has lost a part."""
    table = make_table({"a": (100,)})
    table._table._native.assign_missing(
        table._keys[begin_at : begin_at + 1], np.ones((1, 8), np.float32)
    )

    with pytest.raises(TimeoutError, match=r"'dense': 12 of 13 blocks have no"):
        table.initialize([np.ones(100)], timeout_secs=0.01)

    with pytest.raises(RuntimeError, match="no values for 12 of 13 blocks"):
        table.pull()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named_and_leave_nothing(cluster, bad):
    table = make_table({"a": (50,), "b": (50,)})

    with pytest.raises(ValueError, match="value of 'b' has NaN or Inf"):
        table.initialize([np.ones(50), np.full(50, bad)])

    assert cluster.stats()["dense"]["num_rows"] == 0
    assert table.initialize([np.ones(50), np.zeros(50)])


# --- Steps ------------------------------------------------------------------


def test_each_push_has_its_learning_rate(cluster):
    table = make_table(optimizer=SGD(123.0))
    table.initialize(ZEROS)

    for rate in (1.0, np.float64(0.5), tf.constant(0.25), tf.Variable(0.25)):
        table.push(ONES, learning_rate=rate)

    assert_equal(table.pull(), [np.full((2, 3), -2.0), np.full(3, -2.0)])


def test_no_gradient_means_zeros(cluster):
    table = make_table(optimizer=tsw.optimizers.Momentum(1.0))
    table.initialize(ZEROS)

    table.push(ONES, learning_rate=1.0)
    updated = table.push([None, np.ones(3)], learning_rate=1.0)

    # A momentum goes on, as with Keras.
    assert int(updated) == 2
    assert_equal(
        table.pull(), [np.full((2, 3), -1.9), np.full(3, -2.9)], **TOLERANCE
    )


def test_gradients_may_be_of_other_kinds(cluster):
    table = make_table({"a": (3, 2), "b": (2,)})
    table.initialize([np.zeros((3, 2)), np.zeros(2)])

    table.push(
        [
            tf.IndexedSlices(
                tf.ones((2, 2)), tf.constant([1, 1]), tf.constant([3, 2])
            ),
            tf.constant([1.0, 2.0], tf.float16),
        ],
        learning_rate=1.0,
    )

    assert_equal(
        table.pull(), [[[0.0, 0.0], [-2.0, -2.0], [0.0, 0.0]], [-1.0, -2.0]]
    )


def test_a_graph_pushes_and_pulls(cluster):
    table = make_table()
    table.initialize(ZEROS)
    traces = []

    @tf.function
    def step(gradients, rate):
        traces.append(1)
        with tf.control_dependencies(
            [table.push(gradients, learning_rate=rate)]
        ):
            return table.pull()

    gradients = [tf.constant(g, tf.float32) for g in ONES]
    step(gradients, tf.constant(1.0))
    values = step(gradients, tf.constant(0.5))

    assert_equal(values, [np.full((2, 3), -1.5), np.full(3, -1.5)])
    assert [tuple(v.shape) for v in values] == [(2, 3), (3,)]
    assert len(traces) == 1


# --- What is refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([np.ones((3, 2)), np.ones(3)], r"'a' must have shape \(2, 3\)"),
        ([np.ones((2, 3)), np.ones(4)], r"'b' must have shape \(3,\), got"),
        ([np.ones((2, 3)), np.ones((1, 3))], r"'b' .*got \(1, 3\)"),
        ([np.ones((2, 3))], r"expected 2 .* \(a, b\), got 1"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_applied(
    cluster, values, message
):
    table = make_table()

    with pytest.raises(ValueError, match=f"dense table 'dense'.*{message}"):
        table.initialize(values)
    assert cluster.stats()["dense"]["num_rows"] == 0
    table.initialize(ONES)
    with pytest.raises(ValueError, match=f"dense table 'dense'.*{message}"):
        table.push(values, learning_rate=1.0)

    assert_equal(table.pull(), ONES)


@pytest.mark.parametrize(
    ("bad", "name"), [(np.nan, "first"), (-np.inf, "last")]
)
def test_a_gradient_that_is_not_finite_is_named(cluster, bad, name):
    shapes = {"first": (3000,), "last": (3000,)}
    table = make_table(shapes)
    table.initialize([np.ones(3000)] * 2)
    gradients = {key: np.ones(3000, np.float32) for key in shapes}
    gradients[name][1234] = bad

    with pytest.raises(
        ValueError, match=f"'dense': gradient of '{name}'; nothing was applied"
    ):
        table.push(list(gradients.values()), learning_rate=1.0)

    assert_equal(table.pull(), [np.ones(3000)] * 2)


def test_a_graph_refuses_what_is_not_finite(cluster):
    table = make_table()
    table.initialize(ONES)
    push = tf.function(lambda g: table.push([g, None], learning_rate=1.0))

    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient of 'a'"):
        push(tf.fill((2, 3), float("nan")))

    assert_equal(table.pull(), ONES)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "at least one"),
        ([("a", (1,))], "must map names to shapes"),
        ({"a": (0,), "b": (2, 0)}, "all shapes are empty"),
        ({"a": (-1, 2)}, r"known\. Received: 'a': \(-1, 2\)"),
        ({"a": (None,)}, r"known\. Received: 'a': \(None,\)"),
        ({"a": 3}, "known. Received: 'a': 3"),
        ({"a": (2.5,)}, r"known\. Received: 'a': \(2\.5,\)"),
        ({"a": tf.TensorShape(None)}, "known. Received: 'a'"),
        ({3: (1,)}, "must map names.* Received: 3"),
    ],
)
def test_bad_shapes_are_named(embedded, shapes, message):
    with pytest.raises(ValueError, match=message):
        tsw.DenseTable("dense", shapes)

    assert embedded.tables() == []


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"shapes": {"a": (3, 2), "b": (3,)}}, "a:2x3;b:3.*a:3x2;b:3"),
        ({"shapes": {"b": (3,), "a": (2, 3)}}, "a:2x3;b:3.*b:3;a:2x3"),
        ({"shapes": {"a:2x3;b": (3,)}}, "a:2x3;b:3.*a%3A2x3%3Bb:3"),
    ],
)
def test_one_name_has_one_layout(cluster, other, difference):
    make_table()

    with pytest.raises(ValueError, match=f"'dense' exists.*{difference}"):
        make_table(**other)


def test_an_embedding_table_is_no_dense_table(cluster):
    make_table({"a": (8,)})

    with pytest.raises(ValueError, match=r"'dense' exists.*layout"):
        tsw.EmbeddingTable("dense", 8, optimizer=SGD(1.0), initializer="zeros")


# --- Servers ----------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 0)])
def test_a_checkpoint_restores_to_other_servers(tmp_path, before, after):
    rng = np.random.default_rng(5)
    start, gradients = (random_values(rng, SHAPES) for _ in range(2))
    adam = tsw.optimizers.Adam(0.1)
    with running_cluster(before) as cluster:
        table = make_table(SHAPES, optimizer=adam)
        table.initialize(start)
        table.push(gradients, learning_rate=0.1)
        saved = [v.numpy() for v in table.pull()]
        cluster.save(tmp_path)
        table.push(gradients, learning_rate=0.1)
        stepped = [v.numpy() for v in table.pull()]

    with running_cluster(after) as cluster:
        cluster.restore(tmp_path)
        table = make_table(SHAPES, optimizer=adam)

        # The restored values count, not those with which a worker begins.
        assert not table.initialize(start)
        assert_equal(table.pull(), saved)
        # The optimizer state came with the values.
        table.push(gradients, learning_rate=0.1)
        assert_equal(table.pull(), stepped)


def test_a_checkpoint_of_another_layout_is_refused(tmp_path):
    with running_cluster(1) as cluster:
        make_table({"a": (40,)}).initialize([np.ones(40)])
        cluster.save(tmp_path)

    with running_cluster(2) as cluster:
        table = make_table({"a": (4, 10)})
        table.initialize([np.zeros((4, 10))])
        with pytest.raises(ValueError, match=r"'dense'.*holds other variables"):
            cluster.restore(tmp_path)

        assert_equal(table.pull(), [np.zeros((4, 10))])


def test_the_example_of_the_docstring(embedded):
    table = tsw.DenseTable(
        "mlp", {"kernel": (2, 1), "bias": (1,)}, optimizer=SGD(0.5)
    )

    assert table.initialize([np.ones((2, 1)), np.zeros(1)])
    table.push([np.ones((2, 1)), np.ones(1)], learning_rate=0.5)

    assert [value.numpy().tolist() for value in table.pull()] == [
        [[0.5], [0.5]],
        [-0.5],
    ]
