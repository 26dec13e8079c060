"""The companion of a server: uploads its saves to a store, and fetches them.

One thread (`run`) watches the folders of the server and uploads new saves. On
server 0 a second thread (`serve_requests`) reads requests of clients, passes
them to the first thread, and reports its progress.
"""

import dataclasses
import json
import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfswitch.remote import _request_mailbox, _saves, _transfer
from tfswitch.remote._store import Store, join

_POLL_SECS = 1.0
_CHECK_SECS = 10.0
_FIRST_BACKOFF_SECS = 1.0
_LONGEST_BACKOFF_SECS = 60.0
# Each check for requests calls the store, so checks become rare while there are
# no requests.
_REQUEST_POLL_SECS = 0.1
_LONGEST_REQUEST_POLL_SECS = 2.0

_STATE = "state"
# Folders of a data folder in which the server keeps its own files. They contain
# no checkpoints of clients.
_OWN = (_STATE, "log")
# A hidden file, so that the server still treats the folder as a new one.
_MEMORY = ".remote.json"
# How many ids of saves are kept. One is not enough: a kill may come before or
# after a save is published.
_NUM_REMEMBERED = 4

# Errors that would occur again.
_LASTING = (_transfer.ForeignSaveError, _saves.DamagedError)


def _say(line: str) -> None:
    print(f"tfswitch serve: {line}", file=sys.stderr, flush=True)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


@dataclasses.dataclass
class _Request:
    """A client's request, and the path of its answer."""

    request_id: str
    action: str
    path: str
    save: int
    answer: dict[str, Any] | None = None
    note: str | None = None


@dataclasses.dataclass
class _Backoff:
    secs: float = 0.0
    until: float = 0.0

    def fail(self) -> None:
        self.secs = min(
            max(2 * self.secs, _FIRST_BACKOFF_SECS), _LONGEST_BACKOFF_SECS
        )
        self.until = time.monotonic() + self.secs


