"""Row files that somebody changes in place while they are served.

Each change is made under tfswitch-serving and under a Python process that has
loaded the model, while a client asks all the time. A writer that opens the file
later is seen before it writes. One that had it open is seen within a second.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.integration.predictor_test import (
    PredictionServer,
    ServedRows,
    request,
    wait_until,
)
from tests.programs import PythonProgram

pytestmark = [pytest.mark.faults, pytest.mark.slow]

NUM_ROWS = 50_000
PROGRAM = Path(__file__).with_name("served_files_program.py")


class RefusedError(Exception):
    """A lookup that ended with an error."""


class Serving:
    """tfswitch-serving, which takes each version by itself."""

    def __init__(self, folder: Path, models: Path) -> None:
        self._server = PredictionServer(
            folder, models, "--watch_rows_secs=0.02"
        )
        self.pid = self._server.process.pid

    def ask(self, ids: np.ndarray) -> list[float]:
        try:
            answer = self._server.predict(request(ids=ids))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            if error.code() != grpc.StatusCode.DATA_LOSS:
                raise
            raise RefusedError(error.details()) from error
        return tf.make_ndarray(answer.outputs["score"]).tolist()

    def load(self, version: Path) -> None:
        wait_until(
            lambda: int(version.name) in self._server.states(),
            f"version {version} is found",
        )

    def is_alive(self) -> bool:
        return self._server.process.poll() is None

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *exception) -> None:
        self._server.__exit__(*exception)


class Python:
    """A Python process that has loaded version 1."""

    def __init__(self, folder: Path, models: Path) -> None:
        self._lock = threading.Lock()
        with (folder / "python.log").open("w") as log:
            self._program = PythonProgram(
                PROGRAM,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.pid = self._program.pid
        self.load(models / "1")

    def ask(self, ids: np.ndarray) -> list[float]:
        return self._call("ask " + ",".join(map(str, ids)))

    def load(self, version: Path) -> None:
        self._call(f"load {version}")

    def is_alive(self) -> bool:
        return self._program.poll() is None

    def __enter__(self) -> "Python":
        return self

    def __exit__(self, *exception) -> None:
        self._program.__exit__(None, None, None)

    def _call(self, line: str) -> list[float]:
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None and stdout is not None
        with self._lock:
            stdin.write(line + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        if "error" not in answer:
            return answer["values"]
        assert answer["error"].startswith("DataLossError"), answer
        raise RefusedError(answer["error"])


class Client:
    """Asks for random ids all the time.

    Attributes:
        wrong_at: When the wrong answers were asked for, in monotonic seconds.
        errors: The refusals.
        num_right: How many answers were right.
    """

    def __init__(self, process: Serving | Python, value: float) -> None:
        self.wrong_at: list[float] = []
        self.errors: list[str] = []
        self.num_right = 0
        self._process = process
        self._value = value
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: bool(condition() or self._failure), what)
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "Client":
        self._thread.start()
        self.wait_for(lambda: self.num_right > 20, "answers come")
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        random = np.random.default_rng(7)
        try:
            while not self._stop.is_set():
                asked_at = time.monotonic()
                try:
                    values = self._process.ask(
                        random.integers(0, NUM_ROWS, 1000)
                    )
                except RefusedError as error:
                    self.errors.append(str(error))
                else:
                    if set(values) == {self._value}:
                        self.num_right += 1
                    else:
                        self.wrong_at.append(asked_at)
        except Exception as failure:
            self._failure = failure


@pytest.fixture
def rows(embedded: tsw.Cluster, tmp_path: Path) -> ServedRows:
    """Rows whose value in version 1 is 1."""
    rows = ServedRows(tmp_path)
    rows.set_all(1, NUM_ROWS)
    rows.save(1)
    return rows


@pytest.fixture
def process(
    kind: type[Serving | Python], rows: ServedRows, tmp_path: Path
) -> Iterator[Serving | Python]:
    with kind(tmp_path, rows.models) as process:
        yield process


def file_of(rows: ServedRows, version: int = 1) -> Path:
    (file,) = rows.exports(version).glob("*/*.safetensors")
    return file


def other_rows(rows: ServedRows, folder: Path) -> bytes:
    """A file of the same ids in the same places, with the value 2."""
    rows.set_all(2, NUM_ROWS)
    models, rows.models = rows.models, folder / "elsewhere"
    rows.models.mkdir()
    rows.save(1)
    content = file_of(rows).read_bytes()
    rows.models = models
    return content


def check_next_version(process: Serving | Python, rows: ServedRows) -> None:
    rows.set_all(3, NUM_ROWS)
    process.load(rows.save(2))

    def serves_it() -> bool:
        with contextlib.suppress(RefusedError):
            return set(process.ask(np.arange(NUM_ROWS))) == {3}
        return False

    wait_until(serves_it, "the next version answers")
    assert process.is_alive()


def overwrite(file: Path, content: bytes, wait: Callable[[], None]) -> None:
    with file.open("r+b") as writer:
        wait()
        writer.write(content)


def shorten(file: Path, content: bytes, wait: Callable) -> None:
    os.truncate(file, len(content) // 2)


# Both programs have the same library: the second is here to show that it does.
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (overwrite, Serving),
        (shorten, Serving),
        (overwrite, Python),
        (shorten, Python),
    ],
)
def test_a_file_that_is_changed_in_place_is_refused_before_it_is_written(
    change: Callable[[Path, bytes, Callable[[], None]], None],
    process: Serving | Python,
    rows: ServedRows,
    tmp_path: Path,
) -> None:
    content = other_rows(rows, tmp_path)
    with Client(process, 1) as client:
        change(
            file_of(rows),
            content,
            lambda: client.wait_for(
                lambda: len(client.errors) > 20, "an open writer is enough"
            ),
        )
        seen = len(client.errors)
        client.wait_for(
            lambda: len(client.errors) > seen + 20, "the rows are refused"
        )

    assert process.is_alive()
    assert not client.wrong_at
    assert {str(file_of(rows)) in error for error in client.errors} == {True}
    assert "publish a new export" in client.errors[0]
    check_next_version(process, rows)


@pytest.fixture
def open_writer(rows: ServedRows) -> Iterator[int]:
    """A descriptor that is there before the model is loaded: no lease."""
    with file_of(rows).open("r+b") as writer:
        yield writer.fileno()


@pytest.mark.parametrize("kind", [Serving, Python])
def test_a_writer_that_had_the_file_open_is_seen_within_a_second(
    rows: ServedRows,
    tmp_path: Path,
    open_writer: int,
    process: Serving | Python,
) -> None:
    content = other_rows(rows, tmp_path)
    with Client(process, 1) as client:
        os.pwrite(open_writer, content, 0)
        written_at = time.monotonic()
        client.wait_for(lambda: len(client.errors) > 50, "the rows are refused")

    # The client may have waited for its turn meanwhile.
    assert all(at < written_at + 1 for at in client.wrong_at)
    assert str(file_of(rows)) in client.errors[0]
    check_next_version(process, rows)


def test_a_file_that_becomes_shorter_does_not_end_the_server(
    rows: ServedRows, tmp_path: Path, open_writer: int
) -> None:
    with Serving(tmp_path, rows.models) as serving:
        with Client(serving, 1) as client:
            os.ftruncate(open_writer, file_of(rows).stat().st_size // 2)
            client.wait_for(
                lambda: len(client.errors) > 20, "the rows are refused"
            )

        assert not client.wrong_at
        check_next_version(serving, rows)


def replace(path: Path, content: bytes) -> None:
    new = path.with_name("new")
    new.write_bytes(content)
    new.rename(path)


def unlink(path: Path, content: bytes) -> None:
    path.unlink()


def link_and_rename(path: Path, content: bytes) -> None:
    path.with_name("link").hardlink_to(path)
    path.rename(path.with_name("other"))
    path.with_name("other").chmod(0o444)
    path.with_name("other").read_bytes()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (replace, Serving),
        (unlink, Serving),
        (link_and_rename, Serving),
        (replace, Python),
    ],
)
def test_a_file_whose_name_changes_is_served_on(
    change: Callable[[Path, bytes], None],
    process: Serving | Python,
    rows: ServedRows,
    tmp_path: Path,
) -> None:
    content = other_rows(rows, tmp_path)
    with Client(process, 1) as client:
        change(file_of(rows), content)
        changed_at = time.monotonic()
        right = client.num_right
        client.wait_for(
            lambda: (
                time.monotonic() > changed_at + 1
                and client.num_right > right + 20
            ),
            "answers go on",
        )

    assert not client.errors
    assert not client.wrong_at
    check_next_version(process, rows)


def test_the_handler_of_sigbus_is_in_the_server_alone(
    rows: ServedRows, tmp_path: Path
) -> None:
    def caught(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        (line,) = (x for x in status.splitlines() if x.startswith("SigCgt"))
        return int(line.split()[1], 16) >> (7 - 1) & 1

    with (
        Serving(tmp_path, rows.models) as serving,
        Python(tmp_path, rows.models) as python,
    ):
        assert caught(serving.pid) == 1
        assert caught(python.pid) == 0
