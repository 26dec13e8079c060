"""Saves in object stores: uploads, fetches, and their failures."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from absl import app

import tfswitch as tsw
from tfswitch.cli import main as cli
from tfswitch.cli import remote_server
from tfswitch.remote import (
    _request_mailbox,
    _saves,
    _transfer,
    companion,
    store_checkpoints,
)
from tfswitch.remote._store import Store

IDS = np.arange(50)


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty folder of each kind of store."""
    if request.param == "s3":
        return Store(f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}")
    return Store(f"{request.param}://{tmp_path}/store")


@pytest.fixture
def memory(tmp_path: Path) -> Store:
    return Store(f"memory://{tmp_path}")


@pytest.fixture
def save(embedded: tsw.Cluster, tmp_path: Path) -> Callable[[float], Path]:
    """Saves two tables with rows of one value; returns the folder."""
    tables = [tsw.EmbeddingTable(name, 2) for name in ("user/a", "item")]

    def save(value: float) -> Path:
        for table in tables:
            table.assign(IDS, np.full((IDS.size, 2), value))
        embedded.save(tmp_path / "saves")
        return tmp_path / "saves"

    return save


def upload(folder: Path, store: Store, known_ids: frozenset = frozenset()):
    return _transfer.upload(
        folder,
        store,
        "x",
        known_ids=set(known_ids),
        remember=lambda save_id: None,
        progress=lambda: None,
    )


def fetch(store: Store, folder: Path, *, all_saves: bool = True, tell=print):
    return _transfer.fetch(
        store,
        "x",
        folder,
        all_saves=all_saves,
        progress=lambda save, num_bytes: None,
        tell=tell,
    )


def remote_file(store: Store) -> tuple[str, str]:
    """One of the newest save's files: its name, and its path for fsspec."""
    name = _transfer.in_store(store, "x")[0][0].files[0].name
    return name, f"{store._root}/x/{name}"


def check_whole(store: Store) -> list[int]:
    """Reads all saves as a reader does; returns the numbers of the saves."""
    saves, errors = _transfer.in_store(store, "x")
    assert errors == []
    for save in saves:
        for file in save.files:
            got = store.copy(f"x/{file.name}", file.num_bytes, lambda _: None)
            assert got == file.crc32, file.name
    return [save.number for save in saves]


class StoppingStore(Store):
    """Ends the work with KeyboardInterrupt at its n-th write, half of it done.

    A reader looks after each write.
    """

    def __init__(self, url: str, stop_at: int) -> None:
        super().__init__(url)
        self.left = stop_at
        self.puts: list[str] = []

    def put(self, local, path, progress) -> None:
        self.puts.append(path)
        if self.left == 0:
            half = Path(local).read_bytes()[:-9]
            self._files.pipe_file(f"{self._root}/{path}", half)
        self._do(lambda: Store.put(self, local, path, progress))

    def publish(self, path, data) -> None:
        self._do(lambda: Store.publish(self, path, data))

    def remove(self, paths) -> None:
        for path in paths:
            self._do(lambda path=path: Store.remove(self, [path]))

    def _do(self, write) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        write()
        check_whole(self)


def test_what_is_uploaded_is_fetched_with_the_same_rows(store, save, tmp_path):
    save(1.0)
    folder = save(2.0)

    upload(folder, store)
    saves = fetch(store, tmp_path / "fetched")

    assert [each.number for each in saves] == [2, 1]
    assert _saves.on_disk(tmp_path / "fetched") == _saves.on_disk(folder)
    for number, value in ((None, 2.0), (1, 1.0)):
        with tsw.connect(f"local://{tmp_path.name}{number}") as cluster:
            cluster.restore(tmp_path / "fetched", save=number)
            rows = tsw.EmbeddingTable("user/a", 2).lookup(IDS).numpy()
            np.testing.assert_array_equal(rows, np.full((IDS.size, 2), value))


def test_the_store_keeps_the_saves_that_the_folder_keeps(store, save):
    for number in (1.0, 2.0, 3.0):
        folder = save(number)
        upload(folder, store)

    names = {name for name in os.listdir(folder) if name != ".lock"}
    assert check_whole(store) == [3, 2]
    assert {name.split("/")[0] for name in store.sizes("x")} == names
    assert len(store.sizes("x")) == 2 + 4


