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


class _Ops:
    """The ops; those that push say nothing of shows, clicks and steps."""

    def __init__(self):
        self._library = load_ops()

    def __getattr__(self, name):
        return getattr(self._library, name)

    def tfswitch_push(self, *args, **kwargs):
        return self._library.tfswitch_push(
            *args, **kwargs, shows=[], clicks=[], global_step=0
        )

    def training_lookup(self, table, ids, anchor, learning_rate, *, dim):
        """Of one table: embeddings, probe, unique ids and inverse."""
        found = self._library.tfswitch_training_lookup_many(
            tables=[table],
            ids=[tf.cast(ids, tf.int64)],
            anchors=[anchor],
            learning_rates=[learning_rate],
            shows=[[]],
            clicks=[[]],
            global_steps=[0],
            dims=[dim],
        )
        return (
            found.embeddings[0],
            found.loss_scale_probe,
            found.unique_ids[0],
            found.inverses[0],
        )

    def push_unique(
        self, table, unique_ids, inverse, gradients, learning_rate, loss_scale
    ):
        """To one table: the gradient of the anchor."""
        (anchor_gradient,) = self._library.tfswitch_push_unique_many(
            tables=[table],
            unique_ids=[unique_ids],
            inverses=[inverse],
            gradients=[gradients],
            learning_rates=[learning_rate],
            loss_scale=loss_scale,
            shows=[[]],
            clicks=[[]],
            global_steps=[0],
        )
        return anchor_gradient


ops = _Ops()
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


# --- Lookup -------------------------------------------------------------------


@pytest.mark.parametrize("num_ids", [2049, 50_000])
def test_lookups_of_any_size_agree(table, num_ids):
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, num_ids)
    ids[::3] = ids[0]

    trained, _, unique_ids, inverse = ops.training_lookup(
        table.handle, ids, 0.0, 0.1, dim=DIM
    )
    read = ops.tfswitch_lookup(table.handle, ids, dim=DIM)

    np.testing.assert_array_equal(trained, read)
    np.testing.assert_array_equal(tf.gather(unique_ids, inverse), ids)
    assert len(unique_ids) == len(np.unique(ids)) == table.native.size()


def test_empty_batches_give_empty_answers_and_change_nothing(table):
    ids = tf.zeros([2, 0, 3], tf.int64)

    read = ops.tfswitch_lookup(table.handle, ids, dim=DIM, insert_missing=True)
    trained, probe, unique_ids, inverse = ops.training_lookup(
        table.handle, ids, 0.0, 0.1, dim=DIM
    )
    updated = ops.tfswitch_push(
        table.handle, ids, tf.zeros([2, 0, 3, DIM]), 0.1
    )
    anchor = ops.push_unique(
        table.handle, unique_ids, inverse, trained, 0.1, 0.0
    )

    assert read.shape == trained.shape == [2, 0, 3, DIM]
    assert unique_ids.shape == inverse.shape == [0]
    assert float(probe) == int(updated) == float(anchor) == 0
    assert table.native.size() == 0


@pytest.mark.parametrize("op", ["tfswitch_lookup", "training_lookup"])
def test_lookup_of_another_dim_names_table_and_both_dims(table, op):
    arguments = [[1]] if op == "tfswitch_lookup" else [[1], 0.0, 0.1]

    with refuses(
        tf.errors.InvalidArgumentError, f"'{table.name}' has dim 4", "dim 8"
    ):
        getattr(ops, op)(table.handle, *arguments, dim=8)

    assert table.native.size() == 0


# --- Push ---------------------------------------------------------------------


def test_push_without_insert_missing_skips_unknown_ids(table):
    table.native.assign([5], np.ones((1, DIM), np.float32))

    updated = ops.tfswitch_push(
        table.handle, [5, 6], tf.ones([2, DIM]), 0.25, insert_missing=False
    )

    assert int(updated) == 1
    assert table.rows() == {5: [0.75] * DIM}


