"""Worker: joining, ending steps, waiting for others, leaving."""

import queue
import signal

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests import support
from tests.python.worker_threads import (
    Call,
    arrivals,
    in_threads,
    join_workers,
    running_clients,
    wait_for_stderr,
    wait_until,
)
from tests.support import ServerProcess
from tfswitch import cluster as cluster_lib
from tfswitch.ops import embedding_ops
from tfswitch.train.worker import present_workers

Consistency = tsw.train.Consistency
Worker = tsw.train.Worker

AWAY = (ConnectionError, TimeoutError)


def make_table(cluster, consistency="bsp", name="t", **kwargs):
    return support.make_table(
        name, 1, consistency=consistency, cluster=cluster, **kwargs
    )


def end_steps(*workers):
    in_threads(*(worker.end_step for worker in workers))


def value_of(table, row=1):
    return float(table.lookup([row])[0, 0])


# --- Arguments --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"worker_id": -1}, "worker_id=-1"),
        ({"worker_id": 1.0}, "worker_id=1.0"),
        ({"worker_id": True}, "worker_id=True"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": "2"}, "num_workers='2'"),
        ({"num_workers": 10**7}, "num_workers=10000000"),
        ({"group": ""}, "group=''"),
        ({"group": 3}, "group=3"),
        ({"cluster": "local://"}, "cluster='local://'"),
        ({"consistency": "ssp"}, "consistency='ssp'"),
        (
            {"consistency": {"kind": "ssp", "staleness": -1}},
            "staleness=-1",
        ),
        ({"lease_secs": 0}, "lease_secs=0"),
        ({"lease_secs": float("nan")}, "lease_secs=nan"),
        ({"join_secs": -1.0}, "join_secs=-1.0"),
        ({"wait_secs": "1"}, "wait_secs='1'"),
        ({"wait_secs": True}, "wait_secs=True"),
        ({"wait_secs": float("inf")}, "wait_secs=inf"),
        ({"on_lost_worker": "stop"}, "on_lost_worker='stop'"),
        ({"on_event": "print"}, "on_event='print'"),
    ],
)
def test_bad_arguments_are_named_and_nobody_joins(local, arguments, message):
    arguments = {"worker_id": 0, "num_workers": 2, **arguments}

    with pytest.raises(ValueError, match=f"Received.*{message}|{message}"):
        Worker(**{"cluster": local(0), **arguments})

    with pytest.raises(RuntimeError, match="no worker of a group"):
        local(0)._native.end_step(1.0)


@pytest.mark.parametrize(
    "weight",
    [-1e-300, float("nan"), float("inf"), np.ones(1), "many", None],
    ids=repr,
)
def test_a_bad_weight_is_refused_and_no_step_ends(local, weight):
    worker = Worker(0, 1, consistency="bsp", cluster=local(0))

    with pytest.raises(ValueError, match=r"`weight`.*Received: weight="):
        worker.end_step(weight)

    assert worker.stats()["clock"] == 0


@pytest.mark.parametrize(
    "weight", [0, np.int64(2), np.array(2.0), tf.constant(2.0)], ids=repr
)
def test_a_weight_is_any_scalar(local, weight):
    worker = Worker(0, 1, consistency="bsp", cluster=local(0))

    worker.end_step(weight)

    assert worker.stats()["clock"] == 1


def test_a_symbolic_weight_is_refused(local):
    worker = Worker(0, 1, cluster=local(0))

    @tf.function(autograph=False)
    def step(weight):
        worker.end_step(weight)

    with pytest.raises(ValueError, match=r"symbolic.*outside tf\.function"):
        step(tf.constant(1.0))
    assert worker.stats()["clock"] == 0


def test_properties_say_who_it_is(local):
    worker = Worker(
        1, 3, consistency=Consistency.ssp(2), group="g", cluster=local(0)
    )

    assert worker.worker_id == 1
    assert worker.num_workers == 3
    assert worker.consistency == Consistency.ssp(2)
    assert worker.group == "g"
    assert worker.cluster is local(0)
    assert not worker.is_chief
    assert Worker(0, 3, group="h", cluster=local(1)).is_chief
    assert repr(worker) == ("<tfswitch.train.Worker 1 of 3 in group 'g', ssp>")


def test_a_worker_is_of_the_default_cluster(embedded):
    worker = Worker()

    assert worker.cluster is cluster_lib.default_cluster() is embedded
    assert worker.consistency == Consistency.asp()


