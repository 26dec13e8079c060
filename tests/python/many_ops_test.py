"""The ops of many tables, against those of one."""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch import ops


def make_table(name, dim, **kwargs):
    kwargs.setdefault("initializer", "normal")
    kwargs.setdefault("seed", 0)
    kwargs.setdefault("optimizer", tsw.optimizers.SGD(1.0))
    return tsw.EmbeddingTable(name, dim, **kwargs)


def push_of(table, ids, gradients=None, rate=1.0, **more):
    """A push of ones, unless it is told otherwise."""
    ids = tf.constant(ids)
    if gradients is None:
        gradients = tf.ones([*ids.shape, table.dim])
    return ops.TablePush(
        table.handle, ids, gradients, tf.constant(rate), **more
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


def test_pushes_of_many_are_those_of_each(mode):
    tables, alone = make_tables(), make_tables("_alone")
    ids = {name: np.array(value, np.int64) for name, value in IDS.items()}
    gradients = {
        name: np.random.default_rng(0).normal(size=(*ids[name].shape, dim))
        for name, dim in DIMS.items()
    }

    pushed = mode(
        lambda: ops.push_many(
            [
                push_of(
                    table, ids[name], tf.cast(gradients[name], tf.float32), 0.5
                )
                for name, table in tables.items()
            ]
        )
    )()

    np.testing.assert_array_equal(pushed.updated_rows, [3, 1, 0])
    np.testing.assert_array_equal(pushed.poisons, [0.0] * 3)
    for name, table in tables.items():
        alone[name].push(ids[name], gradients[name], learning_rate=0.5)
        np.testing.assert_array_equal(
            table.lookup(ids[name]), alone[name].lookup(ids[name])
        )


def test_tables_of_several_clusters_go_together(make_cluster):
    tables = []
    for number, servers in enumerate([0, 2, 1]):
        table = make_table(
            f"t{number}", 2, initializer="zeros", cluster=make_cluster(servers)
        )
        tables.append(table)

    ops.push_many([push_of(table, [1, 2, 3]) for table in tables])

    found = ops.lookup_many(
        [table.handle for table in tables],
        [[1, 2, 3]] * 3,
        dims=[2] * 3,
        insert_missing=False,
    )
    np.testing.assert_array_equal(found, np.full((3, 3, 2), -1.0))


def test_an_error_in_the_second_push_names_it_and_applies_nothing(mode):
    first = make_table("first", 2, initializer="ones")
    second = make_table("second", 2, initializer="ones")
    good = {"ids": [2], "gradients": tf.ones([1, 2])}

    for changes, message in [
        ({"gradients": tf.ones([1, 3])}, r"'second': expected .*\[1,3\]"),
        ({"rate": -1.0}, "learning_rate"),
        ({"gradients": tf.constant([[np.nan, 1]])}, "'second'.* id 2"),
        ({"shows": [1.0, 1.0]}, "'second': `shows` must be empty or.* 1 ids"),
        ({"clicks": [-1.0]}, "id 2"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            mode(
                lambda wrong=changes: ops.push_many(
                    [push_of(first, [1]), push_of(second, **(good | wrong))]
                )
            )()
        assert first.size() == second.size() == 0


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_skipped_pushes_are_told_by_nan_and_a_warning(mode, bad, capfd):
    tables = [make_table(name, 2, initializer="ones") for name in ("a", "b")]
    gradients = [tf.ones([1, 2]), tf.constant([[bad, 1.0]])]

    pushed = mode(
        lambda: ops.push_many(
            [
                push_of(table, [1], gradient)
                for table, gradient in zip(tables, gradients, strict=True)
            ],
            skip_non_finite=True,
        )
    )()

    np.testing.assert_array_equal(pushed.poisons, [np.nan, np.nan])
    np.testing.assert_array_equal(pushed.updated_rows, [0, 0])
    assert [table.size() for table in tables] == [0, 0]
    assert "table 'b': the gradient of id 1 is NaN" in capfd.readouterr().err


def test_an_optimizer_that_came_before_another_pushes_no_more(mode):
    table = make_table("t", 2, initializer="zeros")
    other = make_table("other", 2, initializer="zeros")

    def push(rule):
        return mode(
            lambda: ops.push_many(
                [push_of(other, [1], rule=1), push_of(table, [1], rule=rule)]
            )
        )()

    for rule in (1, 1, 0, 3, 0, 3):
        push(rule)
    for rule in (1, 2):
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="table 't' learns by"
        ):
            push(rule)

    for each in (table, other):
        np.testing.assert_array_equal(each.lookup([1]), [[-6.0, -6.0]])


@pytest.mark.parametrize(
    "op",
    [
        lambda table: ops.lookup_many(
            [table.handle] * 257,
            [[1]] * 257,
            dims=[1] * 257,
            insert_missing=True,
        ),
        lambda table: ops.push_many([push_of(table, [1])] * 257),
    ],
    ids=["lookup_many", "push_many"],
)
def test_more_tables_than_a_call_takes_are_refused(embedded, op):
    table = make_table("t", 1)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="at most 256 tables"
    ):
        op(table)
    assert table.size() == 0
