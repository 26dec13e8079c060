"""Long runs of SyncReplicasOptimizer; results are in docs/sync_training.md.

pytest -m acceptance tests/acceptance -s
"""

import signal
import threading

import numpy as np
import pytest

import tfswitch as tsw
from tests.integration.sync_replicas_test import LEASE_SECS, running_workers
from tests.python.sync_replicas_optimizer_test import (
    Script,
    batches_of,
    expected_weights,
)
from tests.python.worker_threads import in_threads, running_clients

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(3600)]


def _train(script, mine, epochs):
    with script.graph.as_default(), script.session() as session:
        for _ in range(epochs):
            script.hook.start_epoch()
            for batch in mine:
                session.run(script.train_op, {script.ids: batch})
            script.hook.finish_epoch()
        script.values = session.run(
            {v.op.name: v for v in script.graph.get_collection("variables")}
        )


def _weights_on(address, num_ids):
    with tsw.Cluster(address) as cluster:
        table = tsw.DenseTable(
            "sync_replicas/variables",
            {"weights": (num_ids,)},
            optimizer=tsw.optimizers.SGD(0.0),
            consistency="bsp",
            cluster=cluster,
        )
        return table.pull()[0].numpy()


def test_200_random_uneven_cases_train_every_sample_once_and_end():
    random = np.random.default_rng(4)
    steps = 0
    for case in range(200):
        count = int(random.integers(1, 9))
        epochs = int(random.integers(1, 4))
        counts = random.integers(0, 21, count)
        kind = random.integers(0, 4)
        if kind == 0:  # The chief has no data.
            counts[0] = 0
        elif kind == 1:  # One alone has some.
            counts[np.arange(count) != random.integers(0, count)] = 0
        sizes = random.integers(1, 9, 5).tolist()
        batches, num_rows = batches_of(counts.tolist(), sizes)
        with running_clients(1 + case % 2) as client:
            scripts = [
                Script(
                    client, f"case{case}", i, count, num_rows=max(num_rows, 1)
                )
                for i in range(count)
            ]
            in_threads(
                *(
                    lambda s=s, b=b, e=epochs: _train(s, b, e)
                    for s, b in zip(scripts, batches, strict=True)
                )
            )
        wanted = expected_weights(batches, max(num_rows, 1), epochs)
        for script in scripts:
            np.testing.assert_allclose(script.values["w"], wanted, atol=2e-6)
            rounds = epochs * int(counts.max())
            assert script.values["global_step"] == rounds
        steps += epochs * int(counts.sum())
    print(f"\n200 cases, {steps} batches: none lost, none twice, no hang")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_are_killed_or_stopped_at_random_harm_nobody(
    tmp_path, number
):
    random = np.random.default_rng(int(number))
    pause = threading.Event()
    harmed = 0
    for run in range(50 if number == signal.SIGKILL else 10):
        count = int(random.integers(2, 4))
        counts = random.integers(200, 600, count)
        batches, num_ids = batches_of(counts.tolist(), [2, 1])
        folder = tmp_path / str(run)
        folder.mkdir()
        victim = int(random.integers(0, count))
        with running_workers(folder, batches, pause={}, announces=True) as (
            workers,
            _,
            address,
        ):
            for worker in workers:
                worker.wait_for("joined")
            pause.wait(random.uniform(0.0, 1.0))
            workers[victim].signal(number)
            if number == signal.SIGSTOP:
                pause.wait(1.5 * LEASE_SECS)
                workers[victim].signal(signal.SIGCONT)
            for index, worker in enumerate(workers):
                if number == signal.SIGKILL and index == victim:
                    continue
                if index > 0:
                    worker.next_line()  # Its values when it had ended.
                worker.finish()
            weights = _weights_on("grpc://" + ",".join(address), num_ids)
        # Each step's weights sum to 1, so nothing counts half or twice.
        np.testing.assert_allclose(
            weights.sum(), round(weights.sum()), atol=1e-3
        )
        for index, mine in enumerate(batches):
            trained = [weights[batch].min() > 0 for batch in mine]
            if index != victim:
                assert all(trained), f"run {run}: worker {index} lost batches"
            else:
                harmed += not all(trained)
                if number == signal.SIGSTOP:  # The step it was stopped in.
                    assert trained.count(False) <= 1
    print(f"\n{number.name}: {harmed} were hit while they trained")
