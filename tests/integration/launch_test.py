"""`tfswitch launch`: exit codes, restarts, and that no process is left."""

import contextlib
import fcntl
import json
import os
import pty
import queue
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs import HANG_SECS, ROOT, environment
from tests.support import examples

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "integration" / "launch_program.py"
COMMAND = "import tfswitch_command; tfswitch_command.main()"
# All processes of a job have it, those that its programs start included.
MARK = "TFSWITCH_LAUNCH_TEST"


def parents() -> dict[int, int]:
    """The parent of each process that has not ended."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(stat.parent.name)] = int(parent)
    return found


class Launch:
    """A running `tfswitch launch`, with two servers unless told otherwise.

    Args:
        words: Flags, the program, and its arguments.
        stdout: A file, to read from elsewhere; then there are no lines, unless
            those of `stderr`.
        stderr: Its process's stderr; by default this process's.
        variables: Variables of its environment.

    Attributes:
        lines: That it has printed, and that were read by a method.
    """

    def __init__(
        self,
        *words: object,
        stdout: int | None = None,
        stderr: int = subprocess.STDOUT,
        **variables: str,
    ) -> None:
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", COMMAND, "launch", "--servers=2"),
                *map(str, words),
            ],
            env=environment(**{name: value}, **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=stderr,
            text=True,
            errors="strict",
        )
        self._stream = self.process.stdout or self.process.stderr
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stream or ():
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def _next(self) -> str | None:
        line = self._queue.get(timeout=HANG_SECS)
        if line is not None:
            self.lines.append(line)
        return line

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads up to the next line that matches as a whole."""
        while (line := self._next()) is not None:
            if found := re.fullmatch(pattern, line):
                return found
        raise AssertionError(f"no line {pattern!r} in {self.lines}")

    def finish(self, code: int) -> list[str]:
        """Waits for the end; returns all lines. No process may be left."""
        found = self.wait_for_end()
        assert found == code, self.lines
        return self.lines

    def wait_for_end(self) -> int:
        """Waits until there is no process left; returns the exit code."""
        while self._next() is not None:
            pass
        code = self.process.wait(HANG_SECS)
        give_up = time.monotonic() + HANG_SECS
        while self.members():
            assert time.monotonic() < give_up, self.members()
            time.sleep(0.01)
        return code

    def members(self) -> dict[int, str]:
        """Processes of the job, by id, and their command lines."""
        found = {}
        for pid in parents():
            with contextlib.suppress(OSError):
                folder = Path("/proc", str(pid))
                variables = (folder / "environ").read_text().split("\0")
                if self._mark in variables:
                    found[pid] = (folder / "cmdline").read_text()
        return found

    def pids(self, text: str) -> list[int]:
        """Processes of the job with this text in their command lines."""
        return [pid for pid, line in self.members().items() if text in line]

    def children(self) -> list[int]:
        """That of the command: one process, which starts all others."""
        return [p for p, its in parents().items() if its == self.process.pid]

    def end(self) -> None:
        self.process.kill()
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        if self._stream:
            self._stream.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with contextlib.ExitStack() as stack:

        def start(*words: object, **options: object) -> Launch:
            job = Launch(*words, **options)
            stack.callback(job.end)
            return job

        yield start


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a program; `index` is the number of its worker."""

    def write_program(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(
            "import json, os, signal, subprocess, sys, time\n"
            "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
            + text
        )
        return path

    return write_program


# It has a child in a session of its own, and both hold out against SIGTERM.
# Each line is one write, as that of the other one could come into it.
STUBBORN = (
    "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'told\\n'))\n"
    "subprocess.Popen(\n"
    "    [sys.executable, '-c', 'import os, signal;'\n"
    "     'signal.signal(signal.SIGTERM, signal.SIG_IGN);'\n"
    "     'os.write(1, b\"child\\\\n\"); signal.pause()'],\n"
    "    start_new_session=True)\n"
    "os.write(1, b'ready\\n')\n"
    "while True: signal.pause()\n"
)


def test_tasks_know_their_place_and_arguments_are_theirs(launch, write):
    program = write("print(os.environ['TF_CONFIG'], json.dumps(sys.argv[1:]))")
    arguments = ["--", "--servers=9", "--help", "--", "-v", "x"]

    job = launch("--workers", 2, program, *arguments)
    lines = job.finish(0)

    configs = []
    for worker in (0, 1):
        (line,) = [m for m in lines if m.startswith(f"[worker {worker}] ")]
        config, words = re.fullmatch(r"\[.*?\] (\{.*\}) (.*)", line).groups()
        assert json.loads(words) == arguments
        configs.append(json.loads(config))
        assert configs[-1]["task"] == {"type": "worker", "index": worker}
    assert configs[0]["cluster"] == configs[1]["cluster"]
    addresses = [a for job in configs[0]["cluster"].values() for a in job]
    assert len(set(addresses)) == 4
    assert len(configs[0]["cluster"]["ps"]) == 2


def test_a_command_knows_the_servers(launch):
    job = launch(
        *(
            "sh",
            "-c",
            "echo $TFSWITCH_SERVERS $TFSWITCH_TIMEOUT_SECS $TF_CONFIG",
        )
    )

    servers, config = job.wait_for(r"\[worker 0\] (\S+) 300 (\{.*)").groups()
    assert json.loads(config)["cluster"]["ps"] == servers.split(",")
    job.finish(0)


def test_tensorflows_own_servers_are_said_to_be_open(launch, write):
    program = write(
        "kind = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
        "if kind != 'chief': signal.pause()\n"
    )

    job = launch("--tf_ps=1", program)

    job.wait_for("tfswitch launch: warning: .*--tf_ps.* listen on all .*")
    assert "warning" not in "".join(job.finish(0)[1:])


def test_lines_are_whole_and_progress_bars_are_their_last_state(launch, write):
    program = write(
        "def put(data):\n"
        "    sys.stdout.buffer.write(data)\n"
        "    sys.stdout.flush()\n"
        "put(b'1/2\\b\\b\\b\\r2/2\\n  indented \\xff\\n')\n"
        "put(b'half '); put(b'of a line\\r\\n\\n')\n"
        "print('error', file=sys.stderr, flush=True)\n"
        "put(b'no end')\n"
    )

    lines = launch(program).finish(0)

    assert [m for m in lines if m.startswith("[worker 0]")] == [
        "[worker 0] 2/2",
        "[worker 0]   indented \N{REPLACEMENT CHARACTER}",
        "[worker 0] half of a line",
        "[worker 0]",
        "[worker 0] error",
        "[worker 0] no end",
    ]


@pytest.mark.parametrize(
    ("end", "how", "code"),
    [
        ("sys.exit(3)", "ended with exit code 3", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", 137),
    ],
    ids=["exit code", "signal"],
)
def test_the_first_failure_ends_all_with_its_last_lines(
    end, how, code, launch, write, tmp_path
):
    # Opening it waits for the other side, so both have started by then.
    os.mkfifo(tmp_path / "started")
    program = write(
        f"if index == 0: {STUBBORN.splitlines()[0]}\n"
        f"open({str(tmp_path / 'started')!r}, 'r' if index else 'w').close()\n"
        "if index == 0:\n"
        f"    {STUBBORN.replace(chr(10), chr(10) + '    ')}\n"
        "for i in range(50): print('line', i)\n"
        f"{end}\n"
    )

    lines = launch("--workers=2", program).finish(code)

    assert lines[-21:] == [
        f"worker 1 {how}; its last lines:",
        *(f"  line {i}" for i in range(30, 50)),
    ]
    assert "[worker 0] told" in lines


def test_a_worker_is_started_again_as_often_as_told(launch, write, tmp_path):
    lives = tmp_path / "lives"
    program = write(
        f"print('job', os.environ['TFSWITCH_JOB'])\n"
        f"with open({str(lives)!r}, 'a') as lives: lives.write('x')\n"
        f"if os.path.getsize({str(lives)!r}) < 3: sys.exit(3)\n"
    )

    lines = launch("--max_worker_restarts=2", program).finish(0)

    again = (
        "tfswitch launch: worker 0 ended with exit code 3; starting it again"
    )
    assert f"{again} (restart 2 of at most 2)" in lines
    jobs = [line for line in lines if "] job launch-" in line]
    assert len(jobs) == 3 and len(set(jobs)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_and_is_in_the_exit_code(number, launch, write):
    job = launch("--workers=2", write(STUBBORN))
    for _ in range(2):
        job.wait_for(r"\[worker \d\] child")

    job.process.send_signal(number)

    lines = job.finish(128 + number)
    assert {"[worker 0] told", "[worker 1] told"} <= set(lines)


def test_a_second_ctrl_c_ends_all_though_the_launcher_is_stuck(launch, write):
    job = launch(write(STUBBORN))
    job.wait_for(r"\[worker 0\] child")
    (child,) = job.children()
    os.kill(child, signal.SIGSTOP)

    # The second is another one, as equal ones may become one.
    job.process.send_signal(signal.SIGTERM)
    while signal_pending(job.process.pid, signal.SIGTERM):
        time.sleep(0.01)
    job.process.send_signal(signal.SIGINT)

    job.finish(128 + signal.SIGTERM)


def signal_pending(pid: int, number: int) -> bool:
    status = Path("/proc", str(pid), "status").read_text()
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("victim", ["guard", "child"])
def test_kill_9_of_the_launcher_leaves_no_process(victim, launch, write):
    job = launch(write(STUBBORN))
    job.wait_for(r"\[worker 0\] child")

    (child,) = job.children()
    os.kill(job.process.pid if victim == "guard" else child, signal.SIGKILL)

    job.finish(-signal.SIGKILL if victim == "guard" else 128 + signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "tfswitch: there is no program 'nothing.py'"),
        (["--workers=0", "true"], "tfswitch: argument --workers: .*from 1"),
        (["--data_dir=/dev/null/d", "true"], "tfswitch: --data_dir: .*/dev/n"),
    ],
    ids=["program", "flag", "folder"],
)
def test_bad_usage_ends_with_2(words, message, launch):
    (line,) = launch(*words).finish(2)

    assert re.match(message, line)


def test_a_program_that_cannot_be_executed_ends_with_2(launch, tmp_path):
    (script := tmp_path / "script").write_text("echo\n")
    script.chmod(0o755)

    lines = launch(script).finish(2)

    assert (
        f"tfswitch launch: '{script}' cannot be run (Exec format error). A "
        "script needs a first line such as #!/bin/sh; ending the job"
    ) in lines


def test_secrets_in_the_environment_are_not_for_the_job(launch):
    names = ("TFSWITCH_TLS_CA", "TFSWITCH_TOKEN_FILE")
    launch(PROGRAM, 1, 0, **dict.fromkeys(names, "/nothing")).finish(0)


def test_a_job_that_takes_too_long_is_ended(launch, write):
    lines = launch("--timeout=1s", write("time.sleep(600)")).finish(124)

    assert (
        "tfswitch launch: the job is not over after 1 s (--timeout); ending "
        "the job"
    ) in lines


def test_a_job_ends_when_nobody_reads_its_lines(launch):
    reading, writing = os.pipe()
    job = launch("sh", "-c", "while echo line; do :; done", stdout=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)

    job.finish(128 + signal.SIGPIPE)


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end to write to."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


def test_a_reader_that_never_reads_holds_up_nobody_but_workers(
    launch, full_pipe
):
    def pids() -> list[int]:
        return job.pids("--shard_index=0")

    job = launch("sh", "-c", "while echo line; do :; done", stdout=full_pipe)
    while not (found := pids()):
        time.sleep(0.01)
    os.kill(found[0], signal.SIGKILL)
    while not (again := pids()) or again == found:
        time.sleep(0.01)

    job.process.send_signal(signal.SIGTERM)

    job.finish(128 + signal.SIGTERM)


def test_a_job_that_takes_too_long_is_ended_though_nobody_reads(
    launch, full_pipe
):
    program = ("sh", "-c", "while echo line; do :; done")

    launch("--timeout=1s", *program, stdout=full_pipe).finish(124)


def test_a_job_goes_on_though_the_disk_of_its_log_is_full(launch):
    with open("/dev/full", "wb") as full:
        job = launch(
            *("sh", "-c", "echo line; echo line"),
            stdout=full.fileno(),
            stderr=subprocess.PIPE,
        )

        lines = job.finish(0)

    assert lines == [
        "tfswitch launch: lines are lost, as they cannot be written: No space "
        "left on device"
    ]


def test_killed_servers_come_back_and_no_step_is_lost(launch):
    job = launch("--workers=2", PROGRAM, 150, 0.02)
    for step, server in ((10, 0), (25, 1), (40, 0)):
        job.wait_for(rf"\[worker 0\] step {step}")
        (pid,) = job.pids(f"--shard_index={server}")
        os.kill(pid, signal.SIGKILL)
        job.wait_for(
            rf"tfswitch launch: server {server} was ended by SIGKILL; "
            r"starting it again \(restart \d of at most 3\)"
        )

    lines = job.finish(0)

    assert f"[worker 0] values {[300] * 8}" in lines


def test_a_server_that_dies_too_often_ends_the_job(launch, write):
    job = launch("--max_restarts=1", write("time.sleep(600)"))
    for _ in range(2):
        job.wait_for(r"\[server 1\] tfswitch-server .* serving on .*")
        (pid,) = job.pids("--shard_index=1")
        os.kill(pid, signal.SIGKILL)

    lines = job.finish(137)

    begin = lines.index(
        "server 1 was ended by SIGKILL (restarts: 1); its last lines:"
    )
    assert re.fullmatch("  20.*Z info started version=.*", lines[begin + 1])


def test_a_server_that_cannot_start_ends_the_job(launch, write, tmp_path):
    flag = f"--data_dir={tmp_path / 'data'}"
    launch(flag, write("pass")).finish(0)

    lines = launch(flag, "--servers=1", write("time.sleep(600)")).finish(1)

    begin = lines.index("server 0 ended with exit code 1; its last lines:")
    assert "2" in lines[begin + 1]


def test_rows_stay_in_a_data_folder_that_was_given(launch, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    for values in (3, 6):
        lines = launch(
            *(f"--data_dir={tmp_path / 'data'}", PROGRAM, 3, 0),
            TMPDIR=str(scratch),
        ).finish(0)
        assert f"[worker 0] values {[values] * 8}" in lines
    lines = launch(PROGRAM, 3, 0, TMPDIR=str(scratch)).finish(0)

    assert f"[worker 0] values {[3] * 8}" in lines
    # A temporary one has been removed.
    assert not any(scratch.iterdir())


def test_flags_for_servers_reach_them(launch):
    lines = launch("--server_arg=--max_tables=0", PROGRAM, 1, 0).finish(2)

    assert any("max_tables" in line for line in lines)


def test_steps_are_printed_where_there_is_no_terminal(launch):
    job = launch("--workers=2", "--progress_every=0.2s", PROGRAM, 1000, 0.01)

    for worker in (0, 1):
        job.wait_for(
            rf"worker {worker}: [1-9]\d* steps, \d+\.\d steps/s, running \d+ s"
        )


def test_steps_stay_below_the_lines_at_a_terminal(launch):
    ours, theirs = pty.openpty()
    launch("--workers=2", PROGRAM, 1000, 0.01, stdout=theirs)
    os.close(theirs)

    drawn = (
        r"worker 0: [1-9]\d* steps, [^\n]*\r\n"
        r"worker 1: [1-9]\d* steps, [^\n]*\r\n"
    )
    # They are erased, a line of a worker comes, and they are there again.
    pattern = rf"{drawn}\x1b\[2A\x1b\[J\[worker [^\x1b]*{drawn}"
    text = ""
    while not re.search(pattern, text):
        text += os.read(ours, 1 << 16).decode()
    os.close(ours)


def test_lines_for_more_workers_than_the_terminal_has_rows_are_left_out():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 5, 80, 0, 0))
    subprocess.run(
        [
            *(sys.executable, "-c"),
            "import tfswitch_command, time\n"
            "tfswitch_command._put_package()\n"
            "from tfswitch.cli import _processes\n"
            "console = _processes.Console()\n"
            "for name in 'ab':\n"
            "    console.draw([name + str(i) for i in range(9)])\n"
            "while console.is_writing: time.sleep(0.01)\n",
        ],
        env=environment(),
        stderr=theirs,
        check=True,
    )
    os.close(theirs)

    drawn = os.read(ours, 1 << 16).decode()

    os.close(ours)
    assert drawn == (
        "a0\r\na1\r\nand 7 more\r\n\x1b[3A\x1b[Jb0\r\nb1\r\nand 7 more\r\n"
    )


def test_kills_at_random_instants_leave_nothing_behind(launch):
    seed = int(os.environ.get("TFSWITCH_TEST_SEED", random.randrange(1 << 32)))
    print("TFSWITCH_TEST_SEED", seed)
    rng = random.Random(seed)
    for _ in range(examples(2, in_long_runs=20)):
        _kill_at_random(launch, rng)


def _kill_at_random(launch: Callable[..., Launch], rng: random.Random) -> None:
    number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    victim = rng.choice(["server", "server", "worker", "guard", "child"])
    secs = rng.uniform(0.0, 2.5)
    print(f"{number.name} to a {victim} after {secs:.3f} s")
    job = launch("--workers=2", PROGRAM, 40, 0.02)
    # Before that it is Python's start that a signal would meet.
    while not (children := job.children()):
        time.sleep(0.001)
    (child,) = children
    time.sleep(secs)
    if victim in ("guard", "child"):
        pids = [job.process.pid if victim == "guard" else child]
    else:
        program = {"server": "tfswitch-server", "worker": PROGRAM.name}[victim]
        family = parents()
        pids = [pid for pid in job.pids(program) if family.get(pid) == child]
    for pid in pids[: rng.randint(1, 2)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    code = job.wait_for_end()

    has_trained = f"[worker 0] values {[80] * 8}" in job.lines
    failures = [
        m[1]
        for line in job.lines
        if (m := re.fullmatch(r"worker \d (.*); (its last lines:|no .*)", line))
    ]
    print(code, failures, has_trained)
    # The job may have been over before.
    expected = {0} if has_trained else set()
    # The other worker may have printed its values before.
    if victim == "worker" and (failures or not has_trained):
        # Python makes an exception of SIGINT.
        ends = {f"was ended by {number.name}": 128 + number}
        if number == signal.SIGINT:
            ends["ended with exit code 1"] = 1
        (failure,) = failures
        expected = {ends[failure]}
    elif victim in ("guard", "child"):
        is_killed = victim == "guard" and number == signal.SIGKILL
        expected.add(-number if is_killed else 128 + number)
    assert code in expected, job.lines
