"""Tables in graphs of TensorFlow 1."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw

v1 = tf.compat.v1


@pytest.fixture
def cluster(request):
    with tsw.Cluster(f"local://{request.node.name}") as cluster:
        yield cluster


def make_table(cluster, **kwargs):
    kwargs = {"optimizer": tsw.optimizers.SGD(0.5), **kwargs}
    return tsw.EmbeddingTable(
        "t", 2, initializer="zeros", cluster=cluster, **kwargs
    )


def test_sessions_of_several_graphs_share_a_table(cluster):
    table = make_table(cluster)
    for steps in range(1, 3):
        with tf.Graph().as_default(), v1.Session() as session:
            ids = v1.placeholder(tf.int64, [None])
            pushed = table.push(ids, tf.ones([2, 2]))
            with tf.control_dependencies([pushed]):
                rows = table.lookup(ids)
            found = session.run(rows, {ids: [3, -4]})
        np.testing.assert_array_equal(found, -0.5 * steps * np.ones((2, 2)))
    np.testing.assert_array_equal(table.lookup([3]), [[-1.0, -1.0]])


def test_a_table_may_be_made_where_the_graph_is(cluster):
    with tf.Graph().as_default(), v1.Session() as session:
        table = make_table(cluster)
        session.run(table.push([1], [[1.0, 2.0]], learning_rate=2.0))
        found = session.run(table.lookup([1]))
    np.testing.assert_array_equal(found, [[-2.0, -4.0]])


def test_a_schedule_of_steps_that_nobody_counts_is_refused(cluster):
    table = make_table(
        cluster, optimizer=tsw.optimizers.SGD(lambda step: 1.0 / step)
    )
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="Pass `learning_rate=`"),
    ):
        table.push([1], [[1.0, 2.0]])


@pytest.mark.filterwarnings("error")
def test_a_table_may_go_while_a_graph_is_made(cluster):
    table = make_table(cluster)
    table.lookup([1])
    with tf.Graph().as_default() as graph:
        graph.finalize()
        del table
        gc.collect()
