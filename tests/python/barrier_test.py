"""Barrier and Worker.wait_at_barrier."""

import threading

import pytest

import tfswitch as tsw
from tests.python.worker_threads import (
    Call,
    in_threads,
    join_workers,
    running_clients,
)

Worker = tsw.train.Worker


@pytest.fixture(params=[0, 2], ids=["embedded", "two_servers"])
def client(request):
    with running_clients(request.param) as client:
        yield client


@pytest.fixture
def local():
    with running_clients(0) as client:
        yield client


def make_table(cluster):
    return tsw.EmbeddingTable(
        "t",
        1,
        initializer="zeros",
        optimizer=tsw.optimizers.SGD(1.0),
        consistency="bsp",
        cluster=cluster,
    )


def test_a_barrier_opens_when_all_have_come(client):
    workers = join_workers(client, 3)
    come = [0]
    lock = threading.Lock()

    def meet(worker):
        barrier = tsw.train.Barrier("here", worker)
        for meeting in range(1, 11):
            with lock:
                come[0] += 1
            barrier.wait()
            assert come[0] >= 3 * meeting

    in_threads(*(lambda w=w: meet(w) for w in workers))


def test_nobody_waits_for_steps_of_one_at_a_barrier(client):
    one, two = join_workers(client, 2, consistency="bsp")
    tables = [make_table(client(i)) for i in range(2)]
    waiting = Call(two.wait_at_barrier, "end")

    for _ in range(3):
        tables[0].push([1], [[1.0]])
        one.end_step()
    assert not waiting.is_over
    one.wait_at_barrier("end")
    waiting.result()

    # They go on together.
    assert one.stats()["clock"] == two.stats()["clock"] == 3
    tables[0].push([1], [[2.0]])
    tables[1].push([1], [[4.0]])
    in_threads(one.end_step, two.end_step)
    assert float(tables[1].lookup([1])[0, 0]) == -3.0 - 3.0


def test_a_wait_that_takes_too_long_names_those_who_are_missing(client):
    one, two = join_workers(client, 2)
    barrier = tsw.train.Barrier("saved", one, timeout_secs=0.05)

    for _ in range(2):  # Waiting can be resumed.
        with pytest.raises(
            TimeoutError,
            match=r"barrier 'saved' waits for worker 1 of 2 \(.*\); gave up",
        ):
            barrier.wait()

    waiting = Call(lambda: barrier.wait(timeout_secs=60))
    two.wait_at_barrier("saved")
    waiting.result()


def test_those_who_have_not_joined_are_counted(local):
    worker = Worker(0, 3, cluster=local(0))

    with pytest.raises(TimeoutError, match="2 of 3 workers that have not"):
        worker.wait_at_barrier("start", timeout_secs=0.05)


def test_different_barriers_are_an_error_for_all(client):
    one, two = join_workers(client, 2)
    first = Call(one.wait_at_barrier, "a")
    second = Call(two.wait_at_barrier, "b")

    for call in (first, second):
        with pytest.raises(
            RuntimeError, match=r"worker 0 at 'a', worker 1 at 'b'"
        ):
            call.result()


def test_a_barrier_in_the_midst_of_a_step_is_refused(client):
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    table = make_table(client(0))
    table.push([1], [[1.0]])

    with pytest.raises(RuntimeError, match="end the step first"):
        worker.wait_at_barrier("end")

    worker.end_step()
    worker.wait_at_barrier("end")
    assert float(table.lookup([1])[0, 0]) == -1.0


def test_one_given_up_comes_back_to_a_barrier(client, capfd):
    worker = Worker(0, 1, cluster=client(0))
    # The group forgets it, and the worker does not know.
    other = client(1)
    Worker(0, 1, cluster=other).leave()

    worker.wait_at_barrier("end")

    assert worker.stats()["workers"]["active"] == 1
    assert "joining again" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_barrier_needs_a_name(local, name):
    worker = Worker(0, 1, cluster=local(0))

    with pytest.raises(ValueError, match=f"Received: name={name!r}"):
        tsw.train.Barrier(name, worker)
    with pytest.raises(ValueError, match=f"Received: name={name!r}"):
        worker.wait_at_barrier(name)


def test_a_barrier_needs_a_worker():
    with pytest.raises(ValueError, match="Received: worker=None"):
        tsw.train.Barrier("end", None)


@pytest.mark.parametrize("secs", [0, -1, float("nan"), "1"])
def test_a_timeout_is_a_positive_number(local, secs):
    worker = Worker(0, 1, cluster=local(0))

    with pytest.raises(ValueError, match="timeout_secs="):
        worker.wait_at_barrier("end", timeout_secs=secs)


def test_a_server_that_is_gone_is_named():
    server = tsw.Server().start()
    cluster = tsw.Cluster(f"grpc://{server.address}", timeout=1.0)
    worker = Worker(0, 2, cluster=cluster)
    address = server.address
    server.stop()

    with pytest.raises((ConnectionError, TimeoutError), match=address):
        Call(worker.wait_at_barrier, "end").result()


def test_a_long_wait_keeps_the_lease():
    with running_clients(2) as client:
        one, two = join_workers(client, 2, lease_secs=1.5)
        waiting = Call(one.wait_at_barrier, "end")

        assert not waiting.wait(2.0)  # What is proven is that it lasts.
        two.wait_at_barrier("end")
        waiting.result()

        assert one.stats()["workers"]["expired"] == 0
        assert one.stats()["waits"]["count"] == 1


def test_a_wait_in_parts_counts_as_one(client, monkeypatch):
    monkeypatch.setattr("tfswitch.train.worker._WAIT_PART_SECS", 0.01)
    workers = join_workers(client, 2, consistency="bsp")
    waiting = Call(workers[0].wait_at_barrier, "here")
    assert not waiting.wait(0.1)
    workers[1].wait_at_barrier("here")
    waiting.result()
    assert workers[0].stats()["waits"]["count"] == 1
