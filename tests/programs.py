"""Python programs that tests start, without the time of importing TensorFlow.

See tests/warm_python.py for how a program here differs from one that a new
interpreter runs. Tests of importing itself start interpreters of their own.
"""

import contextlib
import functools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import IO

ROOT = pathlib.Path(__file__).parents[1]

# A hang fails after this; nothing is measured by it.
HANG_SECS = 240.0


# Settings of this machine: which processor, and how many of them, libraries and
# the emulator take it to have. An emulated processor has other instructions.
_OF_THE_MACHINE = (
    *("OPENBLAS_", "GOTO_", "BLIS_", "MKL_", "OMP_", "KMP_", "NUMEXPR_"),
    *("NPY_", "ONEDNN_", "DNNL_", "TF_NUM_", "GLIBC_TUNABLES", "QEMU_"),
)


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with the checkout on Python's path.

    The settings of the machine are left out. A test that needs one passes it.
    """
    path = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_THE_MACHINE)
    }
    return {**inherited, "PYTHONPATH": path, **variables}


@functools.cache
def _warm_python(keras: str) -> socket.socket:
    """Starts warm_python.py, once for each Keras; it ends with this process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = environment(TF_USE_LEGACY_KERAS=str(int(keras == "tf_keras")))
    # The caller's value is for the caller's program.
    del variables["PYTHONPATH"]
    with there:
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    pathlib.Path(__file__).with_name("warm_python.py"),
                ),
                *(str(there.fileno()), "tensorflow", keras),
            ],
            env=variables,
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
    return here


class PythonProgram:
    """A running program; its methods are those of `subprocess.Popen`.

    As a context manager it kills the program at the end, if that still runs.

    Args:
        arguments: For the interpreter: a file, `-c` or `-m`, and its arguments.
        stdin: None, `subprocess.PIPE`, or a file.
        stdout: The same.
        stderr: The same, or `subprocess.STDOUT`, and no pipe.
        cwd: Folder to run in.
        env: All variables.
    """

    def __init__(
        self,
        *arguments: object,
        stdin: IO | int | None = None,
        stdout: IO | int | None = None,
        stderr: IO | int | None = None,
        cwd: str | os.PathLike[str] = ROOT,
        env: dict[str, str] | None = None,
    ) -> None:
        env = environment() if env is None else env
        self.returncode: int | None = None
        self.stdin = self.stdout = None
        inherited = []
        if stdin == subprocess.PIPE:
            stdin, ours = os.pipe()
            inherited.append(stdin)
            self.stdin = os.fdopen(ours, "w")
        if stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            inherited.append(stdout)
            self.stdout = os.fdopen(ours)
        files = [
            number
            if file is None
            else file
            if isinstance(file, int)
            else file.fileno()
            for number, file in enumerate((stdin, stdout, stderr))
        ]
        if stderr == subprocess.STDOUT:
            files[2] = files[1]
        status, theirs = os.pipe()
        inherited.append(theirs)
        self._status = os.fdopen(status)
        request = {
            "arguments": [str(argument) for argument in arguments],
            "environment": env,
            "folder": str(cwd),
        }
        is_legacy = env.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
        socket.send_fds(
            _warm_python("tf_keras" if is_legacy else "keras"),
            [json.dumps(request).encode()],
            [*files, theirs],
        )
        for file in inherited:
            os.close(file)
        self.args = request["arguments"]
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            # It may end at this moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "PythonProgram":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self.wait()
        for file in (self.stdin, self.stdout, self._status):
            if file is not None:
                file.close()


def run_python(
    *arguments: object,
    input: str = "",
    cwd: str | os.PathLike[str] = ROOT,
    env: dict[str, str] | None = None,
    check: bool = True,
    timeout: float = HANG_SECS,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        arguments: See `PythonProgram`.
        input: The text on its standard input.
        cwd: See `PythonProgram`.
        env: See `PythonProgram`.
        check: Whether the exit code must be 0.
        timeout: It is killed after so many seconds.

    Raises:
        AssertionError: If the exit code is another; with what it printed.
        subprocess.TimeoutExpired: If it has not ended.
    """
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        stdin.write(input)
        stdin.seek(0)
        with PythonProgram(
            *arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
        ) as program:
            code = program.wait(timeout)
        for file in (stdout, stderr):
            file.seek(0)
        result = subprocess.CompletedProcess(
            program.args, code, stdout.read(), stderr.read()
        )
    if check:
        assert code == 0, result.stdout[-20_000:] + result.stderr[-10_000:]
    return result


def run_pytest(path: str, *options: str, **variables: str) -> None:
    """Runs a test file in another process, which must pass.

    Args:
        path: The file.
        options: For pytest.
        variables: Environment variables.
    """
    run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *options,
        path,
        env=environment(**variables),
    )
