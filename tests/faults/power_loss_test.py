"""A power loss at any moment loses no acknowledged write.

A server writes its data folder on a disk that power_loss.c watches. For some
moments the test makes the folders that a power loss may leave, and starts a
server of another boot on them. In some cases the power fails in that start,
too.
"""

import functools
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.faults.damaged_log_test import TFSWITCH
from tests.faults.power_loss import Disk, Journal
from tests.faults.training import IDS, count_table, new_seed
from tests.programs import HANG_SECS, environment
from tests.support import ServerProcess, examples, running_servers
from tests.tokens import TokenFile
from tfswitch._connection import _token_file

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

ONES = -np.ones((IDS.size, 1), np.float32)

ALWAYS = ("--push_log", "--push_log_sync=always")
EACH_SECOND = ("--push_log",)
NO_LOG = ()


def start(
    folder: Path, journal: Journal, flags: tuple[str, ...]
) -> ServerProcess:
    return ServerProcess(
        flags=(f"--data_dir={folder}/data", "--checkpoint_every=inf", *flags),
        variables=journal.variables,
    )


def connect(server: ServerProcess) -> tsw.Cluster:
    return tsw.Cluster(f"grpc://{server.address}", timeout_secs=30.0)


def gone_table(cluster: tsw.Cluster) -> tsw.EmbeddingTable:
    """Its rows are made and then removed."""
    return tsw.EmbeddingTable("gone", 1, cluster=cluster)


def count_of_all(table: tsw.EmbeddingTable) -> int:
    """Returns the value of all rows, which shows that no push is partial."""
    (value,) = set(table.lookup(IDS).numpy()[:, 0])
    return int(value)


class History:
    """The calls of clients, by the sizes of the journal before and after.

    Args:
        folder: The disk's folder.
        journal: The journal of its operations.
        lives: Flags of the servers that have it, one after the other.
    """

    def __init__(
        self, folder: Path, journal: Journal, lives: list[tuple[str, ...]]
    ) -> None:
        self._journal = journal
        self._lives = lives
        self._spans: dict[str, list[tuple[int, int]]] = {
            kind: [] for kind in ("push", "fill", "remove", "save", "stop")
        }
        self._saved: list[int] = []  # How many pushes each save has.
        for flags in lives:
            with start(folder, journal, flags) as server:
                self._live(server)

    def _live(self, server: ServerProcess) -> None:
        """Has each kind of file written."""

        def stop() -> None:
            server.signal(signal.SIGTERM)
            assert server.wait() == 0

        with connect(server) as cluster:
            table, gone = count_table(cluster), gone_table(cluster)
            push = functools.partial(table.push, IDS, ONES)
            save = functools.partial(cluster.save, "save")
            self._call("fill", functools.partial(gone.lookup_or_create, IDS))
            self._call("push", push)
            self._call("push", push)
            self._call("save", save)
            self._call("push", push)
            self._call("remove", functools.partial(gone.remove, IDS))
            self._call("save", save)
            self._call("push", push)
        self._call("stop", stop)

    def _call(self, kind: str, call: Callable[[], object]) -> None:
        begin = self._journal.size
        call()
        self._spans[kind].append((begin, self._journal.size))
        if kind == "save":
            self._saved.append(len(self._spans["push"]))

    def _made(self, kind: str, size: int) -> tuple[int, int]:
        """Returns how many were acknowledged, and how many begun."""
        spans = self._spans[kind]
        return (
            sum(end <= size for _, end in spans),
            sum(begin < size for begin, _ in spans),
        )

    def flags(self, size: int) -> tuple[str, ...]:
        """Returns those of the server that has the disk then."""
        life = self._made("stop", size)[0]
        return self._lives[min(life, len(self._lives) - 1)]

    def check(self, server: ServerProcess, size: int) -> None:
        """Checks that a server has all data that was on the disk for sure."""
        is_flushed = self.flags(size) == ALWAYS
        ends = [end for _, end in self._spans["stop"] if end <= size]
        flushed = size if is_flushed else max(ends, default=0)
        with connect(server) as cluster:
            table, gone = count_table(cluster), gone_table(cluster)
            count = count_of_all(table)
            least, most = (
                self._made("push", flushed)[0],
                self._made("push", size)[1],
            )
            assert least <= count <= most
            fills, removes = (
                self._made("fill", size),
                self._made("remove", size),
            )
            num_rows = gone.size()
            assert num_rows in (0, IDS.size)
            if is_flushed and fills[0] == fills[1] and removes[0] == removes[1]:
                assert num_rows == IDS.size * (fills[0] - removes[0])

            # It goes on.
            table.lookup_or_create(IDS)
            table.push(IDS, ONES)
            assert count_of_all(table) == count + 1
            first, end = self._made("save", size)
            if first > 0:
                cluster.restore("save")
                assert count_of_all(table) in self._saved[first - 1 : end]


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def new_chance(rng: random.Random) -> Callable[[], bool]:
    """Decides what survives: often nothing or all."""
    chance = rng.choice([0.0, 1.0, rng.random()])
    return lambda: rng.random() < chance


