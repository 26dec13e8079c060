"""Servers with a push log that are killed at any moment lose nothing."""

import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.faults.training import (
    IDS,
    bsp_rows,
    count_table,
    new_seed,
    start_bsp,
)
from tests.python.worker_threads import Call
from tests.support import SERVER, ServerProcess, examples, free_ports


class Killed:
    """A cluster of servers, of which one is killed and started again."""

    def __init__(self, folder: Path, num_servers: int, victim: int) -> None:
        self._ports = free_ports(num_servers)
        self._folder = folder
        self._victim = victim
        self._servers = [self._start(i) for i in range(num_servers)]
        self.address = "grpc://" + ",".join(s.address for s in self._servers)

    def _flags(self, shard: int) -> tuple[str, ...]:
        return (
            f"--data_dir={self._folder}/{shard}",
            "--push_log",
            "--checkpoint_every=1s",
        )

    def _start(self, shard: int) -> ServerProcess:
        return ServerProcess(
            address=f"127.0.0.1:{self._ports[shard]}",
            shard_index=shard,
            num_shards=len(self._ports),
            flags=self._flags(shard),
        )

    def kill(self, rng: random.Random) -> None:
        """Also now and then while it recovers."""
        self._servers[self._victim].kill()
        if rng.random() < 0.4:
            server = subprocess.Popen(
                [
                    str(SERVER),
                    "--address=127.0.0.1:0",
                    f"--shard_index={self._victim}",
                    f"--num_shards={len(self._ports)}",
                    *self._flags(self._victim),
                ],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(rng.uniform(0.0, 0.06))
            server.kill()
            server.wait()
        self._servers[self._victim] = self._start(self._victim)

    def __enter__(self) -> "Killed":
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.kill()


def kill_while(cluster: Killed, calls: list[Call], seed: int) -> None:
    """Kills a server at random moments while the calls run."""
    rng = random.Random(seed)
    num_kills = 0
    while num_kills < examples(5) and not all(call.is_over for call in calls):
        time.sleep(rng.uniform(0.05, 1.2))
        cluster.kill(rng)
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
        Killed(tmp_path, num_servers=2, victim=1) as cluster,
        tsw.Cluster(cluster.address, timeout=60.0) as client,
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
def test_bsp_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    num_steps = examples(300)

    def run(
        folder: Path, disturb: Callable[[Killed, list[Call]], None]
    ) -> bytes:
        with Killed(folder, num_servers=2, victim=1) as cluster:
            calls = start_bsp(cluster.address, num_steps, pause=0.01)
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
