"""`max_memory`: new ids get no rows at the ceiling, and nothing is lost."""

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.support import ServerProcess, make_table
from tfswitch.cli import main as cli

MIB = 2**20


def new_ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**40, count)


def fill(table: tsw.EmbeddingTable) -> np.ndarray:
    """Uses ids until no new one gets a row; returns all of them."""
    batches: list[np.ndarray] = []
    sizes = [0]
    while len(sizes) < 2 or sizes[-1] != sizes[-2]:
        batches.append(new_ids(5000, len(batches)))
        table.lookup_or_create(batches[-1])
        sizes.append(table.size())
        assert len(batches) < 100
    return np.concatenate(batches)


@pytest.fixture
def local() -> Any:
    with tsw.connect("local://ceiling", max_memory=12 * MIB) as cluster:
        yield cluster
        tsw.connect("local://ceiling", max_memory=0).close()


def test_rows_stay_below_the_ceiling_and_known_ids_go_on_learning(
    local: tsw.Cluster,
) -> None:
    table = make_table(dim=16, initializer="ones", optimizer="adagrad")
    ids = fill(table)
    known = table.lookup(ids).numpy()[:, 0] == 1
    size = table.size()
    assert 0 < known.sum() == size < len(ids)
    # A push to known ids, to a refused one twice, and to a new one.
    pushed = [*ids[:3], ids[-1], ids[-1], 5]
    assert not known[-1]
    table.push(pushed, np.ones((6, 16)))
    rows = table.lookup(pushed).numpy()
    assert (rows[:3] < 1).all()
    np.testing.assert_array_equal(rows[3:], 0)
    assert table.size() == size
    assert table.stats()["refused_keys"] > 2
    assert table.stats().memory_bytes < 13 * MIB
    # Freed rows may be used again.
    table.remove(ids[:10_000])
    table.lookup_or_create(new_ids(15_000, 1000))
    assert size - 5000 < table.size() <= size
    with pytest.raises(RuntimeError, match="new rows do not fit below max_mem"):
        table.assign(new_ids(5000, 2000), np.ones((5000, 16)))


def test_a_second_table_gets_what_is_left(local: tsw.Cluster) -> None:
    one = make_table(dim=16, name="one")
    two = make_table(dim=16, name="two", admission=tsw.admission.MinCount(2))
    fill(one)
    two.push([1, 2, 3], np.ones((3, 16)))
    two.push([1, 2, 3], np.ones((3, 16)))
    assert two.size() == 0
    assert two.stats()["refused_keys"] == 6
    tsw.connect("local://ceiling", max_memory=100 * MIB).close()
    two.push([1, 2, 3], np.ones((3, 16)))
    two.push([1, 2, 3], np.ones((3, 16)))
    assert two.size() == 3


def test_rows_are_not_promised_to_a_prefetch_at_the_ceiling(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A lookup of a refused id reads the same with and without prefetch."""
    with (
        ServerProcess(flags=("--max_memory=12MiB",)) as server,
        tsw.connect(f"grpc://{server.address}"),
    ):
        table = make_table(dim=16, initializer="ones", optimizer="adagrad")
        fill(table)
        layer = tsw.keras.DynamicEmbedding(16, table=table)
        data = tf.data.Dataset.from_tensor_slices(new_ids(8000, 99)).batch(2000)
        for ids in tsw.data.prefetch_embeddings(data, layer):
            rows = layer(ids, training=True).numpy()
        np.testing.assert_array_equal(rows, 0)
        stats = table.stats()
        assert stats["prefetch_hits"] > 0
        capsys.readouterr()
        assert cli.run(["info", server.address]) == 0
        shown = capsys.readouterr().out
        assert " of 12.0 MiB " in shown
        assert re.search(rf"\b{stats['refused_keys']}\b", shown)


def test_a_server_that_was_killed_has_the_same_rows(tmp_path: Path) -> None:
    flags = ("--max_memory=12MiB", f"--data_dir={tmp_path}", "--push_log")

    def train(table: tsw.EmbeddingTable) -> None:
        for step in range(12):
            ids = new_ids(5000, step)
            table.lookup_or_create(ids)
            # Others are new in the push.
            ids[::2] += 1
            table.push(ids, np.full((5000, 16), 0.1 * step))
            table.push(new_ids(100, 0), np.ones((100, 16)))

    with (
        ServerProcess(flags=flags) as server,
        tsw.connect(f"grpc://{server.address}"),
    ):
        table = make_table(dim=16, initializer="ones", optimizer="adagrad")
        train(table)
        assert table.stats()["refused_keys"] > 5000
        ids, rows = table.export_rows()
        server.kill()
        expected = rows[np.argsort(ids)]
        # The second start is from a save that a full server has made.
        for _ in range(2):
            with ServerProcess(address=server.address, flags=flags) as again:
                after, rows = table.export_rows()
                np.testing.assert_array_equal(np.sort(after), np.sort(ids))
                np.testing.assert_array_equal(rows[np.argsort(after)], expected)
                again.signal(signal.SIGTERM)
                assert again.wait() == 0


def test_a_full_table_is_restored(local: tsw.Cluster, tmp_path: Path) -> None:
    table = make_table(dim=16, initializer="ones", optimizer="adagrad")
    ids = fill(table)
    size = table.size()
    local.save(tmp_path)
    table.remove(ids)
    local.restore(tmp_path)
    assert table.size() == size


def test_a_restore_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with tsw.connect("local://full") as cluster:
        table = make_table(dim=16)
        table.lookup_or_create(new_ids(50_000, 0))
        cluster.save(tmp_path)
        table.remove(new_ids(49_000, 0))
        other = make_table(dim=16, name="other")
        other.lookup_or_create(new_ids(50_000, 1))
        # Each of them fits alone.
        tsw.connect("local://full", max_memory=6 * MIB).close()
        with pytest.raises(RuntimeError, match="max_memory is 6291456"):
            cluster.restore(tmp_path)
        assert table.size() == 1000


def test_wrong_ceilings_are_named() -> None:
    with pytest.raises(ValueError, match="max_memory"):
        tsw.connect("local://", max_memory=-1)
    with (
        ServerProcess() as server,
        pytest.raises(ValueError, match="start servers with --max_memory"),
    ):
        tsw.connect(f"grpc://{server.address}", max_memory=MIB)
