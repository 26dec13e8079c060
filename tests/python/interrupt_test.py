"""Ctrl-C while the process waits for servers or for other workers."""

import contextlib
import fcntl
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import HANG_SECS, PythonProgram
from tests.support import ServerProcess

# The timeouts are longer than the test waits. So a call that hangs fails.
PRELUDE = """
import contextlib
import sys
import threading

import tensorflow as tf

import tfswitch as tsw


def run_step(call):
    with contextlib.suppress(tf.errors.OpError):
        tf.function(call)()


def in_a_step(call):
    threading.Thread(target=run_step, args=(call,), daemon=True).start()


address, path = sys.argv[1:]
if path:
    cluster = tsw.connect(address, timeout_secs=1000)
    table = tsw.EmbeddingTable("t", 2, push_depth=1)
    table.lookup_or_create([1])
    worker = tsw.train.Worker(0, 2, wait_secs=1000)
    step = tf.function(lambda: table.lookup([1]))
    step()
    layer = tsw.keras.DynamicEmbedding(2, table=table)
    ids = tf.data.Dataset.from_tensors([1]).repeat().batch(1)
    batches = iter(tsw.data.prefetch_embeddings(ids, layer))
    layer(next(batches))
print("waits", flush=True)
if path:
    sys.stdin.readline()
"""

ENDS = """
except KeyboardInterrupt:
    print("interrupted")
"""


def read_until(program: PythonProgram, *texts: str) -> None:
    """Reads until all of them have come, in any order."""
    read = ""
    while not all(text in read for text in texts):
        line = program.stdout.readline()
        assert line, f"it has ended before it said {texts!r}"
        read += line


def interrupt(program: PythonProgram) -> list[str]:
    """Returns the lines that the program prints then, and TensorFlow's log."""
    program.send_signal(signal.SIGINT)
    program.wait(HANG_SECS)
    return program.stdout.read().splitlines()


def test_a_connect_says_for_whom_it_waits_and_ends_with_ctrl_c(
    tmp_path: Path,
) -> None:
    # It accepts, and says nothing.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    call = "try:\n    tsw.connect(address, timeout_secs=1000)"
    with (
        listener,
        PythonProgram(
            *("-c", PRELUDE + call + ENDS, f"grpc+unix://{tmp_path}/s", ""),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as program,
    ):
        read_until(program, "tfswitch: waiting for shard 0 (unix:")

        assert "interrupted" in interrupt(program)


def test_ctrl_c_ends_a_save_in_the_process(tmp_path: Path) -> None:
    save = (
        "tsw.EmbeddingTable('t', 2)\n"
        "try:\n    tsw.connect('local://').save(sys.argv[2])"
    )
    with (
        open(tmp_path / ".lock", "w") as lock,
        PythonProgram(
            *("-c", PRELUDE.replace("if path", "if 0") + save + ENDS),
            *("", str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as program,
    ):
        # As a process that saves there has it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        read_until(
            program,
            "tfswitch: waiting for another process",
            f"tfswitch: saving to '{tmp_path}': ",
        )

        assert "interrupted" in interrupt(program)


@pytest.mark.parametrize(
    "call",
    [
        "table.lookup([1])",
        "step()",
        "in_a_step(lambda: table.lookup([1])) or threading.Event().wait()",
        "in_a_step(lambda: table.lookup([2])) or table.lookup([1])",
        "[layer(batch) for batch in batches]",
        "table.size()",
        "[table.push([1], [[1.0, 1.0]]) for _ in range(2)]",
        "cluster.save(path)",
        "tsw.export.base(path)",
        "tsw.data.WorkQueue(['a'], worker=worker)",
        "worker.wait_at_barrier('b')",
    ],
)
def test_ctrl_c_ends_a_wait_for_a_server_that_hangs(
    call: str, tmp_path: Path
) -> None:
    begins = "print('calls', flush=True)"
    with (
        ServerProcess() as server,
        PythonProgram(
            *("-c", f"{PRELUDE}try:\n    {begins}\n    {call}{ENDS}"),
            *(f"grpc://{server.address}", str(tmp_path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as program,
    ):
        read_until(program, "waits")
        server.signal(signal.SIGSTOP)
        try:
            program.stdin.write("\n")
            program.stdin.flush()
            read_until(program, "calls")
            # That it waits shows only in that it does not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(1)
            assert program.returncode is None
            assert "interrupted" in interrupt(program)
        finally:
            server.signal(signal.SIGCONT)


ENDS_DURING_CALLS = """
import json, threading
import tfswitch_command

tfswitch_command._put_package()  # TensorFlow does not run here.
from tfswitch import _native

config = {
    "name": "t", "dim": 2, "initializer": {"uniform": {}},
    "optimizer": {"segments": [{"sgd": {}}]}}
table = _native.Cluster("local://", 60.0).open_table(json.dumps(config))

all_call = threading.Barrier(5)

def work():
    table.size()
    all_call.wait()
    while True:
        table.size()

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
all_call.wait()
"""


def test_a_process_ends_while_daemon_threads_call() -> None:
    for _ in range(5):
        subprocess.run([sys.executable, "-c", ENDS_DURING_CALLS], check=True)
