"""`cluster.save` in the midst of training: a save is of one step of all."""

import contextlib
import json
import random
from collections.abc import Iterator

import numpy as np

import tfswitch as tsw
from tests.python.worker_threads import (
    Call,
    in_threads,
    join_workers,
    wait_until,
)
from tests.support import examples, running_servers

SUM = tsw.train.Consistency.bsp("sum")
IDS = np.arange(200)
# Items of a work queue, and the samples in each.
ITEMS = [str(i) for i in range(8)]
SAMPLES = 25


def make_tables(cluster):
    """A row says how often -1 has been pushed to it."""
    return [
        tsw.EmbeddingTable(
            name,
            1,
            initializer="zeros",
            optimizer=tsw.optimizers.SGD(1.0),
            consistency=SUM,
            cluster=cluster,
        )
        for name in ("a", "b", "samples")
    ]


def take_step(worker, all_tables, item, count):
    """Adds 1 to all rows of two tables, and `count` to those of the third."""
    *tables, samples = all_tables
    item.advance(count)
    for table in tables:
        table.push(IDS, -np.ones((IDS.size, 1)))
    samples.push(IDS, np.full((IDS.size, 1), -float(count)))
    worker.end_step(weight=count)


@contextlib.contextmanager
def training(workers) -> Iterator[None]:
    """Workers that take one step after the other while the body runs."""
    is_over = []

    def train(worker):
        tables = make_tables(worker.cluster)
        draw = random.Random(worker.worker_id)
        queue = tsw.data.WorkQueue(ITEMS, worker=worker, epochs=10**6)
        for epoch in queue.epochs():
            for item in epoch:
                while item.offset < SAMPLES:
                    count = min(draw.randint(1, 4), SAMPLES - item.offset)
                    take_step(worker, tables, item, count)
                    if is_over:
                        worker.leave()
                        return

    calls = [Call(train, worker) for worker in workers]
    try:
        yield
    finally:
        is_over.append(True)
        for call in calls:
            call.result()


def check(path) -> float:
    """Returns the value of all rows of a save of one step."""
    with running_servers(0) as address, tsw.Cluster(address) as cluster:
        cluster.restore(path)
        rows = [table.lookup(IDS).numpy() for table in make_tables(cluster)]
    *steps, samples = (np.unique(values).tolist() for values in rows)
    assert steps[0] == steps[1]
    assert len(steps[0]) == len(samples) == 1
    manifest = json.loads((path / "manifest.json").read_text())
    (queue,) = manifest["work_queues"]["queues"]
    offsets = queue["unfinished"].values()
    left = sum(SAMPLES - int(offset) for offset in offsets)
    taken = int(queue["epoch"]) * len(ITEMS) + int(queue["num_taken"])
    assert samples == [taken * SAMPLES - left]
    return steps[0][0]


def test_a_save_from_outside_is_of_one_step_of_all_workers(client, tmp_path):
    workers = join_workers(client, 2, consistency=SUM)
    paths = [tmp_path / str(i) for i in range(examples(6))]

    with training(workers):
        wait_until(lambda: workers[0].stats()["workers"]["rounds"] > 3)
        for path in paths:
            client(2).save(path)

    steps = [check(path) for path in paths]
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1]  # They have not been held up for long.


def test_a_worker_saves_in_the_midst_of_its_step(client, tmp_path):
    workers = join_workers(client, 2, consistency=SUM)
    queues = [tsw.data.WorkQueue(ITEMS, worker=worker) for worker in workers]
    items = [queue.take() for queue in queues]
    tables = [make_tables(worker.cluster) for worker in workers]

    def step(number, count):
        take_step(workers[number], tables[number], items[number], count)

    in_threads(lambda: step(0, 1), lambda: step(1, 1))
    other = Call(step, 1, 2)
    wait_until(lambda: sum(workers[0].stats()["workers"]["staleness"]) == 3)
    items[0].advance(3)
    tables[0][0].push(IDS, -np.ones((IDS.size, 1)))
    client(0).save(tmp_path)
    workers[0].end_step(weight=3)
    other.result()

    assert check(tmp_path) == 2.0
