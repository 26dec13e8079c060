"""Servers with a push log that are killed at any moment lose nothing."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.faults.servers import Servers
from tests.faults.training import (
    IDS,
    bsp_rows,
    count_table,
    new_seed,
    start_bsp,
)
from tests.python.worker_threads import Call
from tests.support import examples

# Long runs take more kills.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

NUM_KILLS = examples(5, 50)

# Each gradient of a round counts in full.
SUM = tsw.train.Consistency.bsp(reduction="sum")


def kill_while(cluster: Servers, calls: list[Call], seed: int) -> None:
    """Kills a server at random moments while the calls run.

    One after the other; server 0 has the groups of workers and their queues.
    """
    rng = random.Random(seed)
    num_kills = 0
    while num_kills < NUM_KILLS and not all(call.is_over for call in calls):
        time.sleep(rng.uniform(0.05, 1.2))
        cluster.kill(num_kills % 2, rng)
        num_kills += 1
    assert num_kills >= 3


def until(stop: threading.Event, work: Callable[[], None]) -> int:
    count = 0
    while not stop.is_set():
        work()
        count += 1
    return count


@pytest.mark.slow
def test_each_acknowledged_push_counts_once(tmp_path: Path) -> None:
    seed = new_seed()
    stop = threading.Event()
    counts = [0, 0]
    with (
        Servers(tmp_path, 2) as cluster,
        tsw.Cluster(cluster.address, timeout_secs=60.0) as client,
    ):
        table = count_table(client)
        ones = -np.ones((IDS.size, 1), np.float32)

        def train(number: int) -> None:
            counts[number] = until(stop, lambda: table.push(IDS, ones))

        calls = [Call(train, number) for number in range(2)]
        kill_while(cluster, calls, seed)
        stop.set()
        for call in calls:
            call.result()

        rows = table.lookup(IDS).numpy()
        np.testing.assert_array_equal(rows, np.full_like(rows, sum(counts)))
        assert sum(counts) > 20


@pytest.mark.slow
def test_each_push_to_rows_on_disk_counts_once(tmp_path: Path) -> None:
    seed = new_seed()
    stop = threading.Event()
    counts = np.zeros((2, 100_000))
    flags = ("--max_memory=4MiB", f"--cold_dir={tmp_path}/cold")
    with (
        Servers(tmp_path, 2, flags) as cluster,
        tsw.Cluster(cluster.address, timeout_secs=60.0) as client,
    ):
        table = count_table(client, dim=32, when_full="disk")
        table.push(np.arange(100_000), np.zeros((100_000, 32)))

        def train(number: int) -> None:
            draw = np.random.default_rng(seed + number)

            def push() -> None:
                ids = np.unique(draw.integers(0, 100_000, 2000))
                table.push(ids, -np.ones((len(ids), 32)))
                counts[number, ids] += 1

            until(stop, push)

        calls = [Call(train, number) for number in range(2)]
        kill_while(cluster, calls, seed)
        stop.set()
        for call in calls:
            call.result()

        rows = table.lookup(np.arange(100_000)).numpy()
        np.testing.assert_array_equal(rows, np.tile(counts.sum(0), (32, 1)).T)
        assert counts.sum() > 100_000
        stats = table.stats()
        assert stats["cold_rows"] > 5_000
        assert stats["refused_keys"] == 0


@pytest.mark.slow
def test_bsp_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    num_steps = 60 * NUM_KILLS

    def run(
        folder: Path, disturb: Callable[[Servers, list[Call]], None]
    ) -> bytes:
        with Servers(folder, 2) as cluster:
            calls = start_bsp(cluster.address, num_steps, pause=0.007)
            disturb(cluster, calls)
            for call in calls:
                call.result(200.0)  # It takes its steps after the last kill.
            return bsp_rows(cluster.address)

    seed = new_seed()
    whole = run(tmp_path / "whole", lambda cluster, calls: None)
    killed = run(
        tmp_path / "killed",
        lambda cluster, calls: kill_while(cluster, calls, seed),
    )

    assert killed == whole


@pytest.mark.slow
def test_each_item_of_a_work_queue_counts_once(tmp_path: Path) -> None:
    num_items = 30 * NUM_KILLS
    num_steps = 4  # Steps of each item, with one sample each.
    seed = new_seed()
    finished: list[int] = []
    with Servers(tmp_path, 2) as servers:

        def work(number: int) -> None:
            with (
                # With another timeout it is another client.
                tsw.Cluster(
                    servers.address, timeout_secs=60.0 + number
                ) as cluster,
                tsw.train.Worker(
                    number, 2, cluster=cluster, consistency=SUM
                ) as worker,
            ):
                table = count_table(cluster, SUM)
                queue = tsw.data.WorkQueue(
                    [str(i) for i in range(num_items)], worker=worker
                )
                for epoch in queue.epochs():
                    for item in epoch:
                        while item.offset < num_steps:
                            sample = num_steps * item.index + item.offset
                            item.advance(1)
                            table.push([sample], -np.ones((1, 1), np.float32))
                            worker.end_step()
                            time.sleep(0.007)
                        finished.append(item.index)
                assert worker.stats()["dropped_steps"] == 0
                assert queue.stats()["reissued"] == 0

        calls = [Call(work, number) for number in range(2)]
        kill_while(servers, calls, seed)
        for call in calls:
            call.result(200.0)
        with tsw.Cluster(servers.address) as cluster:
            samples = np.arange(num_items * num_steps)
            counts = count_table(cluster, SUM).lookup(samples).numpy()

    np.testing.assert_array_equal(counts, np.ones_like(counts))
    assert sorted(finished) == list(range(num_items))


@pytest.mark.slow
def test_a_restore_that_has_ended_outlasts_kills(tmp_path: Path) -> None:
    rng = random.Random(new_seed())
    root = tmp_path / "checkpoints"
    root.mkdir()
    with (
        Servers(tmp_path, 2, (f"--checkpoint_root={root}",)) as servers,
        tsw.Cluster(servers.address, timeout_secs=60.0) as client,
    ):
        table = count_table(client)
        ones = -np.ones((IDS.size, 1), np.float32)

        def restore() -> None:
            for _ in range(10):
                # The server that was killed has forgotten what it had read.
                with contextlib.suppress(KeyError, OSError, RuntimeError):
                    client.restore("save")
                    return
            client.restore("save")

        for number in range(NUM_KILLS):
            table.push(IDS, ones)
            client.save("save")
            table.push(IDS, ones)
            call = Call(restore)
            time.sleep(rng.uniform(0.0, 0.03))
            servers.kill(rng.randrange(2), rng)
            call.result()
            servers.kill(rng.randrange(2), rng)
            rows = table.lookup(IDS).numpy()
            np.testing.assert_array_equal(rows, np.full_like(rows, number + 1))
