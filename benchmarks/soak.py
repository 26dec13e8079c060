"""Minutes of training with random kills, cuts and saves: no push is lost.

    python benchmarks/soak.py --minutes=10

Workers push gradients of -1 to a table with SGD at rate 1, asynchronously, so
that a row is the number of its pushes. Servers have push logs, and are reached
through proxies that cut, delay, repeat and reorder calls
(tests/faults/proxy.py). Meanwhile servers and workers are killed and started
again, and the table is saved. Each push has one id of its own, and other ids
that all pushes have. All the time, and at the end on other servers from the
last save, the program checks each push. A push that was acknowledged must have
been applied once. A push that was not acknowledged, because its worker was
killed or its call has failed, may have been applied at most once. The program
ends with an error if a check fails.
"""

import contextlib
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from absl import app, flags
from figures import report

import tfswitch as tsw
from tests.faults.proxy import FaultyProxy, random_plan
from tests.faults.servers import Servers
from tests.faults.training import count_table
from tests.programs import PythonProgram
from tests.support import running_servers

_MINUTES = flags.DEFINE_float("minutes", 10.0, "How long it trains.")
_SEED = flags.DEFINE_integer("seed", None, "Of kills and faults; None: draws.")
_SERVERS = flags.DEFINE_integer("servers", 2, "How many.")
_WORKERS = flags.DEFINE_integer("workers", 3, "How many.")
_WORKER = flags.DEFINE_integer("worker", None, "Be this worker.")
_ADDRESS = flags.DEFINE_string("address", None, "Of the servers.")
_PUSHES = flags.DEFINE_string("pushes", None, "File of the worker's pushes.")

SHARED = np.arange(64)
MAX_PUSHES = 1 << 22
# The state of each push is a byte of a file. 0: not begun.
BEGUN, ACKNOWLEDGED, FAILED = 1, 2, 3


def ids_of(worker: int, pushes: np.ndarray | int) -> np.ndarray:
    """Returns the ids that only these pushes have."""
    return (np.int64(worker + 1) << 32) + np.asarray(pushes, np.int64)


def train(worker: int, address: str, path: str) -> None:
    """Pushes until it is killed, or its input ends."""
    over = threading.Event()
    threading.Thread(
        target=lambda: (sys.stdin.read(), over.set()), daemon=True
    ).start()
    states = np.memmap(path, np.uint8, "r+")
    with tsw.Cluster(address, timeout_secs=60.0) as cluster:
        table = count_table(cluster)
        gradients = -np.ones((SHARED.size + 1, 1), np.float32)
        number = int(np.count_nonzero(states))
        while not over.is_set() and number < MAX_PUSHES:
            ids = np.append(SHARED, ids_of(worker, number))
            states[number] = BEGUN
            try:
                table.push(ids, gradients)
            except (ConnectionError, TimeoutError):
                states[number] = FAILED
            else:
                states[number] = ACKNOWLEDGED
            number += 1


