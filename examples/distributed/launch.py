"""Runs a distributed job on this machine, as a cluster's launcher would.

    python examples/distributed/launch.py keras_workers.py \
        --workers 2 --servers 2 -- --consistency bsp

It starts tfswitch servers and workers, each with its own TF_CONFIG, prints what
they print, and ends them all. What follows `--` goes to the program. The exit
code is 0 if that of every worker is.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags

_WORKERS = flags.DEFINE_integer(
    "workers", 2, "How many workers to start.", lower_bound=1
)
_SERVERS = flags.DEFINE_integer(
    "servers", 1, "How many tfswitch servers to start.", lower_bound=1
)
_TF_PS = flags.DEFINE_integer(
    "tf_ps",
    0,
    "How many parameter servers of TensorFlow's own to start, and a chief that "
    "coordinates, as tf.distribute.ParameterServerStrategy needs them. They "
    "are the ps of TF_CONFIG then, and TFSWITCH_SERVERS names ours.",
    lower_bound=0,
)
_HOROVOD = flags.DEFINE_bool(
    "horovod", False, "Have horovodrun start the workers."
)
_TIMEOUT_S = flags.DEFINE_integer(
    "timeout_s", 600, "The job is ended, and has failed, after so long."
)


def server_program() -> str:
    """Where the server is; found without the seconds of an import."""
    found = importlib.util.find_spec("tfswitch")
    if found is None or found.origin is None:
        raise app.UsageError("tfswitch is not installed")
    folder = pathlib.Path(found.origin).parent
    return str(folder / "bin" / "tfswitch-server")


class Job:
    """Processes that end together. Their output is printed with their names."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._printers: list[threading.Thread] = []

    def start(self, name: str, command: list[str], **environment: str) -> None:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._processes[name] = process
        printer = threading.Thread(target=_print_lines, args=(name, process))
        printer.start()
        self._printers.append(printer)

    def wait(self, names: Sequence[str], timeout_s: float) -> bool:
        """Waits for some processes, whether all of them end with 0.

        The first failure is enough, also of a process that nobody waits for:
        the others may be waiting for it.
        """
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            codes = {name: p.poll() for name, p in self._processes.items()}
            for name, code in codes.items():
                if code or (code == 0 and name not in names):
                    print(f"{name} ended with {code}", flush=True)
                    return False
            if all(codes[name] == 0 for name in names):
                return True
            time.sleep(0.1)
        print(f"not ready after {timeout_s} s", flush=True)
        return False

    def end(self) -> None:
        running = [p for p in self._processes.values() if p.poll() is None]
        for process in running:
            process.terminate()
        give_up = time.monotonic() + 5
        for process in running:
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for printer in self._printers:
            printer.join()


def _print_lines(name: str, process: subprocess.Popen[str]) -> None:
    with process.stdout as lines:
        for line in lines:
            # One call, so that lines of two threads do not mix.
            sys.stdout.write(f"[{name}] {line.rstrip()}\n")
            sys.stdout.flush()


def free_addresses(count: int) -> list[str]:
    """Addresses that nobody listens at.

    Everybody has to know them before anybody listens. They are below the ports
    that the system gives to clients, so that no connection takes one meanwhile.
    """
    ports = random.sample(range(20_000, 32_000), 1000)
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = ports.pop()
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(f"127.0.0.1:{port}")
    return found


def tasks(
    cluster: dict[str, list[str]], jobs: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Name and TF_CONFIG of each task of some jobs of a cluster."""
    for job in jobs:
        for i in range(len(cluster.get(job, []))):
            config: dict[str, Any] = {
                "cluster": cluster,
                "task": {"type": job, "index": i},
            }
            yield f"{job} {i}", json.dumps(config)


def run(program: pathlib.Path, arguments: Sequence[str]) -> bool:
    """Runs the job that the flags describe; whether it went well."""
    servers = free_addresses(_SERVERS.value + _WORKERS.value + _TF_PS.value + 1)
    others = servers[_SERVERS.value :]
    del servers[_SERVERS.value :]
    cluster = {"worker": others[: _WORKERS.value]}
    environment = {"TFSWITCH_SERVERS": ",".join(servers)}
    if _TF_PS.value:
        cluster["chief"] = others[-1:]
        cluster["ps"] = others[_WORKERS.value : -1]
    else:
        cluster["ps"] = servers
    job = Job()
    try:
        for i, address in enumerate(servers):
            command = [
                server_program(),
                f"--address={address}",
                f"--shard_index={i}",
                f"--num_shards={len(servers)}",
            ]
            job.start(f"server {i}", command)
        command = [sys.executable, "-u", str(program), *arguments]
        if _HOROVOD.value:
            # Which worker is which, Horovod tells them.
            del cluster["worker"]
            config = json.dumps({"cluster": cluster})
            if shutil.which("horovodrun") is None:
                raise app.UsageError("--horovod: Horovod is not installed")
            command = ["horovodrun", "-np", str(_WORKERS.value), *command]
            job.start("workers", command, TF_CONFIG=config)
            return job.wait(["workers"], _TIMEOUT_S.value)
        kinds = ("worker", "ps", "chief") if _TF_PS.value else ("worker",)
        for name, config in tasks(cluster, kinds):
            job.start(name, command, TF_CONFIG=config, **environment)
        # TensorFlow's own servers run until they are ended.
        deciding = ("chief",) if _TF_PS.value else ("worker",)
        return job.wait(
            [name for name, _ in tasks(cluster, deciding)], _TIMEOUT_S.value
        )
    finally:
        job.end()


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError("name the program to run")
    program = pathlib.Path(argv[1])
    if not program.is_file():
        program = pathlib.Path(__file__).parent / argv[1]
    if not program.is_file():
        raise app.UsageError(f"there is no program {argv[1]!r}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # So that those who are started here end if this process is ended.
    signal.signal(signal.SIGTERM, _exit)
    if not run(program, argv[2:]):
        sys.exit(1)


def _exit(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    app.run(main)
