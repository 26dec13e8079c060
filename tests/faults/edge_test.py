"""Floods of frames end the connection that sends them, and nothing else.

Attackers come from addresses of their own, honest clients from 127.0.0.1.
"""

import contextlib
import itertools
import re
import resource
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

import tfswitch as tsw
from tests.certificates import Authority
from tests.faults import frames
from tests.faults.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    Peer,
    frame,
)
from tests.integration.predictor_test import (
    PredictionServer,
    save,
    wait_until,
)
from tests.support import SERVER

pytestmark = [pytest.mark.faults, pytest.mark.slow]

_NUMBERS = itertools.count(2)


class Target:
    """A server program under attack.

    Attributes:
        address: Where it listens.
        has_tls: Whether it speaks TLS.
        method: A method that strangers may call.
    """

    def __init__(
        self,
        address: str,
        has_tls: bool,
        method: str,
        process: subprocess.Popen[str],
        log: Callable[[], str],
        call: Callable[[], object],
    ) -> None:
        self.address = address
        self.has_tls = has_tls
        self.method = method
        self.log = log
        self.call = call
        self._process = process

    def peer(self, source: str | None = None) -> Peer:
        return Peer(
            self.address,
            tls=self.has_tls,
            source=source or f"127.0.0.{next(_NUMBERS)}",
        )

    def mib(self) -> float:
        """Its memory."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize() / 2**20


@contextlib.contextmanager
def parameter_server(
    folder: Path, authority: Authority, has_tls: bool, where: str
) -> Iterator[Target]:
    tls = authority.sign("server", trusts=True)
    flags = [f"--tls_cert={tls.cert}", f"--tls_key={tls.key}"]
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [str(SERVER), f"--address={where}", *(flags if has_tls else [])],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" serving on ")[1].split()[0]
        scheme = "grpcs" if has_tls else "grpc"
        with tsw.connect(
            f"grpc+unix://{address.removeprefix('unix:')}"
            if address.startswith("unix:")
            else f"{scheme}://{address}",
            tls=tsw.Tls(ca=tls.ca) if has_tls else None,
            timeout_secs=20.0,
        ) as cluster:
            table = tsw.EmbeddingTable("honest", 2, cluster=cluster)
            yield Target(
                address,
                has_tls,
                "/tfswitch.v1.ParameterServer/Handshake",
                process,
                log.read_text,
                lambda: table.push([1], [[1.0, 1.0]]),
            )
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def prediction_server(
    folder: Path, authority: Authority, has_tls: bool, where: str
) -> Iterator[Target]:
    tls = authority.sign("server", trusts=True)
    flags = [f"--tls_cert={tls.cert}", f"--tls_key={tls.key}"]
    (folder / "models").mkdir()
    save(1, folder / "models")
    with PredictionServer(
        folder,
        folder / "models",
        f"--address={where}",
        *(flags if has_tls else []),
        credentials=grpc.ssl_channel_credentials(authority.ca.read_bytes())
        if has_tls
        else None,
    ) as server:
        yield Target(
            server.address,
            has_tls,
            "/tensorflow.serving.ModelService/GetModelStatus",
            server.process,
            server.log,
            server.check,
        )


@pytest.mark.parametrize(
    ("program", "has_tls"), [("server", True), ("serving", False)]
)
def test_an_answer_that_nobody_takes_holds_its_place_for_40_seconds(
    program: str, has_tls: bool, tmp_path: Path
) -> None:
    with PROGRAMS[program](
        tmp_path, Authority(tmp_path), has_tls, "127.0.0.1:0"
    ) as target:
        peer = target.peer()
        no_window = struct.pack(">HI", 4, 0)
        peer.socket.sendall(frame(SETTINGS, 0, 0, no_window))
        peer.acknowledge_settings()
        begin = time.monotonic()
        for stream in range(1, 101, 2):
            peer.socket.sendall(
                frame(
                    HEADERS,
                    END_HEADERS,
                    stream,
                    frames.headers_of("/grpc.health.v1.Health/Check"),
                )
                + frame(DATA, END_STREAM, stream, bytes(5))
            )

        peer.answer_pings(secs=60)

        assert 39 < time.monotonic() - begin < 50
        wait_until(
            lambda: "took nothing of an answer" in target.log(), "it is said"
        )
        target.call()
        peer.close()


@pytest.mark.parametrize("program", ["server", "serving"])
def test_idle_connections_leave_room_for_others_when_they_end(
    program: str, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        started = PROGRAMS[program](
            tmp_path, Authority(tmp_path), False, "127.0.0.1:0"
        )
        target = started.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        peers = [target.peer("127.0.0.2") for _ in range(400)]
        target.call()  # A connection that is there stays.
        for peer in peers:
            peer.close()
        with contextlib.closing(target.peer("127.0.0.3")) as peer:
            peer.acknowledge_settings()
            assert not peer.flood(iter([]), secs=0.2)
    finally:
        started.__exit__(None, None, None)


PROGRAMS = {
    "server": parameter_server,
    "serving": prediction_server,
}
# Both use one library; the second is here to show that it does.
TARGETS = [
    ("server", "plaintext"),
    ("server", "tls"),
    ("server", "unix"),
    ("serving", "tls"),
]


@pytest.fixture(
    scope="module",
    params=TARGETS,
    ids=lambda kind: "-".join(kind),
)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    program, place = request.param
    folder = tmp_path_factory.mktemp("edge")
    where = f"unix:{folder}/s" if place == "unix" else "127.0.0.1:0"
    with PROGRAMS[program](
        folder, Authority(folder), place == "tls", where
    ) as target:
        yield target


@pytest.mark.parametrize("acknowledges", [False, True])
@pytest.mark.parametrize("flood", frames.FLOODS)
def test_a_flood_ends_its_connection_and_takes_no_memory(
    flood: str, acknowledges: bool, target: Target
) -> None:
    target.call()
    before = target.mib()
    peer = target.peer()
    if acknowledges:
        peer.acknowledge_settings()

    is_over = peer.flood(frames.FLOODS[flood](frames.headers_of(target.method)))

    assert is_over
    assert target.mib() - before < 64
    target.call()
    peer.close()


@pytest.mark.parametrize(
    "header",
    [
        b"\x00\x02te\x01x",
        b"\x06\x01x",  # :scheme
        b"\x00\x13grpclb_client_stats\x01x",
    ],
    ids=["te", "scheme", "grpclb_client_stats"],
)
def test_headers_that_made_other_versions_of_grpc_abort_do_no_harm(
    header: bytes, target: Target
) -> None:
    block = frames.headers_of(target.method) + header
    block += b"\x00\x01a\x7f\xa9\x45" + 9000 * b"x"  # Beyond 8 KiB.
    with contextlib.closing(target.peer()) as peer:
        peer.acknowledge_settings()
        peer.socket.sendall(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
        assert peer.socket.recv(1 << 16)

    target.call()


def test_the_log_names_the_connection_and_the_address_waits(
    target: Target,
) -> None:
    source = f"127.0.0.{next(_NUMBERS)}"
    with contextlib.closing(target.peer(source)) as peer:
        # gRPC 1.51 loses bytes that come with the end of a TLS handshake. It
        # then ends the connection itself, as it may do in other floods.
        peer.acknowledge_settings()
        assert peer.flood(frames.FLOODS["settings"](b""))

    by = "a Unix socket" if target.address.startswith("unix:") else source
    wait_until(
        lambda: re.search(
            f"closed a connection of {by}.*: it sent more than 200 resets",
            target.log(),
        ),
        f"the log names {by}",
    )
    if target.address.startswith("unix:"):
        with contextlib.closing(target.peer()) as peer:
            assert not peer.flood(iter([]), secs=0.2)
        return
    with (
        pytest.raises(OSError),
        contextlib.closing(target.peer(source)) as peer,
    ):
        if peer.flood(iter([]), secs=5):
            raise ConnectionResetError
    with contextlib.closing(target.peer()) as peer:
        assert not peer.flood(iter([]), secs=0.2)
