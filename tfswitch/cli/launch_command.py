"""`tfswitch launch` runs servers and workers here (docs/launch.md)."""

import argparse
import collections
import contextlib
import datetime
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from absl import app

from tfswitch.cli import _processes, programs
from tfswitch.cli._arguments import Parser, at_least, duration
from tfswitch.cluster import Cluster

_USAGE = 2
# The exit code of `timeout` of coreutils.
_TIMED_OUT = 124
# How long the reader of the output may take for the last lines, after a signal
# or timeout.
_FLUSH_SECS = 2.0
_REDRAW_SECS = 1.0
_POLL_SECS = 1.0
# Rates are computed over the steps of this time.
_RATE_SECS = 10.0
# At the end of the job, the longest wait for the counts of the servers.
_REPORT_SECS = 2.0


def run(words: Sequence[str]) -> int:
    """Runs a program with its arguments in each worker; returns the code."""
    options = _parser().parse_args(words)
    program = options.program
    if program[0] == "--" and len(program) > 1:
        program = program[1:]
    command = _command(program)
    server = programs.server_command(options.server_arg)
    addresses = free_addresses(
        options.servers + options.workers + options.tf_ps + 1
    )
    kept: str | None = options.data_dir
    try:
        data_dir = kept or tempfile.mkdtemp(prefix="tfswitch_launch_")
        os.makedirs(data_dir, exist_ok=True)
    except OSError as error:
        raise app.UsageError(f"--data_dir: {error}") from error

    def remove() -> None:
        if kept is None:
            shutil.rmtree(data_dir, ignore_errors=True)

    def work() -> int:
        # The job's servers have no TLS and no tokens, so the variables for
        # these are emptied. An empty variable counts as not set.
        names = ["TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME"]
        given = {each.split("=")[0].lstrip("-") for each in options.server_arg}
        if "token_file" not in given:
            names += ["TOKEN", "TOKEN_FILE"]
        for name in names:
            os.environ[f"TFSWITCH_{name}"] = ""
        try:
            return _Launch(options, command, server, addresses, data_dir).run()
        finally:
            remove()

    try:
        return _processes.run_guarded(work)
    finally:
        # Removes the folder if the child was killed before it could do so.
        remove()


# Flags that are numbers: name, least value, default, and help.
_COUNTS = (
    ("servers", 1, 1, "how many servers to start."),
    ("workers", 1, 1, "how many workers to start."),
    (
        "tf_ps",
        0,
        0,
        "how many parameter servers of TensorFlow's own to start, and a "
        "chief that coordinates, as tf.distribute.ParameterServerStrategy "
        "needs them. They are the ps of TF_CONFIG then, and the "
        "environment variable TFSWITCH_SERVERS names the servers of "
        "tfswitch.",
    ),
    (
        "max_restarts",
        0,
        3,
        "how often each server is started again that has died.",
    ),
    (
        "max_worker_restarts",
        0,
        0,
        "how often each worker is started again that has failed. Under "
        "`fit` it goes on where its job is.",
    ),
)


def _parser() -> Parser:
    parser = Parser("launch", "Runs a job of servers and workers here.")
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        help="what each worker runs, and its arguments.",
    )
    for name, least, default, about in _COUNTS:
        parser.add_argument(
            f"--{name}",
            type=at_least(least),
            default=default,
            metavar="N",
            help=f"{about} Default: {default}.",
        )
    parser.add_argument(
        "--server_arg",
        action="append",
        default=[],
        metavar="FLAG",
        help="a flag for each server, such as --server_arg=--max_tables=100. "
        "May be repeated.",
    )
    parser.add_argument(
        "--data_dir",
        help="the folder that has those of the servers. Default: a temporary "
        "one, which is removed at the end.",
    )
    parser.add_argument(
        "--timeout",
        type=duration,
        default=math.inf,
        metavar="DURATION",
        help="the job is ended, with exit code 124, after so long. Default: "
        "never.",
    )
    parser.add_argument(
        "--group",
        default="train",
        help="the group of workers whose steps are shown. Default: "
        "%(default)s.",
    )
    parser.add_argument(
        "--progress_every",
        type=duration,
        default="30s",
        metavar="DURATION",
        help="how often a line of each worker is printed, if the error stream "
        "is no terminal. Default: %(default)s.",
    )
    return parser


