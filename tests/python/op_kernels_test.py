"""The ops themselves, on embedded and remote tables."""

import itertools
import json
import re

import numpy as np
import pytest
import tensorflow as tf

from tfswitch import _native
from tfswitch._loader import load_ops

DIM = 4


ops = load_ops()
_names = itertools.count()


@pytest.fixture(scope="module", params=["embedded", "remote"])
def address(request):
    if request.param == "embedded":
        yield "local://op_kernels_test"
        return
    servers = [_native.Server("127.0.0.1:0", i, 2) for i in range(2)]
    yield "grpc://" + ",".join(server.address for server in servers)
    for server in servers:
        server.stop(1.0)


class Table:
    """A new table, as the ops and as the pybind11 module see it."""

    def __init__(self, address, dim=DIM, **config):
        self.address = address
        self.name = f"t{next(_names)}"
        self.config = json.dumps({"name": self.name, "dim": dim, **config})
        self.native = _native.Cluster(address, 60.0).open_table(self.config)
        self.handle = ops.tfswitch_table_handle(
            cluster=address, config=self.config, shared_name=self.name
        )

    def rows(self):
        ids, values, _ = self.native.export_rows(False)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.fixture
def table(address):
    return Table(address, initializer={"constant": {"value": 1.0}})


def refuses(error, *parts):
    return pytest.raises(error, match=".*".join(map(re.escape, parts)))


def look_up(table, ids, dim=DIM, **more):
    return ops.tfswitch_lookup_many([table], [ids], dims=[dim], **more)[0]


def push(table, ids, gradients, learning_rate=0.25, **more):
    """To one table, with nothing said of shows, clicks and steps."""
    more = {"shows": [], "clicks": [], "global_step": 0, "rules": [0]} | more
    lists = {
        "tables": table,
        "ids": ids,
        "gradients": gradients,
        "learning_rates": learning_rate,
        "shows": more.pop("shows"),
        "clicks": more.pop("clicks"),
        "global_steps": more.pop("global_step"),
    }
    pushed = ops.tfswitch_push_many(
        **{name: [value] for name, value in lists.items()}, **more
    )
    return pushed.updated_rows[0], pushed.poisons[0]


def tie(table, ids, embeddings, **more):
    more = {"poison": 0.0, "shows": [], "clicks": []} | more
    weight = tf.zeros([0, DIM])
    return ops.tfswitch_tie_to_weight(table, ids, embeddings, weight, **more)


# --- Lookups and pushes -------------------------------------------------------


def test_empty_batches_give_empty_answers_and_change_nothing(table):
    ids = tf.zeros([2, 0, 3], tf.int64)

    read = look_up(table.handle, ids, insert_missing=True)
    tied = tie(table.handle, ids, read)
    updated_rows, poison = push(table.handle, ids, tied)

    assert read.shape == tied.shape == [2, 0, 3, DIM]
    assert int(updated_rows) == float(poison) == 0
    assert table.native.size() == 0


def test_push_without_insert_missing_skips_unknown_ids(table):
    table.native.assign([5], np.ones((1, DIM), np.float32))

    updated_rows, _ = push(
        table.handle, [5, 6], tf.ones([2, DIM]), insert_missing=False
    )

    assert int(updated_rows) == 1
    assert table.rows() == {5: [0.75] * DIM}


@pytest.mark.parametrize(
    "op",
    [
        lambda table: look_up(table, [1], dim=8),
        lambda table: tie(table, [1], tf.ones([1, 8])),
        lambda table: push(table, [1], tf.ones([1, 8])),
    ],
    ids=["lookup_many", "tie_to_weight", "push_many"],
)
def test_another_dim_is_refused_with_the_table_and_both_dims(table, op):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"'{table.name}'.*4.*8"
    ):
        op(table.handle)

    assert table.native.size() == 0


