"""connect, the default cluster, and checkpoints of whole clusters."""

import json
import re
import threading

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.python.worker_threads import wait_for_stderr
from tests.support import RestartableServers
from tfswitch import cluster as cluster_lib


@pytest.mark.parametrize(
    "address",
    ["", "localhost:7077", "http://a:1", "grpc:/a:1", "local:", None, 7077],
)
def test_a_bad_address_names_the_accepted_forms(address):
    with pytest.raises(ValueError, match=r'"local://".*"grpc://') as error:
        tsw.connect(address)

    assert f"Received: address={address!r}" in str(error.value)
    assert cluster_lib._default is None


@pytest.mark.parametrize(
    "address",
    [
        "grpc://",
        "grpc://host",
        "grpc://host:port",
        "grpc://a:1,",
        "grpc://a b:1",
    ],
)
def test_a_bad_server_address_is_named(address):
    with pytest.raises(ValueError, match=r"address '"):
        tsw.connect(address)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), "5", True])
def test_a_bad_timeout_is_named(timeout):
    with pytest.raises(ValueError, match="Received: timeout_secs="):
        tsw.connect("local://", timeout_secs=timeout)


def test_a_bad_answer_to_lost_tables_is_named():
    with pytest.raises(ValueError, match="`on_lost_tables`"):
        tsw.connect("local://", on_lost_tables="again")


def test_the_environment_has_a_timeout(monkeypatch):
    monkeypatch.setenv("TFSWITCH_TIMEOUT_SECS", "2.5")
    with tsw.Cluster("local://timeout") as cluster:
        assert cluster.timeout_secs == 2.5
    with tsw.Cluster("local://timeout", timeout_secs=1.0) as cluster:
        assert cluster.timeout_secs == 1.0
    for bad in ("0", "-1", "inf", "soon"):
        monkeypatch.setenv("TFSWITCH_TIMEOUT_SECS", bad)
        with pytest.raises(ValueError, match=f"TFSWITCH_TIMEOUT_SECS='{bad}'"):
            tsw.Cluster("local://timeout")


@pytest.mark.parametrize("tf_config", [None, {"cluster": {"worker": ["w:1"]}}])
def test_without_servers_tables_live_in_this_process(monkeypatch, tf_config):
    if tf_config:
        monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config))

    table = tsw.EmbeddingTable("of_the_default_cluster", 2)

    assert table.cluster.address == "local://"
    assert not table.cluster.is_remote
    assert table.cluster.num_shards == 1
    table.cluster.drop(table.name)


def test_tf_config_names_the_default_servers(monkeypatch):
    with tsw.Server() as server:
        monkeypatch.setenv(
            "TF_CONFIG",
            json.dumps(
                {"cluster": {"ps": [server.address], "worker": ["w:1"]}}
            ),
        )
        cluster = cluster_lib.default_cluster()

        assert cluster.address == f"grpc://{server.address}"
        assert cluster.is_remote
        assert cluster_lib.default_cluster() is cluster
        cluster.close()


def test_a_context_brings_the_former_default_back():
    outer = tsw.connect("local://outer")
    with tsw.connect("local://inner") as inner:
        assert cluster_lib.default_cluster() is inner
        assert tsw.EmbeddingTable("t", 2).cluster is inner

    assert inner.closed
    assert cluster_lib.default_cluster() is outer


def test_a_closed_default_is_no_default():
    tsw.connect("local://closed").close()

    assert cluster_lib.default_cluster().address == "local://"


def test_a_closed_cluster_is_named_and_its_tables_go_on(cluster):
    table = tsw.EmbeddingTable("user", 2)
    table.assign([1], [[1.0, 2.0]])

    cluster.close()

    for call in (
        cluster.tables,
        cluster.stats,
        lambda: tsw.EmbeddingTable("user", 2, cluster=cluster),
    ):
        with pytest.raises(RuntimeError, match=f"{cluster.address}.*closed"):
            call()
    assert table.size() == 1
    np.testing.assert_array_equal(table.lookup([1]), [[1.0, 2.0]])


def test_a_failed_connect_leaves_the_default():
    cluster = tsw.connect("local://stays")

    with pytest.raises(ValueError):
        tsw.connect("nowhere")

    assert cluster_lib.default_cluster() is cluster


def test_embedded_clusters_of_one_name_share_tables():
    one = tsw.connect("local://shared")
    two = tsw.connect("local://shared")
    other = tsw.connect("local://not_shared")
    table = tsw.EmbeddingTable("t", 2, cluster=one)
    table.assign([1], [[1.0, 2.0]])

    assert two.tables() == ["t"]
    assert other.tables() == []
    assert tsw.EmbeddingTable("t", 2, cluster=two).size() == 1


