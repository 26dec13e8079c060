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
def nobody_reads_stderr(server: Server, _data: Path) -> Iterator[None]:
    server.lose_reader()
    yield


@contextlib.contextmanager
def lock_removed(_server: Server, data: Path) -> Iterator[None]:
    (data / ".lock").unlink()
    with pytest.raises(NotServingError):
        ServerProcess(flags=(f"--data_dir={data}", "--push_log"))
    yield


TROUBLES = [stopped, no_more_files, nobody_reads_stderr, lock_removed]


class Job:
    """The calls of a client, also while there is trouble."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.cluster = tsw.Cluster(f"grpc://{server.address}", timeout=20.0)
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
        cluster = tsw.Cluster(f"grpc://{again_started.address}", timeout=20.0)
        assert count_of_all(count_table(cluster)) == job.pushes.acknowledged


@pytest.mark.parametrize("trouble", ["stopped", "few_files"])
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
        cluster = tsw.Cluster(f"grpc://{again_started.address}", timeout=20.0)
        assert count_of_all(count_table(cluster)) == 20


@pytest.mark.parametrize(
    "trouble", [stopped, no_more_files, nobody_reads_stderr]
)
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
