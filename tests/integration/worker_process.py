"""A worker program that a test talks to."""

import contextlib
import json
import queue
import signal
import subprocess
import threading

from tests.programs import PythonProgram, environment

# A hang fails after this; nothing is measured by it.
HANG_SECS = 120.0


class WorkerProcess:
    """A worker program; ended by its id at the latest with the context.

    Args:
        program: The program that it runs.
        job: See the program.
        tf_config: Its cluster and its task.
        log: File for what it writes to stderr.
    """

    def __init__(self, program, job, tf_config, log):
        self._log = log
        self._lines = queue.Queue()
        with log.open("w") as stderr:
            self._process = PythonProgram(
                program,
                json.dumps(job),
                env=environment(
                    TF_CONFIG=json.dumps(tf_config), TF_CPP_MIN_LOG_LEVEL="2"
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def next_line(self):
        """Returns what it prints next; None if it ends instead."""
        try:
            return self._lines.get(timeout=HANG_SECS)
        except queue.Empty:
            raise AssertionError(self._failed("printed nothing")) from None

    def wait_for(self, line):
        """Returns when it has printed `line`, next."""
        found = self.next_line()
        assert found == line, self._failed(f"printed {found}, not {line}")

    def go_on(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def signal(self, number):
        self._process.send_signal(number)

    def finish(self):
        """Returns what it wrote to stderr; it must end well."""
        self.wait_for("done")
        code = self._exit_code()
        assert code == 0, self._failed(f"ended with {code}")
        return self._log.read_text()

    def fail(self):
        """Returns what it wrote to stderr; it must end with an error."""
        code = self._exit_code()
        assert isinstance(code, int), self._failed(f"ended with {code}")
        assert code > 0, self._failed(f"ended with {code}")
        return self._log.read_text()

    def _exit_code(self):
        try:
            return self._process.wait(HANG_SECS)
        except subprocess.TimeoutExpired:
            return "no exit code"

    def end(self):
        with self._process:
            self.signal(signal.SIGKILL)
            self._process.wait(HANG_SECS)
            self._reader.join(HANG_SECS)

    def _failed(self, what):
        # Programs that listen write their stacks.
        self.signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.signal(signal.SIGKILL)
        return f"the worker {what}:\n{self._log.read_text()[-10_000:]}"