def power_losses(
    rng: random.Random, disk: Disk, journal: Journal, count: int
) -> Iterator[tuple[int, Path]]:
    """Applies a journal, and yields the remains after some operations.

    Yields:
        The size of the journal then, and the folder.
    """
    operations = list(journal.operations())
    chosen = rng.sample(range(len(operations)), min(len(operations), count))
    for number, operation in enumerate(operations):
        disk.apply(operation)
        if number in chosen:
            print("after operation", number, operation._replace(data=b""))
            left = journal.path.with_name(f"left-{number}")
            disk.lose_power(new_chance(rng), left)
            yield operation.end, left


def check_start(
    history: History, size: int, left: Path, rng: random.Random
) -> None:
    """Starts a server on what a power loss has left, and at times another.

    The other one has what a power loss in the start of the first leaves.
    """
    flags = history.flags(size)
    disk = Disk(left)
    journal = Journal(left, left.parent, left.name)
    with start(left, journal, flags) as server:
        served_at = journal.size
        history.check(server, size)
    if rng.random() < 0.3:
        operations = [o for o in journal.operations() if o.end <= served_at]
        for operation in operations[: rng.randrange(len(operations) + 1)]:
            disk.apply(operation)
        again = left.with_name(f"{left.name}-again")
        disk.lose_power(new_chance(rng), again)
        with start(
            again, Journal(again, left.parent, again.name), flags
        ) as server:
            history.check(server, size)
        shutil.rmtree(again)
    shutil.rmtree(left)


@pytest.mark.parametrize(
    "lives",
    [[ALWAYS] * 3, [EACH_SECOND, EACH_SECOND], [ALWAYS, NO_LOG, ALWAYS]],
    ids=["always", "each_second", "with_and_without_log"],
)
def test_a_start_after_a_power_loss_has_all_that_was_flushed(
    lives: list[tuple[str, ...]], tmp_path: Path
) -> None:
    rng = random.Random(new_seed())
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = Disk(folder)
    journal = Journal(folder, tmp_path, "first")
    history = History(folder, journal, lives)
    for size, left in power_losses(rng, disk, journal, examples(40)):
        check_start(history, size, left, rng)
    # Nothing has escaped the library.
    disk.lose_power(lambda: True, tmp_path / "whole")
    assert contents(tmp_path / "whole") == contents(folder)


def run(journal: Journal, *arguments: str) -> None:
    """Runs the command line on the disk, in a Python without TensorFlow."""
    subprocess.run(
        [sys.executable, "-c", TFSWITCH, *arguments],
        env=environment(**journal.variables),
        check=True,
        timeout=HANG_SECS,
    )


def served_value(model: Path) -> int:
    """Returns the value that all rows have."""
    loaded = tf.saved_model.load(str(model))
    values = loaded.signatures["serving_default"](
        ids=tf.constant(IDS, tf.int64)
    )["value"]
    (value,) = set(values.numpy()[:, 0])
    return int(value)


def test_exports_and_tokens_are_whole_after_a_power_loss(
    tmp_path: Path,
) -> None:
    rng = random.Random(new_seed())
    folder = tmp_path / "disk"
    folder.mkdir()
    # The sizes of the journal at which each next value was acknowledged.
    done: dict[str, list[int]] = {"value": [], "tokens": []}
    with running_servers(1) as address, tsw.Cluster(address) as cluster:
        table = tsw.EmbeddingTable("user", 1, cluster=cluster)
        table.assign(IDS, np.zeros((IDS.size, 1), np.float32))
        tsw.saved_model.save(
            lambda ids: {"value": table.lookup(ids)},
            folder / "model",
            inputs={"ids": tf.TensorSpec([None], tf.int64)},
        )
        disk = Disk(folder)
        journal = Journal(folder, tmp_path, "first")
        token_file = f"--token_file={folder / 'tokens'}"
        for value in range(1, 5):
            # Exports of the third begin with a base.
            base = ("--base_every=1s", "--keep_bases=1") if value == 3 else ()
            ones = np.full((IDS.size, 1), value, np.float32)
            table.assign(IDS, ones)
            run(
                journal,
                *("export", f"--cluster={address}", "--once"),
                *(f"--path={folder / 'model'}", *base),
            )
            done["value"].append(journal.size)
            run(journal, "token", "create", "--role=read", token_file)
            done["tokens"].append(journal.size)

        for size, left in power_losses(rng, disk, journal, examples(25)):
            tokens = left / "tokens"
            found = {
                "value": served_value(left / "model"),
                "tokens": len(_token_file.read(tokens))
                if tokens.exists()
                else 0,
            }
            for what, ends in done.items():
                last = sum(end <= size for end in ends)
                assert found[what] in (last, last + 1), what
            # More can follow. A model with another path is read at once.
            TokenFile(tokens).create("read")
            tsw.export.base(left / "model", tables=[table])
            left = left.rename(f"{left}-again")
            assert served_value(left / "model") == 4
            shutil.rmtree(left)
    disk.lose_power(lambda: True, tmp_path / "whole")
    assert contents(tmp_path / "whole") == contents(folder)