def test_an_upload_that_ends_anywhere_leaves_whole_saves_and_is_resumed(
    memory, save
):
    save(1.0)
    upload(save(2.0), memory)
    folder = save(3.0)
    before = {path: memory.read(path, 1 << 20) for path in memory.sizes()}
    stop_at = 0
    while True:
        memory.remove(memory.sizes())
        for path, data in before.items():
            memory.publish(path, data)
        stopping = StoppingStore(memory.url, stop_at)
        try:
            upload(folder, stopping)
        except KeyboardInterrupt:
            assert check_whole(memory)[0] in (2, 3)
            resumed = StoppingStore(memory.url, -1)
            upload(folder, resumed)
            # The file that was under way is the only one that comes again.
            assert set(stopping.puts[:-1]).isdisjoint(resumed.puts)
        else:
            break
        assert check_whole(memory) == [3, 2]
        assert len(memory.sizes("x")) == 2 + 4
        stop_at += 1
    # 2 files, 2 manifests, and as many that go.
    assert stop_at >= 6


@pytest.mark.parametrize("harm", ["change", "cut", "lengthen", "remove"])
def test_a_damaged_file_in_a_store_is_refused_by_name(
    harm, memory, save, tmp_path
):
    upload(save(1.0), memory)
    name, path = remote_file(memory)
    data = memory._files.cat(path)
    harmed = {
        "change": data[:-1] + bytes([data[-1] ^ 1]),
        "cut": data[:-1],
        "lengthen": data + b"\0",
    }
    if harm == "remove":
        memory._files.rm_file(path)
    else:
        memory._files.pipe_file(path, harmed[harm])

    with pytest.raises(_saves.DamagedError, match=name.replace(".", r"\.")):
        fetch(memory, tmp_path / "fetched")
    assert _saves.on_disk(tmp_path / "fetched") == []


def test_the_save_before_a_damaged_one_is_fetched_and_said(
    memory, save, tmp_path
):
    save(1.0)
    upload(save(2.0), memory)
    name, path = remote_file(memory)
    memory._files.pipe_file(path, b"")
    said: list[str] = []

    saves = fetch(
        memory, tmp_path / "fetched", all_saves=False, tell=said.append
    )

    assert [each.number for each in saves] == [1]
    assert name in said[0]
    (on_disk,) = _saves.on_disk(tmp_path / "fetched")
    assert on_disk.number == 1


def test_a_fetch_that_ended_goes_on(memory, save, tmp_path, monkeypatch):
    upload(save(1.0), memory)
    fetched: list[str] = []
    copy = Store.copy

    def stopping(self, path, num_bytes, write):
        fetched.append(path)
        if len(fetched) == 2:
            raise ConnectionError("cable")
        return copy(self, path, num_bytes, write)

    monkeypatch.setattr(Store, "copy", stopping)
    with pytest.raises(ConnectionError, match="cable"):
        fetch(memory, tmp_path / "fetched")
    assert _saves.on_disk(tmp_path / "fetched") == []

    fetch(memory, tmp_path / "fetched")
    assert len(fetched) == 3
    assert fetched[1] == fetched[2]


