"""A disk that is full, fails or tears loses no write that was acknowledged."""

import contextlib
import dataclasses
import errno
import functools
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.faults.failing_disk import FailingDisk
from tests.faults.training import IDS, count_table, new_seed
from tests.python.worker_threads import wait_for_stderr, wait_until
from tests.support import NotServingError, ServerProcess, examples

# Long runs take more kills.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

ONES = -np.ones((IDS.size, 1), np.float32)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def disk(data: Path, tmp_path: Path) -> FailingDisk:
    return FailingDisk(data, tmp_path)


def start(data: Path, disk: FailingDisk) -> ServerProcess:
    return ServerProcess(
        flags=(
            f"--data_dir={data}",
            "--push_log",
            "--push_log_sync=always",
            "--checkpoint_every=inf",
        ),
        variables=disk.variables,
    )


def connect(server: ServerProcess, timeout_secs: float = 30.0) -> tsw.Cluster:
    return tsw.Cluster(f"grpc://{server.address}", timeout_secs=timeout_secs)


def count_of_all(table: tsw.EmbeddingTable) -> int:
    """Returns the value of all rows, which shows that no push is partial."""
    (value,) = set(table.lookup(IDS).numpy()[:, 0])
    return int(value)


@dataclasses.dataclass
class Pushes:
    """The pushes of a client, as far as it knows."""

    acknowledged: int = 0
    unsure: int = 0

    def push(self, table: tsw.EmbeddingTable) -> bool:
        """Pushes once; returns whether that was acknowledged."""
        try:
            table.push(IDS, ONES)
        except RuntimeError as error:
            assert "the push log cannot be" in str(error)
            self.unsure += "may be" in str(error)
            return False
        except (ConnectionError, TimeoutError):
            self.unsure += 1
            raise
        self.acknowledged += 1
        return True

    def check(self, table: tsw.EmbeddingTable) -> None:
        found = count_of_all(table)
        assert found - self.acknowledged in range(self.unsure + 1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_writes_are_refused_whole_and_taken_again_without_a_restart(
    data: Path,
    disk: FailingDisk,
    error: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pushes = Pushes()
    with start(data, disk) as server, connect(server) as cluster:
        table = count_table(cluster)
        assert pushes.push(table)
        disk.fail(1, error, forever=True, after_bytes=100)

        with pytest.raises(RuntimeError, match=r"nothing was applied.*restart"):
            table.push(IDS, ONES)
        with pytest.raises(RuntimeError, match="nothing was applied"):
            table.lookup_or_create([10_000])
        assert count_of_all(table) == 1
        with connect(server) as another:
            assert count_of_all(count_table(another)) == 1
        with pytest.raises((RuntimeError, PermissionError), match="cannot"):
            cluster.save("save")

        disk.work()
        assert pushes.push(table)
        disk.fail(1, error, forever=True, after_bytes=100)
        assert not pushes.push(table)
        disk.work()
        assert count_of_all(table) == 2
        assert cluster.save("save")["save"] == 1
        full = " error disk_full path=[^\n]*/log message="
        said = wait_for_stderr(capfd, f"(?s)({full}.*){{2}}")
        assert len(re.findall(full, said)) == 2
        assert len(re.findall(" disk_well path=.*/log\n", said)) == 1
        server.kill()
    # Nothing of the write that failed half-way is in the log.
    with start(data, disk) as server, connect(server) as cluster:
        table = count_table(cluster)
        assert count_of_all(table) == 2
        cluster.restore("save")
        assert count_of_all(table) == 2


def test_after_a_flush_that_failed_the_state_is_saved_before_more_writes(
    data: Path, disk: FailingDisk
) -> None:
    pushes = Pushes()
    with start(data, disk) as server, connect(server) as cluster:
        table = count_table(cluster)
        assert pushes.push(table)
        disk.fail(2, errno.EIO)  # The first call writes the record.
        assert not pushes.push(table)
        assert pushes.unsure == 1
        assert count_of_all(table) == 1
        wait_until(lambda: pushes.push(table))
        assert count_of_all(table) == 2
        server.kill()
    with start(data, disk) as server, connect(server) as cluster:
        assert count_of_all(count_table(cluster)) == 2


def scenario(server: ServerProcess) -> Pushes:
    """Writes each kind of file; returns the results of the pushes."""
    pushes = Pushes()
    with (
        connect(server, timeout_secs=5.0) as cluster,
        # A torn write has ended the server.
        contextlib.suppress(ConnectionError, TimeoutError),
        # The table was not made.
        contextlib.suppress(RuntimeError),
    ):
        table = count_table(cluster)
        for _ in range(2):
            pushes.push(table)
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                cluster.save("save")
            pushes.push(table)
    server.signal(signal.SIGTERM)  # It saves its state.
    server.wait()
    return pushes


FAULTS = {
    "full": errno.ENOSPC,
    "full once": errno.ENOSPC,
    "failing once": errno.EIO,
    "torn": 0,
}


def test_no_call_that_fails_loses_an_acknowledged_write(
    data: Path, disk: FailingDisk, tmp_path: Path
) -> None:
    rng = random.Random(new_seed())
    with start(data, disk) as server:
        disk.work()
        scenario(server)
    num_calls = disk.calls
    disk.work()
    start(data, disk).kill()
    num_recovery_calls = disk.calls
    assert num_calls > 40

    for example in range(examples(5)):
        call = rng.randint(1, num_calls)
        recovery_call = rng.randint(1, num_recovery_calls)
        fault = rng.choice(list(FAULTS))
        print(example, fault, call, recovery_call)
        folder = tmp_path / str(example)
        disk = FailingDisk(folder, tmp_path)
        fail = functools.partial(
            disk.fail,
            error=FAULTS[fault],
            forever=fault == "full",
            after_bytes=rng.choice([0, rng.randrange(200)]),
        )
        with start(folder, disk) as server:
            fail(call)
            pushes = scenario(server)
        fail(recovery_call)
        try:
            start(folder, disk).kill()
        except NotServingError:
            pass
        disk.work()
        with start(folder, disk) as server, connect(server) as cluster:
            table = count_table(cluster)
            if pushes.acknowledged:
                pushes.check(table)
            else:
                table.lookup_or_create(IDS)
            before = count_of_all(table)
            assert Pushes().push(table)
            assert count_of_all(table) == before + 1
            assert cluster.save("save")["num_rows"] == IDS.size


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_training_goes_on_while_rows_cannot_move_to_disk(
    tmp_path: Path, error: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cold = tmp_path / "cold"
    disk = FailingDisk(cold, tmp_path)
    flags = ("--max_memory=6MiB", f"--cold_dir={cold}")
    ids = np.arange(60_000)
    new = np.arange(100_000, 130_000)
    with (
        ServerProcess(flags=flags, variables=disk.variables) as server,
        connect(server) as cluster,
    ):
        table = count_table(cluster, dim=32, when_full="disk")

        def push(some: np.ndarray) -> int:
            """Returns how many ids did not learn."""
            before = table.stats()["refused_keys"]
            table.push(some, -np.ones((len(some), 32)))
            return int(table.stats()["refused_keys"] - before)

        for part in np.split(ids, 60):
            assert push(part) == 0
        demoted = table.stats()["demoted_rows"]
        assert demoted > 10_000
        disk.fail(1, error, forever=True)
        refused = sum(push(part) for part in np.split(new, 30))
        assert refused > 10_000
        # Rows in memory learn, and rows on disk are read.
        assert push(ids[-1000:]) == 0
        assert push(ids[:1000]) == 1000
        rows = table.lookup(ids).numpy()
        np.testing.assert_array_equal(rows[-1000:], 2)
        np.testing.assert_array_equal(rows[:-1000], 1)
        assert table.stats()["demoted_rows"] == demoted
        said = wait_for_stderr(capfd, "not_demoted")
        assert said.count("not_demoted") == 1
        disk.work()
        wait_until(lambda: push(ids[:1000]) == 0)
        np.testing.assert_array_equal(table.lookup(ids[:1000]).numpy(), 2)
        assert push(new) == 0
        assert table.size() == len(ids) + len(new)