def _command(words: Sequence[str]) -> list[str]:
    program = words[0]
    if program.endswith(".py"):
        if os.path.isfile(program):
            # With -u Python does not buffer its output, so each line comes at
            # once.
            return [sys.executable, "-u", *words]
    elif shutil.which(program) is not None:
        return list(words)
    raise app.UsageError(
        f"there is no program {program!r}. Name a file that ends in .py, or a "
        "command; a program in this folder that is none of Python's is ./NAME"
    )


def free_addresses(count: int) -> list[str]:
    """Returns addresses at which no process listens.

    All processes of the job must know the addresses before they listen. The
    ports are below the range that the system gives to outgoing connections, so
    no connection takes one of these ports.
    """
    ports = random.sample(range(20_000, 32_000), 12_000)
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            if not ports:
                raise app.UsageError(
                    f"expected {count} free ports from 20000 to 31999, found "
                    f"{len(found)}. Start fewer servers and workers"
                )
            port = ports.pop()
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(f"127.0.0.1:{port}")
    return found


class _End(NamedTuple):
    """The exit code of the job, and the reason if it has failed."""

    code: int
    reason: str = ""
    lines: Sequence[str] = ()


class _Launch:
    """One job, from the start of its processes to the end of the last one.

    Args:
        options: The flags of the command.
        command: The command of a worker.
        server: The server program, with flags for all servers.
        addresses: Free addresses.
        data_dir: The folder that has the data folders of the servers.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        command: Sequence[str],
        server: Sequence[str],
        addresses: Sequence[str],
        data_dir: str,
    ) -> None:
        self._options = options
        self._command = command
        self._server = server
        self._addresses = addresses
        self._data_dir = data_dir
        self._console = _processes.Console()
        self._job = _processes.Job(self._console)
        self._servers: dict[str, str] = {}  # Addresses, by name.
        self._restarts: collections.Counter[str] = collections.Counter()
        # The tasks that run `command`, by name.
        self._tasks: dict[str, _processes.Process] = {}
        # The environment variables of each task.
        self._environments: dict[str, dict[str, str]] = {}
        self._deciding: list[str] = []
        self._steps = _Steps()
        self._deadline = time.monotonic() + options.timeout

    def run(self) -> int:
        """Returns the exit code."""
        end = _End(1)
        try:
            end = self._start() or self._watch()
        finally:
            self._console.draw([])
            if end.reason:
                self._say(f"{end.reason}; ending the job")
            # Servers end after the workers, because a worker that is told to
            # end may still save its tables there.
            self._job.end(self._tasks.values())
            for line in self._steps.report():
                self._say(line)
            self._job.end(self._job.processes)
            _processes.kill_descendants()
            self._console.print(end.lines, is_error=True)
            least = time.monotonic() + _FLUSH_SECS
            signals = self._job.flush(max(self._deadline, least))
            self._console.close()
        return 128 + signals[0] if signals else end.code

    def _start(self) -> _End | None:
        """Starts all processes; returns None if that succeeded."""
        servers = self._addresses[: self._options.servers]
        others = self._addresses[self._options.servers :]
        cluster = {"worker": others[: self._options.workers]}
        if self._options.tf_ps:
            cluster = {
                "chief": others[-1:],
                **cluster,
                "ps": others[self._options.workers : -1],
            }
            self._deciding = ["chief 0"]
            self._say(
                "warning: with --tf_ps, TensorFlow's own servers listen on all "
                "interfaces, without TLS and tokens. Anyone who reaches their "
                "ports can run code as you; keep others away with a firewall"
            )
        else:
            self._deciding = [
                f"worker {i}" for i in range(self._options.workers)
            ]
        environment = {
            "TFSWITCH_SERVERS": ",".join(servers),
            # The name by which a restarted worker finds its job.
            "TFSWITCH_JOB": os.environ.get("TFSWITCH_JOB")
            or f"launch-{uuid.uuid4()}",
            "TFSWITCH_TIMEOUT_SECS": os.environ.get("TFSWITCH_TIMEOUT_SECS")
            or "300",
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        }
        for i, address in enumerate(servers):
            self._servers[f"server {i}"] = address
            self._start_server(f"server {i}")
        for kind, tasks in cluster.items():
            for i in range(len(tasks)):
                config = {
                    "cluster": {"ps": servers, **cluster},
                    "task": {"type": kind, "index": i},
                }
                name = f"{kind} {i}"
                self._environments[name] = {
                    **environment,
                    "TF_CONFIG": json.dumps(config),
                }
                try:
                    self._start_task(name)
                except OSError as error:
                    return _End(
                        _USAGE,
                        f"{self._command[0]!r} cannot be run "
                        f"({error.strerror}). A script needs a first line such "
                        "as #!/bin/sh",
                    )
        self._steps.watch("grpc://" + ",".join(servers), self._options.group)
        return None

    def _start_task(self, name: str) -> None:
        self._tasks[name] = self._job.start(
            name, self._command, self._environments[name]
        )

    def _start_server(self, name: str) -> None:
        index = list(self._servers).index(name)
        # Servers and workers resolve relative paths of checkpoints against the
        # same folder.
        root = "" if os.getcwd() == "/" else os.getcwd()
        place = [
            f"--address={self._servers[name]}",
            f"--shard_index={index}",
            f"--num_shards={self._options.servers}",
            f"--data_dir={os.path.join(self._data_dir, str(index))}",
            "--push_log",
            f"--checkpoint_root={root}",
        ]
        program, *others = self._server
        # The given flags come last, so that they may replace those of this
        # command.
        self._job.start(name, [program, *place, *others], {})

    def _watch(self) -> _End:
        every = (
            _REDRAW_SECS
            if self._console.is_terminal
            else self._options.progress_every
        )
        next_progress = time.monotonic() + every
        while True:
            signals, ended = self._job.wait(min(self._deadline, next_progress))
            if signals:
                name = signal.Signals(signals[0]).name
                self._deadline = 0.0
                return _End(128 + signals[0], f"{name} came")
            for process in ended:
                end = self._end_after(process)
                if end is not None:
                    return end
            if all(self._tasks[name].status == 0 for name in self._deciding):
                return _End(0)
            if not self._console.has_reader:
                return _End(128 + signal.SIGPIPE)
            now = time.monotonic()
            if now >= self._deadline:
                return _End(
                    _TIMED_OUT,
                    f"the job is not over after {self._options.timeout:g} s "
                    "(--timeout)",
                )
            if now >= next_progress:
                next_progress = now + every
                if not self._console.is_behind:
                    self._show_progress(now)

    def _end_after(self, process: _processes.Process) -> _End | None:
        """Restarts a server or worker; returns None if the job continues."""
        name, status = process.name, process.status
        assert status is not None
        how = process.describe_end()
        is_server = name in self._servers
        most = self._options.max_worker_restarts
        # A server that has ended with an exit code would fail again.
        may_restart = status != 0 and name.startswith("worker ")
        if is_server:
            most, may_restart = self._options.max_restarts, status <= 0
        if may_restart and self._restarts[name] < most:
            self._restarts[name] += 1
            self._say(
                f"{how}; starting it again (restart {self._restarts[name]} of "
                f"at most {most})"
            )
            if is_server:
                self._start_server(name)
            else:
                self._start_task(name)
            return None
        if self._restarts[name]:
            how += f" (restarts: {self._restarts[name]})"
        if not is_server and status == 0 and name in self._deciding:
            return None
        printed = [f"  {line}" for line in process.last_lines]
        lines = [f"{how}; " + ("its last lines:" if printed else "no output")]
        lines += printed
        # The task should still run, so the exit code 0 is an error, too.
        return _End(_processes.exit_code(status) or 1, how, lines)

    def _show_progress(self, now: float) -> None:
        workers = [name for name in self._tasks if not name.startswith("ps ")]
        lines = []
        for number, name in enumerate(workers):
            task = self._tasks[name]
            secs = now - task.begin
            lines.append(
                f"{name}: {self._steps.describe(number)}"
                + ("ended" if task.status is not None else _describe(secs))
            )
        if self._console.is_terminal:
            self._console.draw(lines)
        else:
            self._console.print(lines, is_error=True)

    def _say(self, line: str) -> None:
        self._console.print([f"tfswitch launch: {line}"], is_error=True)


def _describe(secs: float) -> str:
    if secs < 60:
        return f"running {secs:.0f} s"
    return f"running {datetime.timedelta(seconds=int(secs))}"


class _Steps:
    """How many steps the workers of a group have ended, and how fast.

    A thread asks the servers, because that may wait. It replaces its last
    answer as a whole, so no lock is needed.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, float]] = {}
        self._where = ("", "")

    def watch(self, address: str, group: str) -> None:
        self._where = (address, group)
        threading.Thread(
            target=self._ask, args=(address, group), daemon=True
        ).start()

    def report(self) -> list[str]:
        """Returns lines about lost workers, lost steps and items not done."""
        lines = []
        address, group = self._where
        # Servers may have gone, and the workers may have made no group.
        with contextlib.suppress(Exception):
            if not self._latest:
                return []
            cluster = Cluster(address, timeout_secs=_REPORT_SECS)
            stats = cluster._group_stats(group)
            for worker, loss in sorted(
                stats["losses"].items(), key=lambda item: int(item[0])
            ):
                if not loss["is_back"]:
                    lines.append(
                        f"worker {worker} was lost after {loss['num_steps']} "
                        "steps that count; what was left of data of its own "
                        "was not trained"
                    )
            if int(stats["dropped"]):
                lines.append(f"{stats['dropped']} steps do not count")
            for queue, items in stats["unfinished"].items():
                lines.append(
                    f"not done of work queue '{queue}': "
                    + ", ".join(items["values"])
                )
        return lines

    def describe(self, worker: int) -> str:
        """Returns for example "1,204 steps, 31.2 steps/s, ", or nothing."""
        steps, rate = self._latest.get(worker, (None, 0.0))
        return "" if steps is None else f"{steps:,} steps, {rate:.1f} steps/s, "

    def _ask(self, address: str, group: str) -> None:
        cluster: Cluster | None = None
        samples: dict[int, collections.deque[tuple[float, int]]]
        samples = collections.defaultdict(collections.deque)
        while True:
            time.sleep(_POLL_SECS)
            # After an error the job continues without this display. The usual
            # cause is that there is no group yet, or that a server is away.
            with contextlib.suppress(Exception):
                if cluster is None:
                    cluster = Cluster(address, timeout_secs=5.0)
                latest = {}
                stats = cluster._group_stats(group)
                for number, count in stats["num_steps"].items():
                    worker, steps = int(number), int(count)
                    now = time.monotonic()
                    past = samples[worker]
                    past.append((now, steps))
                    while len(past) > 2 and past[1][0] < now - _RATE_SECS:
                        past.popleft()
                    secs = now - past[0][0]
                    rate = (steps - past[0][1]) / secs if secs > 0 else 0.0
                    latest[worker] = (steps, max(0.0, rate))
                self._latest = latest
