"""Scripts with SyncReplicasOptimizer, of which one dies at a known step."""

import contextlib
import json
import re
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.integration.worker_process import WorkerProcess
from tests.programs import ROOT
from tests.support import ServerProcess, free_ports

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "integration" / "sync_replicas_program.py"

LEASE_SECS = 5.0


@contextlib.contextmanager
def running_workers(
    folder, batches, *, pause, announces=False, engine="tables", **optimizer
):
    """Starts workers on two servers.

    Yields them, a function that starts one more, and of the servers the
    addresses, of TensorFlow's the processes.
    """
    num_ids = 1 + max(i for mine in batches for batch in mine for i in batch)
    job = {
        "engine": engine,
        "batches": batches,
        "num_ids": num_ids,
        "out": str(folder / "checkpoint"),
        "pause": pause,
        "announces": announces,
        "optimizer": {"lease_secs": LEASE_SECS, **optimizer},
    }
    with contextlib.ExitStack() as stack:
        servers = []
        if engine == "tables":
            servers = [
                stack.enter_context(
                    ServerProcess(shard_index=i, num_shards=2)
                ).address
                for i in range(2)
            ]
            cluster = {
                "ps": servers,
                "worker": [f"worker{i}:1" for i in range(len(batches))],
            }
        else:
            hosts = [f"127.0.0.1:{p}" for p in free_ports(2 + len(batches))]
            cluster = {"ps": hosts[:2], "worker": hosts[2:]}
        logs = iter(range(100))

        def start(index, kind="worker", **changes):
            worker = WorkerProcess(
                PROGRAM,
                {**job, **changes},
                {"cluster": cluster, "task": {"type": kind, "index": index}},
                folder / f"{kind}{index}_{next(logs)}.log",
            )
            stack.callback(worker.end)
            return worker

        if engine == "variables":
            servers = [start(i, "ps") for i in range(2)]
            for server in servers:
                server.wait_for("serves")
        workers = [start(i) for i in range(len(batches))]
        yield workers, start, servers


def test_the_others_go_on_when_the_chief_dies(tmp_path):
    batches = [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
        [[12, 13], [14, 15], [16, 17], [18]],
    ]
    with running_workers(tmp_path, batches, pause={"0": [2]}) as (
        workers,
        start,
        _,
    ):
        workers[0].wait_for("paused")
        workers[0].signal(signal.SIGKILL)
        # Steps that the chief had not begun do not count.
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


@pytest.mark.parametrize(
    ("engine", "steps"),
    [("variables", 3), ("tables", 1)],
    ids=["while_it_trains", "at_the_end"],
)
def test_a_dead_worker_raises_on_the_others_if_asked_to(
    tmp_path, engine, steps
):
    batches = [[[0], [1], [2]][:steps], [[3], [4]]]
    with running_workers(
        tmp_path, batches, pause={"1": [1]}, engine=engine, on_evict="raise"
    ) as (workers, _, _):
        workers[1].wait_for("paused")
        workers[1].signal(signal.SIGKILL)
        assert "1 of the workers have died" in workers[0].fail()


def test_a_dead_worker_is_not_waited_for_by_those_of_tensorflows_servers(
    tmp_path,
):
    batches = [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9]],
        [[10, 11], [12, 13], [14, 15]],
    ]
    pause = {"0": [2], "1": [1], "2": [1, 2]}
    with running_workers(
        tmp_path, batches, pause=pause, engine="variables"
    ) as (workers, _, _):
        workers[1].wait_for("paused")
        workers[2].wait_for("paused")
        workers[1].signal(signal.SIGKILL)
        # One that stalls for long is given up and comes back.
        workers[2].signal(signal.SIGSTOP)
        workers[0].wait_for("paused")  # It has gone on without them.
        workers[2].signal(signal.SIGCONT)
        workers[2].go_on()
        workers[2].wait_for("paused")
        for index in (0, 2):
            workers[index].go_on()
        found = json.loads(workers[2].next_line())
        for index in (0, 2):
            workers[index].finish()
    wanted = [1 / 6] * 2 + [1 / 2] * 2 + [1 / 4] * 2  # The chief's.
    wanted += [1 / 6] * 2 + [0] * 2  # The dead worker's.
    # The step in which it heard that it had been given up does not count.
    wanted += [1 / 6] * 2 + [0] * 2 + [1 / 4] * 2
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("engine", ["tables", "variables"])
def test_a_worker_that_is_started_again_goes_on_where_it_was(tmp_path, engine):
    batches = [[[0], [1], [2]], [[3], [4]]]
    with running_workers(
        tmp_path, batches, pause={"0": [1], "1": [1]}, engine=engine
    ) as (workers, start, _):
        for worker in workers:
            worker.wait_for("paused")
        workers[1].signal(signal.SIGKILL)
        again = start(1, pause={}, batches=[[], [[4]]], announces=True)
        again.wait_for("joined")
        workers[0].go_on()
        found = json.loads(again.next_line())
        for worker in (workers[0], again):
            worker.finish()
    # As if nothing had happened.
    np.testing.assert_allclose(
        found, [1 / 2, 1 / 2, 1, 1 / 2, 1 / 2], atol=1e-6
    )