def test_push_unique_takes_a_loss_scale_of_zero_as_one(table):
    _, _, unique_ids, inverse = ops.training_lookup(
        table.handle, [5], 0.0, 0.25, dim=DIM
    )

    ops.push_unique(
        table.handle, unique_ids, inverse, tf.ones([DIM]), 0.25, 0.0
    )

    assert table.rows() == {5: [0.75] * DIM}


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (
            {"gradients": [1.0] * 7},
            ["expected 8", "x dim 4", "got 7", "[7]"],
        ),
        ({"inverse": [0, 2]}, ["inverse"]),
        ({"inverse": [-1, 0]}, ["inverse"]),
        ({"inverse": [0, 0]}, ["inverse"]),
        ({"learning_rate": [0.25]}, ["learning_rate", "[1]"]),
    ],
)
def test_push_unique_refuses_what_does_not_fit(table, wrong, parts):
    table.native.assign([5, 77], np.ones((2, DIM), np.float32))
    arguments = {
        "unique_ids": np.array([5, 77]),
        "inverse": [0, 1],
        "gradients": np.ones((2, DIM), np.float32),
        "learning_rate": 0.25,
        "loss_scale": 1.0,
    }

    with refuses(tf.errors.InvalidArgumentError, *parts):
        ops.push_unique(table.handle, **{**arguments, **wrong})

    assert table.rows() == {5: [1.0] * DIM, 77: [1.0] * DIM}


# --- Handles ------------------------------------------------------------------


def test_handles_of_one_shared_name_are_one(table):
    again = ops.tfswitch_table_handle(
        cluster=table.address, config=table.config, shared_name=table.name
    )
    ops.tfswitch_push(table.handle, [5], tf.ones([1, DIM]), 0.25)

    read = ops.tfswitch_lookup(again, [5], dim=DIM)

    np.testing.assert_array_equal(read, [[0.75] * DIM])


def test_shared_name_of_another_table_is_refused(table):
    other = json.dumps({"name": "other", "dim": DIM})

    with refuses(
        tf.errors.InvalidArgumentError, f"handle '{table.name}'", "other"
    ):
        ops.tfswitch_table_handle(
            cluster=table.address, config=other, shared_name=table.name
        )


def test_table_that_exists_with_another_config_names_the_difference(table):
    other = json.dumps({"name": table.name, "dim": DIM + 1})

    with pytest.raises(tf.errors.OpError, match=f"'{table.name}'.*dim"):
        ops.tfswitch_table_handle(
            cluster=table.address, config=other, shared_name="another handle"
        )


def test_handle_of_a_variable_is_refused():
    variable = tf.Variable([1.0])

    with pytest.raises(tf.errors.InvalidArgumentError, match="TableResource"):
        ops.tfswitch_lookup(variable.handle, [1], dim=DIM)


def test_handle_to_no_server_fails_within_the_timeout():
    with refuses(tf.errors.UnavailableError, "127.0.0.1:1"):
        ops.tfswitch_table_handle(
            cluster="grpc://127.0.0.1:1",
            config=json.dumps({"name": "t", "dim": DIM}),
            timeout_s=1.0,
        )


def test_unknown_cluster_address_is_refused():
    with refuses(tf.errors.InvalidArgumentError, "'ftp://host'"):
        ops.tfswitch_table_handle(cluster="ftp://host", config="{}")


# --- Graphs -------------------------------------------------------------------


def test_ops_run_in_a_function_with_a_handle_opened_inside(table):
    @tf.function(reduce_retracing=True)
    def train(ids):
        handle = ops.tfswitch_table_handle(
            cluster=table.address,
            config=table.config,
            shared_name=f"{table.name} in graph",
        )
        rows, probe, unique_ids, inverse = ops.training_lookup(
            handle, ids, 0.0, 0.25, dim=DIM
        )
        ops.push_unique(
            handle, unique_ids, inverse, tf.ones_like(rows), 0.25, probe
        )
        return ops.tfswitch_lookup(handle, ids, dim=DIM)

    for ids in ([5, 6], [5], [6, 5, 5]):
        read = train(tf.constant(ids))

    np.testing.assert_array_equal(read, [[0.5] * DIM, [0.0] * DIM, [0.0] * DIM])