class Companion:
    """Keeps the saves of one server in a folder of a store.

    Args:
        url: The URL of all servers of the cluster.
        data_dir: The data folder of the server.
        checkpoint_root: The folder of checkpoints that clients ask for; server
            0 handles the checkpoints of all servers.
        shard_index: See `tsw.Server`.
        num_shards: See `tsw.Server`.
        cluster: The name of the cluster.

    Raises:
        ValueError, ImportError: As `Store`.
    """

    def __init__(
        self,
        url: str,
        *,
        data_dir: str,
        checkpoint_root: str,
        shard_index: int,
        num_shards: int,
        cluster: str,
    ) -> None:
        self._store = Store(url)
        self._data = Path(data_dir).absolute()
        root = checkpoint_root or str(self._data / "checkpoints")
        self._root = Path(root).absolute()
        self._shard_index = shard_index
        self._num_shards = num_shards
        self._cluster = cluster
        self._remote = _request_mailbox.shard_folder(shard_index)
        self._is_over = threading.Event()
        self._wake = threading.Event()
        self._has_marker = False
        self._has_identity = False
        # When each folder was uploaded: time, inode and size of its newest
        # manifest, by its path in the store.
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._uploaded: dict[str, int] = {}
        self._backoffs: dict[str, _Backoff] = {}
        self._arrived: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._requests: list[_Request] = []
        self._progress = 0

    # --- Before the server ---------------------------------------------------

    def prepare(self, timeout_secs: float) -> None:
        """Fetches the server's newest save, if its data folder is new.

        Args:
            timeout_secs: How long to try if the store fails, in seconds. If the
                data folder has rows, the store is tried once, for 10 s, because
                the server can start without the store.

        Raises:
            ValueError: If the URL is of another cluster.
            RuntimeError: If the store has a save that is not of the folder.
            OSError: If no save in the store is whole, or the store was not
                reached.
        """
        if not self._is_new():
            self._check_in_time()
            return
        backoff = _Backoff()
        end = time.monotonic() + timeout_secs
        while True:
            try:
                with _transfer.locked(self._data):
                    self._fetch_state()
                return
            except (ValueError, *_LASTING):
                raise
            except Exception as error:
                backoff.fail()
                if backoff.until > end:
                    raise OSError(
                        f"cannot fetch the state of the server from "
                        f"'{self._store.url}', tried for {timeout_secs:g} s: "
                        f"{_describe(error)}"
                    ) from error
                _say(
                    f"warning: cannot read '{self._store.url}': "
                    f"{_describe(error)}; trying again in {backoff.secs:g} s"
                )
                time.sleep(backoff.secs)

    def _is_new(self) -> bool:
        """Whether the data folder is empty, or has only an unfinished fetch."""
        try:
            names = set(os.listdir(self._data))
        except FileNotFoundError:
            return True
        if "log" in names or _saves.ids_of(self._data / _STATE):
            return False
        # The server refuses a folder that has other files but no identity.
        return "identity.json" in names or all(
            name[0] == "." or name == "lost+found" for name in names
        )

    def _check_in_time(self) -> None:
        errors: list[Exception] = [TimeoutError(f"{_CHECK_SECS:g} s are over")]

        def check() -> None:
            try:
                self._check()
                errors.clear()
            except Exception as error:
                errors[:] = [error]

        checking = threading.Thread(target=check, daemon=True)
        checking.start()
        checking.join(_CHECK_SECS)
        for error in errors:
            if isinstance(error, (ValueError, _transfer.ForeignSaveError)):
                raise error
            _say(
                f"warning: cannot read '{self._store.url}': "
                f"{_describe(error)}; starting with the rows in '{self._data}'"
            )

    def _check(self) -> None:
        self._mark()
        path = join(self._remote, _STATE)
        there, _ = _transfer.in_store(self._store, path)
        _transfer.check_is_own(
            there,
            self._data / _STATE,
            self._store,
            path,
            self._known_ids(path),
        )

    def _mark(self) -> None:
        if not self._has_marker:
            _request_mailbox.check_marker(
                self._store, self._cluster, self._num_shards
            )
            self._has_marker = True

    def _fetch_state(self) -> None:
        self._mark()
        path = join(self._remote, _STATE)
        said = time.monotonic()

        def progress(save: _saves.Save, num_bytes: int) -> None:
            nonlocal said
            if time.monotonic() - said > 1.0:
                said = time.monotonic()
                _say(
                    f"fetching save {save.number}: {_mib(num_bytes)} of "
                    f"{_mib(save.num_bytes)}"
                )

        there, _ = _transfer.in_store(self._store, path)
        identity = self._store.read(
            join(self._remote, "identity.json"), _request_mailbox.MAX_BYTES
        )
        if there and identity is None:
            raise _saves.DamagedError(
                f"'{self._store.url}/{self._remote}' has saves and no "
                "identity.json, which says whose they are"
            )
        own = self._data / "identity.json"
        if identity is not None and not own.exists():
            # The server checks whether the identity is its own.
            _transfer.write_file(own, identity)
        # Remembers the ids of all saves in the store, so that the server's next
        # saves may overwrite these saves.
        for save in reversed(there):
            self._remember(path, save.save_id)
        saves = _transfer.fetch(
            self._store,
            path,
            self._data / _STATE,
            all_saves=False,
            progress=progress,
            tell=_say,
        )
        if not saves:
            return
        counter = self._data / "writes"
        if not counter.exists():
            # The counter may be too low, so the server says "at least". No boot
            # of a machine has the id "fetched": see cc/recovery/data_folder.h.
            _transfer.write_file(
                counter,
                struct.pack("<Q40s24x", saves[0].num_writes, b"fetched"),
            )
        _say(
            f"fetched save {saves[0].number} ({_mib(saves[0].num_bytes)}) from "
            f"'{self._store.url}/{path}'; it is not known how many writes "
            "since then are lost"
        )

    # --- Beside the server ---------------------------------------------------

    def run(self) -> None:
        """Uploads saves until `stop` is called, and then the remaining ones."""
        while True:
            is_last = self._is_over.is_set()
            try:
                is_done = self._upload_all()
                self._answer_all()
            except Exception as error:
                # Any error is caught, because no other thread uploads saves.
                is_done = False
                _say(f"warning: cannot look for saves: {_describe(error)}")
            if is_last and is_done:
                return
            self._wake.wait(_POLL_SECS)
            self._wake.clear()

    def stop(self) -> None:
        """Makes `run` return when all saves are uploaded."""
        self._backoffs.clear()
        self._is_over.set()
        self._wake.set()

    def _folders(self) -> Iterator[tuple[str, Path]]:
        """Yields the folders of saves, with their paths in the store."""
        yield join(self._remote, _STATE), self._data / _STATE
        if self._shard_index != 0:
            return
        for path in sorted({request.path for request in self._requests}):
            yield path, self._root / path
        for folder, names, files in os.walk(self._root):
            here = Path(folder)
            path = here.relative_to(self._root).as_posix()
            if path == ".":
                names[:] = [
                    name for name in names if name != _request_mailbox.SERVERS
                ]
            elif _saves.NEWEST in files:
                names.clear()  # Tables have no saves inside.
                yield path, here
            if "identity.json" in files:  # This is a data folder.
                names[:] = [name for name in names if name not in _OWN]

    def _upload_all(self) -> bool:
        """Uploads new saves; returns whether everything is in the store."""
        is_done = True
        for path, folder in self._folders():
            try:
                found = os.stat(folder / _saves.NEWEST)
            except FileNotFoundError:
                continue
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if self._stamps.get(path) == stamp:
                continue
            backoff = self._backoffs.setdefault(path, _Backoff())
            if time.monotonic() < backoff.until:
                is_done = False
                continue
            try:
                self._upload(path, folder)
                self._stamps[path] = stamp
                self._backoffs.pop(path, None)
            except Exception as error:
                # After `stop`, an upload that failed with a lasting error is
                # not tried again.
                is_done &= self._is_over.is_set() and isinstance(
                    error, _LASTING
                )
                self._fail(path, error, backoff)
        return is_done

    def _upload(self, path: str, folder: Path) -> None:
        self._mark()
        if not self._has_identity and folder == self._data / _STATE:
            identity = (self._data / "identity.json").read_bytes()
            self._store.publish(join(self._remote, "identity.json"), identity)
            self._has_identity = True
        result = _transfer.upload(
            folder,
            self._store,
            path,
            known_ids=self._known_ids(path),
            remember=lambda save_id: self._remember(path, save_id),
            progress=self._step,
        )
        if result is None:
            return
        save, is_new = result
        self._uploaded[path] = save.number
        if is_new:
            _say(
                f"uploaded save {save.number} ({_mib(save.num_bytes)}) to "
                f"'{self._store.url}/{path}'"
            )

    def _fail(self, path: str, error: Exception, backoff: _Backoff) -> None:
        backoff.fail()
        _say(
            f"warning: cannot upload to '{self._store.url}/{path}': "
            f"{_describe(error)}; trying again in {backoff.secs:g} s"
        )
        for request in self._requests:
            if request.path == path:
                request.note = _describe(error)
                if isinstance(error, _LASTING):
                    request.answer = _failed(error)

    def _step(self) -> None:
        self._progress += 1

    def _known_ids(self, path: str) -> set[str]:
        return set(self._memory().get(path, []))

    def _remember(self, path: str, save_id: str) -> None:
        memory = self._memory()
        ids = [each for each in memory.get(path, []) if each != save_id]
        memory[path] = [*ids, save_id][-_NUM_REMEMBERED:]
        text = json.dumps({"url": self._store.url, "saves": memory}, indent=2)
        _transfer.write_file(self._data / _MEMORY, text.encode() + b"\n")

    def _memory(self) -> dict[str, list[str]]:
        try:
            memory = json.loads((self._data / _MEMORY).read_bytes())
            return memory["saves"] if memory["url"] == self._store.url else {}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    # --- Requests of clients --------------------------------------------------

    def _answer_all(self) -> None:
        while not self._arrived.empty():
            request = self._arrived.get()
            self._requests.append(request)
            # The client waits, so its folder is tried at once, even after a
            # failure.
            self._backoffs.pop(request.path, None)
            self._wake.set()
        for request in self._requests:
            if request.answer is None:
                try:
                    request.answer = self._try(request)
                except (ValueError, _saves.DamagedError) as error:
                    request.answer = _failed(error)
                except Exception as error:
                    request.note = _describe(error)
        self._requests = [r for r in self._requests if r.answer is None]

    def _try(self, request: _Request) -> dict[str, Any] | None:
        folder = self._root / request.path
        # The same check as the server makes for paths of clients.
        if not folder.resolve().is_relative_to(self._root.resolve()):
            raise ValueError(f"'{folder}' leads away from '{self._root}'")
        if folder.is_relative_to(self._data / _STATE):
            raise ValueError(f"'{folder}' has the server's own saves")
        saves = _saves.on_disk(folder)
        newest = saves[0].number if saves else 0
        if request.action == "fetch":
            return _done(newest if saves else self._fetch(request.path, folder))
        if newest < request.save:
            raise ValueError(
                f"'{folder}' has no save {request.save}. If the servers of the "
                "client are others than those of this URL, give the URL that "
                "they were started with. Several servers must share their "
                "--checkpoint_root"
            )
        # If the save is not uploaded yet, there is no answer. The next check of
        # the folders uploads it.
        uploaded = self._uploaded.get(request.path, -1)
        return _done(uploaded) if uploaded >= request.save else None

    def _fetch(self, path: str, folder: Path) -> int:
        def progress(save: _saves.Save, num_bytes: int) -> None:
            self._step()

        with _transfer.locked(folder):
            saves = _transfer.fetch(
                self._store,
                path,
                folder,
                all_saves=True,
                progress=progress,
                tell=_say,
            )
        for save in saves[::-1]:
            self._remember(path, save.save_id)
        if saves:
            _say(f"fetched '{self._store.url}/{path}' to '{folder}'")
        return saves[0].number if saves else 0

    def serve_requests(self) -> None:
        """Reads requests until `stop`; only on server 0."""
        open_requests: dict[str, _Request] = {}
        said: dict[str, Any] = {}
        poll = _REQUEST_POLL_SECS
        backoff = _Backoff()
        is_first = True
        while not self._is_over.wait(max(poll, backoff.secs)):
            try:
                if is_first:
                    _request_mailbox.clear_answers(self._store)
                    is_first = False
                listed = set(_request_mailbox.request_ids(self._store))
                for request_id in set(open_requests) - listed:
                    # The client of this request has given up.
                    open_requests.pop(request_id).answer = {}
                    said.pop(request_id, None)
                    self._store.remove(
                        [_request_mailbox.answer_name(request_id)]
                    )
                new = listed - set(open_requests)
                for request_id in new:
                    request = self._read_request(request_id)
                    if request is not None:
                        open_requests[request_id] = request
                        if request.answer is None:
                            self._arrived.put(request)
                            self._wake.set()
                for request in list(open_requests.values()):
                    # The answer is read once, because the other thread may set
                    # it at any moment.
                    final = request.answer
                    answer = final or {
                        "state": "running",
                        "progress": self._progress,
                        "note": request.note,
                    }
                    if said.get(request.request_id) != answer:
                        name = _request_mailbox.answer_name(request.request_id)
                        _request_mailbox.write_json(self._store, name, answer)
                        said[request.request_id] = answer
                    if final is not None:
                        self._store.remove(
                            [_request_mailbox.request_name(request.request_id)]
                        )
                        del open_requests[request.request_id]
                        del said[request.request_id]
                poll = (
                    _REQUEST_POLL_SECS
                    if open_requests or new
                    else min(2 * poll, _LONGEST_REQUEST_POLL_SECS)
                )
                backoff = _Backoff()
            except Exception as error:
                if backoff.secs == 0.0:
                    _say(
                        f"warning: cannot hear requests of clients in "
                        f"'{self._store.url}': {_describe(error)}; trying again"
                    )
                backoff.fail()

    def _read_request(self, request_id: str) -> _Request | None:
        request = _Request(request_id, "", "", 0)
        try:
            name = _request_mailbox.request_name(request_id)
            value = _request_mailbox.read_json(self._store, name)
            if value is None:
                return None  # The client has given up.
            request.action = str(value["action"])
            request.path = _request_mailbox.checkpoint_path(str(value["path"]))
            request.save = int(value["save"])
            if request.action not in ("fetch", "upload"):
                raise ValueError(f"unknown action '{request.action}'")
        except (
            _saves.DamagedError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:
            request.answer = _failed(error)
        return request


def _done(save: int) -> dict[str, Any]:
    return {"state": "done", "save": save}


def _failed(error: BaseException) -> dict[str, Any]:
    return {"state": "failed", "error": _describe(error)}
