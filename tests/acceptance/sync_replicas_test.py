"""Long runs of SyncReplicasOptimizer.

The results are in docs/sync_replicas_comparison.md.

pytest -m acceptance tests/acceptance -s
"""

import contextlib
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.integration.sync_replicas_test import LEASE_SECS, running_workers
from tests.python.sync_replicas_optimizer_test import (
    Script,
    TableServers,
    VariableServers,
    batches_of,
    expected_weights,
)
from tests.python.worker_threads import in_threads, running_clients

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(3600)]


@pytest.fixture(params=["tables", "variables"])
def engine(request):
    """Where the variables are: on tfswitch's or on TensorFlow's servers."""
    return request.param


@contextlib.contextmanager
def running_engine(engine, num_servers, num_workers):
    """Yields what `Script` needs."""
    if engine == "variables":
        yield VariableServers(num_servers, num_workers)
        return
    with running_clients(num_servers) as client:
        yield TableServers(client)


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


def test_200_random_uneven_cases_train_every_sample_once_and_end(engine):
    random = np.random.default_rng(4)
    steps = 0
    with contextlib.ExitStack() as stack:
        kinds = [
            stack.enter_context(running_engine(engine, 1 + i, 8))
            for i in range(2)
        ]
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
            scripts = [
                Script(
                    kinds[case % 2],
                    f"case{case}",
                    i,
                    count,
                    num_rows=max(num_rows, 1),
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
                np.testing.assert_allclose(
                    script.values["w"], wanted, atol=2e-6
                )
                rounds = epochs * int(counts.max())
                assert script.values["global_step"] == rounds
            steps += epochs * int(counts.sum())
    print(f"\n{engine}: 200 cases, {steps} batches: none lost, none twice")


def test_1000_epochs_end_on_3_servers(engine):
    batches, num_rows = batches_of([3, 1], [2])
    with running_engine(engine, 3, 2) as servers:
        scripts = [Script(servers, "epochs", i, 2) for i in range(2)]
        in_threads(
            *(
                lambda s=s, b=b: _train(s, b, 1000)
                for s, b in zip(scripts, batches, strict=True)
            ),
            timeout_secs=1200.0,
        )
    wanted = expected_weights(batches, 64, 1000)
    for script in scripts:
        np.testing.assert_allclose(script.values["w"], wanted, rtol=1e-4)
        assert script.values["global_step"] == 3000
    print(f"\n{engine}: 1,000 epochs of {num_rows} samples have ended")


@pytest.mark.parametrize(
    ("number", "runs", "victims"),
    [
        (signal.SIGKILL, 50, 1),
        (signal.SIGKILL, 10, 2),
        (signal.SIGSTOP, 10, 1),
    ],
    ids=["killed", "two_killed", "stopped"],
)
def test_workers_that_are_killed_or_stopped_at_random_harm_nobody(
    tmp_path, engine, number, runs, victims
):
    random = np.random.default_rng(int(number) + victims)
    pause = threading.Event()
    harmed = 0
    for run in range(runs):
        count = int(random.integers(1 + victims, 3 + victims))
        counts = random.integers(200, 600, count)
        batches, num_ids = batches_of(counts.tolist(), [2, 1])
        folder = tmp_path / str(run)
        folder.mkdir()
        # TensorFlow's servers cannot do without the chief.
        first = 0 if engine == "tables" and victims == 1 else 1
        hit = random.permutation(np.arange(first, count))[:victims].tolist()
        with running_workers(
            folder,
            batches,
            pause={},
            announces=True,
            engine=engine,
            # A sample's weight is then the same in whatever step it counts.
            normalize="initial",
        ) as (workers, _, servers):
            for worker in workers:
                worker.wait_for("joined")
            pause.wait(random.uniform(0.0, 1.0))
            for index in hit:
                workers[index].signal(number)
            if number == signal.SIGSTOP:
                pause.wait(1.5 * LEASE_SECS)
                for index in hit:
                    workers[index].signal(signal.SIGCONT)
            values = None
            for index, worker in enumerate(workers):
                if number == signal.SIGKILL and index in hit:
                    continue
                if index > 0:  # Its values when it had ended.
                    values = worker.next_line()
                    if values is None and index in hit:
                        break  # The others had ended before it came back.
                worker.finish()
            weights = _final_weights(engine, servers, num_ids, folder)
        for index, mine in enumerate(batches):
            of_sample = 1.0 / (count * len(mine[0]))
            times = [weights[batch] / of_sample for batch in mine]
            trained = [found.max() > 0 for found in times]
            for found, is_trained in zip(times, trained, strict=True):
                # All of the batch once, or nothing of it.
                np.testing.assert_allclose(found, is_trained, atol=1e-5)
            if index not in hit:
                assert all(trained), f"run {run}: worker {index} lost batches"
            else:
                harmed += not all(trained)
                # A stopped worker loses the step in which that was noticed.
                if number == signal.SIGSTOP and values is not None:
                    assert trained.count(False) <= 1
    print(
        f"\n{engine}, {number.name} of {victims}: {runs} runs, in which "
        f"{harmed} workers were hit while they trained"
    )


def _final_weights(engine, servers, num_ids, folder):
    if engine == "variables":
        saved = tf.train.load_checkpoint(str(folder / "checkpoint"))
        weights, mirror = map(saved.get_tensor, ("weights", "mirror"))
        np.testing.assert_array_equal(weights, mirror)
        return weights
    with tsw.Cluster("grpc://" + ",".join(servers)) as cluster:
        table = tsw.DenseTable(
            "sync_replicas/variables",
            {"weights": (num_ids,), "mirror": (num_ids,)},
            optimizer=tsw.optimizers.SGD(0.0),
            consistency=tsw.train.Consistency.bsp("sum"),
            cluster=cluster,
        )
        weights, mirror = (value.numpy() for value in table.pull())
        np.testing.assert_array_equal(weights, mirror)
        return weights


def test_without_the_chief_workers_of_tensorflows_servers_end(tmp_path):
    random = np.random.default_rng(3)
    pause = threading.Event()
    for run in range(10):
        count = int(random.integers(2, 4))
        batches, _ = batches_of([3000] * count, [2, 1])
        folder = tmp_path / str(run)
        folder.mkdir()
        with running_workers(
            folder, batches, pause={}, announces=True, engine="variables"
        ) as (workers, _, _):
            for worker in workers:
                worker.wait_for("joined")
            pause.wait(random.uniform(0.0, 1.0))
            workers[0].signal(signal.SIGKILL)
            for worker in workers[1:]:
                assert "start all workers again" in worker.fail()
    print("\nvariables, SIGKILL of the chief: 10 runs, all others end")
