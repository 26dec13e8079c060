"""Training with a known result, for all tests of faults."""

import random
import time
from collections.abc import Callable

import numpy as np

import tfswitch as tsw
from tests.python.worker_threads import Call

IDS = np.arange(500)
DIM = 4
BSP = tsw.train.Consistency.bsp()


def new_seed() -> int:
    """Returns a seed, and prints it for the case that the test fails."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    return seed


def count_table(
    cluster: tsw.Cluster,
    consistency: tsw.train.Consistency | None = None,
    *,
    dim: int = 1,
    when_full: str | None = None,
) -> tsw.EmbeddingTable:
    """Each push of -1 adds 1 to its rows, which begin with 0."""
    return tsw.EmbeddingTable(
        "count",
        dim,
        initializer="zeros",
        optimizer=tsw.optimizers.SGD(1.0),
        consistency=consistency,
        when_full=when_full,
        cluster=cluster,
    )


def bsp_table(cluster: tsw.Cluster) -> tsw.EmbeddingTable:
    """A table whose bits depend on all gradients and their order."""
    return tsw.EmbeddingTable(
        "user",
        DIM,
        optimizer=tsw.optimizers.Adagrad(0.1),
        consistency=BSP,
        seed=7,
        cluster=cluster,
    )


def push_step(table: tsw.EmbeddingTable, worker: int, step: int) -> None:
    """Pushes the gradients of a step, which depend only on worker and step."""
    rng = np.random.default_rng([worker, step])
    ids = rng.integers(0, IDS.size, 64)
    table.push(ids, rng.normal(size=(64, DIM)).astype(np.float32))


def train(
    worker: tsw.train.Worker,
    num_steps: int,
    *,
    first_step: int | None = None,
    pause: float = 0.0,
    after_step: Callable[[int], None] = lambda number: None,
) -> None:
    """Takes steps up to so many.

    Args:
        worker: A worker that has joined.
        num_steps: The number of all steps.
        first_step: By default the first that the worker has not taken.
        pause: Seconds between two steps, on average.
        after_step: Called after each step with the number of steps so far.
    """
    if first_step is None:
        first_step = worker.stats()["clock"]
    rows = bsp_table(worker.cluster)
    counts = count_table(worker.cluster, BSP)
    for step in range(first_step, num_steps):
        push_step(rows, worker.worker_id, step)
        counts.push(IDS, -np.ones((IDS.size, 1), np.float32))
        worker.end_step(weight=64.0)
        # Now this worker waits for the other one, now the other for this.
        time.sleep(random.uniform(0.0, 2.0 * pause))
        after_step(step + 1)


def start_bsp(address: str, num_steps: int, pause: float = 0.0) -> list[Call]:
    """Starts two workers of this process."""

    def work(number: int) -> None:
        with (
            # With another timeout it is another client.
            tsw.Cluster(address, timeout_secs=60.0 + number) as cluster,
            tsw.train.Worker(
                number, 2, cluster=cluster, consistency=BSP
            ) as worker,
        ):
            train(worker, num_steps, pause=pause)
            assert worker.stats()["dropped_steps"] == 0

    return [Call(work, number) for number in range(2)]


def bsp_rows(address: str) -> bytes:
    """Returns the bits of all rows."""
    with tsw.Cluster(address) as cluster:
        return bsp_table(cluster).lookup(IDS).numpy().tobytes()