def test_threads_that_ask_first_get_one_default():
    clusters = []
    threads = [
        threading.Thread(
            target=lambda: clusters.append(cluster_lib.default_cluster())
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(clusters) == 8
    assert len({id(cluster) for cluster in clusters}) == 1


def test_a_unix_socket_is_an_address(tmp_path):
    path = tmp_path / "socket"
    with (
        tsw.Server(f"unix:{path}"),
        tsw.connect(f"grpc+unix://{path}") as cluster,
    ):
        table = tsw.EmbeddingTable("t", 2)
        table.assign([1], [[1.0, 2.0]])

        assert cluster.is_remote
        np.testing.assert_array_equal(table.lookup([1]), [[1.0, 2.0]])


def test_tables_and_stats_list_all_tables(cluster):
    assert cluster.tables() == []
    assert cluster.stats() == {}

    tables = [tsw.EmbeddingTable(name, 2) for name in "ba"]
    tables[0].lookup_or_create([1, 2, 3])

    assert cluster.tables() == ["a", "b"]
    stats = cluster.stats()
    assert re.fullmatch(
        r"\{'a': 0 rows, [\d.]+ .iB, 'b': 3 rows, [\d.]+ .iB\}", str(stats)
    )
    assert stats["a"]["num_rows"] == 0
    assert stats["b"]["num_rows"] == 3


def test_servers_in_the_wrong_order_are_refused():
    with (
        tsw.Server(shard_index=0, num_shards=2) as zero,
        tsw.Server(shard_index=1, num_shards=2) as one,
    ):
        with pytest.raises(RuntimeError, match=f"{one.address} is shard 1"):
            tsw.connect(f"grpc://{one.address},{zero.address}")
        with pytest.raises(RuntimeError, match=r"is shard 0 .* all 2 servers"):
            tsw.connect(f"grpc://{zero.address}")
        # A list as people write it is the same cluster.
        with tsw.connect(f"grpc://{zero.address}, {one.address} ") as cluster:
            assert cluster.address == f"grpc://{zero.address},{one.address}"


# --- Checkpoints ------------------------------------------------------------


def fill(num_rows=2000, dim=3):
    """Makes a table with rows and optimizer state; returns what it holds."""
    table = tsw.EmbeddingTable(
        "user", dim, optimizer=tsw.optimizers.Adam(0.1), seed=5
    )
    ids = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, num_rows)
    table.push(ids, np.random.default_rng(5).normal(size=(num_rows, dim)))
    return table, ids


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1)])
def test_a_checkpoint_restores_to_any_number_of_servers(
    tmp_path, before, after
):
    gradients = np.random.default_rng(6).normal(size=(2000, 3))
    with running_cluster(before) as cluster:
        table, ids = fill()
        report = cluster.save(tmp_path / "checkpoint")
        saved = table.lookup(ids).numpy()
        table.push(ids, gradients)
        stepped = table.lookup(ids).numpy()
    assert report == {"tables": ["user"], "num_rows": 2000, "save": 1}

    with running_cluster(after) as cluster:
        assert cluster.restore(tmp_path / "checkpoint") == report
        assert cluster.tables() == ["user"]
        table = tsw.EmbeddingTable(
            "user", 3, optimizer=tsw.optimizers.Adam(0.1), seed=5
        )
        assert table.size() == 2000
        np.testing.assert_array_equal(table.lookup(ids), saved)
        # The optimizer state came with the rows.
        table.push(ids, gradients)
        np.testing.assert_array_equal(table.lookup(ids), stepped)


def test_one_table_is_saved_and_restored_alone(cluster, tmp_path):
    one, two = tsw.EmbeddingTable("one", 1), tsw.EmbeddingTable("two", 1)
    one.assign([1], [[1.0]])
    two.assign([1], [[2.0]])
    cluster.save(tmp_path)
    one.assign([1], [[3.0]])
    two.assign([1], [[3.0]])

    report = one.restore(tmp_path)

    assert report == {"tables": ["one"], "num_rows": 1, "save": 1}

    np.testing.assert_array_equal(one.lookup([1]), [[1.0]])
    np.testing.assert_array_equal(two.lookup([1]), [[3.0]])


def test_anyone_can_read_a_checkpoint_with_safetensors(cluster, tmp_path):
    table, ids = fill(num_rows=100)
    cluster.save(tmp_path)
    expected = dict(zip(ids.tolist(), table.lookup(ids).numpy(), strict=True))

    found = {}
    for path in tmp_path.rglob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path)
        keys = next(t for t in tensors.values() if t.dtype == np.int64)
        rows = next(
            t
            for t in tensors.values()
            if t.dtype == np.float32 and t.ndim == 2 and t.shape[1] == 3
        )
        found.update(zip(keys.tolist(), rows, strict=True))

    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(found[key], row)