class Pushes:
    """Counts the pushes of all workers."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.paths = [folder / f"worker-{i}" for i in range(_WORKERS.value)]
        for path in self.paths:
            path.write_bytes(b"")
            os.truncate(path, MAX_PUSHES)
        self._states = [np.memmap(path, np.uint8, "r") for path in self.paths]

    def states(self) -> list[np.ndarray]:
        """Returns the states of the pushes that have begun, by worker."""
        return [
            np.array(states[: np.count_nonzero(states)])
            for states in self._states
        ]

    def check(self, table: tsw.EmbeddingTable) -> list[str]:
        """Returns what is wrong with the rows of a table.

        Pushes may go on meanwhile.
        """
        before = self.states()
        wrong = []
        for worker, states in enumerate(before):
            for begin in range(0, len(states), 1 << 16):
                part = states[begin : begin + (1 << 16)]
                ids = ids_of(worker, begin + np.arange(len(part)))
                rows = table.lookup(ids).numpy()[:, 0]
                must = part == ACKNOWLEDGED
                wrong += [
                    f"push {id_} is there {row:g} times"
                    for id_, row in zip(ids[must], rows[must], strict=True)
                    if row != 1
                ] + [
                    f"push {id_}, not acknowledged, is there {row:g} times"
                    for id_, row in zip(ids[~must], rows[~must], strict=True)
                    if row not in (0, 1)
                ]
        counts = set(table.lookup(SHARED).numpy()[:, 0])
        least = sum(np.count_nonzero(s == ACKNOWLEDGED) for s in before)
        most = sum(map(len, self.states()))
        wrong += [
            f"a shared row has {count:g} pushes, not {least} to {most}"
            for count in counts
            if not least <= count <= most
        ]
        return wrong


class Soak:
    """One run."""

    def __init__(self, folder: pathlib.Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        (folder / "checkpoints").mkdir()
        self._log = (folder / "log").open("w")
        self._stack = contextlib.ExitStack()
        self.pushes = Pushes(folder)
        self.servers = self._stack.enter_context(
            Servers(
                folder,
                _SERVERS.value,
                (f"--checkpoint_root={folder}/checkpoints",),
            )
        )
        self.proxies = [
            self._stack.enter_context(
                FaultyProxy(address, random_plan(seed + shard, share=0.03))
            )
            for shard, address in enumerate(self.servers.addresses)
        ]
        self.cluster = self._stack.enter_context(
            tsw.Cluster(self.servers.address, timeout_secs=60.0)
        )
        self.table = count_table(self.cluster)
        self._workers = [self._start(i) for i in range(_WORKERS.value)]
        self.recoveries: list[float] = []
        self.num_server_kills = 0
        self.num_worker_kills = 0
        self.saves: list[float] = []
        self.num_failed_saves = 0
        self.num_checks = 0
        self.num_failed_checks = 0
        self.wrong: list[str] = []

    def _start(self, worker: int) -> PythonProgram:
        return PythonProgram(
            __file__,
            f"--worker={worker}",
            f"--pushes={self.pushes.paths[worker]}",
            "--address=grpc://" + ",".join(p.address for p in self.proxies),
            stdin=subprocess.PIPE,
            stderr=self._log,
        )

    def kill(self) -> None:
        """Kills a server or a worker, and starts it again."""
        if self._rng.random() < 0.5:
            kills, seconds = self.servers.kill(
                self._rng.randrange(_SERVERS.value), self._rng
            )
            self.num_server_kills += kills
            self.recoveries.append(seconds)
            return
        number = self._rng.randrange(_WORKERS.value)
        if self._workers[number].poll() is not None:
            raise RuntimeError(f"worker {number} has ended by itself")
        self._workers[number].kill()
        self._workers[number].wait(60.0)
        self._workers[number] = self._start(number)
        self.num_worker_kills += 1

    def save(self) -> None:
        """Saves as a client does."""
        begin = time.perf_counter()
        try:
            self.cluster.save("soak")
        # If a server is gone during the save, its files are missing.
        except (OSError, TimeoutError, RuntimeError) as error:
            print("save:", error, file=self._log, flush=True)
            self.num_failed_saves += 1
        else:
            self.saves.append(time.perf_counter() - begin)

    def check(self) -> None:
        """Checks all pushes."""
        try:
            self.wrong += self.pushes.check(self.table)
        except (ConnectionError, TimeoutError) as error:
            print("lookup:", error, file=self._log, flush=True)
            self.num_failed_checks += 1
        self.num_checks += 1

    def run(self, seconds: float) -> None:
        """Trains for so long."""
        end = time.monotonic() + seconds
        over = threading.Event()
        failed: list[BaseException] = []

        def again(
            work: Callable[[], None], shortest: float, longest: float
        ) -> None:
            rng = random.Random(self._rng.random())
            while not over.wait(rng.uniform(shortest, longest)):
                try:
                    work()
                except BaseException as error:
                    failed.append(error)
                    over.set()

        threads = [
            threading.Thread(target=again, args=args)
            for args in (
                (self.kill, 1.0, 6.0),
                (self.save, 2.0, 6.0),
                (self.check, 0.5, 1.5),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() < end and not self.wrong:
                if over.wait(1.0):
                    break
        finally:
            over.set()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]
        for worker in self._workers:
            worker.stdin.close()
        for worker in self._workers:
            if (code := worker.wait(120.0)) != 0:
                raise RuntimeError(f"a worker has ended with {code}")

    def check_end(self) -> None:
        """Checks all pushes here, and from the last save on other servers."""
        self.check()
        path = self._folder / "checkpoints" / "soak"
        self.cluster.save("soak")
        with (
            running_servers(_SERVERS.value + 1) as address,
            tsw.Cluster(address) as cluster,
        ):
            cluster.restore(path)
            self.wrong += [
                f"after a restore {wrong}"
                for wrong in self.pushes.check(count_table(cluster))
            ]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._stack.close()
        self._log.close()

    def show(self) -> None:
        """Prints the summary."""
        states = np.concatenate(self.pushes.states())
        num_acknowledged = int(np.count_nonzero(states == ACKNOWLEDGED))
        recoveries = self.recoveries or [0.0]
        faults = sum(proxy.num_faults for proxy in self.proxies)
        for row, unit, values, to_reach in (
            ("pushes that were acknowledged", "", [num_acknowledged], ""),
            (
                "pushes whose worker was killed, or whose call has failed",
                "",
                [len(states) - num_acknowledged],
                "",
            ),
            ("kills of servers", "", [self.num_server_kills], ""),
            ("kills of workers", "", [self.num_worker_kills], ""),
            ("calls cut, delayed, repeated or reordered", "", [faults], ""),
            ("seconds of a server's return", "s", recoveries, ""),
            ("saves", "", [len(self.saves)], ""),
            (
                "saves that a kill has ended",
                "",
                [self.num_failed_saves],
                "",
            ),
            ("checks of all pushes", "", [self.num_checks], ""),
            (
                "checks whose lookups have failed",
                "",
                [self.num_failed_checks],
                "0",
            ),
            ("pushes lost or counted twice", "", [len(self.wrong)], "0"),
        ):
            middle = statistics.median(values)
            text = f"{middle:,g}" if unit == "" else f"{middle:.3g} {unit}"
            if len(values) > 1:
                text += f" ({min(values):.3g} to {max(values):.3g})"
            print(f"{row}: {text}", flush=True)
            report(f"soak | {row} | measured", unit, values, to_reach)


def main(argv: list[str]) -> None:
    del argv
    if _WORKER.value is not None:
        train(_WORKER.value, _ADDRESS.value, _PUSHES.value)
        return
    seed = _SEED.value
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(pathlib.Path(folder), seed)
        try:
            soak.run(60.0 * _MINUTES.value)
            soak.check_end()
        finally:
            soak.close()
        soak.show()
        if soak.wrong:
            sys.exit("\n".join(["WRONG:", *soak.wrong[:20]]))
        print("each push that was acknowledged is there once")


if __name__ == "__main__":
    app.run(main)
