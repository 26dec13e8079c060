"""Tables under ParameterServerStrategy; run by parameter_server_strategy_test.

In a process of its own, which connects to TensorFlow's servers for good. They
run in the same process, but each has its own devices and resources.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.support import free_ports


@pytest.fixture(scope="module")
def strategy():
    # They have to be told of each other's ports.
    ps, *workers = (f"127.0.0.1:{port}" for port in free_ports(3))
    spec = tf.train.ClusterSpec({"ps": [ps], "worker": workers})
    # They share the threads of the process and wait for each other on them.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16)
    servers = [
        tf.distribute.Server(
            spec, job_name=job, task_index=i, protocol="grpc", config=config
        )
        for job, i in (("ps", 0), ("worker", 0), ("worker", 1))
    ]
    yield tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, rpc_layer="grpc"
        )
    )
    del servers


@pytest.fixture(scope="module")
def coordinator(strategy):
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


@pytest.fixture(autouse=True)
def cluster():
    with (
        tsw.Server() as server,
        tsw.connect(f"grpc://{server.address}") as cluster,
    ):
        yield cluster


def make_layer(**kwargs):
    layer = tsw.keras.DynamicEmbedding(
        2,
        name="user",
        embeddings_initializer="zeros",
        optimizer=tsw.optimizers.SGD(1.0),
        **kwargs,
    )
    layer.build((None,))
    return layer


def make_step(strategy, layer):
    def replica_step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, training=True))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        return loss

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        return strategy.run(replica_step, args=(ids,))

    return step


def test_each_scheduled_step_is_taken_once(strategy, coordinator):
    with strategy.scope():
        layer = make_layer()
    step = make_step(strategy, layer)

    for _ in range(20):
        coordinator.schedule(step, args=(np.array([1, 2, 1]),))
    coordinator.join()

    assert layer.table.iterations == 20
    np.testing.assert_array_equal(
        layer.table.lookup([1, 2]), [[-40.0, -40.0], [-20.0, -20.0]]
    )


def test_the_worker_that_runs_a_step_opens_the_table(strategy):
    with strategy.scope():
        layer = make_layer()
        _ = layer.table.handle  # The coordinator's; must not be captured.
        graph = make_step(strategy, layer).get_concrete_function().graph

    captured = [tensor for tensor, _ in graph.captures]
    assert captured
    assert all("/job:ps/" in tensor.device for tensor in captured)
    operations = list(graph.get_operations())
    for function in graph.as_graph_def().library.function:
        operations += function.node_def
    types = {getattr(o, "type", None) or o.op for o in operations}
    assert "Tfswitch>TableHandle" in types


def test_a_new_learning_rate_reaches_the_workers(strategy, coordinator):
    with strategy.scope():
        layer = make_layer()
    step = make_step(strategy, layer)
    coordinator.schedule(step, args=(np.array([7]),))
    coordinator.join()

    layer.table.learning_rate = 0.5
    coordinator.schedule(step, args=(np.array([7]),))
    coordinator.join()

    np.testing.assert_array_equal(layer.table.lookup([7]), [[-1.5, -1.5]])
    assert step.experimental_get_tracing_count() == 1


def test_workers_look_up_without_training(strategy, coordinator):
    table = tsw.EmbeddingTable("item", 2, initializer="ones")
    table.lookup_or_create([3])

    @tf.function
    def read(ids):
        return table.lookup(ids)

    rows = coordinator.schedule(read, args=(np.array([3, 4]),)).fetch()

    np.testing.assert_array_equal(rows, [[1.0, 1.0], [0.0, 0.0]])


def test_a_table_of_the_coordinator_is_refused(strategy):
    with tsw.connect("local://"), strategy.scope():
        layer = make_layer()
        step = make_step(strategy, layer)

        with pytest.raises(ValueError, match="coordinator's process"):
            step.get_concrete_function()


def test_the_coordinator_itself_reads_in_the_scope(strategy):
    with strategy.scope():
        layer = make_layer()

        rows = layer(np.array([[5]]))

    np.testing.assert_array_equal(rows, [[[0.0, 0.0]]])
