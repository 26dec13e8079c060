"""Servers that come back with their rows: docs/durability.md."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import HANG_SECS, environment
from tests.python.worker_threads import Call, wait_until
from tests.support import SERVER, ServerProcess

IDS = np.arange(200)


def test_training_goes_on_after_a_kill_and_each_lost_push_is_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(shard: int, address: str = "127.0.0.1:0") -> ServerProcess:
        return ServerProcess(
            address=address,
            shard_index=shard,
            num_shards=2,
            flags=(
                f"--data_dir={tmp_path}/{shard}",
                "--checkpoint_every=1s",
            ),
        )

    with (
        start(0) as zero,
        start(1) as one,
        tsw.connect(f"grpc://{zero.address},{one.address}") as cluster,
    ):
        table = tsw.EmbeddingTable(
            "user", 1, initializer="zeros", optimizer=tsw.optimizers.SGD(1.0)
        )
        num_pushes = 0
        has_come_back = threading.Event()

        def train() -> None:
            nonlocal num_pushes
            last = 0
            while last < 10:
                table.push(IDS, -np.ones((IDS.size, 1)))
                num_pushes += 1
                last += has_come_back.is_set()

        call = Call(train)
        state = tmp_path / "1" / "state"
        wait_until(lambda: any(state.glob("manifest-0*.json")))
        one.kill()
        with start(1, one.address) as again:
            assert again.address == one.address
            has_come_back.set()
            call.result()

            values = table.lookup(IDS).numpy()[:, 0]
            said = capfd.readouterr().err
            found = re.findall(r"gone back to .* (\d+) writes since", said)
            assert len(found) == 1, said
            # Rows of shard 0 have all pushes. Rows of shard 1 lack these.
            assert set(values) == {num_pushes, num_pushes - int(found[0])}
            assert cluster.tables() == ["user"]


def test_a_server_that_is_stopped_while_it_recovers_ends_without_an_error(
    tmp_path: Path,
) -> None:
    flags = f"--data_dir={tmp_path}"
    with ServerProcess(flags=(flags,)) as server:
        with tsw.connect(f"grpc://{server.address}"):
            tsw.EmbeddingTable("user", 1).lookup_or_create(IDS)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0

    # The signal is pending, and blocked, when the program starts. Not in a fork
    # of this process, where libraries may start threads that do not block it.
    program = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, SERVER, "--address=127.0.0.1:0", flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )

    assert (ended.returncode, ended.stdout) == (0, "")
    assert re.findall("Z [a-z]+ ([a-z_]+) ", ended.stderr) == [
        "started",
        "stopped",
    ]


def test_a_table_restored_under_another_name_is_there_after_a_kill(
    tmp_path: Path,
) -> None:
    def start() -> ServerProcess:
        return ServerProcess(flags=(f"--data_dir={tmp_path}", "--push_log"))

    optimizer = tsw.optimizers.SGD(1.0)
    with start() as server, tsw.connect(f"grpc://{server.address}") as cluster:
        table = tsw.EmbeddingTable(
            "user", 1, initializer="ones", optimizer=optimizer
        )
        table.lookup_or_create(IDS)
        table.save("alone")
        table.push(IDS, np.ones((IDS.size, 1)))
        cluster.restore("alone", {"user": "copy"})
        copy = tsw.EmbeddingTable(
            "copy", 1, initializer="ones", optimizer=optimizer
        )
        # It is in the log, behind the restore.
        copy.push(IDS[:50], -np.ones((50, 1)))
        server.kill()

    with start() as server, tsw.connect(f"grpc://{server.address}") as cluster:
        assert cluster.tables() == ["copy", "user"]
        values = {
            name: tsw.EmbeddingTable(
                name, 1, initializer="ones", optimizer=optimizer
            ).lookup(IDS)
            for name in cluster.tables()
        }
        np.testing.assert_array_equal(values["user"], np.zeros((200, 1)))
        np.testing.assert_array_equal(values["copy"][:50], 2 * np.ones((50, 1)))
        np.testing.assert_array_equal(values["copy"][50:], np.ones((150, 1)))
