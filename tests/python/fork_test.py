"""Processes that fork before and after they use tfswitch."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.programs import environment, run_python
from tests.support import ServerProcess

# The start of the programs below. A child exits as a program does, with its
# destructors and exit functions. An alarm ends a child that hangs.
PRELUDE = """
import gc
import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfswitch as tsw
from tfswitch import _loader


class Child:
    def __init__(self, call, *arguments):
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            signal.alarm(120)
            try:
                answer = call(*arguments)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps(answer, default=str).encode())
            os.close(writing)
            sys.exit()
        os.close(writing)

    def wait(self):
        with os.fdopen(self._reading) as file:
            answer = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        assert code == 0, (code, answer)
        return json.loads(answer)


def make_table(name="t"):
    return tsw.EmbeddingTable(
        name, 2, initializer="zeros", optimizer=tsw.optimizers.SGD(1.0)
    )


def push(table, times=1):
    for _ in range(times):
        table.push([1], np.ones((1, 2), np.float32))


def steps(table):
    return -table.lookup([1]).numpy()[0, 0]
"""

CALLS_IN_A_FORK = """
address, folder = sys.argv[1:]
cluster = tsw.connect(address, timeout_secs=10)
table = make_table()
push(table)
worker = tsw.train.Worker(0, 1)
schedule = tsw.export.Schedule(folder + "/rows", tables=["t"])
schedule.start(3600)

layer = tsw.keras.DynamicEmbedding(2, table="layer")
layer(tf.constant([1]), training=True)
ids = keras.Input((), dtype="int64")
model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
model.compile("sgd", "mse")
private = tsw.keras.DynamicEmbedding(2, name="private")
private(tf.constant([1]), training=True)

ops = _loader.load_ops()
tsw.saved_model.save(model, folder + "/model")
served = ops.tfswitch_served_model()
ops.tfswitch_open_served_model(
    served, folder + "/model/assets/tfswitch_model.json"
)


def look_up_served():
    rows = ops.tfswitch_pin_served_rows(served)
    return ops.tfswitch_served_lookup(rows, [[1]], tables=["layer"], dims=[2])


look_up_served()


def let_go():
    global private
    cluster.close()
    del private  # A table that goes with its layer.
    gc.collect()


calls = {
    "lookup": lambda: table.lookup([1]),
    "lookup_or_create": lambda: table.lookup_or_create([2]),
    "push": lambda: push(table),
    "size": lambda: table.size(),
    "remove": lambda: table.remove([1]),
    "export_rows": lambda: table.export_rows(),
    "another table": lambda: make_table("another"),
    "op TableHandle": lambda: ops.tfswitch_table_handle(
        cluster=address, config=table._config
    ),
    "op ServedLookup": look_up_served,
    "a served model": lambda: tsw.saved_model.state(folder + "/model"),
    "the layer": lambda: layer(tf.constant([1]), training=True),
    "fit": lambda: model.fit(np.arange(4), np.ones((4, 1)), verbose=0),
    "a new layer": lambda: tsw.keras.DynamicEmbedding(2, name="new")(
        tf.constant([1])
    ),
    "tables": lambda: cluster.tables(),
    "save": lambda: cluster.save(folder + "/checkpoint"),
    "connect": lambda: tsw.connect(address, timeout_secs=10),
    "connect to another": lambda: tsw.connect("local://another"),
    "server": lambda: tsw.Server().start(),
    "end_step": lambda: worker.end_step(),
    "leave": lambda: worker.leave(),
    "export": lambda: schedule.export(),
    "nothing": lambda: None,
    "let go": let_go,
}
locks = [
    schedule._thread_lock,
    schedule._export_lock,
    table._handle_lock,
    layer._table_lock,
]
answers = {}
for name, call in calls.items():
    # As threads may hold them that a fork does not have; up to its exit.
    for lock in locks:
        lock.acquire()
    child = Child(call)
    for lock in locks:
        lock.release()
    answers[name] = child.wait()
    push(table)
