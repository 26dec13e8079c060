"""Tables with `when_full="disk"`, whose least used rows move to disk."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.support import NotServingError, ServerProcess, make_table

MIB = 2**20


@pytest.fixture
def local(tmp_path: Path) -> Iterator[tsw.Cluster]:
    with tsw.connect(
        f"local://{tmp_path.name}",
        max_memory=12 * MIB,
        cold_dir=tmp_path / "cold",
    ) as cluster:
        yield cluster


def zipf_ids(count: int, seed: int) -> np.ndarray:
    """Half of them from a few popular ones."""
    random = np.random.default_rng(seed)
    ids = (random.zipf(1.2, count) - 1) % 150_000
    return np.where(
        random.random(count) < 0.5, ids, random.integers(0, 150_000, count)
    )


def train(name: str, prefetch: bool, **settings: Any) -> list[np.ndarray]:
    """Trains a model; returns its losses, predictions and rows."""
    keras.utils.set_random_seed(1)
    layer = tsw.keras.DynamicEmbedding(16, name=name, seed=3, **settings)
    model = keras.Sequential(
        [keras.Input((4,), dtype="int64"), layer, keras.layers.Flatten()]
    )
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    ids = zipf_ids(200 * 2048, 1).reshape(-1, 4)
    y = (ids.sum(1) % 7).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((ids, y)).batch(512)
    if prefetch:
        data = tsw.data.prefetch_embeddings(data, layer)
    losses = model.fit(data, epochs=1, verbose=0).history["loss"]
    predictions = model.predict(ids[:2000], verbose=0)
    rows = layer.table.lookup(np.unique(ids)).numpy()
    return [np.array(losses), predictions, rows]


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_model_learns_the_same_numbers_as_in_memory(
    prefetch: bool, local: tsw.Cluster
) -> None:
    tiered = train("tiered", prefetch, when_full="disk")
    stats = local.stats()["tiered"]
    assert stats["cold_rows"] > 10_000
    assert stats["promoted_rows"] > 1000
    assert stats["refused_keys"] == 0
    assert stats.memory_bytes < 14 * MIB
    with tsw.connect("local://memory"):
        for one, other in zip(tiered, train("plain", prefetch), strict=True):
            np.testing.assert_array_equal(one, other)


def test_checkpoints_have_rows_from_memory_and_disk(
    local: tsw.Cluster, tmp_path: Path
) -> None:
    table = make_table(
        dim=16, initializer="ones", optimizer="adagrad", when_full="disk"
    )
    ids = np.arange(150_000)
    for part in np.split(ids, 50):
        table.lookup_or_create(part)
        table.push(part, np.ones((len(part), 16)))
    rows = table.lookup(ids).numpy()
    assert table.stats()["cold_rows"] > 50_000
    local.save(str(tmp_path / "saved"))
    table.remove(ids[::2])
    assert table.size() == 75_000
    table.shrink(policy=tsw.eviction.L2Norm(100.0))
    assert table.size() == 0
    local.restore(str(tmp_path / "saved"))
    np.testing.assert_array_equal(table.lookup(ids).numpy(), rows)
    assert table.stats()["cold_rows"] > 50_000
    assert table.stats().memory_bytes < 13 * MIB
    with tsw.connect("local://elsewhere") as other:
        with pytest.raises(RuntimeError, match="no folder for its rows"):
            other.restore(str(tmp_path / "saved"))
        assert not other.stats()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"admission": tsw.admission.MinCount(2)},
        {"consistency": "bsp"},
        {"update": "dense"},
    ],
    ids=["asp", "admission", "bsp", "dense"],
)
def test_a_server_that_was_killed_has_the_same_rows(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    flags = (
        "--max_memory=12MiB",
        f"--cold_dir={tmp_path}/cold",
        f"--data_dir={tmp_path}/data",
        "--push_log",
    )
    random = np.random.default_rng(5)
    keys = np.arange(200_000)
    with (
        ServerProcess(flags=flags) as server,
        tsw.connect(f"grpc://{server.address}"),
        contextlib.ExitStack() as stack,
    ):
        table = make_table(
            dim=16, optimizer="adam", when_full="disk", **settings
        )
        worker = None
        if "consistency" in settings:
            worker = stack.enter_context(
                tsw.train.Worker(0, 1, consistency="bsp")
            )

        def push(ids: np.ndarray) -> None:
            gradients = random.normal(size=(len(ids), 16))
            table.lookup_or_create(ids)
            table.push(ids, gradients)
            if worker is not None:
                worker.end_step()

        for ids in np.split(np.arange(150_000), 50):
            push(np.repeat(ids, 2))
        for _ in range(50):
            push(np.unique(random.zipf(1.1, 3000) % 200_000))
        expected = table.lookup(keys).numpy()
        stats = table.stats()
        assert stats["cold_rows"] > 50_000
        assert stats["promoted_rows"] > 10_000
        assert stats["refused_keys"] == 0
        stack.close()
        server.kill()
        assert list((tmp_path / "cold" / "0").glob("*.cold"))
        # The second start is from a save with rows on disk.
        for _ in range(2):
            with ServerProcess(address=server.address, flags=flags) as again:
                np.testing.assert_array_equal(
                    table.lookup(keys).numpy(), expected
                )
                stats = table.stats()
                assert stats["cold_rows"] > 50_000
                assert stats.memory_bytes < 15 * MIB
                again.signal(signal.SIGTERM)
                assert again.wait() == 0
        assert not list((tmp_path / "cold" / "0").glob("*.cold"))
        # Without the folder the server does not serve, and keeps all.
        with pytest.raises(NotServingError):
            ServerProcess(flags=flags[2:])


def test_wrong_folders_are_named(tmp_path: Path, local: tsw.Cluster) -> None:
    with pytest.raises(RuntimeError, match="another process writes to"):
        tsw.connect("local://second", cold_dir=tmp_path / "cold")
    with pytest.raises(RuntimeError, match=r"rows are in .*cold. already"):
        tsw.connect(local.address, cold_dir=tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot create folder .*file"):
        tsw.connect("local://third", cold_dir=tmp_path / "file")
    with pytest.raises(ValueError, match="refuse or evict"):
        make_table(eviction=tsw.eviction.MaxRows(10), when_full="disk")
    with (
        tsw.connect("local://fourth"),
        pytest.raises(RuntimeError, match="Start servers with --cold_dir"),
    ):
        make_table(when_full="disk")


def test_a_tiered_storage_bounds_the_memory_of_the_process(
    tmp_path: Path,
) -> None:
    storage = tsw.TieredStorage(memory=8 * MIB, path=tmp_path / "cold")
    with tsw.connect(f"local://{tmp_path.name}"):
        layer = tsw.keras.DynamicEmbedding(16, storage=storage)
        for ids in np.split(np.arange(100_000), 20):
            layer(ids, training=True)
        assert layer.table.stats()["cold_rows"] > 10_000
        # The folder belongs to this process, not to the model.
        config = layer.get_config()
        assert config["when_full"] == "disk"
        assert "storage" not in config
        other = dataclasses.replace(storage, memory=MIB)
        with pytest.raises(ValueError, match="bounds all tables"):
            make_table(storage=other)
        with pytest.raises(ValueError, match='"disk", because of `storage`'):
            make_table(storage=storage, when_full="evict")
    with pytest.raises(ValueError, match="memory"):
        tsw.TieredStorage(memory=0, path="cold")
    with (
        ServerProcess() as server,
        tsw.connect(f"grpc://{server.address}"),
        pytest.raises(ValueError, match="Start servers with --max_memory"),
    ):
        make_table(storage=storage)
