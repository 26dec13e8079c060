"""Servers outlive what happens around them, and lose no acknowledged write."""

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import prediction_service_pb2_grpc

import tfswitch as tsw
from tests.faults.failing_disk_test import Pushes, count_of_all
from tests.faults.training import count_table
from tests.faults.unread_stderr_test import Server, running
from tests.integration.predictor_test import (
    MODEL,
    request,
    save,
    wait_until,
)
from tests.support import NotServingError, ServerProcess

pytestmark = [pytest.mark.faults, pytest.mark.slow]

PAUSE_SECS = 2
# How much memory a server may add to what it has on entering a memory cgroup.
LITTLE_BYTES = 64 << 20


def stop(process: subprocess.Popen[str]) -> None:
    """Stops a process for longer than the server's timeouts in these tests."""
    process.send_signal(signal.SIGSTOP)
    threading.Timer(PAUSE_SECS, process.send_signal, [signal.SIGCONT]).start()


@contextlib.contextmanager
def stopped(server: Server, _data: Path) -> Iterator[None]:
    stop(server.process)
    yield


@contextlib.contextmanager
def no_more_files(server: Server, _data: Path) -> Iterator[None]:
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # One for a log that is not open yet.
    used = len(os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def memory_group(max_bytes: int) -> Iterator[Path]:
    """A memory cgroup; yields the file that takes its processes."""
    root = Path("/sys/fs/cgroup")
    limit = "memory.max"
    if (root / "memory").is_dir():  # cgroup v1.
        root, limit = root / "memory", "memory.limit_in_bytes"
    group = root / f"tfswitch_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(max_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        processes = (group / "cgroup.procs").read_text().split()
        for process in processes:
            (root / "cgroup.procs").write_text(process)
        group.rmdir()


@contextlib.contextmanager
def little_memory(server: Server, _data: Path) -> Iterator[None]:
    with memory_group(LITTLE_BYTES) as processes:
        processes.write_text(str(server.process.pid))
        yield


@contextlib.contextmanager
def lock_removed(_server: Server, data: Path) -> Iterator[None]:
    (data / ".lock").unlink()
    with pytest.raises(NotServingError):
        ServerProcess(flags=(f"--data_dir={data}", "--push_log"))
    yield


TROUBLES = [stopped, no_more_files, little_memory, lock_removed]


class Job:
    """The calls of a client, also while there is trouble."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.cluster = tsw.Cluster(
            f"grpc://{server.address}", timeout_secs=20.0
        )
        self.table = count_table(self.cluster)
        self.pushes = Pushes()
        self._folder = folder

    def push(self) -> None:
        for _ in range(20):
            self.pushes.push(self.table)

    def save(self) -> None:
        self.cluster.save("save")

    def export(self) -> None:
        tsw.export.base(self._folder / "export", tables=[self.table])


@pytest.mark.parametrize("call", [Job.push, Job.save, Job.export])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_server_goes_on_and_keeps_what_it_has_acknowledged(
    trouble: Callable[..., contextlib.AbstractContextManager[None]],
    call: Callable[[Job], None],
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    flags = (f"--data_dir={data}", "--push_log", "--checkpoint_every=inf")
    with running("tfswitch-server", *flags) as server:
        job = Job(server, tmp_path)
        job.push()
        with trouble(server, data):
            try:
                call(job)
            except RuntimeError as error:
                assert "Too many open files" in str(error)

        for again in (Job.push, Job.save, Job.export):
            again(job)
        assert job.pushes.acknowledged >= 40
        assert job.pushes.unsure == 0

    with ServerProcess(flags=flags) as again_started:
        cluster = tsw.Cluster(
            f"grpc://{again_started.address}", timeout_secs=20.0
        )
        assert count_of_all(count_table(cluster)) == job.pushes.acknowledged


def test_a_server_that_is_killed_for_its_memory_loses_no_acknowledged_write(
    tmp_path: Path,
) -> None:
    flags = (f"--data_dir={tmp_path}/data", "--push_log")
    rows = np.ones((1 << 16, 16), np.float32)

    def make_table(cluster: tsw.Cluster) -> tsw.EmbeddingTable:
        return tsw.EmbeddingTable("big", rows.shape[1], cluster=cluster)

    with (
        running("tfswitch-server", *flags) as server,
        memory_group(LITTLE_BYTES) as processes,
    ):
        processes.write_text(str(server.process.pid))
        table = make_table(
            tsw.Cluster(f"grpc://{server.address}", timeout_secs=5.0)
        )
        num_assigned = 0
        with pytest.raises(ConnectionError):
            for first in range(0, 1 << 24, len(rows)):
                table.assign(np.arange(first, first + len(rows)), rows)
                num_assigned += len(rows)
        assert server.process.wait(10) == -signal.SIGKILL
        assert num_assigned > 0

    with ServerProcess(flags=flags) as again_started:
        table = make_table(
            tsw.Cluster(f"grpc://{again_started.address}", timeout_secs=20.0)
        )
        np.testing.assert_array_equal(
            table.lookup(np.arange(num_assigned)), np.float32(1)
        )


@pytest.mark.parametrize("trouble", ["stopped", "few_files", "little_memory"])
def test_a_recovery_ends_in_all_rows_or_is_refused(
    trouble: str, tmp_path: Path
) -> None:
    flags = (f"--data_dir={tmp_path}/data", "--push_log")
    with running("tfswitch-server", *flags) as server:
        job = Job(server, tmp_path)
        job.push()

    if trouble == "stopped":
        with running("tfswitch-server", *flags, meanwhile=stop) as server:
            assert count_of_all(Job(server, tmp_path).table) == 20
    elif trouble == "little_memory":
        # From "it is killed at its start" to "enough".
        for mebibytes in (8, 16, 24, 32, 64):
            with (
                memory_group(mebibytes << 20) as processes,
                contextlib.suppress(AssertionError),
                running(
                    "tfswitch-server",
                    *flags,
                    before=lambda processes=processes: processes.write_text(
                        str(os.getpid())
                    ),
                ),
            ):
                pass
    else:
        # From "none can be opened" to "enough".
        for files in range(4, 40, 4):
            with (
                contextlib.suppress(AssertionError),
                running(
                    "tfswitch-server",
                    *flags,
                    before=lambda files=files: resource.setrlimit(
                        resource.RLIMIT_NOFILE, (files, files)
                    ),
                ),
            ):
                pass
    with ServerProcess(flags=flags) as again_started:
        cluster = tsw.Cluster(
            f"grpc://{again_started.address}", timeout_secs=20.0
        )
        assert count_of_all(count_table(cluster)) == 20


@pytest.mark.parametrize("trouble", [stopped, no_more_files, little_memory])
def test_predictions_go_on(
    trouble: Callable[..., contextlib.AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    (tmp_path / "models").mkdir()
    save(1, tmp_path / "models")
    with (
        running(
            "tfswitch-serving",
            f"--model_dir={tmp_path}/models",
            f"--model_name={MODEL}",
        ) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

        def version() -> int:
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Predict(request(), timeout=60)
                return answer.outputs["version"].int64_val[0]
            return 0

        wait_until(lambda: version() == 1, "it serves")
        with trouble(server, tmp_path):
            save(2, tmp_path / "models")
            time.sleep(PAUSE_SECS)
            assert version() in (1, 2)

        wait_until(lambda: version() == 2, "it serves the new version")