assert steps(table) == len(calls) + 1, steps(table)
assert not worker.stats()["left"]
worker.end_step()
assert private.table.size() == 1
print(json.dumps(answers))
"""


@pytest.mark.parametrize(
    ("where", "grpc_fork_support"),
    [("local", "0"), ("tcp", "1")],
)
def test_calls_in_a_fork_say_what_to_do_and_the_parent_goes_on(
    where: str, grpc_fork_support: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        address = "local://"
        if where != "local":
            server = stack.enter_context(ServerProcess())
            address = f"grpc://{server.address}"
        program = run_python(
            *("-c", PRELUDE + CALLS_IN_A_FORK, address, tmp_path),
            env=environment(GRPC_ENABLE_FORK_SUPPORT=grpc_fork_support),
        )

    answers = json.loads(program.stdout.splitlines()[-1])
    assert answers.pop("nothing") is None
    assert answers.pop("let go") is None
    for name, answer in answers.items():
        kind = "FailedPrecondition" if name.startswith("op ") else "Runtime"
        assert answer.startswith(f"{kind}Error: "), (name, answer)
        assert "this process is a fork of one that uses tfswitch" in answer
        assert "multiprocessing.get_context('spawn')" in answer, name
        assert f"has opened the cluster '{address}'" in answer, name
    # Exit functions and destructors print nothing.
    assert "Traceback" not in program.stderr
    assert "Exception ignored" not in program.stderr


FORK_BEFORE_USE = """
(address,) = sys.argv[1:]


def train():
    tsw.connect(address, timeout_secs=10)
    push(make_table(), 20)


children = [Child(train) for _ in range(2)]
assert [child.wait() for child in children] == [None, None]
tsw.connect(address)
assert steps(make_table()) == 40
"""


def test_forks_before_use_push_each_under_its_own_identity() -> None:
    with ServerProcess() as server:
        run_python(
            *("-c", PRELUDE + FORK_BEFORE_USE, f"grpc://{server.address}")
        )


SERVER_IN_THE_PARENT = """
def leave_the_block(server):
    with server:
        raise KeyError("as a child might")


first = tsw.Server().start()
address = first.address
cluster = tsw.connect(f"grpc://{address}", timeout_secs=10)
table = make_table()
push(table)
release, hold = os.pipe()
lasting = Child(lambda: (os.close(hold), os.read(release, 1))[0])
answer = Child(leave_the_block, first).wait()
assert answer == "KeyError: 'as a child might'", answer
push(table)
assert steps(table) == 2
# Nor does a child that lives keep the address from the next server.
first.stop()
with tsw.Server(address):
    tsw.connect(f"grpc://{address}", timeout_secs=20)
    second = make_table("second")
    push(second)
    assert steps(second) == 1
os.write(hold, b".")
lasting.wait()
"""


def test_a_server_goes_on_while_forks_of_its_process_come_and_go() -> None:
    run_python("-c", PRELUDE + SERVER_IN_THE_PARENT)


MULTIPROCESSING = """
import multiprocessing
import sys

import keras
import numpy as np

import tfswitch as tsw


def look_up(address):
    with tsw.connect(address, timeout_secs=10):
        table = tsw.EmbeddingTable("t", 2, initializer="zeros")
        return table.lookup([1]).numpy().tolist()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.arange(index, index + 4)[:, None], np.ones((4, 1))


if __name__ == "__main__":
    address = sys.argv[1]
    cluster = tsw.connect(address, timeout_secs=10)
    table = tsw.EmbeddingTable("t", 2, initializer="zeros")
    table.assign([1], np.ones((1, 2), np.float32))
    ids = keras.Input((1,), dtype="int64")
    layer = tsw.keras.DynamicEmbedding(2, name="word")
    rows = keras.layers.Flatten()(layer(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile("adam", "mse")
    for _ in range(2):
        model.fit(Batches(workers=2, use_multiprocessing=True), verbose=0)
    assert model.layers[1].table.size() == 11

    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            pool.apply(look_up, [address])
        except RuntimeError as error:
            assert "get_context('spawn')" in str(error)
        else:
            raise AssertionError("a fork had no error")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(look_up, [address]) == [[1.0, 1.0]]
    assert look_up(address) == [[1.0, 1.0]]
"""


def test_data_loaders_fork_and_users_of_tables_are_spawned(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(MULTIPROCESSING)
    with ServerProcess() as server:
        run_python(program, f"grpc://{server.address}")