def test_the_save_that_was_restored_is_said(embedded, tmp_path):
    table = tsw.EmbeddingTable("user", 1)
    for value in (1.0, 2.0, 3.0):
        table.assign([1], [[value]])
        report = embedded.save(tmp_path, keep=3)
    assert report["save"] == 3

    assert embedded.restore(tmp_path, save=1)["save"] == 1
    np.testing.assert_array_equal(table.lookup([1]), [[1.0]])
    (tmp_path / "manifest.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"restored save 2 .*manifest"):
        report = embedded.restore(tmp_path)
    assert report["save"] == 2
    np.testing.assert_array_equal(table.lookup([1]), [[2.0]])
    with pytest.raises(KeyError, match="has no save 7; it has: 2, 1"):
        embedded.restore(tmp_path, save=7)
    for bad in (0, True, "1"):
        with pytest.raises(ValueError, match="`save`"):
            embedded.restore(tmp_path, save=bad)
        with pytest.raises(ValueError, match="`keep`"):
            embedded.save(tmp_path, keep=bad)


def test_tables_of_the_save_before_are_dropped_only_if_named(
    embedded, tmp_path
):
    one, two = (tsw.EmbeddingTable(name, 1) for name in ("one", "two"))
    embedded.save(tmp_path)
    two.drop()

    with pytest.raises(RuntimeError, match=r"'two'.*`drop`"):
        embedded.save(tmp_path)

    assert embedded.save(tmp_path, drop=["two"])["tables"] == [one.name]


def test_a_save_says_which_freed_tables_it_lacks(embedded, tmp_path, capfd):
    _kept = tsw.EmbeddingTable("kept", 2)
    tsw.EmbeddingTable("gone", 2).lookup_or_create([1])

    embedded.save(tmp_path)

    wait_for_stderr(capfd, "table 'gone' had 1 rows")


def test_a_save_does_not_replace_a_checkpoint_by_what_is_left(tmp_path):
    with (
        RestartableServers(tmp_path) as servers,
        tsw.connect(servers.address) as cluster,
    ):
        table, ids = fill()
        cluster.save("checkpoint")
        before = table.lookup(ids).numpy()
        servers.restart(1)

        lost = r"shard 1 has lost table 'user' since .*reset_lost_tables"
        with pytest.raises(tf.errors.DataLossError, match=lost):
            tf.function(table.lookup)(ids)
        for call in (
            lambda: table.lookup(ids),
            lambda: table.push(ids, np.ones((2000, 3))),
            table.size,
            table.export_rows,
            lambda: cluster.save("checkpoint"),
            lambda: fill(),
        ):
            with pytest.raises(OSError, match=lost):
                call()
        assert "shard 1" in cluster.stats()["user"]["lost"]

        assert cluster.restore("checkpoint")["num_rows"] == 2000
        np.testing.assert_array_equal(table.lookup(ids), before)
        assert cluster.stats()["user"]["lost"] == ""


def test_lost_tables_go_on_when_they_are_reset(tmp_path):
    with (
        RestartableServers(tmp_path) as servers,
        tsw.connect(servers.address) as cluster,
    ):
        table, ids = fill()
        assert table.size() == 2000
        servers.restart(1)

        (report,) = cluster.reset_lost_tables()

        assert report["table"] == "user"
        assert report["shards"] == [1]
        assert table.size() == 2000 - report["num_lost_rows"]
        table.push(ids, np.ones((2000, 3)))
        assert table.size() == 2000
        assert cluster.reset_lost_tables() == []


def test_servers_write_and_read_only_below_their_folder(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "mine.safetensors").write_text("mine")
    with (
        tsw.Server(checkpoint_root=inside) as server,
        tsw.connect(f"grpc://{server.address}") as cluster,
    ):
        fill(num_rows=10)
        for path in (outside, "../outside", "/"):
            for call in (cluster.save, cluster.restore):
                with pytest.raises(
                    PermissionError, match="--checkpoint_root"
                ) as raised:
                    call(path)
                assert "stay" not in str(raised.value)
        assert cluster.save("a/b")["num_rows"] == 10
        assert cluster.restore(inside / "a" / "b")["num_rows"] == 10
    assert [path.name for path in outside.iterdir()] == ["mine.safetensors"]


def test_what_is_not_there_is_named(cluster, tmp_path):
    _user = tsw.EmbeddingTable("user", 1)
    cluster.save(tmp_path)

    with pytest.raises(KeyError, match=r"item.*'user'"):
        cluster.save(tmp_path, ["item"])
    with pytest.raises(KeyError, match="item"):
        cluster.restore(tmp_path, ["item"])
    with pytest.raises(KeyError, match="nothing_here"):
        cluster.restore(tmp_path / "nothing_here")


def test_a_name_in_place_of_names_is_refused(embedded, tmp_path):
    with pytest.raises(ValueError, match=r"write \['user'\]"):
        embedded.save(tmp_path, "user")
