"""A stderr that nobody reads holds up no call and no end of a server."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_service_pb2_grpc

import tfswitch as tsw
from tests.integration.predictor_test import MODEL, request, save
from tests.integration.unread_answers_test import frame
from tests.programs import HANG_SECS, environment
from tests.python.worker_threads import wait_until
from tests.support import PACKAGE, ServerProcess
from tests.tokens import TokenFile

pytestmark = pytest.mark.faults

# Each is a line, or more than one; the buffer of a pipe has room for some 200.
NUM_REFUSED = 400
IDS = np.arange(8)
PULL = "/tfswitch.v1.ParameterServer/Pull"
PREDICT = "/tensorflow.serving.PredictionService/Predict"


class Server:
    """A server program whose stderr is a pipe.

    Attributes:
        address: Where it listens.
        process: The process.

    Args:
        program: Its name.
        flags: Its flags.
        before: Called in its process.
        meanwhile: Called while it starts.
    """

    def __init__(
        self,
        program: str,
        *flags: str,
        before: Callable[[], None] | None = None,
        meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    ) -> None:
        self._read, self._write = os.pipe()
        self.process = subprocess.Popen(
            [PACKAGE / "bin" / program, "--address=127.0.0.1:0", *flags],
            # Not by way of Python, of which it would inherit that SIGPIPE is
            # ignored.
            env=environment(LD_LIBRARY_PATH=str(Path(tf.__file__).parent)),
            stdout=subprocess.PIPE,
            stderr=self._write,
            text=True,
            preexec_fn=before,
        )
        if meanwhile is not None:
            meanwhile(self.process)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"(?:listening|serving) on (\S+)", line)
        assert match, line + os.read(self._read, 10_000).decode()
        self.address = match[1]

    def fill(self) -> None:
        """Leaves no room in the pipe."""
        # Not os.set_blocking, which would be for the server, too.
        path = f"/proc/self/fd/{self._write}"
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(pipe, size * b"\n")
        os.close(pipe)

    def lose_reader(self) -> None:
        os.close(self._write)
        os.close(self._read)

    def read(self) -> str:
        """Returns the contents of the pipe."""
        unread = np.zeros(1, np.int32)
        fcntl.ioctl(self._read, termios.FIONREAD, unread)
        return os.read(self._read, unread[0]).decode() if unread[0] else ""

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_SECS)


@contextlib.contextmanager
def running(program: str, *flags: str, **calls: Any) -> Iterator[Server]:
    server = Server(program, *flags, **calls)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def bad_metadata(address: str, path: str) -> None:
    """Calls with a header that gRPC cannot parse, and says so on stderr."""
    fields = b"\x83\x86"  # :method POST, :scheme http
    for name, value in (
        (b":path", path.encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"grpc-previous-rpc-attempts", b"\xff\x1b[31mred"),
    ):
        fields += b"\0" + bytes([len(name)]) + name
        fields += bytes([len(value)]) + value
    host, port = address.split(":")
    for _ in range(NUM_REFUSED // 50):
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                + frame(4, 0, 0, b"")
                + b"".join(frame(1, 5, 2 * i + 1, fields) for i in range(50))
                # Answered after all of them.
                + frame(6, 0, 0, b"the ping")
            )
            answer = b""
            while frame(6, 1, 0, b"the ping") not in answer:
                more = connection.recv(1 << 16)
                assert more, answer
                answer += more


def refused_calls(address: str, path: str) -> None:
    """Calls with a token that the server does not know."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(path)
        metadata = (("authorization", "Bearer \\x1b[31m"),)
        for _ in range(NUM_REFUSED):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=HANG_SECS, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def bad_predictions(address: str, token: str) -> None:
    """Calls that fail inside of TensorFlow."""
    bad = request(ids=np.zeros((2, 3), np.int64), dense=np.zeros((3, 1)))
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        for _ in range(NUM_REFUSED):
            with pytest.raises(grpc.RpcError) as failed:
                stub.Predict(bad, timeout=HANG_SECS, metadata=metadata)
            assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT


STATES: dict[str, Callable[[Server], None]] = {
    "unread": Server.fill,
    "without_reader": Server.lose_reader,
}


@pytest.mark.parametrize("state", STATES)
def test_pushes_return_and_are_saved_whatever_becomes_of_stderr(
    state: str, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    admin = tokens.create("admin")
    flags = (
        f"--data_dir={tmp_path}/data",
        "--checkpoint_every=inf",
        f"--token_file={tokens.path}",
    )
    optimizer = tsw.optimizers.SGD(1.0)

    def rows(address: str, push: bool) -> np.ndarray:
        with tsw.connect(f"grpc://{address}", token=admin) as cluster:
            table = tsw.EmbeddingTable(
                *("user", 1),
                initializer="zeros",
                optimizer=optimizer,
                cluster=cluster,
            )
            if push:
                table.push(IDS, -np.ones((IDS.size, 1), np.float32))
            return table.lookup(IDS).numpy()[:, 0]

    with running("tfswitch-server", *flags) as server:
        STATES[state](server)
        refused_calls(server.address, PULL)
        bad_metadata(server.address, PULL)

        assert set(rows(server.address, push=True)) == {1.0}
        assert server.end() == 0

    with ServerProcess(flags=flags) as again:
        assert set(rows(again.address, push=False)) == {1.0}


@pytest.mark.parametrize("state", STATES)
def test_predictions_return_whatever_becomes_of_stderr(
    state: str, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    reader = tokens.create("read")
    (tmp_path / "models").mkdir()
    save(1, tmp_path / "models")

    with running(
        "tfswitch-serving",
        f"--model_dir={tmp_path}/models",
        f"--model_name={MODEL}",
        f"--token_file={tokens.path}",
    ) as server:
        # At its start it writes less than the pipe can hold.
        with grpc.insecure_channel(server.address) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

            def predict() -> bool:
                with contextlib.suppress(grpc.RpcError):
                    return bool(
                        stub.Predict(
                            request(),
                            timeout=HANG_SECS,
                            metadata=(("authorization", f"Bearer {reader}"),),
                        ).outputs
                    )
                return False

            wait_until(predict)
            STATES[state](server)
            refused_calls(server.address, PREDICT)
            bad_metadata(server.address, PREDICT)
            bad_predictions(server.address, reader)

            assert predict()
        assert server.end() == 0


def test_a_stranger_writes_few_lines_and_only_what_a_terminal_may_show(
    tmp_path: Path,
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    tokens.create("admin")
    with running("tfswitch-server", f"--token_file={tokens.path}") as server:
        bad_metadata(server.address, PULL)
        refused_calls(server.address, PULL)
        assert server.end() == 0
        lines = server.read().splitlines()

    assert all(line.isascii() and line.isprintable() for line in lines)
    of_grpc = [line for line in lines if " grpc message=" in line]
    refused = [line for line in lines if " warning caller_refused " in line]
    assert r"\\xff\\x1b[31mred" in of_grpc[0]
    assert len(of_grpc) < 100
    assert 20 <= len(refused) < 100
    left_out = re.findall(
        r"(\d+) more lines about caller_ref", "\n".join(lines)
    )
    assert sum(map(int, left_out)) + len(refused) == NUM_REFUSED
