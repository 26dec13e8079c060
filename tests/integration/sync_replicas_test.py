"""Scripts with SyncReplicasOptimizer, of which one dies at a known step."""

import contextlib
import json
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.integration.worker_process import WorkerProcess
from tests.support import ROOT, ServerProcess

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "integration" / "sync_replicas_program.py"

LEASE_SECS = 2.0


@contextlib.contextmanager
def running_workers(folder, batches, *, pause, announces=False, **optimizer):
    """Starts workers on two servers.

    Yields them, a function that starts one more, and the servers' address.
    """
    num_ids = 1 + max(i for mine in batches for batch in mine for i in batch)
    job = {
        "batches": batches,
        "num_ids": num_ids,
        "out": str(folder / "checkpoint"),
        "pause": pause,
        "announces": announces,
        "optimizer": {"lease_secs": LEASE_SECS, **optimizer},
    }
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(shard_index=i, num_shards=2))
            for i in range(2)
        ]
        cluster = {
            "ps": [server.address for server in servers],
            "worker": [f"worker{i}:1" for i in range(len(batches))],
        }
        logs = iter(range(100))

        def start(index, **changes):
            worker = WorkerProcess(
                PROGRAM,
                {**job, **changes},
                {
                    "cluster": cluster,
                    "task": {"type": "worker", "index": index},
                },
                folder / f"worker{index}_{next(logs)}.log",
            )
            stack.callback(worker.end)
            return worker

        address = "grpc://" + ",".join(cluster["ps"])
        yield [start(i) for i in range(len(batches))], start, address


def test_the_others_go_on_when_the_chief_dies(tmp_path):
    batches = [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
        [[12, 13], [14, 15], [16, 17], [18]],
    ]
    with running_workers(tmp_path, batches, pause={"0": 2}) as (
        workers,
        start,
        _,
    ):
        workers[0].wait_for("paused")
        workers[0].signal(signal.SIGKILL)
        # What the chief had not begun counts for nothing.
        wanted = [1 / 6] * 4 + [0] * 2 + [1 / 6] * 4 + [1 / 4] * 2
        wanted += [1 / 6] * 4 + [1 / 4] * 2 + [1]
        for worker in workers[1:]:
            found = json.loads(worker.next_line())
            np.testing.assert_allclose(found, wanted, atol=1e-6)
            worker.finish()

        # A chief that comes back finds everything, and saves it.
        again = [
            start(i, pause={}, batches=[[[4, 5]], [], []]) for i in range(3)
        ]
        for worker in again[1:]:
            worker.next_line()
        for worker in again:
            worker.finish()

    saved = tf.train.load_checkpoint(str(tmp_path / "checkpoint"))
    wanted[4] = wanted[5] = 1 / 2
    np.testing.assert_allclose(saved.get_tensor("weights"), wanted, atol=1e-6)
    assert saved.get_tensor("global_step") == 5


@pytest.mark.parametrize("steps", [3, 1], ids=["training", "at_the_end"])
def test_a_dead_worker_raises_on_the_others_if_asked_to(tmp_path, steps):
    batches = [[[0], [1], [2]][:steps], [[3], [4]]]
    with running_workers(
        tmp_path, batches, pause={"1": 1}, on_evict="raise"
    ) as (workers, _, _):
        workers[1].wait_for("paused")
        workers[1].signal(signal.SIGKILL)
        assert "1 of the workers of group" in workers[0].fail()
