"""The ops of many tables, against those of one."""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch import ops
from tfswitch._loader import load_ops

library = load_ops()


def make_table(name, dim, **kwargs):
    kwargs.setdefault("initializer", "normal")
    kwargs.setdefault("seed", 0)
    kwargs.setdefault("optimizer", tsw.optimizers.SGD(1.0))
    return tsw.EmbeddingTable(name, dim, **kwargs)


def lookup_of(table, ids, anchor, rate=1.0, **more):
    return ops.TableLookup(
        table.handle,
        tf.constant(ids),
        anchor,
        tf.constant(rate),
        table.dim,
        **more,
    )


def run_eagerly(function):
    return function


@pytest.fixture(
    params=[(0, run_eagerly), (3, tf.function)],
    ids=["embedded_eager", "servers_in_a_function"],
)
def mode(request):
    """How ops are run; tables are in this process or on servers."""
    num_servers, mode = request.param
    with running_cluster(num_servers):
        yield mode


IDS = {"a": [[1, 2], [1, 5]], "b": 7, "c": []}
DIMS = {"a": 2, "b": 3, "c": 1}


def make_tables(suffix=""):
    return {name: make_table(name + suffix, DIMS[name]) for name in IDS}


def test_lookups_of_many_are_those_of_each(mode):
    tables, alone = make_tables(), make_tables("_alone")
    ids = {name: tf.constant(value, tf.int64) for name, value in IDS.items()}
    for name in IDS:
        expected = alone[name].lookup_or_create(ids[name])
        assert tables[name].size() == 0

        read = mode(
            lambda: ops.lookup_many(
                [t.handle for t in tables.values()],
                list(ids.values()),
                dims=list(DIMS.values()),
                insert_missing=True,
            )
        )()

        np.testing.assert_array_equal(read[list(IDS).index(name)], expected)
        for table in tables.values():
            table.remove([1, 2, 5, 7])


def test_training_lookups_of_many_are_those_of_each(mode):
    tables, alone = make_tables(), make_tables("_alone")
    anchors = {name: tf.Variable(0.0) for name in IDS}
    factor = {name: 1.0 + i for i, name in enumerate(IDS)}

    @mode
    def step():
        with tf.GradientTape() as tape:
            result = ops.training_lookup_many(
                [
                    lookup_of(table, np.array(IDS[name], np.int64), anchor, 0.5)
                    for (name, table), anchor in zip(
                        tables.items(), anchors.values(), strict=True
                    )
                ]
            )
            loss = tf.add_n(
                [
                    tf.reduce_sum(rows) * factor[name]
                    for name, rows in zip(IDS, result.embeddings, strict=True)
                ]
            )
            loss = (loss + result.loss_scale_probe) * 64.0
        return result, tape.gradient(loss, list(anchors.values()))

    result, gradients = step()

    assert gradients == [0.0] * 3
    for i, name in enumerate(IDS):
        ids = tf.constant(IDS[name], tf.int64)
        expected = ops.training_lookup(
            alone[name].handle,
            ids,
            tf.constant(0.0),
            tf.constant(0.5),
            dim=DIMS[name],
        )
        np.testing.assert_array_equal(result.embeddings[i], expected.embeddings)
        np.testing.assert_array_equal(result.unique_ids[i], expected.unique_ids)
        np.testing.assert_array_equal(result.inverses[i], expected.inverse)
        alone[name].push(
            ids,
            tf.fill([*ids.shape, DIMS[name]], factor[name]),
            learning_rate=0.5,
        )
        np.testing.assert_array_equal(
            tables[name].lookup(ids), alone[name].lookup(ids)
        )


def test_a_table_that_comes_twice_takes_a_step_for_each(embedded):
    table = make_table("t", 2, initializer="zeros")
    anchor = tf.Variable(0.0)

    with tf.GradientTape() as tape:
        result = ops.training_lookup_many(
            [lookup_of(table, [1, 2], anchor), lookup_of(table, [1], anchor)]
        )
        loss = tf.add_n([tf.reduce_sum(x) for x in result.embeddings])
    tape.gradient(loss, anchor)

    np.testing.assert_array_equal(
        table.lookup([1, 2]), [[-2.0, -2.0], [-1.0, -1.0]]
    )