def test_the_example_of_the_docstring(embedded):
    table = tsw.EmbeddingTable("user", 2, consistency="bsp")
    with Worker(0, 1, consistency="bsp") as worker:
        for ids, gradients in [([1, 2], np.ones((2, 2)))] * 3:
            table.push(ids, gradients)
            worker.end_step(weight=len(ids))

    assert table.size() == 2
    assert worker.stats()["clock"] == 3


# --- bsp --------------------------------------------------------------------


def test_bsp_applies_a_step_when_all_have_ended_it(client):
    one, two = join_workers(client, 2, consistency="bsp")
    tables = [make_table(client(i)) for i in range(2)]

    assert int(tables[0].push([1], [[1.0]])) == 0
    first = Call(one.end_step)
    wait_until(lambda: arrivals(two) == 1)
    tables[1].push([1], [[3.0]])

    assert value_of(tables[0]) == 0.0
    assert not first.is_over
    two.end_step()
    first.result()
    assert value_of(tables[0]) == value_of(tables[1]) == -2.0


# --- Waiting ends -----------------------------------------------------------


def test_ending_a_step_again_after_a_timeout_goes_on_waiting(client):
    one = Worker(0, 2, consistency="bsp", cluster=client(0))
    two = Worker(1, 2, consistency="bsp", cluster=client(1), wait_secs=0.05)
    tables = [make_table(client(i)) for i in range(2)]
    tables[1].push([1], [[4.0]])
    for _ in range(2):
        with pytest.raises(TimeoutError, match="worker 0"):
            two.end_step()
    tables[0].push([1], [[2.0]])

    one.end_step()
    two.end_step()

    # One step, and one contribution of each.
    assert value_of(tables[0]) == -3.0
    assert one.stats()["clock"] == two.stats()["clock"] == 1
    assert one.stats()["workers"]["contributions"] == 2


def test_a_timeout_does_not_let_a_worker_run_ahead(client):
    kind = Consistency.ssp(0)
    slow = Worker(0, 2, consistency=kind, cluster=client(0))
    fast = Worker(1, 2, consistency=kind, cluster=client(1), wait_secs=0.05)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="worker 0"):
            fast.end_step()

    assert fast.stats()["clock"] == 1
    slow.end_step()
    fast.end_step()
    assert fast.stats()["clock"] == 1


def test_who_was_lost_is_said_and_ends_those_that_want_that(client, capfd):
    events = queue.Queue()
    worker = Worker(
        0,
        3,
        consistency="bsp",
        join_secs=0.05,
        lease_secs=0.3,
        cluster=client(0),
        on_lost_worker="fail",
        on_event=lambda *event: events.put(event),
    )
    lost = (
        "workers 1, 2 are given up after 0.05 s without having joined; 1 of 3 "
        "goes on"
    )

    assert events.get(timeout=60) == ("lost", lost)
    with pytest.raises(RuntimeError, match=f"{lost}, and worker 0 ends"):
        worker.end_step()
    assert worker.stats()["workers"]["lost"] == {1: 0, 2: 0}

    worker.leave()
    err = wait_for_stderr(capfd, "what was left of data of its own")
    assert f"tfswitch: group 'train': {lost}\n" in err
    assert "at the end: lost worker 1 after 0 steps that count, worker 2" in err


# --- Pushes -----------------------------------------------------------------


def test_a_push_without_a_worker_is_refused(client):
    table = make_table(client(0))

    with pytest.raises(
        RuntimeError, match=r"'t'.*make a tfswitch\.train\.Worker first"
    ):
        table.push([1], [[1.0]])

    assert table.size() == 0


def test_a_push_of_a_laxer_worker_is_refused(client):
    Worker(0, 1, consistency=Consistency.ssp(2), cluster=client(0))
    table = make_table(client(0), Consistency.ssp(1))

    with pytest.raises(RuntimeError, match="consistency of the strictest tabl"):
        table.push([1], [[1.0]])

    assert table.size() == 0


def test_a_refused_push_in_a_graph_is_an_error_of_tensorflow(local):
    table = make_table(local(0))

    @tf.function
    def step():
        table.push([1], [[1.0]])

    with pytest.raises(tf.errors.FailedPreconditionError, match="Worker first"):
        step()


def test_a_graph_ends_its_step_by_an_op(client):
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    table = make_table(client(0))

    @tf.function
    def step():
        with tf.control_dependencies([table.push([1], [[2.0]])]):
            weight = tf.constant(3.0, tf.float64)
        embedding_ops.end_step(table.handle, weight)
        return table.lookup([1])

    np.testing.assert_array_equal(step(), [[-2.0]])
    np.testing.assert_array_equal(step(), [[-4.0]])
    assert worker.stats()["clock"] == 2


