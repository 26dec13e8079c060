"""Objects of a cluster are used by their own cluster, or refused."""

import re

import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch import export
from tfswitch._which_keras import keras


@pytest.fixture
def there(tmp_path):
    """A cluster that is not the default."""
    cluster = tsw.Cluster(f"local://{tmp_path}")
    yield cluster
    cluster.close()


@pytest.fixture(params=[0, 1], ids=["embedded", "server"])
def here(request):
    """The default cluster, with a table of two rows, `t`."""
    with running_cluster(request.param) as cluster:
        table = tsw.EmbeddingTable("t", 2)
        table.push([1, 2], [[1.0, 1.0]] * 2)
        yield cluster
        del table  # Without one that refers to it there is no table.


def make_table(cluster, name="t", kind=tsw.EmbeddingTable):
    """A table of three rows, or a dense one."""
    if kind is tsw.DenseTable:
        return kind(name, {"w": (3,)}, cluster=cluster)
    table = kind(name, 2, cluster=cluster)
    table.push([1, 2, 3], [[1.0, 1.0]] * 3)
    return table


def dense_optimizer(path, tables, cluster):
    with tf.Graph().as_default():
        weight = tf.compat.v1.get_variable("w", [2])
        tsw.train.SyncReplicasOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0),
            replicas_to_aggregate=1,
            cluster=cluster,
        ).apply_gradients(
            [(tf.ones([2]), weight)],
            table_gradients=[
                (table, tf.constant([1], tf.int64), tf.ones([1, 2]))
                for table in tables
            ],
            global_step=tf.compat.v1.train.get_or_create_global_step(),
        )


# Functions that take a cluster and tables, and methods of a cluster.
CALLS = {
    "base": lambda path, tables, cluster: export.base(
        path, tables=tables, cluster=cluster
    ),
    "schedule": lambda path, tables, cluster: export.Schedule(
        path, tables=tables, cluster=cluster
    ).export(),
    "schedule_that_connects": lambda path, tables, cluster: export.Schedule(
        path, tables=tables, cluster=lambda: cluster
    ).export(),
    "callback": lambda path, tables, cluster: tsw.keras.ExportTables(
        path, every_batches=1, tables=tables, cluster=cluster
    ).on_train_end(),
    "save": lambda path, tables, cluster: cluster.save(path, tables),
    "save_and_drop": lambda path, tables, cluster: cluster.save(
        path, drop=tables
    ),
    "restore": lambda path, tables, cluster: cluster.restore(path, tables),
    "drop": lambda path, tables, cluster: [cluster.drop(t) for t in tables],
    "sync_replicas": dense_optimizer,
}


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (CALLS[name], kind)
        for name in CALLS
        for kind in (tsw.EmbeddingTable, tsw.DenseTable)
        if name != "sync_replicas" or kind is tsw.EmbeddingTable
    ],
)
def test_a_table_of_another_cluster_is_refused(
    here, there, tmp_path, call, kind
):
    table = make_table(there, kind=kind)
    with pytest.raises(ValueError) as raised:
        call(tmp_path / "out", [table], here)
    message = str(raised.value)
    for part in ("table 't'", there.address, here.address, "Give one call"):
        assert part in message
    assert not (tmp_path / "out").exists()
    assert "t" in here.tables() and "t" in there.tables()


@pytest.mark.parametrize("name", ["base", "schedule", "callback"])
def test_tables_of_two_clusters_are_refused(here, there, tmp_path, name):
    tables = [make_table(there, "a"), make_table(here, "b")]
    for given in (tables, tables[::-1]):
        with pytest.raises(ValueError, match=r"table '[ab]' is in .*'[ab]'"):
            CALLS[name](tmp_path / "out", given, None)


@pytest.mark.parametrize("cluster", [None, "own"])
@pytest.mark.parametrize("name", ["base", "schedule", "callback"])
def test_the_rows_of_the_table_that_is_given_are_exported(
    here, there, tmp_path, name, cluster
):
    table = make_table(there)
    CALLS[name](
        tmp_path / "out",
        [table, "t"],
        None if cluster is None else there,
    )
    assert export.delta(tmp_path / "out", cluster=there).num_rows == 0
    files = list((tmp_path / "out").glob("base-*/manifest.json"))
    assert len(files) == 1
    assert re.search(r'"num_rows":\s*"?3\b', files[0].read_text())


def test_a_closed_cluster_gives_way_to_the_default_at_its_address(tmp_path):
    address = f"local://{tmp_path}"
    with tsw.connect(address) as cluster:
        table = make_table(cluster)
    with tsw.connect(address):
        assert export.base(tmp_path / "out", tables=[table]).num_rows == 3


def test_methods_of_a_cluster_take_its_own_tables(here, tmp_path):
    table = make_table(here, "own")
    assert here.save(tmp_path / "c", [table])["tables"] == ["own"]
    assert here.restore(tmp_path / "c", [table])["num_rows"] == 3
    here.drop(table)
    assert "own" not in here.tables()


@pytest.mark.parametrize("tables", ["t", [3], [""], [None], [object()]])
def test_what_is_no_table_is_named(here, tmp_path, tables):
    for call in (
        lambda: export.base(tmp_path, tables=tables),
        lambda: here.save(tmp_path, tables),
        lambda: here.restore(tmp_path, tables),
    ):
        with pytest.raises(ValueError, match="`tables` must"):
            call()


def two_tables(here, there):
    first, second = make_table(here, "a"), make_table(there, "b")
    ids = keras.Input((1,), dtype="int64")
    embed = tsw.keras.DynamicEmbedding
    parts = [embed(2, table=table)(ids) for table in (first, second)]
    return keras.Model(ids, keras.layers.Concatenate()(parts))


def test_a_model_of_two_clusters_is_refused(embedded, there, tmp_path):
    model = two_tables(embedded, there)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"table 'b' is in .*table 'a' is in"):
        tsw.saved_model.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"table '[ab]' is in .*'[ab]' is in"):
        model.fit(
            tf.ones([2, 1], tf.int64),
            tf.ones([2, 1, 4]),
            callbacks=[
                tsw.keras.callbacks.BackupAndRestore(tmp_path / "c", every=1)
            ],
            verbose=0,
        )
