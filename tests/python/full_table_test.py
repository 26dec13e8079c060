"""New ids when a table, or the memory for tables, is full."""

import re
import signal
import threading
from collections.abc import Callable
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
        assert re.search(r" keys +cpu +traffic ", shown)
        assert re.search(rf"\b{stats['refused_keys']}\b", shown)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"when_full": "evict"},
        {"eviction": tsw.eviction.MaxRows(20_000, order="lfu")},
        {
            "eviction": tsw.eviction.MaxRows(9000),
            "admission": tsw.admission.MinCount(2),
        },
    ],
    ids=["refuse", "evict", "lfu", "admission"],
)
def test_a_server_that_was_killed_has_the_same_rows(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    flags = ("--max_memory=12MiB", f"--data_dir={tmp_path}", "--push_log")

    def train(table: tsw.EmbeddingTable) -> None:
        for step in range(12):
            ids = new_ids(5000, step)
            table.lookup_or_create(ids)
            # Others are new in the push.
            ids[::2] += 1
            table.push(ids, np.full((5000, 16), 0.1 * step))
            table.push(new_ids(100, 0), np.ones((100, 16)))
            table.push(ids, np.full((5000, 16), 0.1 * step))

    with (
        ServerProcess(flags=flags) as server,
        tsw.connect(f"grpc://{server.address}"),
    ):
        table = make_table(
            dim=16, initializer="ones", optimizer="adagrad", **settings
        )
        train(table)
        stats = table.stats()
        changed = [name for name in stats if re.match("refused|evicted", name)]
        assert sum(stats[name] for name in changed) > 5000
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


def ids_of(table: tsw.EmbeddingTable) -> list[int]:
    return sorted(table.export_rows()[0].tolist())


def test_the_longest_unused_rows_make_room(cluster: tsw.Cluster) -> None:
    """Even within a day, and never those of the same batch."""
    cluster.day = 1
    table = make_table(eviction=tsw.eviction.MaxRows(20))
    for i in range(20):
        table.push([i], [[1.0, 1.0]])
    table.push([3, 0], np.ones((2, 2)))
    table.lookup([1])  # Is no use of the row.
    table.lookup_or_create([2, 100, 100, 101])
    assert ids_of(table) == [0, 2, 3, *range(5, 20), 100, 101] or (
        cluster.num_shards > 1
    )
    table.push([102, 2], np.ones((2, 2)))
    assert {2, 102} <= set(ids_of(table))
    assert table.size() <= 20 + cluster.num_shards
    assert table.stats()["refused_keys"] == 0


@pytest.mark.parametrize("order", ["lru", "lfu"])
def test_the_most_used_rows_stay(order: str, local: tsw.Cluster) -> None:
    """Ids of a steady set stay among many that are seen once."""
    table = make_table(
        eviction=tsw.eviction.MaxRows(2000, order=order), initializer="ones"
    )
    steady = np.arange(1000)
    for step in range(50):
        table.push(steady, np.ones((1000, 2)))
        table.push(new_ids(200, step), np.ones((200, 2)))
        assert table.size() <= 2000
    assert set(steady) <= set(ids_of(table))
    assert table.stats()["evicted_by_max_rows"] > 8000


def test_scores_decide_if_the_table_evicts_by_score(local: tsw.Cluster) -> None:
    table = make_table(
        eviction=tsw.eviction.AnyOf(
            [tsw.eviction.ShowClickScore(0.1), tsw.eviction.MaxRows(100)]
        )
    )
    ids = np.arange(100)
    clicks = np.where(ids % 2 == 0, 1.0, 0.0)
    table.push(ids, np.ones((100, 2)), shows=np.ones(100), clicks=clicks)
    table.lookup_or_create(np.arange(1000, 1030))
    assert set(ids[::2]) <= set(ids_of(table))


def test_max_rows_may_refuse_instead(cluster: tsw.Cluster) -> None:
    table = make_table(
        eviction=tsw.eviction.MaxRows(500),
        when_full="refuse",
        initializer="ones",
    )
    ids = np.arange(2000)
    table.lookup_or_create(ids)
    stayed = ids_of(table)
    assert len(stayed) <= 500 + cluster.num_shards
    table.lookup_or_create(ids + 5000)
    table.push(ids + 7000, np.ones((2000, 2)))
    assert ids_of(table) == stayed
    assert table.stats()["refused_keys"] == 2000 - len(stayed) + 4000
    with pytest.raises(RuntimeError, match="below max_rows=500"):
        table.assign(ids, np.ones((2000, 2)))


def test_a_batch_larger_than_the_table_gets_as_many_rows_as_fit(
    local: tsw.Cluster,
) -> None:
    table = make_table(eviction=tsw.eviction.MaxRows(10), initializer="ones")
    table.lookup_or_create(np.arange(10))
    rows = table.lookup_or_create(np.arange(5, 105)).numpy()
    assert table.size() == 10
    assert (rows[:5] == 1).all()  # They were there.
    assert rows[:, 0].sum() == 10
    assert table.stats()["refused_keys"] == 90
    there = ids_of(table)
    with pytest.raises(RuntimeError, match="or max_rows=10"):
        table.assign(np.arange(200, 211), np.ones((11, 2)))
    with pytest.raises(ValueError, match="id 300 is Inf"):
        table.assign([300], [[np.inf, 0.0]])
    assert ids_of(table) == there
    table.assign([*there[5:], 300], np.ones((6, 2)))
    assert set(ids_of(table)) > {*there[5:], 300}


def test_ids_that_wait_for_admission_evict_no_rows(local: tsw.Cluster) -> None:
    table = make_table(
        eviction=tsw.eviction.MaxRows(100), admission=tsw.admission.MinCount(3)
    )
    for _ in range(3):
        table.push(np.arange(100), np.ones((100, 2)))
    for step in range(20):
        table.push(new_ids(500, step), np.ones((500, 2)))
    assert ids_of(table) == [*range(100)]
    table.push([200, 200, 200], np.ones((3, 2)))
    assert 200 in ids_of(table)
    assert 96 <= table.size() <= 100


def run_together(*calls: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(c,)) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize(
    "admission", [None, tsw.admission.MinCount(2)], ids=["always", "min_count"]
)
def test_threads_together_never_exceed_max_rows(
    admission: Any, local: tsw.Cluster
) -> None:
    table = make_table(eviction=tsw.eviction.MaxRows(300), admission=admission)
    sizes: list[int] = []
    # A size is exact only while nobody writes.
    barrier = threading.Barrier(4, lambda: sizes.append(table.size()))

    def train(seed: int) -> None:
        for step in range(60):
            ids = new_ids(120, 100 * seed + step)
            table.lookup_or_create(ids)
            table.push(np.repeat(ids, 2), np.ones((240, 2)))
            barrier.wait(timeout=60)

    run_together(*(lambda s=s: train(s) for s in range(4)))  # type: ignore[misc]
    assert 200 < max(sizes) <= 300


@pytest.mark.parametrize(
    "admission", [None, tsw.admission.MinCount(3)], ids=["always", "min_count"]
)
def test_memory_stays_constant_while_ids_come_and_go(
    admission: Any, local: tsw.Cluster
) -> None:
    """Each id gets its row; ids that wait for admission make room, too."""
    table = make_table(
        dim=64, initializer="ones", when_full="evict", admission=admission
    )
    for step in range(60):
        ids = new_ids(4000, step)
        twice = np.repeat(ids[:1000], 2)
        table.push(np.append(ids, twice), np.ones((6000, 64)))
        assert table.stats().memory_bytes < 13 * MIB
        assert (table.lookup(ids[:1000]).numpy() == -2).all()
    stats = table.stats()
    assert stats["evicted_by_max_memory"] > 10_000
    assert stats["refused_keys"] == 0
    assert (stats["num_candidates"] > 50_000) == (admission is not None)


def test_a_restore_keeps_max_rows(tmp_path: Path) -> None:
    with tsw.connect("local://larger") as cluster:
        table = make_table(name="t", dim=2, statistics=tsw.statistics.Usage())
        for day in range(4):
            cluster.day = day
            table.push(np.arange(100 * day, 100 * day + 100), np.ones((100, 2)))
        cluster.save(tmp_path)
    with tsw.connect("local://smaller") as cluster:
        table = make_table(name="t", dim=2, eviction=tsw.eviction.MaxRows(150))
        cluster.restore(tmp_path)
        assert table.size() == 150
        assert set(range(300, 400)) <= set(ids_of(table))


def test_bsp_rounds_do_not_grow_a_full_table(local: tsw.Cluster) -> None:
    table = make_table(eviction=tsw.eviction.MaxRows(50), consistency="bsp")
    with tsw.train.Worker(0, 1, consistency="bsp") as worker:
        for step in range(10):
            table.push(new_ids(40, step), np.ones((40, 2)))
            worker.end_step()
            assert table.size() <= 50
    assert table.size() > 40


def test_wrong_ceilings_are_named() -> None:
    with pytest.raises(ValueError, match="max_memory"):
        tsw.connect("local://", max_memory=-1)
    with (
        ServerProcess() as server,
        pytest.raises(ValueError, match="start servers with --max_memory"),
    ):
        tsw.connect(f"grpc://{server.address}", max_memory=MIB)
