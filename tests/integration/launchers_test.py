"""deploy/task.sh and deploy/slurm/train.sbatch, without Slurm and YARN.

Stand-ins start tasks as these systems do: each has its processes in a group,
which gets the signals.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.certificates import Authority
from tests.programs import HANG_SECS, ROOT, environment
from tests.support import ServerProcess, free_ports
from tests.tokens import TokenFile

DEPLOY = ROOT / "deploy"
SERVERS = WORKERS = 2
PUSHES = 40

# As far as train.sbatch asks them.
SLURM = """
import os, signal, subprocess, sys

steps = os.environ["STAND_IN_STEPS"]
name, *words = os.path.basename(sys.argv[0]), *sys.argv[1:]
if name == "scontrol":
    print("localhost")
elif name == "squeue":
    for i, line in enumerate(open(steps)):
        print(f"1.{i}", line.split()[0])
elif name == "scancel":
    for i, line in enumerate(open(steps)):
        for group in line.split()[1:] if words[-1] in ("1", f"1.{i}") else ():
            try:
                os.killpg(int(group), signal.SIGTERM)
            except ProcessLookupError:
                pass
else:
    assert os.environ["SRUN_CPUS_PER_TASK"] == "3"
    flags = {}
    while words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        flags[flag] = value
    tasks = [
        subprocess.Popen(
            words,
            env={**os.environ, "SLURM_PROCID": str(i)},
            start_new_session=True,
        )
        for i in range(int(flags["--ntasks"]))
    ]

    def kill(number, frame):
        for task in tasks:
            os.killpg(task.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    with open(steps, "a") as file:
        name = flags.get("--job-name", "train")
        print(name, *(task.pid for task in tasks), file=file)
    codes = [task.wait() for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

# A worker, without the seconds that TensorFlow takes to import.
WORKER = f"""
import json, os, pathlib, signal, sys, time
import numpy as np
import tfswitch_command
tfswitch_command._put_package()
from tfswitch._connection import _tf_config
from tfswitch import cluster, optimizers
from tfswitch._settings._table_spec import TableSpec

number = _tf_config.task().number
spec = TableSpec("zeros", optimizers.SGD(1.0), seed=0)
table = cluster.default_cluster()._native.open_table(
    json.dumps(spec.to_table_config("counts", 1)))
for step in range({PUSHES}):
    table.push(np.arange(8), -np.ones((8, 1), np.float32), 1.0, True)
    if number == 0 and step == {PUSHES // 2}:
        if sys.argv[1] == "kill":
            for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes().decode().split("\\0")
                except OSError:
                    continue
                if "--data_dir=" + sys.argv[2] in words:
                    os.kill(int(file.parent.name), signal.SIGKILL)
        elif sys.argv[1] == "fail":
            sys.exit(7)
        elif sys.argv[1] == "hang":
            def save(*_):
                for _ in range(1000):
                    table.push(
                        np.arange(8), -np.ones((8, 1), np.float32), 1.0, True)
                os._exit(0)

            signal.signal(signal.SIGTERM, save)
            print("hangs", flush=True)
            time.sleep(1000)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with tfswitch, python3 and Slurm's programs, for the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    code = "import tfswitch_command; tfswitch_command.main()"
    for name, words in (
        ("tfswitch", f"{sys.executable} -c '{code}'"),
        ("python3", sys.executable),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    for name in ("srun", "scontrol", "scancel", "squeue"):
        (folder / name).write_text(f"#!{sys.executable}\n{SLURM}")
    for program in folder.iterdir():
        program.chmod(0o755)
    (tmp_path / "worker.py").write_text(WORKER)
    return folder


def variables(programs: Path, **more: str) -> dict[str, str]:
    path = f"{programs}:{os.environ['PATH']}"
    return environment(PATH=path, **more)


@pytest.fixture
def submit(
    programs: Path, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs train.sbatch as a job of Slurm."""
    jobs = []

    def run(*arguments: object, tasks: int = SERVERS + WORKERS):
        steps = tmp_path / "steps"
        steps.touch()
        job = subprocess.Popen(
            [
                *("bash", DEPLOY / "slurm" / "train.sbatch"),
                *(tmp_path / "worker.py", *map(str, arguments)),
            ],
            env=variables(
                programs,
                STAND_IN_STEPS=str(steps),
                SLURM_NTASKS=str(tasks),
                SLURM_JOB_ID="1",
                SLURM_CPUS_PER_TASK="3",
                TFSWITCH_PORT=str(two_ports()),
                SLURM_JOB_NODELIST="localhost",
                SLURM_SUBMIT_DIR=str(tmp_path),
                TFSWITCH_TASK=str(DEPLOY / "task.sh"),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        jobs.append((job, steps))
        return job

    yield run
    for job, steps in jobs:
        job.kill()
        for group in re.findall(r"\d+", steps.read_text()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(group), signal.SIGKILL)
        job.communicate()


def two_ports() -> int:
    """Returns a free port whose next one is most likely free."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port


def check_no_server_is_left(data: Path) -> None:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert f"--data_dir={data}".encode() not in file.read_bytes()


def saved_counts(*data: Path) -> list[float]:
    """Starts servers from their folders, and looks the counts up."""
    for folder in data:
        assert (folder / "state" / "manifest.json").exists()
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(
                ServerProcess(
                    shard_index=i,
                    num_shards=SERVERS,
                    flags=(f"--data_dir={folder}", "--push_log"),
                )
            ).address
            for i, folder in enumerate(data)
        ]
        cluster = stack.enter_context(
            tsw.connect("grpc://" + ",".join(addresses))
        )
        table = cluster._native.open_table(
            json.dumps(cluster._list("counts")[0]["config"])
        )
        return table.pull(np.arange(8), False).ravel().tolist()


def test_slurm_job_counts_each_push_once_though_a_server_is_killed(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    data = tmp_path / "tfswitch_job" / "data"

    output, _ = (job := submit("kill", data / "1")).communicate(
        timeout=HANG_SECS
    )

    assert job.returncode == 0, output
    assert len(re.findall("with TLS, tokens", output)) == SERVERS + 1
    assert "server 1 ended with exit code 137, and is started again" in output
    check_no_server_is_left(data)
    assert saved_counts(data / "0", data / "1") == [WORKERS * PUSHES] * 8
    assert [path.name for path in data.parent.iterdir()] == ["data"]


def test_slurm_job_fails_with_a_worker_and_its_servers_save(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    data = tmp_path / "tfswitch_job" / "data"

    output, _ = (job := submit("fail")).communicate(timeout=HANG_SECS)

    assert job.returncode == 7, output
    assert "train.sbatch: a step has ended with exit code 7" in output
    check_no_server_is_left(data)
    assert min(saved_counts(data / "0", data / "1")) > PUSHES / 2


def test_slurm_job_lets_workers_save_and_then_saves_when_its_time_ends(
    submit: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    job = submit("hang")
    assert job.stdout is not None
    while (line := job.stdout.readline()) != "hangs\n":
        assert line
    secrets = tmp_path / "tfswitch_job" / "secrets-1"
    assert not (secrets / "ca.key").exists()
    assert all(file.stat().st_mode & 0o077 == 0 for file in secrets.iterdir())

    job.send_signal(signal.SIGTERM)

    output, _ = job.communicate(timeout=HANG_SECS)
    assert job.returncode == 143, output
    data = tmp_path / "tfswitch_job" / "data"
    check_no_server_is_left(data)
    assert min(saved_counts(data / "0", data / "1")) > 1000


def test_slurm_job_without_a_worker_is_refused(
    submit: Callable[..., subprocess.Popen[str]],
) -> None:
    output, _ = (job := submit(tasks=2)).communicate(timeout=HANG_SECS)

    assert job.returncode == 2
    assert output == "train.sbatch: --ntasks=2 must be more than SERVERS=2\n"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    Authority(folder).sign("server", "DNS:tfswitch")
    token = TokenFile(folder / "tokens").create("train")
    (folder / "token").write_text(f"{token}\n")
    return folder


def test_containers_of_yarn_count_each_push_once_though_a_server_is_killed(
    programs: Path, secrets: Path, tmp_path: Path
) -> None:
    """YARN gives each container a folder, and its processes a group."""
    cluster = {
        "ps": [f"127.0.0.1:{port}" for port in free_ports(SERVERS)],
        "worker": ["worker-0:0", "worker-1:0"],
    }
    folders = [tmp_path / f"ps-{i}" for i in range(SERVERS)]
    data = [
        folder / "tfswitch_data" / str(i) for i, folder in enumerate(folders)
    ]
    containers = {}
    try:
        for kind in ("ps", "worker"):
            for i in range(2):
                folder = tmp_path / f"{kind}-{i}"
                folder.mkdir()
                task = {"type": kind, "index": i}
                config = {"cluster": cluster, "task": task}
                containers[kind, i] = subprocess.Popen(
                    [
                        *(DEPLOY / "task.sh", tmp_path / "worker.py"),
                        *("kill", data[1]),
                    ],
                    cwd=folder,
                    env=variables(
                        programs,
                        TF_CONFIG=json.dumps(config),
                        TFSWITCH_SECRETS=str(secrets),
                    ),
                    start_new_session=True,
                    stderr=(folder / "stderr").open("w"),
                )
        for i in range(WORKERS):
            assert containers["worker", i].wait(HANG_SECS) == 0
        # Those that are not tracked are ended when the others have ended. A
        # server that gets the signal twice would not save.
        for i in range(SERVERS):
            while containers["ps", i].poll() is None:
                os.killpg(containers["ps", i].pid, signal.SIGTERM)
                time.sleep(0.001)
            assert containers["ps", i].returncode == 0
    finally:
        for container in containers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(container.pid, signal.SIGKILL)
            container.wait()
    assert (
        "exit code 137, and is started again"
        in (folders[1] / "stderr").read_text()
    )
    assert saved_counts(*data) == [WORKERS * PUSHES] * 8


def test_a_server_with_an_error_of_its_own_is_not_started_again(
    programs: Path, secrets: Path, tmp_path: Path
) -> None:
    (secrets / "tokens").unlink()
    task = {"type": "ps", "index": 0}
    config = {"cluster": {"ps": ["127.0.0.1:0"]}, "task": task}

    result = subprocess.run(
        [DEPLOY / "task.sh"],
        cwd=tmp_path,
        env=variables(
            programs,
            TF_CONFIG=json.dumps(config),
            TFSWITCH_SECRETS=str(secrets),
        ),
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )

    assert result.returncode == 2
    assert "started again" not in result.stderr
    assert str(secrets / "tokens") in result.stderr


def test_missing_secrets_are_named(programs: Path) -> None:
    result = subprocess.run(
        [DEPLOY / "task.sh"],
        env=variables(programs),
        capture_output=True,
        text=True,
    )

    assert result.returncode == 1
    assert "TFSWITCH_SECRETS: is the folder of certificates" in result.stderr