def test_many_lookups_of_one_graph_run_at_the_same_time(table):
    table.native.assign(np.arange(8), np.ones((8, DIM), np.float32))

    def read(i):
        return ops.tfswitch_lookup(table.handle, tf.fill([5], i), dim=DIM)

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
    ("ids", "embeddings", "num_ids"),
    [
        (UNKNOWN, UNKNOWN, None),
        ([], [DIM], 1),
        ([None], [None, DIM], None),
        ([2, 3], [2, 3, DIM], 6),
        ([0], [0, DIM], 0),
    ],
)
def test_shapes_of_lookups_follow_the_ids(ids, embeddings, num_ids):
    ids = tf.TensorSpec(ids, tf.int64)

    (read,) = shape_of(
        lambda table, ids: ops.tfswitch_lookup(table, ids, dim=DIM), ids
    )
    trained = shape_of(
        lambda table, ids: tuple(
            ops.training_lookup(table, ids, 0.0, 0.1, dim=DIM)
        ),
        ids,
    )

    expected = [embeddings, [], [None], [num_ids]]
    assert read.as_list() == expected[0] if read.rank else embeddings == UNKNOWN
    assert [str(shape) for shape in trained] == [
        str(tf.TensorShape(shape)) for shape in expected
    ]


@pytest.mark.parametrize(
    ("ids", "gradients", "is_right"),
    [
        (UNKNOWN, UNKNOWN, True),
        ([None], UNKNOWN, True),
        (UNKNOWN, [None, DIM], True),
        ([], [DIM], True),
        ([2, None], [None, 3, DIM], True),
        ([2], [3, DIM], False),
        ([2], [2], False),
        (UNKNOWN, [], False),
    ],
)
def test_push_checks_shapes_when_the_graph_is_built(ids, gradients, is_right):
    def build():
        return shape_of(
            lambda table, ids, gradients: ops.tfswitch_push(
                table, ids, gradients, 0.1
            ),
            tf.TensorSpec(ids, tf.int64),
            floats(gradients),
        )

    if is_right:
        assert build() == [[]]
    else:
        with pytest.raises(ValueError, match=r"Shape|rank|Dimension"):
            build()


@pytest.mark.parametrize(
    "wrong",
    [
        {"unique_ids": []},
        {"inverse": [2, 2]},
        {"gradients": []},
        {"learning_rate": [1]},
        {"loss_scale": [1]},
    ],
)
def test_push_unique_checks_ranks_when_the_graph_is_built(wrong):
    shapes = {
        "unique_ids": [None],
        "inverse": [None],
        "gradients": [None, DIM],
        "learning_rate": [],
        "loss_scale": [],
    }
    dtypes = {"unique_ids": tf.int64, "inverse": tf.int32}

    def build(shapes):
        return shape_of(
            ops.push_unique,
            *(
                tf.TensorSpec(shape, dtypes.get(name, tf.float32))
                for name, shape in shapes.items()
            ),
        )

    assert build(shapes) == [[]]
    with pytest.raises(ValueError, match="rank"):
        build({**shapes, **wrong})


@pytest.mark.parametrize(
    ("anchor", "learning_rate"), [([1], []), ([], [1]), ([2, 2], [])]
)
def test_training_lookup_takes_scalars_only(anchor, learning_rate):
    with pytest.raises(ValueError, match="rank 0"):
        shape_of(
            lambda *inputs: tuple(ops.training_lookup(*inputs, dim=DIM)),
            tf.TensorSpec([None], tf.int64),
            floats(anchor),
            floats(learning_rate),
        )


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
