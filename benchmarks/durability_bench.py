"""The cost of a data folder and a push log, and how long recovery takes.

    python benchmarks/durability_bench.py --rows=10000000

Two servers take turns, one with --push_log and one with rows only in memory:
two threads push and look up batches. Then the server with the log is killed,
and recovers, first from its save and then from its log. At the end it saves at
intervals, all rows or only changed rows, while nothing else happens and while
two threads push. The data folders are in a temporary folder.
"""

import dataclasses
import json
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
        self.cluster = tsw.Cluster(f"grpc://{self.address}", timeout_secs=600.0)
        self.table = tsw.EmbeddingTable(
            "table",
            DIM,
            optimizer=tsw.optimizers.Adagrad(0.1),
            cluster=self.cluster,
        )

    def start(self, address: str, *more: str) -> tuple[float, str]:
        """Returns the seconds until it serves, and its error stream."""
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [str(SERVER), f"--address={address}", *self._arguments, *more],
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


def in_threads(work: Callable[[int], None]) -> None:
    """Calls it with the number of each thread, and waits for all."""
    threads = [
        threading.Thread(target=work, args=(t,)) for t in range(_THREADS.value)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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

    in_threads(work)
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


@dataclasses.dataclass
class Save:
    """One that a server has made of itself."""

    begin: float
    end: float
    new_bytes: int
    cpu_seconds: float  # The server's, meanwhile.


class Saves:
    """Watches a server's saves."""

    def __init__(self, server: Server, folder: pathlib.Path) -> None:
        self.seen: list[Save] = []
        self._server = server
        self._manifest = folder / "state" / "manifest.json"
        self._names: set[str] = set()
        self._is_over = False
        self._read()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True
        self._thread.join()

    def wait_for(self, number: int) -> list[Save]:
        while len(self.seen) < number:
            time.sleep(0.01)
        return self.seen

    def _cpu(self) -> float:
        stat = pathlib.Path(f"/proc/{self._server.process.pid}/stat")
        fields = stat.read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _read(self) -> tuple[float, int]:
        manifest = json.loads(self._manifest.read_text())
        files = [
            file
            for table in manifest["tables"].values()
            for file in table["files"]
        ]
        new = [file for file in files if file["name"] not in self._names]
        self._names = {file["name"] for file in files}
        return manifest["server"]["saved_at_ms"] / 1e3, sum(
            file["bytes"] for file in new
        )

    def _watch(self) -> None:
        stamp = self._manifest.stat().st_mtime_ns
        samples = [(time.time(), self._cpu())]
        while not self._is_over:
            time.sleep(0.01)
            samples.append((time.time(), self._cpu()))
            now = self._manifest.stat().st_mtime_ns
            if now == stamp:
                continue
            stamp = now
            begin, new_bytes = self._read()
            before = [cpu for at, cpu in samples if at <= begin][-1]
            self.seen.append(
                Save(begin, now / 1e9, new_bytes, samples[-1][1] - before)
            )
            samples = samples[-1:]


def plain_write(path: pathlib.Path, num_bytes: int) -> float:
    """Returns the processor time to write this much to a file, and to memory.

    The file stays, as a save does, so that the next one needs other memory.
    """
    block = bytes(1 << 27)
    begin = time.process_time()
    with path.open("wb") as file:
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
    return time.process_time() - begin


def save(server: Server, folder: pathlib.Path) -> None:
    gradients = np.ones((_BATCH.value, DIM), np.float32)
    every = 10.0
    server.stop(signal.SIGTERM)
    server.start(server.address, f"--checkpoint_every={every:.0f}s")
    saves = Saves(server, folder)
    rng = np.random.default_rng(0)

    def push(ids: np.ndarray) -> float:
        begin = time.perf_counter()
        server.table.push(ids, gradients[: len(ids)])
        return time.perf_counter() - begin

    def push_all(share: float) -> None:
        ids = rng.choice(_ROWS.value, int(_ROWS.value * share), replace=False)
        for begin in range(0, len(ids), _BATCH.value):
            push(np.sort(ids[begin : begin + _BATCH.value]))

    # While nothing else happens: each time the same, but for what has changed.
    wholes, parts = [], []
    while len(wholes) < 3 or len(parts) < 3:
        is_whole = len(wholes) <= len(parts)
        saves.wait_for(len(saves.seen) + 1)
        push_all(1.0 if is_whole else 0.01)
        number = len(saves.seen)
        newest = saves.wait_for(number + 1)[number]
        (wholes if newest.new_bytes > _ROWS.value * 70 else parts).append(
            newest
        )
    num_bytes = statistics.median(each.new_bytes for each in wholes)
    show(
        "plain write of as much, per core",
        "GB/s",
        [
            num_bytes
            / plain_write(folder.parent / f"plain{i}", int(num_bytes))
            / 1e9
            for i in range(3)
        ],
        "for comparison",
    )
    show(
        "save of all rows, per core",
        "GB/s",
        [each.new_bytes / each.cpu_seconds / 1e9 for each in wholes],
        "at least 0.8",
    )
    whole = statistics.median(each.end - each.begin for each in wholes)
    show(
        "save after 1 % of rows changed / of all rows, time",
        "",
        [(each.end - each.begin) / whole for each in parts],
        "at most 0.05",
    )

    # While two threads push.
    calls: list[tuple[float, float]] = []
    end = time.time() + 6 * every

    def train(thread: int) -> None:
        own = np.random.default_rng(thread)
        while time.time() < end:
            ids = np.unique(own.integers(0, _ROWS.value, _BATCH.value))
            begin = time.time()
            calls.append((begin, push(ids)))

    first = len(saves.seen)
    in_threads(train)
    saves.stop()
    ratios, longest = [], []
    for before, each in zip(
        saves.seen[first:], saves.seen[first + 1 :], strict=False
    ):
        if each.end > end:
            break
        inside = [
            seconds
            for begin, seconds in calls
            if each.begin - 1.0 <= begin <= each.end
        ]
        longest.append(max(inside) * 1e3)
        during = sum(each.begin <= begin <= each.end for begin, _ in calls)
        apart = sum(before.end <= begin <= each.begin for begin, _ in calls)
        ratios.append(
            (during / (each.end - each.begin))
            / (apart / (each.begin - before.end))
        )
    show("pushes during a save / between saves", "", ratios, "at least 0.7")
    show("longest push of a save", "ms", longest, "at most 50")


def recover(server: Server) -> None:
    returns, replays = [], []
    for number in range(3):
        _, errors = server.stop(signal.SIGTERM)
        if "not saved" in errors:
            raise RuntimeError(errors)
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
            save(logged, pathlib.Path(folder) / "data")
        finally:
            for server in servers:
                server.process.kill()


if __name__ == "__main__":
    app.run(main)
