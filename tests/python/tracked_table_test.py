"""Tables in `tf.train.Checkpoint`, alone and in models."""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch._which_keras import keras


def make_table(name="user/x", dim=2, **arguments):
    return tsw.EmbeddingTable(name, dim, optimizer="adagrad", **arguments)


def rows_of(table):
    ids, values, slots = table._export_with_slots()
    order = np.argsort(ids)
    return (*(x[order].tolist() for x in (ids, values, slots)),)


def test_a_manager_brings_the_newest_rows_back_and_older_ones(
    cluster, monkeypatch, tmp_path
):
    saves = []
    save = cluster.save
    monkeypatch.setattr(
        cluster, "save", lambda *a, **k: saves.append(a) or save(*a, **k)
    )
    table = make_table()
    table.set_checkpoint_folder(tmp_path / "user")
    checkpoint = tf.train.Checkpoint(table=table, step=tf.Variable(0))
    manager = tf.train.CheckpointManager(checkpoint, tmp_path / "m", 2)
    assert manager.restore_or_initialize() is None
    states = {}
    for step in (1, 2, 3):
        table.push([step, 0], [[1.0, 2.0], [-1.0, 0.5]])
        checkpoint.step.assign(step)
        states[manager.save()] = rows_of(table)
    table.push([9, 0], [[1.0, 1.0], [1.0, 1.0]])

    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert rows_of(table) == states[manager.latest_checkpoint]
    assert (table.iterations, int(checkpoint.step)) == (3, 3)
    # One for each, and none by a restore.
    assert len(saves) == (3 if cluster.is_remote else 0)
    checkpoint.restore(manager.checkpoints[0]).assert_consumed()
    assert rows_of(table) == states[manager.checkpoints[0]]
    assert len(manager.checkpoints) == 2


def test_a_save_that_servers_have_removed_is_named(tmp_path):
    with running_cluster(1):
        table = make_table()
        table.set_checkpoint_folder(tmp_path / "user", keep=1)
        checkpoint = tf.train.Checkpoint(table=table)
        table.push([1], [[1.0, 2.0]])
        first = checkpoint.save(str(tmp_path / "c"))
        checkpoint.save(str(tmp_path / "c"))

        with pytest.raises(
            KeyError, match=r"save 1 in '.*user'.*set_checkpoint_folder"
        ):
            checkpoint.restore(first)


def test_rows_of_a_process_go_to_servers(tmp_path):
    with running_cluster(0):
        table = make_table()
        table.push([1, 5], [[1.0, 2.0], [3.0, 4.0]])
        expected = rows_of(table)
        path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))

    with running_cluster(2):
        table = make_table()
        tf.train.Checkpoint(table=table).restore(path)
        assert rows_of(table) == expected


def test_rows_of_another_dim_are_refused_by_name(tmp_path):
    with running_cluster(0):
        table = make_table()
        table.push([1], [[1.0, 2.0]])
        path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    with running_cluster(0):
        table = make_table(dim=3)
        with pytest.raises(ValueError, match=r"'user/x'.*4 floats.*have 6"):
            tf.train.Checkpoint(table=table).restore(path)


def make_model(folder):
    ids = keras.Input((2,), dtype="int64")
    # Layers that share a table, a table of its own, and features.
    layers = [
        tsw.keras.DynamicEmbedding(2, name="a", table="shared"),
        tsw.keras.DynamicEmbedding(2, name="b", table="shared"),
        tsw.keras.DynamicEmbedding(4, name="own"),
    ]
    features = tsw.keras.DynamicEmbeddings({"f": {"output_dim": 3}}, name="of")
    parts = [layer(ids) for layer in layers] + [features({"f": ids})["f"]]
    output = keras.layers.Dense(1)(
        keras.layers.Flatten()(keras.layers.Concatenate()(parts))
    )
    model = keras.Model(ids, output)
    model.compile("adagrad", "mse", run_eagerly=True)
    return model, [*layers, *features.features.values()]


def test_a_model_that_holds_layers_carries_their_tables(cluster, tmp_path):
    def fit(model):
        ids = np.arange(16).reshape(8, 2) % 11
        model.fit(ids, np.ones(8), verbose=0, shuffle=False)

    def tables(layers):
        found = {layer.table.name: layer.table for layer in layers}
        for layer in layers:
            layer.table.set_checkpoint_folder(tmp_path / layer.table.name)
        return found

    model, layers = make_model(tmp_path)
    fit(model)
    before = {name: rows_of(t) for name, t in tables(layers).items()}
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "c"))
    if cluster.is_remote:
        assert (tmp_path / "shared" / "manifest.json").exists()
    fit(model)
    after = {name: rows_of(t) for name, t in tables(layers).items()}

    if not cluster.is_remote:  # Their tables are of the layers before.
        for table in tables(layers).values():
            table.drop()
    restored, its_layers = make_model(tmp_path)
    tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(
        path
    ).expect_partial()
    assert {n: rows_of(t) for n, t in tables(its_layers).items()} == before
    fit(restored)
    assert {n: rows_of(t) for n, t in tables(its_layers).items()} == after


@pytest.mark.parametrize(
    "arguments", [{"path": ""}, {"path": "x", "keep": 0}], ids=str
)
def test_bad_arguments_are_named(embedded, arguments):
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        make_table().set_checkpoint_folder(**arguments)
