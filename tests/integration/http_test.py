"""Metrics and probes over HTTP, of both servers."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import predict_pb2

import tfswitch as tsw
from tests.certificates import Authority
from tests.integration.predictor_test import (
    COMMAND,
    HANG_SECS,
    PredictionServer,
    save,
)
from tests.programs import environment
from tests.python.worker_threads import wait_for_stderr, wait_until
from tests.support import SERVER, ServerProcess, free_ports, make_table
from tests.tokens import TokenFile, id_of

SERVE = (sys.executable, "-m", "tfswitch", "serve")
PAGES = ("/metrics", "/healthz", "/readyz")


class Scraper:
    """A client of the HTTP address of a server.

    Args:
        port: Its port, of this machine.
        ca: The authority of its certificate; None: it has no TLS.
    """

    def __init__(self, port: int, ca: Path | None = None) -> None:
        self._port = port
        self._tls = (
            None if ca is None else ssl.create_default_context(cafile=ca)
        )

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        """Returns the status and the text of a page."""
        connection = (
            http.client.HTTPConnection("127.0.0.1", self._port, HANG_SECS)
            if self._tls is None
            else http.client.HTTPSConnection(
                "127.0.0.1", self._port, context=self._tls, timeout=HANG_SECS
            )
        )
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def all_at_once(self, count: int) -> set[bytes]:
        """Scrapes over as many connections, and returns the status lines."""
        with contextlib.ExitStack() as stack:
            connections = []
            for _ in range(count):
                connection = stack.enter_context(self.connect())
                connection.sendall(
                    b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n"
                )
                connections.append(connection)
            return {
                connection.makefile("rb").read().split(b"\r\n")[0]
                for connection in connections
            }

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), HANG_SECS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("http")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    models = folder / "models"
    models.mkdir()
    save(1, models)
    return models


Start = Callable[..., contextlib.AbstractContextManager[object]]


@pytest.fixture(params=["tfswitch-server", "tfswitch-serving"])
def start(
    request, folder: Path, models: Path, authority: Authority
) -> Iterator[Start]:
    """Starts each of the two servers with flags."""

    def serving(*flags: str) -> PredictionServer:
        has_tls = any(flag.startswith("--tls_cert") for flag in flags)
        tls = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        return PredictionServer(
            folder, models, *flags, credentials=tls if has_tls else None
        )

    if request.param == "tfswitch-serving":
        yield serving
    else:
        yield lambda *flags: ServerProcess(command=SERVE, flags=flags)


@pytest.mark.slow
def test_metrics_and_probes_have_the_rules_of_grpc(
    start: Start, authority: Authority, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    reader, revoked = tokens.create("read"), tokens.create("read")
    tokens.revoke(revoked)
    tls = authority.sign("server")
    (port,) = free_ports(1)
    scraper = Scraper(port, authority.ca)

    with start(
        f"--http_address=127.0.0.1:{port}",
        *(f"--tls_cert={tls.cert}", f"--tls_key={tls.key}"),
        f"--token_file={tokens.path}",
    ):
        status, metrics = scraper.get("/metrics", reader)
        assert status == 200
        assert re.search(
            r'^tfswitch_build_info\{.*version="\S+"\} 1$', metrics, re.M
        )
        assert re.search(r"^tfswitch_uptime_seconds\S* [\d.]+$", metrics, re.M)
        assert scraper.get("/healthz") == (200, "ok\n")
        assert scraper.get("/readyz") == (200, "ok\n")
        assert scraper.get("/metrics")[0] == 401
        assert scraper.get("/metrics", revoked)[0] == 401
        status, error = scraper.get("/nothing")
        assert (status, error[:21]) == (404, "there is no such page")
        assert all(page in error for page in PAGES)
        with pytest.raises((http.client.HTTPException, OSError)):
            Scraper(port).get("/metrics", reader)

        # The server shows a renewed certificate.
        authority.sign("server", "IP:127.0.0.2")

        def is_renewed() -> bool:
            try:
                return scraper.get("/healthz")[0] != 200
            except ssl.SSLCertVerificationError:
                return True

        wait_until(is_renewed)


@pytest.mark.slow
def test_a_refused_scrape_is_written_down(tmp_path: Path, capfd) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    revoked = tokens.create("read")
    tokens.create("read")
    tokens.revoke(revoked)
    (port,) = free_ports(1)

    with ServerProcess(
        flags=(
            f"--http_address=127.0.0.1:{port}",
            f"--token_file={tokens.path}",
        )
    ):
        Scraper(port).get("/metrics", revoked)
        written = wait_for_stderr(capfd, " caller_refused ")

    assert f" http=127.0.0.1:{port} " in written
    assert f" call=/metrics claims={id_of(revoked)} from=ipv4:127.0.0.1:" in (
        written
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", [(str(SERVER),), SERVE, tuple(COMMAND)])
def test_a_taken_port_ends_the_program_as_grpcs_does(
    command: tuple[str, ...], models: Path
) -> None:
    flags = [f"--model_dir={models}"] if command == tuple(COMMAND) else []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = subprocess.run(
            [
                *(*command, *flags, "--address=127.0.0.1:0"),
                f"--http_address={address}",
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=HANG_SECS,
        )

    assert result.returncode == 1
    assert result.stdout == ""
    assert (
        f'why="flag --http_address: cannot listen on {address}: another server '
        'is running there; stop it or take another port"'
    ) in result.stderr


def test_a_view_has_hot_ids_and_events_and_only_servers_pages_may_read_it() -> (
    None
):
    (port,) = free_ports(1)
    trusted = "https://ps1.example.com"
    flags = (
        f"--http_address=127.0.0.1:{port}",
        f"--http_servers=http://127.0.0.1:{port},HTTPS://ps1.example.com:443/",
    )
    with (
        ServerProcess(flags=flags) as server,
        tsw.connect(f"grpc://{server.address}"),
    ):
        table = make_table("viewed")
        for _ in range(3000):
            table.lookup([7])

        headers = {}
        for method, origin in (
            ("OPTIONS", trusted),
            ("GET", trusted),
            ("GET", "https://evil.example.com"),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            with contextlib.closing(connection):
                connection.request(
                    method, "/view.json", headers={"Origin": origin}
                )
                answer = connection.getresponse()
                headers[method, origin] = answer.headers
                view = answer.read()
        allowed = [
            each["Access-Control-Allow-Origin"] for each in headers.values()
        ]
        assert allowed == [trusted, trusted, None]
        refused = headers["GET", "https://evil.example.com"]
        assert "Access-Control-Allow-Headers" not in refused

        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(connection):
            rebound = {"Host": f"evil.example.com:{port}"}
            connection.request("GET", "/view.json", headers=rebound)
            answer = connection.getresponse()
            assert (answer.status, b"--token_file" in answer.read()) == (
                403,
                True,
            )
        assert Scraper(port).get("/")[0] == 200

    state = json.loads(view)
    assert state["http_servers"] == [f"http://127.0.0.1:{port}", trusted]
    (heat,) = state["heats"]
    assert (heat["table"], len(heat["virtual_shards"])) == ("viewed", 64)
    assert heat["hot_keys"] == [{"key": "7", "share": 1}]
    assert 'tfswitch_table_info{shard="0",table="viewed"' in state["metrics"]
    events = [json.loads(event)["event"] for event in state["events"]]
    assert events == ["started", "table_made"]


@pytest.mark.slow
def test_training_goes_on_beside_a_thousand_scrapes_and_slow_clients() -> None:
    (port,) = free_ports(1)
    scraper = Scraper(port)
    ids = np.arange(1000)
    with (
        ServerProcess(flags=(f"--http_address=127.0.0.1:{port}",)) as server,
        tsw.connect(f"grpc://{server.address}"),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(300):
            slow = stack.enter_context(scraper.connect())
            slow.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        table = make_table()
        status_lines: list[set[bytes]] = []
        scrapes = threading.Thread(
            target=lambda: status_lines.append(scraper.all_at_once(1000))
        )
        scrapes.start()
        num_steps = 0
        while scrapes.is_alive() or num_steps < 10:
            table.lookup_or_create(ids)
            table.push(ids, np.full((ids.size, 2), -1, np.float32))
            num_steps += 1
        scrapes.join()

        assert status_lines == [{b"HTTP/1.1 200 OK"}]
        np.testing.assert_array_equal(table.lookup(ids), float(num_steps))


@pytest.mark.slow
def test_a_prediction_server_is_ready_when_its_health_is_serving(
    folder: Path, models: Path
) -> None:
    (port,) = free_ports(1)
    with PredictionServer(
        folder, models, f"--http_address=127.0.0.1:{port}", wait=False
    ) as server:
        scraper = Scraper(port)
        answers = {scraper.get("/readyz")}
        assert scraper.get("/healthz") == (200, "ok\n")
        wait_until(server.is_serving)
        wait_until(lambda: scraper.get("/readyz") == (200, "ok\n"))

        assert answers <= {(503, "no model is loaded yet\n"), (200, "ok\n")}

        # A call has the result that the model gives.
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "none"
        with pytest.raises(grpc.RpcError) as refused:
            server.predict(request)
        name = refused.value.code().name
        metrics = scraper.get("/metrics")[1]
        calls = f'tfswitch_calls_total{{call="Predict",code="{name}"}} 1\n'
        assert calls in metrics
        duration = 'tfswitch_call_duration_seconds_count{call="Predict"} 1\n'
        assert duration in metrics
        assert 'tfswitch_model_version{model="' in metrics
