"""Models that look up on servers: what they serve, and when servers go."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.programs import HANG_SECS, ROOT
from tests.python.worker_threads import Call, in_threads
from tests.support import RestartableServers
from tfswitch._which_keras import IS_LEGACY, keras

IDS = np.array([1, 2, 3, 3, 10**12, -4])


@pytest.fixture
def servers():
    with RestartableServers() as servers:
        yield servers


@pytest.fixture
def connected(servers):
    with tsw.connect(servers.address, timeout_secs=10.0) as cluster:
        yield cluster


@pytest.fixture
def table(connected):
    table = tsw.EmbeddingTable("t", 4)
    table.assign(np.arange(100), np.arange(400.0).reshape(100, 4) / 7)
    return table


def save(table, path, **kwargs):
    """Saves a table's lookup."""
    arguments = {"deadline_secs": 10.0, **kwargs}
    tsw.saved_model.save(
        lambda ids: {"embeddings": table.lookup(ids)},
        path,
        mode="remote",
        inputs={"ids": tf.TensorSpec([None], tf.int64)},
        **arguments,
    )
    return path


def serve(loaded, ids=IDS):
    signature = loaded.signatures["serving_default"]
    return signature(ids=tf.constant(ids, tf.int64))["embeddings"].numpy()


def num_rows(cluster):
    return {name: s["num_rows"] for name, s in cluster.stats().items()}


def assert_same(scores, expected):
    """The same bits; with tf_keras, which compiles other graphs, nearly."""
    if IS_LEGACY:
        np.testing.assert_allclose(scores, expected, rtol=1e-6)
    else:
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("cache_rows", [0, 10])
def test_a_loaded_model_gives_the_bits_of_predict(
    connected, tmp_path, cache_rows
):
    city = keras.Input((2,), dtype="string", name="city")
    user = keras.Input((), dtype="int64", name="user")
    embedded = tsw.keras.DynamicEmbeddings(
        {
            "city": tsw.keras.DynamicEmbedding(3, combiner="sum", name="city"),
            "user": tsw.keras.DynamicEmbedding(2, name="user"),
        }
    )({"city": city, "user": user})
    x = keras.layers.Concatenate()(
        [
            embedded["city"],
            embedded["user"],
            tsw.keras.DynamicEmbedding(4, name="alone")(user),
        ]
    )
    x = keras.layers.Dense(8, "relu")(x)
    score = keras.layers.Dense(1, "sigmoid", name="score")(x)
    model = keras.Model({"city": city, "user": user}, score)
    model.compile("adam", "binary_crossentropy")
    random = np.random.default_rng(0)
    inputs = {
        "city": tf.constant(random.choice(["a", "b", "c", "d"], (64, 2))),
        "user": tf.constant(random.integers(0, 30, 64)),
    }
    model.fit(
        tf.data.Dataset.from_tensor_slices(
            (inputs, random.integers(0, 2, 64))
        ).batch(16),
        verbose=0,
    )
    # Also ids that were never trained.
    inputs = {"city": inputs["city"][::-1], "user": inputs["user"] * 3 - 1}
    expected = model.predict(tf.data.Dataset.from_tensors(inputs), verbose=0)
    before = num_rows(connected)

    tsw.saved_model.save(
        model, tmp_path / "1", mode="remote", cache_rows=cache_rows
    )
    loaded = tf.saved_model.load(tmp_path / "1")

    for _ in range(3):
        assert_same(
            loaded.signatures["serving_default"](**inputs)["score"], expected
        )
    assert_same(loaded.serve(inputs), expected)
    assert num_rows(connected) == before
    state = tsw.saved_model.state(tmp_path / "1")
    assert (state.mode, state.addresses) == ("remote", connected.address)
    assert state.cached_rows <= cache_rows
    assert (state.cache_hits > 0) == (cache_rows > 0)