@pytest.mark.parametrize(
    ("op", "wrong", "parts"),
    [
        (push, {"gradients": [1.0] * 7}, ["[2,4]", "ids of", "got [7]"]),
        (push, {"gradients": [[[1.0] * 4] * 2]}, ["[2,4]", "got [1,2,4]"]),
        (push, {"gradients": [[np.inf] * 4, [1.0] * 4]}, ["id 5"]),
        (push, {"learning_rate": [0.25]}, ["`learning_rates`", "[1]"]),
        (push, {"learning_rate": np.nan}, ["learning_rate"]),
        (push, {"global_step": [1]}, ["`global_steps`", "scalar", "[1]"]),
        (push, {"shows": [1.0]}, ["`shows`", "each of 2 ids", "[1]"]),
        (push, {"shows": [1.0, -1.0]}, ["shows", "id 77"]),
        (push, {"clicks": [1.0] * 3}, ["`clicks`", "each of 2 ids", "[3]"]),
        (push, {"rules": [0, 0]}, ["`rules`", "each of 1 tables, got 2"]),
        (tie, {"embeddings": [1.0] * 7}, ["dim 4", "[2]", "got shape [7]"]),
        (tie, {"poison": [0.0]}, ["`poison`", "scalar", "[1]"]),
        (tie, {"shows": [1.0]}, ["`shows`", "each of 2 ids", "[1]"]),
        (tie, {"clicks": [1.0] * 3}, ["`clicks`", "each of 2 ids", "[3]"]),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    table, op, wrong, parts
):
    rows = np.ones((2, DIM), np.float32)
    table.native.assign([5, 77], rows)
    fitting = {
        "ids": np.array([5, 77]),
        "gradients" if op is push else "embeddings": rows,
    }

    with refuses(tf.errors.InvalidArgumentError, *parts):
        op(table.handle, **{**fitting, **wrong})

    assert table.rows() == {5: [1.0] * DIM, 77: [1.0] * DIM}


# --- Handles ------------------------------------------------------------------


def test_handles_of_one_shared_name_are_one(table):
    again = ops.tfswitch_table_handle(
        cluster=table.address, config=table.config, shared_name=table.name
    )
    push(table.handle, [5], tf.ones([1, DIM]))

    read = look_up(again, [5])

    np.testing.assert_array_equal(read, [[0.75] * DIM])


def test_shared_name_of_another_table_is_refused(table):
    other = json.dumps({"name": "other", "dim": DIM})

    with refuses(
        tf.errors.InvalidArgumentError, f"handle '{table.name}'", "other"
    ):
        ops.tfswitch_table_handle(
            cluster=table.address, config=other, shared_name=table.name
        )


def test_handle_of_a_variable_is_refused():
    variable = tf.Variable([1.0])

    with pytest.raises(tf.errors.InvalidArgumentError, match="TableResource"):
        look_up(variable.handle, [1])


def test_handle_to_no_server_fails_within_the_timeout():
    with refuses(tf.errors.UnavailableError, "127.0.0.1:1"):
        ops.tfswitch_table_handle(
            cluster="grpc://127.0.0.1:1",
            config=json.dumps({"name": "t", "dim": DIM}),
            timeout_s=1.0,
        )


# --- Graphs -------------------------------------------------------------------


def test_ops_run_in_a_function_with_a_handle_opened_inside(table):
    @tf.function(reduce_retracing=True)
    def train(ids):
        handle = ops.tfswitch_table_handle(
            cluster=table.address,
            config=table.config,
            shared_name=f"{table.name} in graph",
        )
        rows = look_up(handle, ids, insert_missing=True)
        push(handle, ids, tf.ones_like(tie(handle, ids, rows)))
        return look_up(handle, ids)

    for ids in ([5, 6], [5], [6, 5, 5]):
        read = train(tf.constant(ids, tf.int64))

    np.testing.assert_array_equal(read, [[0.5] * DIM, [0.0] * DIM, [0.0] * DIM])


def test_many_lookups_of_one_graph_run_at_the_same_time(table):
    table.native.assign(np.arange(8), np.ones((8, DIM), np.float32))

    def read(i):
        return look_up(table.handle, tf.fill([5], i))

    dataset = tf.data.Dataset.range(800).map(
        lambda i: read(i % 8), num_parallel_calls=100
    )

    assert sum(float(tf.reduce_sum(rows)) for rows in dataset) == 800 * 5 * DIM


def shape_of(function, *specs):
    concrete = tf.function(function).get_concrete_function(
        tf.TensorSpec([], tf.resource), *specs
    )
    return [tensor.shape for tensor in concrete.outputs]


def floats(shape):
    return tf.TensorSpec(shape, tf.float32)


UNKNOWN = tf.TensorShape(None)


@pytest.mark.parametrize(
    ("ids", "embeddings"),
    [
        (UNKNOWN, UNKNOWN),
        ([], [DIM]),
        ([None], [None, DIM]),
        ([2, 3], [2, 3, DIM]),
        ([0], [0, DIM]),
    ],
)
def test_shapes_of_lookups_follow_the_ids(ids, embeddings):
    def train(table, ids):
        read = look_up(table, ids)
        return read, tie(table, ids, read)

    found = shape_of(train, tf.TensorSpec(ids, tf.int64))

    assert [str(shape) for shape in found] == [
        str(tf.TensorShape(embeddings))
    ] * 2


@pytest.mark.parametrize(
    ("ids", "gradients", "learning_rate", "is_right"),
    [
        (UNKNOWN, UNKNOWN, UNKNOWN, True),
        ([None], UNKNOWN, [], True),
        (UNKNOWN, [None, DIM], [], True),
        ([], [DIM], [], True),
        ([2, None], [None, 3, DIM], [], True),
        ([2], [3, DIM], [], False),
        ([2], [2], [], False),
        (UNKNOWN, [], [], False),
        ([2], [2, DIM], [1], False),
    ],
)
def test_push_checks_shapes_when_the_graph_is_built(
    ids, gradients, learning_rate, is_right
):
    def build():
        return shape_of(
            push,
            tf.TensorSpec(ids, tf.int64),
            floats(gradients),
            floats(learning_rate),
        )

    if is_right:
        assert build() == [[], []]
    else:
        with pytest.raises(ValueError, match=r"Shape|rank|Dimension"):
            build()


def test_size_and_handle_are_scalars():
    assert shape_of(ops.tfswitch_size) == [[]]
    handle = tf.function(
        lambda: ops.tfswitch_table_handle(cluster="local://", config="{}")
    ).get_concrete_function()
    assert handle.output_shapes == []


def test_handle_input_must_be_a_scalar():
    with pytest.raises(ValueError, match="rank 0"):
        tf.function(ops.tfswitch_size).get_concrete_function(
            tf.TensorSpec([2], tf.resource)
        )
