"""A push log that has lost acknowledged writes, and `tfswitch repair`."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfswitch as tsw
from tests.faults.training import IDS, count_table
from tests.programs import HANG_SECS, environment
from tests.support import NotServingError, ServerProcess

pytestmark = pytest.mark.faults

NUM_RECORDS = 102  # The first 3 make the table and its rows.
# The command line in a Python that has no TensorFlow.
TFSWITCH = (
    "import sys; sys.modules['tensorflow'] = None; "
    "import tfswitch_command; tfswitch_command.main()"
)


def start(data: Path) -> ServerProcess:
    return ServerProcess(
        flags=(
            f"--data_dir={data}",
            "--push_log",
            # No record says of an earlier one that it is on the disk.
            "--push_log_sync=1h",
            "--checkpoint_every=inf",
        )
    )


def repair(data: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TFSWITCH, "repair", str(data), *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def record_at(segment: bytes, number: int) -> int:
    """The offset of a record in the segment that begins with record 1."""
    at = 8
    for _ in range(number - 1):
        length = int.from_bytes(segment[at + 16 : at + 24], "little")
        at += 40 + (length + 7) // 8 * 8
    return at


def test_a_server_refuses_a_log_that_lost_writes_until_it_is_repaired(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    ones = [[-1.0]] * IDS.size
    with (
        start(data) as server,
        tsw.connect(f"grpc://{server.address}") as cluster,
    ):
        table = count_table(cluster)
        table.lookup_or_create(IDS)
        for _ in range(NUM_RECORDS - 3):
            table.push(IDS, ones)
        refused = repair(data, "--to_save")
        assert refused.returncode == 1
        assert f"another process writes to '{data}'" in refused.stderr
        server.kill()
    (segment,) = (data / "log").iterdir()
    damaged = bytearray(segment.read_bytes())
    at = record_at(damaged, 51)
    damaged[at + 60] ^= 1
    segment.write_bytes(damaged)
    before = contents(data)

    capfd.readouterr()
    with pytest.raises(NotServingError):
        start(data)
    said = capfd.readouterr().err
    assert f"'{segment}' is damaged at offset {at}, where record 51" in said
    assert "; 52 acknowledged writes from there on are lost" in said
    assert f"`tfswitch repair {data} --dry_run`" in said
    assert contents(data) == before

    shown = repair(data, "--dry_run")
    assert shown.returncode == 0, shown.stderr
    assert f"{segment}: 50 whole records from 1 on" in shown.stdout
    assert f"is damaged at offset {at}, where record 51" in shown.stdout
    assert "before the damage: 52 acknowledged writes are lost" in shown.stdout
    assert contents(data) == before

    repaired = repair(data)
    assert repaired.returncode == 0, repaired.stderr
    (aside,) = data.glob("log.removed-*/*")
    assert aside.read_bytes() == damaged
    for lost in (52, 0):  # It is said once.
        with (
            start(data) as server,
            tsw.connect(f"grpc://{server.address}") as cluster,
        ):
            rows = count_table(cluster).lookup(IDS).numpy()
            assert set(rows[:, 0]) == {50 - 3}
            said = capfd.readouterr().err
            assert " recovered " in said
            assert f" lost_writes={lost} lost_writes_are=exact " in said
            server.kill()