def test_the_op_refuses_a_bad_weight(local):
    Worker(0, 1, consistency="bsp", cluster=local(0))
    table = make_table(local(0))

    with pytest.raises(tf.errors.InvalidArgumentError, match="weight"):
        embedding_ops.end_step(table.handle, tf.constant(-1.0, tf.float64))


def test_threads_may_push_in_one_step(client):
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    table = make_table(client(0))

    in_threads(
        *(
            lambda: [table.push([1, 2], [[1.0], [1.0]]) for _ in range(10)]
            for _ in range(4)
        )
    )
    worker.end_step()

    assert [value_of(table, row) for row in (1, 2)] == [-40.0, -40.0]


# --- Stats and leaving ------------------------------------------------------


def test_stats_count_steps_and_waits(client):
    one, two = join_workers(client, 2, consistency="bsp")
    for _ in range(4):
        end_steps(one, two)

    stats = one.stats()

    assert stats["clock"] == 4
    assert stats["dropped_steps"] == 0
    assert stats["waits"]["count"] == 4
    assert 0.0 <= stats["waits"]["longest_s"] <= stats["waits"]["total_s"]
    workers = stats["workers"]
    assert workers == two.stats()["workers"]
    assert workers["active"] == 2
    assert workers["rounds"] == 4
    assert workers["contributions"] == 8
    assert workers["dropped"] == workers["expired"] == 0
    assert workers["rejoined"] == 0
    # In a round nobody is ahead of one who has begun it.
    assert sum(workers["staleness"]) == workers["staleness"][0] == 8


def test_a_context_leaves_at_its_end_and_with_an_error(client):
    with Worker(0, 1, consistency="bsp", cluster=client(0)) as worker:
        assert worker.stats()["workers"]["active"] == 1

    worker.leave()  # Once more is no error.
    assert worker.stats()["workers"]["active"] == 0

    with pytest.raises(ZeroDivisionError), worker:
        worker.end_step()
        raise ZeroDivisionError
    assert worker.stats()["workers"]["active"] == 0


def test_an_error_of_leaving_does_not_hide_what_went_wrong():
    server = tsw.Server().start()
    cluster = tsw.Cluster(f"grpc://{server.address}", timeout_secs=2.0)

    with pytest.raises(ZeroDivisionError), Worker(cluster=cluster):
        server.stop()
        raise ZeroDivisionError


@pytest.mark.parametrize("num_servers", [0, 1])
def test_closing_a_cluster_leaves_the_group(num_servers):
    with running_clients(num_servers) as client:
        one, two = join_workers(client, 2, consistency="bsp")
        table = make_table(client(0))  # Keeps the connection.

        client(0).close()

        assert two.stats()["workers"]["active"] == 1
        two.end_step()
        one.leave()  # There is nothing left to do.
        assert one not in present_workers()
        del one, table


def test_closing_a_cluster_leaves_a_worker_of_another_one_alone(local):
    cluster = local(0)
    same = tsw.Cluster(cluster.address, timeout_secs=cluster.timeout_secs)
    worker = Worker(0, 1, cluster=cluster)

    same.close()

    assert worker.stats()["workers"]["active"] == 1


def test_closing_a_cluster_whose_server_has_gone_is_no_error():
    server = tsw.Server().start()
    cluster = tsw.Cluster(f"grpc://{server.address}", timeout_secs=600.0)
    worker = Worker(0, 1, consistency="bsp", cluster=cluster, lease_secs=6)
    table = make_table(cluster)
    server.stop()

    # Takes only few of the 600 seconds that calls wait for a server.
    assert Call(cluster.close).wait(60)

    with pytest.raises(RuntimeError, match="closed"):
        worker.end_step()
    del table


def test_a_worker_of_a_closed_cluster_is_refused(local):
    cluster = local(0)
    cluster.close()

    with pytest.raises(RuntimeError, match="closed"):
        Worker(cluster=cluster)


# --- Servers that are away --------------------------------------------------


def test_a_server_that_is_gone_is_named():
    server = tsw.Server().start()
    cluster = tsw.Cluster(f"grpc://{server.address}", timeout_secs=2.0)
    address = server.address
    worker = Worker(0, 1, consistency="bsp", cluster=cluster)
    worker.end_step()

    server.stop()

    for call in (
        worker.end_step,
        worker.leave,
        worker.stats,
        lambda: Worker(0, 1, consistency="bsp", cluster=cluster),
    ):
        with pytest.raises(AWAY, match=address):
            Call(call).result()