@pytest.mark.parametrize(
    "name",
    [
        "../user%2Fa/x.safetensors",
        "/etc/x.safetensors",
        "user%2Fa/../x.safetensors",
        "user%2Fa/x.json",
        "item/x.safetensors",
        "%server/x.safetensors",
        7,
    ],
)
def test_a_name_that_leads_out_of_the_checkpoint_is_refused(
    name, memory, save, tmp_path
):
    folder = save(1.0)
    upload(folder, memory)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tables"]["user/a"]["files"][0]["name"] = name
    memory.publish("x/manifest.json", json.dumps(manifest).encode())

    with pytest.raises(_saves.DamagedError, match=r"x/manifest\.json.*\.saf"):
        fetch(memory, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("text", [b"", b"[]", b"[" * 10**5, b'{"format": 1}'])
def test_a_manifest_that_is_none_is_named(text):
    with pytest.raises(_saves.DamagedError, match="manifest 'm' is damaged"):
        _saves.parse(text, "m")


def test_names_of_table_folders_are_those_of_the_core(save):
    assert [_saves.folder_of(name) for name in ("user/a", ".é.")] == [
        "user%2Fa",
        "%2E%C3%A9.",
    ]
    assert {
        file.name.split("/")[0] for file in _saves.on_disk(save(0.0))[0].files
    } == {
        "user%2Fa",
        "item",
    }


def test_a_save_of_another_folder_is_not_overwritten(memory, save, tmp_path):
    upload(save(1.0), memory)
    there = _transfer.in_store(memory, "x")
    shutil.rmtree(tmp_path / "saves")
    folder = save(2.0)

    with pytest.raises(_transfer.ForeignSaveError, match=f"'{memory.url}/x'"):
        upload(folder, memory)

    assert _transfer.in_store(memory, "x") == there
    # But one that was uploaded from here, and is not kept any more, is.
    assert upload(folder, memory, frozenset([there[0][0].save_id]))
    assert check_whole(memory) == [1]


def test_a_save_that_goes_while_it_is_uploaded_is_left_out(
    memory, save, monkeypatch
):
    folder = save(1.0)
    put = Store.put
    num_puts = 0

    def replaced(self, local, path, progress):
        nonlocal num_puts
        num_puts += 1
        if num_puts == 2:
            save(2.0)
            save(3.0)
        put(self, local, path, progress)

    monkeypatch.setattr(Store, "put", replaced)
    result = upload(folder, memory)

    assert result is not None
    assert result[0].number == 3
    assert check_whole(memory) == [3, 2]


def test_a_wait_that_is_interrupted_takes_its_request_back(memory, monkeypatch):
    _request_mailbox.check_marker(memory, "", 1)
    seen: list[list[str]] = []

    def interrupt(seconds):
        seen.append(_request_mailbox.request_ids(memory))
        raise KeyboardInterrupt

    monkeypatch.setattr(store_checkpoints.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store_checkpoints.RemoteCheckpoint(f"{memory.url}/x", 30.0).upload(1)

    assert len(seen[0]) == 1
    assert _request_mailbox.request_ids(memory) == []


def test_saves_of_servers_below_a_checkpoint_root_are_no_checkpoints(
    memory, save, tmp_path
):
    folder = save(1.0)
    for data in ("0", "1"):
        (tmp_path / data).mkdir()
        (tmp_path / data / "identity.json").write_text("{}")
        shutil.copytree(folder, tmp_path / data / "state")
    beside = make_companion(
        memory, tmp_path / "0", checkpoint_root=str(tmp_path)
    )
    beside.stop()
    beside.run()

    tops = {name.split("/")[0] for name in memory.sizes()}
    assert tops == {"saves", "tfswitch-servers"}
    assert memory.sizes("tfswitch-servers/00000/state")


def make_companion(memory: Store, data: Path, **options) -> companion.Companion:
    arguments = {
        "data_dir": str(data),
        "checkpoint_root": "",
        "shard_index": 0,
        "num_shards": 1,
        "cluster": "",
    }
    return companion.Companion(memory.url, **{**arguments, **options})


def test_an_upload_that_fails_is_tried_again_and_said(
    memory, save, monkeypatch, capfd
):
    folder = save(1.0)
    monkeypatch.setattr(companion, "_FIRST_BACKOFF_SECS", 0.01)
    monkeypatch.setattr(companion, "_POLL_SECS", 0.01)
    left = 2
    put = Store.put

    def failing(self, *arguments):
        nonlocal left
        if left > 0:
            left -= 1
            raise ConnectionError("no route")
        put(self, *arguments)

    monkeypatch.setattr(Store, "put", failing)
    beside = make_companion(
        memory, folder / "data", checkpoint_root=str(folder.parent)
    )
    beside.stop()
    beside.run()

    error = capfd.readouterr().err
    assert error.count("no route; trying again in 0.0") == 2
    assert f"uploaded save 1 (0.0 MiB) to '{memory.url}/saves'" in error
    assert [s.number for s in _transfer.in_store(memory, "saves")[0]] == [1]


@pytest.mark.parametrize(("num_shards", "cluster"), [(2, ""), (1, "other")])
def test_a_url_of_another_cluster_is_refused(
    num_shards, cluster, memory, tmp_path
):
    make_companion(memory, tmp_path / "a").prepare(1.0)
    other = make_companion(
        memory, tmp_path / "b", num_shards=num_shards, cluster=cluster
    )

    with pytest.raises(ValueError, match=f"belongs to 1 .*{num_shards} serv"):
        other.prepare(1.0)


def test_a_store_that_does_not_answer_is_named_at_the_start(
    memory, tmp_path, monkeypatch
):
    def failing(self, *arguments):
        raise ConnectionError("no route")

    monkeypatch.setattr(Store, "read", failing)

    with pytest.raises(OSError, match=rf"'{memory.url}', tried.*no route"):
        make_companion(memory, tmp_path / "new").prepare(0.01)


def test_a_server_with_rows_starts_though_the_store_is_silent(
    memory, tmp_path, monkeypatch, capfd
):
    is_over = threading.Event()
    monkeypatch.setattr(companion, "_CHECK_SECS", 0.05)
    monkeypatch.setattr(Store, "read", lambda *arguments: is_over.wait())
    (tmp_path / "data" / "log").mkdir(parents=True)

    make_companion(memory, tmp_path / "data").prepare(600.0)

    is_over.set()
    assert "starting with the rows in" in capfd.readouterr().err


@pytest.mark.parametrize("ends", ["deadline", "signal"])
def test_the_last_upload_has_a_deadline_that_is_said(ends, capfd):
    uploading = threading.Event()
    thread = threading.Thread(target=uploading.wait)
    thread.start()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        if ends == "signal":
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        remote_server._wait(thread, 0.2 if ends == "deadline" else 600.0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        uploading.set()
        thread.join()

    why = "0.2 s are over" if ends == "deadline" else "signal 15 came"
    assert f"warning: {why}: the last save was not" in capfd.readouterr().err


@pytest.mark.parametrize("path", ["", "a/../../b", "tfswitch-servers/x", "./a"])
def test_a_checkpoint_that_is_not_below_the_servers_url_is_refused(path):
    with pytest.raises(ValueError, match="must lie below the servers' URL"):
        _request_mailbox.checkpoint_path(path)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(
        ImportError, match=r"pip install 'tfswitch-ps\[remote\]'"
    ):
        Store("s3://bucket")


def test_a_protocol_that_is_unknown_is_named():
    with pytest.raises(ValueError, match="warp"):
        Store("warp://bucket")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--remote=memory://x"], "--remote needs --data_dir"),
        (
            ["--remote=memory://x", "--data_dir=/d", "--checkpoint_root=/."],
            "must not be '/'",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_named(arguments, message):
    with pytest.raises(app.UsageError, match=message):
        cli.run(["serve", *arguments])


def test_a_url_above_which_no_servers_save_is_refused(make_cluster):
    cluster = make_cluster(1)

    with pytest.raises(ValueError, match=r"tfswitch serve.*--remote=URL"):
        cluster.save("memory://nobody/x")


def test_tables_of_this_process_are_not_saved_to_a_url(embedded):
    with pytest.raises(ValueError, match="Received: path='memory://nobody/x'"):
        embedded.save("memory://nobody/x")


def test_a_save_that_nobody_uploads_says_so(
    make_cluster, memory, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    _request_mailbox.check_marker(memory, "", 1)
    with (
        tsw.Server(checkpoint_root=tmp_path) as server,
        tsw.connect(f"grpc://{server.address}", timeout_secs=4.0) as cluster,
    ):
        tsw.EmbeddingTable("user", 2).assign([1], [[1.0, 2.0]])
        with pytest.raises(TimeoutError, match=r"nobody answered.*--remote="):
            cluster.save(f"{memory.url}/x")

        waiting = f"waiting for save 1 to be in '{memory.url}/x'"
        assert waiting in capfd.readouterr().err
        # Nobody finds it later.
        assert _request_mailbox.request_ids(memory) == []