def test_a_server_that_is_away_is_named_within_the_deadline(
    servers, table, tmp_path
):
    path = save(table, tmp_path / "1", deadline_secs=2.0)
    loaded = tf.saved_model.load(path)
    away = servers.addresses[1]
    servers.stop(1)

    with pytest.raises(tf.errors.UnavailableError) as raised:
        serve(loaded)
    assert f"shard 1 ({away}) did not answer within 2s" in str(raised.value)
    assert "TFSWITCH_SERVING_ADDRESSES" in str(raised.value)
    state = tsw.saved_model.state(path)
    assert state.refused == 1 and away in state.error


def test_a_lookup_is_repeated_until_the_server_is_there(
    servers, table, tmp_path
):
    """The port is free for a while: each call until then is refused."""
    path = save(table, tmp_path / "1", deadline_secs=60.0)
    loaded = tf.saved_model.load(path)
    expected = table.lookup(IDS).numpy()
    checkpoint = str(tmp_path / "checkpoint")
    tsw.cluster.default_cluster().save(checkpoint)
    servers.stop(1)
    lookup = Call(serve, loaded)
    assert not lookup.wait(0.3)
    servers.start(1)
    # It came through to the new server, which has no tables, and not to the
    # end of its time. Who serves does not make them.
    with pytest.raises(
        tf.errors.DataLossError, match=r"lost table 't'.*estore"
    ):
        lookup.result()
    with tsw.connect(servers.address) as again:
        again.restore(checkpoint)
    np.testing.assert_array_equal(serve(loaded), expected)
    assert tsw.saved_model.state(path).error is None


def test_many_lookups_at_once_do_not_hold_each_other_up(table, tmp_path):
    """More of them than TensorFlow has threads, in one step and in many."""

    def many(ids):
        return {
            "embeddings": tf.concat(
                [table.lookup(ids + i) for i in range(40)], axis=1
            )
        }

    tsw.saved_model.save(
        many,
        tmp_path / "1",
        mode="remote",
        inputs={"ids": tf.TensorSpec([None], tf.int64)},
        cache_rows=20,
        deadline_secs=60.0,
    )
    loaded = tf.saved_model.load(tmp_path / "1")
    ids = np.arange(20)
    expected = serve(loaded, ids)
    np.testing.assert_array_equal(
        expected, many(tf.constant(ids))["embeddings"]
    )
    calls = [lambda: [serve(loaded, ids) for _ in range(3)]] * 16
    results = in_threads(*calls, timeout_secs=HANG_SECS)
    assert np.shape(results) == (16, 3, *expected.shape)
    assert np.all(results == expected)


def test_tables_are_checked_when_it_is_loaded(
    connected, table, tmp_path, monkeypatch
):
    path = save(table, tmp_path / "1")
    with RestartableServers() as others:
        monkeypatch.setenv("TFSWITCH_SERVING_ADDRESSES", others.address)
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="no table 't' at "
        ):
            tf.saved_model.load(path)
    monkeypatch.setenv("TFSWITCH_SERVING_ADDRESSES", "local://here")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="no servers are there"
    ):
        tf.saved_model.load(path)


def test_there_is_nothing_to_refresh(table, tmp_path):
    path = save(table, tmp_path / "1")
    loaded = tf.saved_model.load(path)
    for call in (
        tsw.saved_model.refresh,
        tsw.saved_model.resume,
        lambda path: tsw.saved_model.watch(path, 1),
        lambda path: tsw.saved_model.roll_back(path, 1),
    ):
        with pytest.raises(RuntimeError, match="looks up on servers"):
            call(path)
    for publish in (tsw.export.base, tsw.export.delta):
        with pytest.raises(ValueError, match=r"has no exports.*embedded"):
            publish(path)
    del loaded