@pytest.mark.parametrize("engine", ["tables", "variables"])
def test_a_second_process_with_the_number_of_a_worker_is_refused(
    tmp_path, engine
):
    batches = [[[0], [1]], [[2], [3]]]
    with running_workers(
        tmp_path, batches, pause={"0": [1], "1": [1]}, engine=engine
    ) as (workers, start, _):
        for worker in workers:
            worker.wait_for("paused")
        # Its address is free again, so that the twin can have it.
        workers[1].signal(signal.SIGKILL)
        twin = start(1, optimizer={"lease_secs": LEASE_SECS, "task_index": 0})
        assert re.search(
            r"RuntimeError: .* process \d+ of this machine is worker 0 "
            r"\(.*`task_index=0`.*\). Give each process its own number",
            twin.fail(),
        )
        again = start(1, pause={}, batches=[[], [[3]]], announces=True)
        again.wait_for("joined")
        workers[0].go_on()
        found = json.loads(again.next_line())
        for worker in (workers[0], again):
            worker.finish()
    # The twin, which was a chief, has not set the values to zeros.
    np.testing.assert_allclose(found, [1 / 2] * 4, atol=1e-6)


def test_without_the_chief_the_workers_of_tensorflows_servers_end(tmp_path):
    batches = [[[0], [1]], [[2], [3]], [[4]]]
    with running_workers(
        tmp_path, batches, pause={"0": [1]}, engine="variables"
    ) as (workers, start, _):
        workers[0].wait_for("paused")
        workers[0].signal(signal.SIGKILL)
        for worker in workers[1:]:
            assert "start all workers again" in worker.fail()

        # The same servers serve the next start of all.
        again = [start(i, pause={}) for i in range(3)]
        for worker in again[1:]:
            found = json.loads(worker.next_line())
            np.testing.assert_allclose(
                found, [1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3], atol=1e-6
            )
        for worker in again:
            worker.finish()


@pytest.mark.parametrize(
    ("number", "index"),
    [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)],
    ids=["killed", "first_hangs"],
)
def test_workers_end_when_a_server_of_tensorflow_is_lost(
    tmp_path, number, index
):
    batches = [[[0], [1]], [[2], [3]]]
    with running_workers(
        tmp_path,
        batches,
        pause={"0": [1], "1": [1]},
        engine="variables",
    ) as (workers, _, servers):
        for worker in workers:
            worker.wait_for("paused")
        servers[index].signal(number)
        for worker in workers:
            worker.go_on()
        failures = [worker.fail() for worker in workers]
    for failure in failures:
        # Unless the chief hears of it first, and tells the others.
        assert re.search(r"ConnectionError|a step could not be taken", failure)
    assert any("ConnectionError" in failure for failure in failures)


def test_workers_do_not_join_when_a_server_of_tensorflow_hangs(tmp_path):
    with running_workers(
        tmp_path,
        [[[0]], [[1]]],
        pause={"0": [-1], "1": [-1]},
        engine="variables",
        join_secs=8.0,
    ) as (workers, _, servers):
        for worker in workers:
            worker.wait_for("paused")
        servers[1].signal(signal.SIGSTOP)
        for worker in workers:
            worker.go_on()
        for worker in workers:
            assert "have not all answered within 8 s" in worker.fail()
