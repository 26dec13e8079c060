"""Worker processes that train one model with plain `fit`, on two servers."""

import contextlib
import json
import re
import signal

import numpy as np
import pytest

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.integration import worker_program
from tests.integration.worker_process import WorkerProcess
from tests.programs import ROOT, run_python
from tests.support import ServerProcess

pytestmark = pytest.mark.slow

Consistency = tsw.train.Consistency

PROGRAM = ROOT / "tests" / "integration" / "worker_program.py"

# Float32 sums in another order, over a few steps.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

NUM_WORKERS = 3


class Job:
    """Workers and servers of one training."""

    def __init__(self, stack, folder, batches, job):
        self._stack = stack
        self._folder = folder
        self._batches = batches  # For each worker.
        self._job = {"out": str(folder), **job}
        self._servers = [
            stack.enter_context(ServerProcess(shard_index=i, num_shards=2))
            for i in range(2)
        ]

    def start(self, number, **job):
        """Starts worker `number`."""
        count = len(self._batches)
        data = self._folder / f"data-{number}.npz"
        arrays = {}
        for i, (ids, targets) in enumerate(self._batches[number]):
            arrays[f"ids_{i}"], arrays[f"targets_{i}"] = ids, targets
        np.savez(data, **arrays)
        # With a chief, which is worker 0.
        task = ("chief", 0) if number == 0 else ("worker", number - 1)
        process = WorkerProcess(
            PROGRAM,
            {"data": str(data), **self._job, **job},
            {
                "cluster": {
                    "ps": [server.address for server in self._servers],
                    "chief": ["unused:1"],
                    "worker": ["unused:1"] * (count - 1),
                },
                "task": {"type": task[0], "index": task[1]},
            },
            self._folder / f"log-{number}.txt",
        )
        self._stack.callback(process.end)
        return process

    def run(self):
        """Starts all workers; returns when they have ended."""
        processes = [self.start(i) for i in range(len(self._batches))]
        for process in processes:
            process.finish()

    def result(self, run, number):
        """Arrays of worker `number` after a run, and its stats."""
        found = np.load(self._folder / f"{run}-{number}.npz")
        names = sorted(n for n in found.files if n.startswith("arr_"))
        return [found[name] for name in names], json.loads(str(found["stats"]))

    def table_values(self, run):
        """The rows and the dense blocks that the servers have at the end."""
        address = ",".join(server.address for server in self._servers)
        with tsw.Cluster(f"grpc://{address}") as cluster:
            return export(cluster, f"rows of {run}"), export(
                cluster, f"dense of {run}"
            )


@pytest.fixture
def make_job(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda batches, **job: Job(stack, tmp_path, batches, job)


def export(cluster, name):
    """All rows of a table that is there, by id, as bytes can be compared."""
    (info,) = cluster._list(name)
    table = cluster._native.open_table(json.dumps(info["config"]))
    ids, values, slots = table.export_rows(True)
    order = np.argsort(ids)
    return ids[order], values[order], None if slots is None else slots[order]


def make_batches(sizes, seed=0):
    """Batches of given sizes, of few ids, so that workers share them."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(
                0,
                worker_program.NUM_IDS,
                (size, worker_program.IDS_PER_SAMPLE),
            ),
            rng.normal(size=(size, 1)).astype(np.float32),
        )
        for size in sizes
    ]


def union(rounds):
    """One batch per round: those of all workers that have one."""
    return [
        tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
        for batches in rounds
    ]


def rounds_of(batches):
    """Round r: the r-th batches of all workers that have one."""
    return [
        [own[r] for own in batches if r < len(own)]
        for r in range(max(map(len, batches)))
    ]


def train_alone(name, rounds):
    """The result of one process with a plain optimizer and all batches."""
    with running_cluster(0):
        model, layer = worker_program.make_model(
            name, lambda optimizer: optimizer, "rows"
        )
        # Not `fit`: Keras begins one step more at the end of a generator, and
        # what needs no data, such as weight decay, takes place.
        for batch in union(rounds):
            model.train_on_batch(*batch)
        return worker_program.result_of(model, layer)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


# --- bsp --------------------------------------------------------------------


# Another number of batches for each worker, and another last batch.
UNEVEN = [
    make_batches([4] * (5 - i) + [1 + i], seed=i) for i in range(NUM_WORKERS)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job that has trained with AdamW twice."""
    with contextlib.ExitStack() as stack:
        job = Job(
            stack,
            tmp_path_factory.mktemp("workers"),
            UNEVEN,
            {
                "runs": [("adamw", "adamw"), ("adamw again", "adamw")],
                "consistency": Consistency.bsp().get_config(),
            },
        )
        job.run()
        yield job


def test_bsp_trains_as_one_process_with_the_union(trained):
    expected = train_alone("adamw", rounds_of(UNEVEN))

    # Worker 0 has most batches, so it has seen the last round.
    found, stats = trained.result("adamw", 0)
    assert_close(found, expected)
    assert stats["clock"] == len(UNEVEN[0]) == stats["workers"]["rounds"]
    assert stats["workers"]["contributions"] == sum(map(len, UNEVEN))
    assert stats["workers"]["expired"] == stats["workers"]["dropped"] == 0


def test_bsp_runs_are_equal_to_the_bit(trained):
    for first, second in zip(
        trained.table_values("adamw"),
        trained.table_values("adamw again"),
        strict=True,
    ):
        assert len(first[0]) > 0
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)
    for worker in range(NUM_WORKERS):
        for one, other in zip(
            trained.result("adamw", worker)[0],
            trained.result("adamw again", worker)[0],
            strict=True,
        ):
            # The rows of a worker that ends early are read while others train.
            if worker == 0 or one.shape[0] != worker_program.NUM_IDS:
                np.testing.assert_array_equal(one, other)


