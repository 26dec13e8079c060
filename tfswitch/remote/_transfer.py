"""Moves the saves of a checkpoint between a disk and a store.

A reader sees a save once a manifest names its files. So files are written
before the manifest that names them, and older manifests before the newest; old
manifests are removed before their files. Thus a reader sees only complete
saves, at each moment of a transfer, even if the transfer is killed. A file name
is never used twice, so a file with the right bytes and checksum need not be
sent again.
"""

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tfswitch.remote import _saves
from tfswitch.remote._saves import DamagedError, Save, SavedFile
from tfswitch.remote._store import BLOCK_BYTES, Store, join

# How often a transfer starts again because a save was replaced meanwhile.
_ATTEMPTS = 5
_LOCK_SECS = 30.0

Progress = Callable[[], None]


class ForeignSaveError(RuntimeError):
    """A store has a save that this folder has neither made nor fetched."""


def upload(
    folder: Path,
    store: Store,
    path: str,
    *,
    known_ids: set[str],
    remember: Callable[[str], None],
    progress: Progress,
) -> tuple[Save, bool] | None:
    """Uploads the saves of a folder, and removes all others in the store.

    Every file is read back, and its checksum compared with the manifest's.

    Args:
        folder: The folder with the saves. A save that is removed meanwhile is
            left out.
        store: The target.
        path: The folder in the store.
        known_ids: The ids of saves that were uploaded from or fetched to this
            folder before.
        remember: Called with the id of the newest save before readers see this
            save.
        progress: Called again and again while the upload proceeds.

    Returns:
        The newest save, and whether it was new to the store; None if there is
        no save.

    Raises:
        ForeignSaveError: If the newest save in the store is of another folder.
            Nothing has changed there.
        DamagedError: If a file of the folder is damaged, or the store has other
            bytes than were uploaded.
    """
    for attempt in range(_ATTEMPTS):
        saves = _saves.on_disk(folder)
        if not saves:
            return None
        try:
            return saves[0], _upload(
                folder, saves, store, path, known_ids, remember, progress
            )
        except _GoneError as error:
            if attempt == _ATTEMPTS - 1 or saves == _saves.on_disk(folder):
                raise DamagedError(str(error)) from error
    raise AssertionError("the last attempt returns or raises")


class _GoneError(Exception):
    """A file is not there any more: its save may have been replaced."""


def _upload(
    folder: Path,
    saves: list[Save],
    store: Store,
    path: str,
    known_ids: set[str],
    remember: Callable[[str], None],
    progress: Progress,
) -> bool:
    sizes = store.sizes(path)
    there, _ = in_store(store, path, sizes)
    check_is_own(there, folder, store, path, known_ids)
    # Files of published saves need no new check: each was read back before its
    # manifest was published.
    good = {
        file
        for save in there
        for file in save.files
        if sizes.get(file.name) == file.num_bytes
    }
    named: set[str] = set()
    for save in saves:
        for file in save.files:
            named.add(file.name)
            if file in good:
                continue
            good.add(file)
            _upload_file(folder, file, store, path, sizes, progress)
    newest, *former = saves
    remember(newest.save_id)
    present = {save.text for save in there}
    names = [_saves.former_name(save.number) for save in former]
    for name, save in zip(names, former, strict=True):
        if save.text not in present or name not in sizes:
            store.publish(join(path, name), save.text)
    is_new = _saves.NEWEST not in sizes or there[:1] != [newest]
    if is_new:
        store.publish(join(path, _saves.NEWEST), newest.text)
    old = [name for name in sizes if _saves.is_manifest(name)]
    store.remove(
        join(path, name) for name in old if name not in (*names, _saves.NEWEST)
    )
    store.remove(
        join(path, name)
        for name in sizes
        if _saves.is_row_file(name) and name not in named
    )
    return is_new


def _upload_file(
    folder: Path,
    file: SavedFile,
    store: Store,
    path: str,
    sizes: dict[str, int],
    progress: Progress,
) -> None:
    local, remote = folder / file.name, join(path, file.name)

    def is_there() -> bool:
        return _is_whole(store, remote, file, lambda block: progress())

    if sizes.get(file.name) == file.num_bytes and is_there():
        return
    try:
        store.put(str(local), remote, progress)
    except FileNotFoundError:
        if local.exists():
            raise  # For example, the bucket is not there.
    if not local.exists():
        raise _GoneError(f"file '{local}' is missing")
    progress()
    if not is_there():
        raise DamagedError(
            f"file '{local}' is damaged: its bytes or its checksum are not "
            "those of the manifest"
            if not _is_whole_on_disk(local, file)
            else f"'{store.url}/{remote}' is not as it was uploaded: its bytes "
            "or its checksum differ"
        )


