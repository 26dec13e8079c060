"""Barrier and Worker.wait_at_barrier."""

import pytest

import tfswitch as tsw
from tests.python.worker_threads import (
    Call,
    join_workers,
    running_clients,
)

Worker = tsw.train.Worker


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


def test_a_long_wait_keeps_the_lease():
    with running_clients(2) as client:
        one, two = join_workers(client, 2, lease_secs=3.0)
        waiting = Call(one.wait_at_barrier, "end")

        assert not waiting.wait(4.0)  # The wait must last.
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