@pytest.mark.slow
def test_a_server_that_stops_answering_ends_a_wait():
    """`wait_secs` is for other workers; the server has its own deadline."""
    with ServerProcess() as server:
        address = f"grpc://{server.address}"
        clusters = [
            tsw.Cluster(address, timeout_secs=4.0 + i) for i in range(2)
        ]
        one, two = (
            Worker(i, 2, consistency="bsp", cluster=clusters[i], wait_secs=600)
            for i in range(2)
        )
        blocked = Call(one.end_step)
        wait_until(lambda: arrivals(two) == 1)

        server.signal(signal.SIGSTOP)

        with pytest.raises(AWAY, match=server.address):
            blocked.result()
        with pytest.raises(AWAY, match=server.address):
            Call(two.end_step).result()


def test_a_server_that_was_started_again_is_joined_again(capfd):
    server = tsw.Server().start()
    address = server.address
    cluster = tsw.Cluster(
        f"grpc://{address}", timeout_secs=20.0, on_lost_tables="recreate"
    )
    worker = Worker(0, 1, consistency="bsp", cluster=cluster)
    table = make_table(cluster)
    worker.end_step()
    server.stop()

    with tsw.Server(address):
        table.push([1], [[1.0]])
        worker.end_step()  # It had not joined there yet: does not count.
        table.push([1], [[2.0]])
        worker.end_step()

        assert value_of(table) == -2.0
        assert worker.stats()["dropped_steps"] == 1
        worker.leave()

    assert "step that has just ended does not count" in capfd.readouterr().err


def test_a_server_that_was_started_again_is_left_and_joined():
    server = tsw.Server().start()
    address = server.address
    with tsw.Cluster(f"grpc://{address}", timeout_secs=20.0) as cluster:
        worker = Worker(0, 1, consistency="bsp", cluster=cluster)
        server.stop()

        with tsw.Server(address):
            worker.leave()  # Nobody knows it there.
            again = Worker(0, 1, consistency="bsp", cluster=cluster)
            again.end_step()

            assert again.stats()["clock"] == 1
            again.leave()


# --- Several workers of one process -----------------------------------------


def test_a_worker_whose_place_is_taken_does_nothing(local):
    former = Worker(0, 1, group="a", cluster=local(0))
    present = Worker(0, 1, group="b", cluster=local(0))

    for call in (former.end_step, former.stats):
        with pytest.raises(RuntimeError, match="another Worker"):
            call()
    former.leave()

    present.end_step()
    assert present.stats()["workers"]["active"] == 1


def test_a_task_that_is_no_worker_has_no_number(local, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1"], "evaluator": ["b:1"]},'
        ' "task": {"type": "evaluator", "index": 0}}',
    )

    with pytest.raises(ValueError, match="evaluator 0, which is no worker"):
        Worker(cluster=local(0))


def test_steps_that_count_are_repeated_without_effect(client):
    cluster = client(0)
    table = make_table(cluster)

    def step(worker):
        table.push([7], [[-1.0]])
        worker.end_step()

    first = Worker(0, 1, cluster=cluster, consistency="bsp")
    for _ in range(4):
        step(first)
    assert first.stats()["num_steps"] == 4

    # Started again from a checkpoint of its second step.
    again = Worker(0, 1, cluster=cluster, consistency="bsp", first_step=2)
    for number in range(2, 6):
        assert again.stats()["num_steps"] == number
        step(again)
    again.wait_at_barrier("end")

    np.testing.assert_array_equal(table.lookup([7]).numpy(), [[6.0]])


def test_an_item_of_a_work_queue_is_not_advanced_by_a_repeated_step(local):
    cluster = local(0)
    table = make_table(cluster)
    first = Worker(0, 1, cluster=cluster, consistency="bsp")
    table.push([7], [[-1.0]])
    first.end_step()

    again = Worker(0, 1, cluster=cluster, consistency="bsp", first_step=0)
    queue = tsw.data.WorkQueue(["a"], worker=again)
    item = queue.take()

    with pytest.raises(RuntimeError, match="join without first_step"):
        item.advance(1)


@pytest.mark.parametrize("first_step", [-1, 1.5, "2"])
def test_a_bad_first_step_is_named(local, first_step):
    with pytest.raises((ValueError, TypeError), match="first_step"):
        Worker(0, 1, cluster=local(0), first_step=first_step)
