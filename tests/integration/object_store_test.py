"""Servers that keep their saves in an object store: docs/object_stores.md."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import environment
from tests.support import ServerProcess
from tfswitch.remote import _transfer
from tfswitch.remote._store import Store

# `tfswitch serve`, from a checkout.
SERVE = (
    sys.executable,
    "-c",
    "import tfswitch_command; tfswitch_command.main()",
    "serve",
)
IDS = np.arange(100)


def serve(
    folder: Path, url: str, shard: int, num_shards: int, *flags: str
) -> ServerProcess:
    return ServerProcess(
        command=SERVE,
        shard_index=shard,
        num_shards=num_shards,
        flags=(
            f"--data_dir={folder}/{shard}",
            f"--checkpoint_root={folder}/shared",
            f"--remote={url}",
            *flags,
        ),
    )


def rows_of(table: tsw.EmbeddingTable) -> list[float]:
    return sorted({float(value) for value in table.lookup(IDS)[:, 0]})


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    "num_servers", [1, 2] if os.environ.get("TFSWITCH_LONG_TESTS") else [1]
)
def test_servers_come_up_from_s3_on_empty_disks(
    num_servers, s3_bucket, tmp_path
):
    url = f"{s3_bucket}/{tmp_path.name}"
    (tmp_path / "shared").mkdir()

    @contextlib.contextmanager
    def running() -> Iterator[list[ServerProcess]]:
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(serve(tmp_path, url, shard, num_servers))
                for shard in range(num_servers)
            ]

    def connect(servers: list[ServerProcess]) -> tsw.Cluster:
        return tsw.connect(
            "grpc://" + ",".join(server.address for server in servers)
        )

    with running() as servers:
        with connect(servers) as cluster:
            table = tsw.EmbeddingTable("user", 2)
            for value in (1.0, 2.0):
                table.assign(IDS, np.full((IDS.size, 2), value))
                # It waits until the save is there.
                number = cluster.save(f"{url}/run/x")["save"]
                saves, _ = _transfer.in_store(Store(url), "run/x")
                assert saves[0].number == number == value
            table.assign(IDS, np.full((IDS.size, 2), 3.0))
        for server in servers:
            server.signal(signal.SIGTERM)
        for server in servers:
            assert server.wait() == 0
    shutil.rmtree(tmp_path)
    (tmp_path / "shared").mkdir(parents=True)

    with running() as servers, connect(servers) as cluster:
        table = tsw.EmbeddingTable("user", 2)
        assert table.size() == IDS.size
        assert rows_of(table) == [3.0]
        cluster.restore(f"{url}/run/x", save=1)
        assert rows_of(table) == [1.0]
        # Saves go on from those in the store.
        assert cluster.save(f"{url}/run/x")["save"] == 3
        saves, _ = _transfer.in_store(Store(url), "run/x")
        assert [save.number for save in saves] == [3, 2]


@pytest.mark.slow
def test_the_companion_ends_as_its_server_and_takes_it_along(tmp_path):
    url = f"file://{tmp_path}/store"
    (tmp_path / "shared").mkdir()
    with serve(tmp_path, url, 0, 1) as server:
        with tsw.connect(f"grpc://{server.address}"):
            tsw.EmbeddingTable("user", 2).assign([1], [[1.0, 2.0]])
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    assert [
        save.number
        for save in _transfer.in_store(
            Store(url), "tfswitch-servers/00000/state"
        )[0]
    ] == [1]

    # To kill it is to kill the server: the folder is free for the next.
    for _ in range(2):
        serve(tmp_path, url, 0, 1).kill()

    arguments = [
        *(f"--data_dir={tmp_path}/0", "--address=127.0.0.1:0"),
        f"--remote={url}",
    ]
    wrong = subprocess.run(
        [*SERVE, *arguments, "--shard_index=1", "--num_shards=1"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2, wrong.stderr
    # The folder's rows are older than the store's.
    shutil.rmtree(tmp_path / "0" / "state")
    (tmp_path / "0" / ".remote.json").unlink()
    (tmp_path / "0" / "log").mkdir()
    older = subprocess.run(
        [*SERVE, *arguments], env=environment(), capture_output=True, text=True
    )
    assert older.returncode == 1
    assert "move the folder away" in older.stderr