def test_tables_of_several_clusters_go_together(make_cluster):
    tables = []
    for number, servers in enumerate([0, 2, 1]):
        table = make_table(
            f"t{number}", 2, initializer="zeros", cluster=make_cluster(servers)
        )
        tables.append(table)
    anchor = tf.Variable(0.0)

    with tf.GradientTape() as tape:
        result = ops.training_lookup_many(
            [lookup_of(table, [1, 2, 3], anchor) for table in tables]
        )
        loss = tf.add_n([tf.reduce_sum(x) for x in result.embeddings])
    tape.gradient(loss, anchor)

    for table in tables:
        np.testing.assert_array_equal(
            table.lookup([1, 2, 3]), np.full((3, 2), -1.0)
        )


def test_a_table_that_the_loss_does_not_use_is_pushed_zeros(mode):
    a, b = make_table("a", 2), make_table("b", 2)
    rows = b.lookup_or_create([1]).numpy()
    anchor = tf.Variable(0.0)

    @mode
    def step():
        with tf.GradientTape() as tape:
            result = ops.training_lookup_many(
                [lookup_of(a, [1], anchor), lookup_of(b, [1], anchor)]
            )
            loss = tf.reduce_sum(tf.gather(result.embeddings[0], [0, 0]))
        return tape.gradient(loss, anchor)

    before = a.lookup_or_create([1]).numpy()
    step()

    np.testing.assert_allclose(a.lookup([1]), before - 2.0, rtol=1e-6)
    np.testing.assert_array_equal(b.lookup([1]), rows)


@pytest.mark.parametrize(("num_servers", "num_ids"), [(0, 2049), (3, 60_000)])
def test_long_batches_of_many_agree(make_cluster, num_servers, num_ids):
    make_cluster(num_servers)
    tables = [make_table(f"t{i}", 8 * i + 8) for i in range(4)]
    draw = np.random.default_rng(0)
    ids = [draw.integers(-(2**63), 2**63, num_ids) for _ in tables]
    ids[1][::3] = 5
    anchor = tf.Variable(0.0)

    with tf.GradientTape() as tape:
        result = ops.training_lookup_many(
            [
                lookup_of(table, each, anchor)
                for table, each in zip(tables, ids, strict=True)
            ]
        )
        loss = tf.add_n([tf.reduce_sum(x) for x in result.embeddings])
    tape.gradient(loss, anchor)

    for table, each, before in zip(tables, ids, result.embeddings, strict=True):
        count = np.ones((num_ids, 1), np.float32)
        count[each == 5] = np.count_nonzero(each == 5)
        np.testing.assert_allclose(
            table.lookup(each), before - count, rtol=1e-5, atol=1e-5
        )


def test_shapes_are_known_to_graphs(embedded):
    a, b = make_table("a", 2), make_table("b", 3)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.int64),
            tf.TensorSpec([], tf.int32),
        ]
    )
    def lookups(one, two):
        handles = [a.handle, b.handle]
        plain = ops.lookup_many(
            handles, [one, two], dims=[2, 3], insert_missing=False
        )
        assert [x.shape.as_list() for x in plain] == [[None, 4, 2], [3]]
        trained = library.tfswitch_training_lookup_many(
            tables=handles,
            ids=[one, tf.cast(two, tf.int64)],
            anchors=[0.0, 0.0],
            learning_rates=[0.1, 0.1],
            shows=[[], []],
            clicks=[[], []],
            global_steps=[0, 0],
            dims=[2, 3],
        )
        assert trained.loss_scale_probe.shape == []
        assert [x.shape.as_list() for x in trained.inverses] == [[None], [1]]
        assert [x.shape.as_list() for x in trained.unique_ids] == [[None]] * 2
        return plain

    lookups.get_concrete_function()


def arguments(table, **changes):
    return {
        "tables": [table.handle] * 2,
        "ids": [[1], [2, 3]],
        "anchors": [0.0, 0.0],
        "learning_rates": [0.1, 0.1],
        "shows": [[], []],
        "clicks": [[], []],
        "global_steps": [0, 0],
        "dims": [2, 2],
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": [2]}, "one dim for each of 2 tables, got 1"),
        ({"dims": [2, 3]}, "table 't' has dim 2.*built for dim 3"),
        ({"anchors": [0.0, [0.0]]}, "`anchors` must be a scalar"),
        ({"learning_rates": [[0.1], 0.1]}, "`learning_rates` must be a scalar"),
        ({"global_steps": [0, [0]]}, "`global_step` must be a scalar"),
        ({"shows": [[], [1.0]]}, "`shows` must be empty or.*each of 2 ids"),
    ],
)
def test_wrong_inputs_are_named_and_make_no_rows(embedded, changes, message):
    table = make_table("t", 2)

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        library.tfswitch_training_lookup_many(**arguments(table, **changes))

    assert table.size() == 0