def check_is_own(
    there: list[Save],
    folder: Path,
    store: Store,
    path: str,
    known_ids: set[str],
) -> None:
    """Raises `ForeignSaveError` if the store's newest save is not the folder's.

    The next upload of the folder would overwrite that save.
    """
    if not there or there[0].save_id in known_ids | _saves.ids_of(folder):
        return
    raise ForeignSaveError(
        f"'{store.url}/{path}' has save {there[0].number} "
        f"({there[0].save_id}), which was neither made in '{folder}' nor "
        "fetched to it, and would be overwritten. To go on with the save in "
        "the store, move the folder away, and it is fetched; to go on with the "
        "folder's, give another URL or remove the store's"
    )


def in_store(
    store: Store, path: str, sizes: dict[str, int] | None = None
) -> tuple[list[Save], list[DamagedError]]:
    """Returns the saves of a folder of a store, and errors of damaged saves."""
    saves, errors = [], []
    for name in store.sizes(path) if sizes is None else sizes:
        if not _saves.is_manifest(name):
            continue
        where = join(path, name)
        text = store.read(where, _saves.MAX_MANIFEST_BYTES)
        if text is None:
            continue
        try:
            saves.append(_saves.parse(text, f"{store.url}/{where}"))
        except _saves.VersionError:
            raise  # Otherwise an upload would remove the save's files.
        except DamagedError as error:
            errors.append(error)
    return _saves.sort(saves), errors


def fetch(
    store: Store,
    path: str,
    folder: Path,
    *,
    all_saves: bool,
    progress: Callable[[Save, int], None],
    tell: Callable[[str], None],
) -> list[Save]:
    """Copies the saves of a folder of a store to a folder without saves.

    Files that an earlier attempt has fetched are not fetched again. The
    manifest is written when all files are whole and on the disk.

    Args:
        store: The source.
        path: The folder in the store.
        folder: The target; it is made if it does not exist.
        all_saves: Whether to fetch all saves, or only the newest whole one.
        progress: Called with a save and how many bytes of it have arrived.
        tell: Called with a line about each damaged save.

    Returns:
        The fetched saves, the newest first. The list is empty if there is no
        save.

    Raises:
        DamagedError: If there are saves, and none is whole. The message names
            the file.
    """
    for _ in range(_ATTEMPTS):
        there, errors = in_store(store, path)
        whole = []
        for save in there:
            try:
                for file in _missing(save, folder, progress):
                    _fetch_file(store, path, file, folder)
                whole.append(save)
            except DamagedError as error:
                errors.append(error)
            if whole and not all_saves:
                break
        if errors and in_store(store, path)[0] != there:
            # A newer save has come meanwhile, and files of an older save were
            # removed. So the fetch starts again.
            continue
        if errors and not whole:
            raise errors[0]
        for skipped in errors:
            tell(f"a save is skipped: {skipped}")
        for save, name in zip(
            reversed(whole),
            [_saves.former_name(save.number) for save in whole[:0:-1]]
            + [_saves.NEWEST],
            strict=False,
        ):
            write_file(folder / name, save.text)
        return whole
    raise DamagedError(
        f"the saves in '{store.url}/{path}' were replaced {_ATTEMPTS} times "
        "while they were fetched. Try again"
    )


def _missing(
    save: Save, folder: Path, progress: Callable[[Save, int], None]
) -> Iterator[SavedFile]:
    count = 0
    for file in save.files:
        if not _is_whole_on_disk(folder / file.name, file):
            yield file
        count += file.num_bytes
        progress(save, count)


def _fetch_file(store: Store, path: str, file: SavedFile, folder: Path) -> None:
    local, remote = folder / file.name, join(path, file.name)
    local.parent.mkdir(parents=True, exist_ok=True)
    part = local.with_name(local.name + ".part")
    try:
        with open(part, "wb") as output:
            is_whole = _is_whole(store, remote, file, output.write)
            output.flush()
            os.fsync(output.fileno())
        if not is_whole:
            raise DamagedError(
                f"'{store.url}/{remote}' is missing or damaged: its bytes or "
                "its checksum are not those of the manifest"
            )
        os.replace(part, local)
        _sync(local.parent)
    finally:
        part.unlink(missing_ok=True)


def _is_whole(
    store: Store,
    path: str,
    file: SavedFile,
    write: Callable[[bytes], object],
) -> bool:
    try:
        return store.copy(path, file.num_bytes, write) == file.crc32
    except FileNotFoundError:
        return False


def _is_whole_on_disk(path: Path, file: SavedFile) -> bool:
    try:
        with open(path, "rb") as source:
            if os.fstat(source.fileno()).st_size != file.num_bytes:
                return False
            crc = 0
            while block := source.read(BLOCK_BYTES):
                crc = zlib.crc32(block, crc)
            return crc == file.crc32
    except FileNotFoundError:
        return False


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, also if the machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as output:
        output.write(data)
        output.flush()
        os.fsync(output.fileno())
    os.replace(part, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder, as `FolderLock` in cc/base/files.h.

    Raises:
        TimeoutError: If another process keeps the lock for 30 s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_SECS
    with open(folder / ".lock", "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process uses '{folder}'; end it"
                    ) from None
                time.sleep(0.05)
        yield
