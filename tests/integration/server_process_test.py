"""Server programs that start, stop, and die in the middle of work."""

import signal
import sys

import numpy as np
import pytest

import tfswitch as tsw
from tests.support import ServerProcess, free_ports, make_table


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


@pytest.mark.slow
def test_a_model_trains_on_after_its_server_came_back():
    import keras
    import tensorflow as tf

    with (
        # While nobody listens there, no other process may get the port.
        ServerProcess(address=f"127.0.0.1:{free_ports(1)[0]}") as server,
        tsw.connect(
            f"grpc://{server.address}",
            timeout_secs=5.0,
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
