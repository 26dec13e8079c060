"""Measures the cost of security, and how much a hostile client slows others.

    python benchmarks/security_bench.py --bench=build-bench/benchmarks

First it runs access_bench and exchange_bench, with a token and a certificate.
Then a client looks up ids on a server that requires tokens, in rounds: alone,
and while a process without a token attacks the server. The attacker sends
garbage, one byte at a time, or messages of huge lengths, opens thousands of
connections, or sends floods of frames from a hundred addresses. Another one
scrapes metrics with a token. The attacker has the lowest priority, because a
real one would be on another machine.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from absl import app, flags
from figures import report

import tfswitch as tsw
from tests.faults import frames
from tfswitch._connection import _token_file

_BENCH = flags.DEFINE_string("bench", None, "The folder of the C++ programs.")
_SECONDS = flags.DEFINE_float("seconds", 3.0, "Of each turn.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each.")

SERVER = pathlib.Path(tsw.__file__).parent / "bin" / "tfswitch-server"
GREETING = frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0)
PULL = frames.headers_of("/tfswitch.v1.ParameterServer/Pull")
IDS = np.arange(64)


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def garbage(address: str) -> None:
    """Makes 200 connections a second that send random bytes."""
    with connect(address) as peer:
        peer.sendall(random.randbytes(4096))
    time.sleep(0.005)


_slow: list[socket.socket] = []


def slow_bytes(address: str) -> None:
    """Keeps 500 connections that send a byte of the greeting every 100 ms."""
    if len(_slow) < 500:
        _slow.append(connect(address))
        return
    for peer in _slow:
        try:
            peer.send(GREETING[:1])
        except OSError:
            pass
    time.sleep(0.1)


def huge_lengths(address: str) -> None:
    """Makes 200 calls of Pull a second whose messages claim to have 4 GiB."""
    headers = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, PULL)
    message = b"\0\xff\xff\xff\xff" + b"x" * 1000
    data = frames.frame(frames.DATA, 0, 1, message)
    with connect(address) as peer:
        peer.sendall(GREETING + headers + data)
        peer.recv(4096)
    time.sleep(0.005)


def connections(address: str) -> None:
    """Keeps 3,000 connections that send the greeting and then nothing."""
    if len(_slow) < 3000:
        _slow.append(connect(address))
        _slow[-1].sendall(GREETING)
        return
    time.sleep(0.1)


_sources = itertools.cycle(f"127.0.0.{i}" for i in range(2, 102))


def flood(name: str, address: str) -> None:
    """Returns a connection of the next of 100 addresses, until it is closed."""
    with contextlib.closing(
        frames.Peer(address, source=next(_sources))
    ) as peer:
        peer.socket.sendall(frames.frame(frames.SETTINGS, 1, 0))
        peer.flood(frames.FLOODS[name](PULL), secs=1)


def scrapes(address: str) -> None:
    """Makes 1,000 connections to the HTTP port, each with a scrape.

    They have a token, so that the server makes all answers.
    """
    request = (
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {os.environ['TOKEN']}\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(connect(os.environ["HTTP_ADDRESS"]))
            for _ in range(1000)
        ]
        for peer in peers:
            peer.sendall(request)
        for peer in peers:
            answer = b""
            while part := peer.recv(1 << 16):
                answer += part
            assert answer.startswith(b"HTTP/1.1 200"), answer[:100]


ATTACKS: dict[str, Callable[[str], None]] = {
    "1,000 scrapes at once": scrapes,
    "garbage": garbage,
    "slow bytes": slow_bytes,
    "huge lengths": huge_lengths,
    "3,000 connections": connections,
    **{name: functools.partial(flood, name) for name in frames.FLOODS},
}


def attack(name: str, address: str) -> None:
    """Attacks until the process is killed."""
    os.nice(19)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    print("ready", flush=True)
    while True:
        try:
            ATTACKS[name](address)
        except OSError:
            time.sleep(0.01)


def p99_us(table: tsw.EmbeddingTable) -> float:
    """Returns the 99th percentile for lookups of 64 ids, one after another."""
    times = []
    end = time.perf_counter() + _SECONDS.value
    while time.perf_counter() < end:
        begin = time.perf_counter()
        table.lookup(IDS)
        times.append((time.perf_counter() - begin) * 1e6)
    return float(np.quantile(times, 0.99))


def peak_mib(server: int) -> float:
    """Returns the most memory that a process has had since the last call."""
    status = pathlib.Path(f"/proc/{server}/status").read_text("utf-8")
    pathlib.Path(f"/proc/{server}/clear_refs").write_text("5", "utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def measure(
    name: str, address: str, table: tsw.EmbeddingTable, server: int
) -> None:
    alone, beside, memory = [], [], []
    for _ in range(_ROUNDS.value):
        alone.append(p99_us(table))
        peak_mib(server)
        with subprocess.Popen(
            [sys.executable, __file__, "--attack", name, address],
            stdout=subprocess.PIPE,
        ) as attacker:
            assert attacker.stdout is not None
            attacker.stdout.readline()
            time.sleep(1.0)
            beside.append(p99_us(table))
            assert attacker.poll() is None
            attacker.kill()
        memory.append(peak_mib(server))
    ratios = [b / a for a, b in zip(alone, beside, strict=True)]
    print(
        f"{name}: p99 of a lookup {statistics.median(alone):.0f} us alone, "
        f"{statistics.median(beside):.0f} us beside it, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}; bar: 2), the server's memory {max(memory):.0f} MiB"
    )
    report(f"hostile | {name} | p99 alone", "us", alone)
    report(f"hostile | {name} | p99 beside it", "us", beside)
    report(f"hostile | {name} | beside / alone", "", ratios, "at most 2")
    report(f"hostile | {name} | server", "MiB", memory)


def make_files(folder: pathlib.Path) -> None:
    """Makes the files that exchange_bench --secure uses."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", folder / "server.key", "-out", folder / "server.pem"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "ca.pem").write_bytes((folder / "server.pem").read_bytes())
    token = _token_file.add(folder / "tokens", "admin")
    (folder / "token").write_text(token)


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_files(folder)
        if _BENCH.value is not None:
            for program in (
                ["access_bench"],
                ["exchange_bench", f"--secure={folder}"],
            ):
                subprocess.run(
                    [os.path.join(_BENCH.value, program[0]), *program[1:]],
                    check=True,
                )
        with socket.create_server(("127.0.0.1", 0)) as free:
            http_address = f"127.0.0.1:{free.getsockname()[1]}"
        os.environ["HTTP_ADDRESS"] = http_address
        os.environ["TOKEN"] = (folder / "token").read_text()
        with subprocess.Popen(
            [
                *(SERVER, "--address=127.0.0.1:0"),
                f"--http_address={http_address}",
                *("--num_threads=1", f"--token_file={folder / 'tokens'}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as server:
            assert server.stdout is not None
            found = re.search(r"serving on (\S+)", server.stdout.readline())
            assert found is not None
            address = found[1]
            with tsw.Cluster(
                f"grpc://{address}", token=folder / "token"
            ) as cluster:
                table = tsw.EmbeddingTable("table", 16, cluster=cluster)
                table.lookup_or_create(IDS)
                p99_us(table)  # To warm up.
                for attack_name in ATTACKS:
                    measure(attack_name, address, table, server.pid)
            server.terminate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        attack(*sys.argv[2:])
    else:
        app.run(main)