def test_bsp_goes_on_without_a_worker_that_was_killed(make_job):
    batches = [make_batches([4] * 6 + [1], seed=i) for i in range(3)]
    job = make_job(
        batches,
        runs=[("run", "adam")],
        consistency=Consistency.bsp().get_config(),
        worker={"lease_secs": 8.0},
    )
    others = [job.start(0), job.start(1)]
    victim = job.start(2, pause=3)

    victim.wait_for("paused")
    victim.signal(signal.SIGKILL)
    for process in others:
        err = process.finish()
        # The worker that starts last may be waited for, too.
        assert re.search(
            r"group 'run': waiting for worker(.*\n)*"
            r"tfswitch: group 'run': worker 2 is given up after 8 s; 2 of 3 go "
            r"on\n(.*\n)*.* at the end: lost worker 2 after 3 steps that count",
            err,
        ), err

    rounds = rounds_of([batches[0], batches[1], batches[2][:3]])
    found, stats = job.result("run", 0)
    assert stats["clock"] == 7
    assert_close(found, train_alone("adam", rounds))
    assert stats["workers"]["expired"] == 1


def test_a_worker_of_a_job_that_is_started_again_goes_on_or_ends(make_job):
    batches = [make_batches([4] * 6, seed=i) for i in range(2)]
    job = make_job(
        batches,
        runs=[("run", "adam")],
        consistency=Consistency.bsp().get_config(),
        worker={"lease_secs": 60.0, "job": "day 1"},
    )
    other = job.start(0)
    victim = job.start(1, pause=3)

    victim.wait_for("paused")
    victim.signal(signal.SIGKILL)
    err = job.start(1).finish()
    other.finish()

    assert "job 'day 1' goes on in epoch 1 of 1, after 3 steps" in err
    found, stats = job.result("run", 0)
    assert stats["clock"] == stats["workers"]["rounds"] == 6
    assert_close(found, train_alone("adam", rounds_of(batches)))
    # After all have left.
    assert "has ended fit 1, which ends here at once" in job.start(1).finish()


# --- Ends -------------------------------------------------------------------

JOIN_AND_END = """
import sys
import tfswitch as tsw
tsw.connect(sys.argv[1])
worker = tsw.train.Worker(1, 2, consistency="bsp", lease_secs=600)
print("joined", flush=True)
sys.exit(int(sys.argv[2]))
"""


def test_nobody_waits_for_a_process_that_has_ended():
    """It leaves by itself; its lease would last."""
    code = 3
    with (
        ServerProcess() as server,
        tsw.Cluster(f"grpc://{server.address}") as cluster,
    ):
        worker = tsw.train.Worker(
            0, 2, consistency="bsp", lease_secs=600, cluster=cluster
        )
        result = run_python(
            *("-c", JOIN_AND_END, f"grpc://{server.address}", code),
            check=False,
        )
        assert (result.returncode, result.stdout) == (code, "joined\n"), result

        with worker:
            worker.end_step()
            assert worker.stats()["workers"]["active"] == 1
            assert worker.stats()["workers"]["expired"] == 0
