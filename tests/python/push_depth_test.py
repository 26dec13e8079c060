"""Pushes in flight: no call reads too early; prefetch_test.py trains."""

import contextlib
import pathlib
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.programs import PythonProgram
from tests.support import RestartableServers, ServerProcess, make_table
from tests.tokens import TokenFile
from tfswitch.ops import TablePush
from tfswitch.table import push_many

IDS = np.arange(5)
ONES = np.ones((5, 2))


# Calls, and what they must give after three steps of -1 from zero.
CALLS: dict[str, tuple[Callable[[tsw.EmbeddingTable], Any], Any]] = {
    "lookup": (lambda t: t.lookup(IDS).numpy().min(), -3),
    "graph": (lambda t: tf.function(t.lookup)(IDS).numpy().min(), -3),
    "size": (lambda t: t.size(), 5),
    "stats": (lambda t: t.stats()["num_rows"], 5),
    "export_rows": (lambda t: t.export_rows()[1].min(), -3),
    "remove": (lambda t: t.remove(IDS), 5),
    "flush": (lambda t: t.cluster.flush(), None),
    "epoch end": (
        lambda t: keras.callbacks.CallbackList().on_epoch_end(0),
        None,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_wait_for_all_pushes_in_flight(name: str) -> None:
    call, expected = CALLS[name]
    with ServerProcess() as server:
        address = f"grpc://{server.address}"
        table = make_table(push_depth=4, cluster=tsw.Cluster(address))
        table.push([], np.zeros((0, 2)))  # Prepares all that a push needs.
        server.signal(signal.SIGSTOP)
        try:
            # One push waits for the server, and the others for that one.
            pushed = [table.push(IDS, ONES) for _ in range(3)]
        finally:
            threading.Timer(0.2, server.signal, (signal.SIGCONT,)).start()

        assert pushed == [-1, -1, -1]
        assert call(table) == expected
        with tsw.Cluster(address) as other:
            rows = other.table("t").lookup(IDS).numpy()
        assert rows.min() == (0 if name == "remove" else -3)


def test_the_smallest_depth_counts_for_tables_that_learn_together() -> None:
    cluster = tsw.connect("local://", push_depth=3)
    deep = make_table("deep", cluster=cluster)
    shallow = make_table("shallow", push_depth=0, cluster=cluster)
    pushes = [
        TablePush(table, tf.constant([1], tf.int64), tf.ones([1, 2]))
        for table in (deep, shallow)
    ]

    assert [int(n) for n in push_many(pushes)] == [1, 1]
    assert [int(n) for n in push_many(pushes[:1])] == [-1]


def test_an_error_names_its_step_once_and_leaves_the_call_undone() -> None:
    with ServerProcess() as server:
        cluster = tsw.Cluster(
            f"grpc://{server.address}", timeout_secs=0.5, push_depth=2
        )
        table = make_table(cluster=cluster)
        table.push(IDS, ONES)
        cluster.flush()
        server.kill()

        table.push(IDS, ONES)
        table.push(IDS, ONES)
        with pytest.raises(
            (ConnectionError, TimeoutError),
            match=r"the push of step 2: .*shard",
        ):
            table.push(IDS, ONES)
        assert table.iterations == 3
        # No later test may get the error of the other push.
        with contextlib.suppress(OSError):
            cluster.flush()


# Answers of a server to a push, and the errors of the call after it.
REFUSALS: dict[str, tuple[type[Exception], str]] = {
    "no right": (PermissionError, "needs train"),
    "lost table": (OSError, "has lost table"),
    "dropped table": (KeyError, "no table 't'"),
}


@pytest.mark.parametrize("cause", REFUSALS)
def test_a_refused_push_is_the_error_of_the_next_call(
    cause: str, tmp_path: pathlib.Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    role = "read" if cause == "no right" else "train"
    admin, token = tokens.create("admin"), tokens.create(role)
    with RestartableServers(token_file=tokens.path) as servers:
        owner = tsw.Cluster(servers.address, token=admin)
        cluster = tsw.Cluster(servers.address, token=token, push_depth=1)
        make_table(cluster=owner)
        table = make_table(cluster=cluster)
        assert table.lookup(IDS).shape == (5, 2)
        if cause == "lost table":
            servers.restart(1)
        elif cause == "dropped table":
            owner.drop("t")
        expected, text = REFUSALS[cause]
        table.push(IDS, ONES)
        with pytest.raises(expected, match=rf"the push of step 1: .*{text}"):
            table.lookup(IDS)
        cluster.flush()  # The error was raised once.


def test_gradients_with_nan_are_an_error_of_their_own_step() -> None:
    table = make_table(push_depth=2, cluster=tsw.connect("local://"))

    with pytest.raises(ValueError, match="gradient of id 3 is NaN"):
        table.push([3], [[np.nan, 0.0]])

    assert table.size() == 0


PROGRAM = """
import sys
import tfswitch as tsw
from tests.support import make_table
cluster = tsw.connect(sys.argv[1], push_depth=8, timeout_secs=1)
table = make_table()
table.push([1], [[1.0, 1.0]])
cluster.flush()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(8):
    table.push([1], [[1.0, 1.0]])
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_program_that_ends_waits_for_its_pushes(is_killed: bool) -> None:
    with (
        ServerProcess() as server,
        PythonProgram(
            *("-c", PROGRAM, f"grpc://{server.address}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as program,
    ):
        while program.stdout.readline() != "ready\n":
            pass
        if is_killed:
            server.kill()
        program.stdin.write("\n")
        program.stdin.flush()
        output = program.stdout.read()
        assert program.wait(60) == 0
        assert ("the push of step 2: " in output) == is_killed
        if not is_killed:
            with tsw.Cluster(f"grpc://{server.address}") as cluster:
                rows = cluster.table("t").lookup([1]).numpy()
            assert rows.tolist() == [[-9, -9]]