def test_what_is_served_where_it_was_not_trained(table, servers, tmp_path):
    with tsw.connect(f"local://{tmp_path}"):
        local = tsw.EmbeddingTable("t", 4)
        with pytest.raises(ValueError, match=r"in this process.*addresses"):
            save(local, tmp_path / "1")
        assert not (tmp_path / "1").exists()
        path = save(local, tmp_path / "1", addresses=servers.address)
    np.testing.assert_array_equal(
        serve(tf.saved_model.load(path)), table.lookup(IDS).numpy()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"addresses": "a:1"}, "addresses='a:1'"),
        ({"addresses": "local://x"}, "addresses='local://x'"),
        ({"addresses": "grpc://a"}, "addresses='grpc://a'"),
        ({"addresses": "grpc://a:1,"}, "addresses='grpc://a:1,'"),
        ({"addresses": "grpc+unix://a"}, r"addresses='grpc\+unix://a'"),
        ({"addresses": 3}, "addresses=3"),
        ({"addresses": "grpc://a:xyz"}, "'xyz' is no port in 'a:xyz'"),
        ({"addresses": "grpc://a:99999"}, "'99999' is no port"),
        ({"addresses": "grpc://a:0, b:2"}, "'0' is no port"),
        ({"addresses": "grpc://::1:7"}, "needs brackets"),
        ({"addresses": "grpcs://a:1,grpc://b:2"}, "more than one scheme"),
        ({"addresses": "grpc+unix:///" + 107 * "a"}, "longer than 107 bytes"),
        ({"deadline_secs": 0}, "deadline_secs=0"),
        ({"deadline_secs": float("nan")}, "deadline_secs=nan"),
        ({"deadline_secs": "1"}, "deadline_secs='1'"),
        ({"cache_rows": -1}, "cache_rows=-1"),
        ({"cache_rows": 1.5}, "cache_rows=1.5"),
        ({"cache_secs": 0}, "cache_secs=0"),
        ({"row_format": "int8"}, "row_format='int8'"),
        (
            {"mode": "embedded", "cache_rows": 3},
            r"are of models with.*cache_rows=3",
        ),
    ],
)
def test_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.saved_model.save(
            lambda ids: ids, tmp_path / "1", **{"mode": "remote", **arguments}
        )


@pytest.mark.parametrize(
    "address",
    [
        "grpc://a:1,b.c:65535",
        "grpc://[::1]:7077",
        "grpc://unix:/run/ps",
        "grpc+unix:///run/ps0,/run/ps1",
    ],
)
def test_addresses_that_can_be_connected_to_are_taken(table, tmp_path, address):
    path = save(table, tmp_path / "1", addresses=address)
    contents = json.loads((path / tsw.export._MODEL_FILE).read_text())
    assert contents["remote"]["addresses"] == address


def test_the_file_says_where_the_rows_are(table, tmp_path):
    path = save(
        table, tmp_path / "1", cache_rows=7, cache_secs=2, addresses=None
    )
    contents = json.loads((path / tsw.export._MODEL_FILE).read_text())
    assert len(contents.pop("id")) == 16
    assert contents == {
        "format": "tfswitch-model",
        "version": 2,
        "tables": {"t": 4},
        "remote": {
            "addresses": tsw.cluster.default_cluster().address,
            "deadline_secs": 10.0,
            "cache_rows": 7,
            "cache_secs": 2,
        },
    }


def test_cpp_serves_the_same_bits(table, tmp_path):
    build = os.environ.get("TFSWITCH_BUILD_DIR")
    program = Path(build or ROOT / "build") / "tests/cc/ops/serve_saved_model"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    path = save(table, tmp_path / "1", addresses="grpc://127.0.0.1:1")
    command = [
        program,
        tsw.ops.library_path(),
        path,
        *map(str, IDS),
    ]
    address = tsw.cluster.default_cluster().address
    served = subprocess.run(
        command,
        check=True,
        timeout=HANG_SECS,
        capture_output=True,
        text=True,
        env={**os.environ, "TFSWITCH_SERVING_ADDRESSES": address},
    )
    np.testing.assert_array_equal(
        np.array(served.stdout.split(), np.float32).reshape(-1, 4),
        table.lookup(IDS).numpy(),
    )

    env = {**os.environ, "TFSWITCH_SERVING_DEADLINE_SECS": "0.5"}
    refused = subprocess.run(
        command, timeout=HANG_SECS, capture_output=True, text=True, env=env
    )
    assert refused.returncode == 1
    assert "127.0.0.1:1) did not answer within 500ms" in refused.stderr
