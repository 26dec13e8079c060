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
from tests.python.worker_threads import Call
from tests.support import SERVER, ServerProcess, examples, free_ports

IDS = np.arange(500)
DIM = 4


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
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    stop = threading.Event()
    counts = [0, 0]
    with (
        Killed(tmp_path, num_servers=2, victim=1) as cluster,
        tsw.connect(cluster.address, timeout=60.0),
    ):
        table = tsw.EmbeddingTable(
            "user", DIM, initializer="zeros", optimizer=tsw.optimizers.SGD(1.0)
        )
        ones = -np.ones((IDS.size, DIM), np.float32)

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
    bsp = tsw.train.Consistency.bsp()

    def make_table(cluster: tsw.Cluster) -> tsw.EmbeddingTable:
        return tsw.EmbeddingTable(
            "user",
            DIM,
            optimizer=tsw.optimizers.Adagrad(0.1),
            consistency=bsp,
            seed=7,
            cluster=cluster,
        )

    def run(
        folder: Path, disturb: Callable[[Killed, list[Call]], None]
    ) -> bytes:
        with Killed(folder, num_servers=2, victim=1) as cluster:

            def work(number: int) -> None:
                with (
                    # With another timeout it is another client.
                    tsw.Cluster(cluster.address, timeout=60.0 + number) as own,
                    tsw.train.Worker(
                        number, 2, cluster=own, consistency=bsp
                    ) as worker,
                ):
                    table = make_table(own)
                    rng = np.random.default_rng(number)
                    for _ in range(num_steps):
                        ids = rng.integers(0, IDS.size, 64)
                        gradients = rng.normal(size=(64, DIM))
                        table.push(ids, gradients.astype(np.float32))
                        worker.end_step(weight=64.0)
                        time.sleep(0.01)
                    assert worker.stats()["dropped_steps"] == 0

            calls = [Call(work, number) for number in range(2)]
            disturb(cluster, calls)
            for call in calls:
                call.result(200.0)  # It takes its steps after the last kill.
            with tsw.Cluster(cluster.address) as reader:
                return make_table(reader).lookup(IDS).numpy().tobytes()

    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    whole = run(tmp_path / "whole", lambda cluster, calls: None)
    killed = run(
        tmp_path / "killed",
        lambda cluster, calls: kill_while(cluster, calls, seed),
    )

    assert killed == whole
