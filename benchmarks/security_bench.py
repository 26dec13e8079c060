"""What safety costs, and how far a hostile client slows others down.

    python benchmarks/security_bench.py --bench=build-bench/benchmarks

First access_bench and exchange_bench, with a token and a certificate. Then a
client looks up ids on a server that asks for tokens, in rounds: alone, and
beside a process without a token that sends garbage, one byte at a time, or
messages of huge lengths, or opens connections by the thousand. That process has
the lowest priority, because the attacker of a server is on another machine.
"""

import os
import pathlib
import random
import re
import resource
import socket
import statistics
import struct
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
from tfswitch import _token_file

_BENCH = flags.DEFINE_string("bench", None, "The folder of the C++ programs.")
_SECONDS = flags.DEFINE_float("seconds", 3.0, "Of each turn.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each.")

SERVER = pathlib.Path(tsw.__file__).parent / "bin" / "tfswitch-server"
# HTTP/2's greeting with an empty SETTINGS frame.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
IDS = np.arange(64)


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def garbage(address: str) -> None:
    """Connections that send random bytes, 200 a second."""
    with connect(address) as peer:
        peer.sendall(random.randbytes(4096))
    time.sleep(0.005)


_slow: list[socket.socket] = []


def slow_bytes(address: str) -> None:
    """500 connections that send a byte of the greeting every 100 ms."""
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
    """Calls of Pull whose messages say that they have 4 GiB, 200 a second."""
    path = b"/tfswitch.v1.ParameterServer/Pull"
    # Literal fields without indexing: :method, :scheme, :path, :authority, ...
    fields = b"\x83\x86"
    for name, value in (
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ):
        fields += b"\0" + bytes([len(name)]) + name
        fields += bytes([len(value)]) + value
    headers = struct.pack(">I", len(fields))[1:] + b"\1\4\0\0\0\1" + fields
    message = b"\0\xff\xff\xff\xff" + b"x" * 1000
    data = struct.pack(">I", len(message))[1:] + b"\0\0\0\0\0\1" + message
    with connect(address) as peer:
        peer.sendall(GREETING + headers + data)
        peer.recv(4096)
    time.sleep(0.005)


def connections(address: str) -> None:
    """3,000 connections that greet and stay."""
    if len(_slow) < 3000:
        _slow.append(connect(address))
        _slow[-1].sendall(GREETING)
        return
    time.sleep(0.1)


ATTACKS: dict[str, Callable[[str], None]] = {
    "garbage": garbage,
    "slow bytes": slow_bytes,
    "huge lengths": huge_lengths,
    "3,000 connections": connections,
}


def attack(name: str, address: str) -> None:
    """Goes on until it is killed."""
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
    """Of lookups of 64 ids, one after another."""
    times = []
    end = time.perf_counter() + _SECONDS.value
    while time.perf_counter() < end:
        begin = time.perf_counter()
        table.lookup(IDS)
        times.append((time.perf_counter() - begin) * 1e6)
    return float(np.quantile(times, 0.99))


def measure(name: str, address: str, table: tsw.EmbeddingTable) -> None:
    alone, beside = [], []
    for _ in range(_ROUNDS.value):
        alone.append(p99_us(table))
        with subprocess.Popen(
            [sys.executable, __file__, "--attack", name, address],
            stdout=subprocess.PIPE,
        ) as attacker:
            assert attacker.stdout is not None
            attacker.stdout.readline()
            time.sleep(1.0)
            beside.append(p99_us(table))
            attacker.kill()
    ratios = [b / a for a, b in zip(alone, beside, strict=True)]
    print(
        f"{name}: p99 of a lookup {statistics.median(alone):.0f} us alone, "
        f"{statistics.median(beside):.0f} us beside it, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}; bar: 2)"
    )
    report(f"hostile | {name} | p99 alone", "us", alone)
    report(f"hostile | {name} | p99 beside it", "us", beside)
    report(f"hostile | {name} | beside / alone", "", ratios, "at most 2")


def make_files(folder: pathlib.Path) -> None:
    """Those of exchange_bench --secure."""
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
        with subprocess.Popen(
            [
                *(SERVER, "--address=127.0.0.1:0"),
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
                    measure(attack_name, address, table)
            server.terminate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        attack(*sys.argv[2:])
    else:
        app.run(main)
