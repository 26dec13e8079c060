"""Worker processes that train what a work queue hands out, on two servers."""

import contextlib
import signal

import numpy as np
import pytest

import tfswitch as tsw
from tests.integration import work_queue_program
from tests.integration.worker_process import WorkerProcess
from tests.programs import ROOT
from tests.support import ServerProcess

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "integration" / "work_queue_program.py"
ITEMS = [f"file-{i}" for i in range(12)]
SAMPLES = 9
EPOCHS = 2


@pytest.fixture
def start(tmp_path):
    """`start(number, **job)` starts a worker; `start.servers`: where."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(shard_index=i, num_shards=2))
            for i in range(2)
        ]

        def start_worker(number, **job):
            process = WorkerProcess(
                PROGRAM,
                {"items": ITEMS, "samples": SAMPLES, "epochs": EPOCHS, **job},
                {
                    "cluster": {
                        "ps": [server.address for server in servers],
                        "worker": ["unused:1"] * 3,
                    },
                    "task": {"type": "worker", "index": number},
                },
                tmp_path / f"log-{number}.txt",
            )
            stack.callback(process.end)
            return process

        start_worker.servers = ",".join(server.address for server in servers)
        yield start_worker


def test_every_sample_counts_once_though_workers_are_killed(start):
    """One for good, one that is started again; both in the midst of a step."""
    survivor = start(0)
    victims = [start(1, pause=2), start(2, pause=2)]
    for victim in victims:
        victim.wait_for("paused")
        victim.signal(signal.SIGKILL)

    again = start(2)

    survivor.finish()
    again.finish()
    with tsw.Cluster(f"grpc://{start.servers}") as cluster:
        table = work_queue_program.make_counts(cluster)
        counts = -table.lookup(np.arange(len(ITEMS) * SAMPLES)).numpy()
    np.testing.assert_array_equal(counts, EPOCHS)
