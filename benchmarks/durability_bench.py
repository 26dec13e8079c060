"""The cost of a data folder and a push log, and how long recovery takes.

    python benchmarks/durability_bench.py --rows=10000000

Two servers take turns, one with --push_log and one with rows in memory only:
pushes and lookups of a batch each, by two threads. Then the server with the log
saves all rows, is killed, comes back from its save, and from its log. The data
folders are in a temporary folder.
"""

import os
import pathlib
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from absl import app, flags
from figures import report

import tfswitch as tsw

_ROWS = flags.DEFINE_integer("rows", 10_000_000, "Of the table.")
_BATCH = flags.DEFINE_integer("batch", 8192, "Ids of a push or a lookup.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Of each turn.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Turns of each.")
_THREADS = flags.DEFINE_integer("threads", 2, "That push or look up.")

DIM = 16
SERVER = pathlib.Path(tsw.__file__).parent / "bin" / "tfswitch-server"


class Server:
    """A server process with one table, and the client of it."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.start("127.0.0.1:0")
        self.cluster = tsw.Cluster(f"grpc://{self.address}", timeout=600.0)
        self.table = tsw.EmbeddingTable(
            "table",
            DIM,
            optimizer=tsw.optimizers.Adagrad(0.1),
            cluster=self.cluster,
        )

    def start(self, address: str) -> tuple[float, str]:
        """Returns the seconds until it serves, and its error stream."""
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [str(SERVER), f"--address={address}", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        seconds = time.perf_counter() - begin
        found = re.search(r"serving on (\S+)", line)
        if found is None:
            assert self.process.stderr is not None
            raise RuntimeError(self.process.stderr.read())
        self.address = found[1]
        return seconds, line

    def stop(self, number: signal.Signals) -> tuple[float, str]:
        """Returns the seconds until it has ended, and its error stream."""
        begin = time.perf_counter()
        self.process.send_signal(number)
        _, errors = self.process.communicate()
        return time.perf_counter() - begin, errors


def rate(call: Callable[[np.ndarray], object], seed: int) -> float:
    """Returns the rows a second of calls with batches of random ids."""
    counts = [0] * _THREADS.value
    end = time.perf_counter() + _SECONDS.value

    def work(thread: int) -> None:
        rng = np.random.default_rng([seed, thread])
        batches = [
            rng.choice(_ROWS.value, _BATCH.value, replace=False)
            if _ROWS.value <= 1 << 20
            else np.unique(rng.integers(0, _ROWS.value, _BATCH.value))
            for _ in range(8)
        ]
        while time.perf_counter() < end:
            ids = batches[counts[thread] % len(batches)]
            call(ids)
            counts[thread] += 1

    threads = [
        threading.Thread(target=work, args=(t,)) for t in range(_THREADS.value)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) * _BATCH.value / _SECONDS.value


def show(row: str, unit: str, values: list[float], to_reach: str) -> None:
    middle = statistics.median(values)
    print(
        f"{row}: {middle:.3g} {unit} ({min(values):.3g} to {max(values):.3g})"
        f"; to reach: {to_reach}",
        flush=True,
    )
    report(f"durability | {row} | figure", unit, values, to_reach)


def compare(logged: Server, plain: Server) -> None:
    gradients = np.ones((_BATCH.value, DIM), np.float32)
    for name, to_reach, call in (
        (
            "pushes with a push log / without",
            "at least 0.75",
            lambda server: (
                lambda ids: server.table.push(ids, gradients[: len(ids)])
            ),
        ),
        (
            "lookups with a push log / without",
            "at least 0.97",
            lambda server: server.table.lookup,
        ),
    ):
        ratios = []
        for number in range(_ROUNDS.value):
            # The order of the two changes from round to round.
            servers = [logged, plain]
            rates = {
                server: rate(call(server), number)
                for server in (servers if number % 2 else servers[::-1])
            }
            ratios.append(rates[logged] / rates[plain])
        show(name, "", ratios, to_reach)


def recover(server: Server) -> None:
    saves, returns, replays = [], [], []
    bytes_of_row = 8 + 4 * 2 * DIM
    for number in range(3):
        seconds, errors = server.stop(signal.SIGTERM)
        if "not saved" in errors:
            raise RuntimeError(errors)
        saves.append(_ROWS.value * bytes_of_row / seconds / 1e9)
        returns.append(server.start(server.address)[0])
        num_rows = 0
        rng = np.random.default_rng(number)
        gradients = np.ones((_BATCH.value, DIM), np.float32)
        while num_rows < 4_000_000:
            ids = np.unique(rng.integers(0, _ROWS.value, _BATCH.value))
            server.table.push(ids, gradients[: len(ids)])
            num_rows += len(ids)
        server.stop(signal.SIGKILL)
        seconds, _ = server.start(server.address)
        replays.append(num_rows / 1e6 / max(seconds - returns[-1], 1e-3))
    show("save at the end, all rows", "GB/s", saves, "at least 0.8")
    show("recovery from a save", "s", returns, "at most 5")
    show("replay of the log", "M rows/s", replays, "at least 2")


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        logged = Server(
            f"--data_dir={folder}/data", "--push_log", "--checkpoint_every=inf"
        )
        plain = Server()
        servers = [logged, plain]
        try:
            for server in servers:
                for begin in range(0, _ROWS.value, 1 << 18):
                    ids = np.arange(begin, min(begin + (1 << 18), _ROWS.value))
                    server.table.lookup_or_create(ids)
            compare(logged, plain)
            plain.stop(signal.SIGKILL)
            recover(logged)
        finally:
            for server in servers:
                server.process.kill()


if __name__ == "__main__":
    app.run(main)
