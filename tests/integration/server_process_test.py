"""Server programs that start, stop, and die in the middle of work."""

import signal
import sys
import threading

import numpy as np
import pytest

import tfswitch as tsw
from tests.python.worker_threads import Call
from tests.support import ServerProcess

AWAY = (ConnectionError, TimeoutError)


def make_table(name="user"):
    return tsw.EmbeddingTable(
        name, 2, initializer="ones", optimizer=tsw.optimizers.SGD(1.0)
    )


@pytest.mark.slow
def test_python_serves_as_the_program_does():
    with (
        ServerProcess(
            command=(sys.executable, "-m", "tfswitch", "serve"),
            shard_index=0,
            num_shards=2,
        ) as zero,
        ServerProcess(shard_index=1, num_shards=2) as one,
        tsw.connect(f"grpc://{zero.address},{one.address}") as cluster,
    ):
        make_table().lookup_or_create(np.arange(100))

        assert cluster.num_shards == 2
        zero.signal(signal.SIGTERM)
        assert zero.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_server_gracefully(number):
    with ServerProcess() as server:
        with tsw.connect(f"grpc://{server.address}"):
            make_table().lookup_or_create([1])

            server.signal(number)

            assert server.wait() == 0


def test_a_dead_server_is_named_and_a_new_one_is_taken():
    with (
        ServerProcess(shard_index=0, num_shards=2) as zero,
        ServerProcess(shard_index=1, num_shards=2) as one,
        tsw.connect(
            f"grpc://{zero.address},{one.address}", timeout_secs=2.0
        ) as cluster,
    ):
        table = make_table()
        ids = np.arange(100)
        table.push(ids, np.ones((100, 2)))
        one.kill()

        calls = [
            Call(table.lookup, ids),
            Call(table.lookup_or_create, ids),
            Call(table.push, ids, np.ones((100, 2))),
            Call(table.assign, ids, np.ones((100, 2))),
            Call(table.remove, ids),
            Call(table.size),
            Call(table.export_rows),
            Call(cluster.tables),
        ]
        for call in calls:
            with pytest.raises(AWAY, match=one.address):
                call.result()

        with ServerProcess(
            address=one.address, shard_index=1, num_shards=2
        ) as again:
            assert again.address == one.address
            # The new server is empty. Rows are made again if the user says so.
            with pytest.raises(OSError, match="shard 1 has lost table"):
                table.lookup_or_create(ids)
            cluster.reset_lost_tables()
            table.lookup_or_create(ids)
            assert table.size() == 100
            table.assign(ids, np.zeros((100, 2)))
            table.push(ids, np.ones((100, 2)))
            np.testing.assert_array_equal(
                table.lookup(ids), np.full((100, 2), -1.0)
            )


def test_a_server_killed_in_mid_call_fails_calls_within_the_deadline():
    with (
        ServerProcess() as server,
        tsw.connect(
            f"grpc://{server.address}",
            timeout_secs=2.0,
            on_lost_tables="recreate",
        ),
    ):
        table = make_table()
        busy = threading.Event()
        ids = np.arange(20_000)

        def work():
            while True:
                table.push(ids, np.ones((20_000, 2)))
                busy.set()

        calls = [Call(work) for _ in range(2)]
        assert busy.wait(60)
        server.kill()
        for call in calls:
            with pytest.raises(AWAY, match=server.address):
                call.result()

        with ServerProcess(address=server.address):
            table.push([1], [[1.0, 1.0]])
            np.testing.assert_array_equal(table.lookup([1]), [[0.0, 0.0]])


def test_a_server_that_hangs_times_out():
    with (
        ServerProcess() as server,
        tsw.connect(f"grpc://{server.address}", timeout_secs=2.0),
    ):
        table = make_table()
        table.assign([1], [[3.0, 4.0]])
        server.signal(signal.SIGSTOP)

        with pytest.raises(AWAY, match=server.address):
            table.lookup([1])

        server.signal(signal.SIGCONT)
        np.testing.assert_array_equal(table.lookup([1]), [[3.0, 4.0]])


@pytest.mark.slow
def test_a_model_trains_on_after_its_server_came_back():
    import keras
    import tensorflow as tf

    with (
        ServerProcess() as server,
        tsw.connect(
            f"grpc://{server.address}",
            timeout_secs=2.0,
            on_lost_tables="recreate",
        ),
    ):
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int64"),
                tsw.keras.DynamicEmbedding(4, name="emb"),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
        ids, targets = np.arange(12).reshape(4, 3), np.ones((4, 1))
        model.train_on_batch(ids, targets)
        server.kill()

        with pytest.raises(
            (tf.errors.UnavailableError, tf.errors.DeadlineExceededError),
            match=server.address,
        ):
            model.train_on_batch(ids, targets)

        with ServerProcess(address=server.address):
            model.train_on_batch(ids, targets)
            assert model.get_layer("emb").table.size() == 12
