"""deploy/nginx keeps floods of frames from a server, and lets trainers work."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfswitch as tsw
from tests.certificates import Authority
from tests.faults import frames
from tests.programs import ROOT
from tests.support import ServerProcess, free_ports

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin")

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of an nginx in front of a server."""
    tls = Authority(tmp_path).sign("server")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    text = (ROOT / "deploy/nginx/tfswitch.conf").read_text()
    for there, here in {
        "7443": address,
        "/etc/tfswitch/tls.crt": tls.cert,
        "/etc/tfswitch/tls.key": tls.key,
        "/run/tfswitch/0.sock": tmp_path / "0.sock",
    }.items():
        assert there in text
        text = text.replace(there, str(here))
    config = tmp_path / "nginx.conf"
    config.write_text(
        "daemon off; user root; worker_processes 1;\n"
        f"pid {tmp_path}/pid; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {tmp_path}; {text} }}\n"
    )
    with ServerProcess(address=f"unix:{tmp_path}/0.sock"):
        nginx = subprocess.Popen(
            [str(NGINX), "-c", config, "-e", tmp_path / "log"]
        )
        try:
            yield address
        finally:
            nginx.terminate()
            nginx.wait(timeout=20)


def connect(address: str, tmp_path: Path) -> tsw.Cluster:
    return tsw.connect(
        f"grpcs://{address}",
        tls=tsw.Tls(ca=tmp_path / "ca.pem"),
        timeout_secs=20.0,
    )


def test_workers_train_while_another_address_floods(
    address: str, tmp_path: Path
) -> None:
    with connect(address, tmp_path) as cluster:
        table = tsw.EmbeddingTable(
            "t", 2, initializer="zeros", optimizer="sgd", cluster=cluster
        )
        worker = tsw.train.Worker(0, 1, consistency="asp", cluster=cluster)
        for kind in frames.FLOODS.values():
            peer = frames.Peer(address, tls=True, source="127.0.0.2")
            peer.acknowledge_settings()
            headers = frames.headers_of("/grpc.health.v1.Health/Check")
            peer.flood(kind(headers), secs=1)
            table.push([1], [[1.0, 1.0]])
            worker.end_step()
            peer.close()
        # More than nginx keeps in memory.
        table.assign(range(200_000), [[1.0, 2.0]] * 200_000)
        assert table.size() == 200_000