def test_wrong_pushes_are_named_and_apply_nothing(embedded):
    table = make_table("t", 2)
    table.assign([1, 2], np.ones((2, 2), np.float32))
    good = {
        "tables": [table.handle] * 2,
        "unique_ids": [[1], [2]],
        "inverses": [[0], [0]],
        "gradients": [tf.ones([1, 2]), tf.ones([1, 2])],
        "learning_rates": [1.0, 1.0],
        "loss_scale": 0.0,
        "shows": [[], []],
        "clicks": [[], []],
        "global_steps": [0, 0],
    }

    for changes, message in [
        ({"gradients": [tf.ones([1, 2]), tf.ones([3])]}, "expected 2 gradient"),
        ({"inverses": [[0], [1]]}, "inverse"),
        ({"learning_rates": [1.0, -1.0]}, "learning_rate"),
        ({"loss_scale": [1.0]}, "`loss_scale` must be a scalar"),
        ({"clicks": [[], [-1.0]]}, "id 2"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            library.tfswitch_push_unique_many(**(good | changes))
        np.testing.assert_array_equal(table.lookup([1, 2]), np.ones((2, 2)))

    anchors = library.tfswitch_push_unique_many(
        **(good | {"gradients": [tf.ones([1, 2]), [[np.nan, 1]]]})
    )
    np.testing.assert_array_equal(anchors, [np.nan, np.nan])
    np.testing.assert_array_equal(table.lookup([1, 2]), np.ones((2, 2)))
    anchors = library.tfswitch_push_unique_many(**good)
    assert [float(x) for x in anchors] == [0.0, 0.0]
    np.testing.assert_array_equal(table.lookup([1, 2]), np.zeros((2, 2)))


def test_xla_is_refused_with_what_to_do(embedded):
    table = make_table("t", 2)

    @tf.function(jit_compile=True)
    def step(ids):
        return ops.lookup_many(
            [table.handle], [ids], dims=[2], insert_missing=True
        )

    with pytest.raises(ValueError, match="XLA cannot"):
        step(tf.constant([1]))


def test_a_server_that_is_away_is_named():
    server = tsw.Server()
    address = server.start().address
    with tsw.connect(f"grpc://{address}", timeout=1.0):
        table = make_table("t", 2)
        anchor = tf.Variable(0.0)
        ops.training_lookup_many([lookup_of(table, [1], anchor)] * 2)
        server.stop()

        with pytest.raises(tf.errors.UnavailableError, match=address):
            ops.training_lookup_many([lookup_of(table, [1], anchor)] * 2)


def test_each_of_very_many_pushes_counts_in_any_order_of_tables(make_cluster):
    make_cluster(1)
    tables = [make_table(f"t{i}", 1, initializer="zeros") for i in range(256)]
    handles = [table.handle for table in reversed(tables)]
    rows = {"ids": [[1]] * 256, "dims": [1] * 256}
    ops.lookup_many(handles, **rows, insert_missing=True)
    for _ in range(6):
        library.tfswitch_push_unique_many(
            tables=handles,
            unique_ids=[[1]] * 256,
            inverses=[[0]] * 256,
            gradients=[[[1.0]]] * 256,
            learning_rates=[1.0] * 256,
            loss_scale=0.0,
            shows=[[]] * 256,
            clicks=[[]] * 256,
            global_steps=[0] * 256,
        )

    found = ops.lookup_many(handles, **rows, insert_missing=False)
    np.testing.assert_array_equal(found, np.full((256, 1, 1), -6.0))


def test_more_tables_than_a_call_takes_are_refused(embedded):
    table = make_table("t", 1)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="at most 256 tables"
    ):
        ops.lookup_many(
            [table.handle] * 257,
            [tf.constant([1])] * 257,
            dims=[1] * 257,
            insert_missing=True,
        )
    assert table.size() == 0
