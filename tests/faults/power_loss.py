"""The folders that a power loss may leave: power_loss.c, and its journal.

The model is stricter than file systems are. Data that was not flushed may
survive or not, separately for each sector of a write. A flush of a file does
not flush its name, which needs a flush of the folder. Changes of one name keep
their order, and a rename happens as a whole or not at all.
"""

import dataclasses
import os
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_suffix(".c")
_HEADER = struct.Struct("=4I4Q")
_SECTOR = 512

(CREATE, MAKE_FOLDER, WRITE, RESIZE, RENAME, REMOVE, LINK, SYNC) = range(8)


class Operation(NamedTuple):
    """A call that changed a file or a folder, named by its inode."""

    kind: int
    inode: int
    folder: int
    to_folder: int
    at: int
    name: str
    to_name: str
    data: bytes
    end: int  # Where its record ends in the journal.


class Journal:
    """Records what programs with the variables do to files below a folder.

    Args:
        folder: The watched folder, which must exist.
        files: Folder for the library and the journal, not below `folder`.
        boot_id: The id of the boot that the programs see.

    Attributes:
        path: Where the journal is.
        variables: Environment variables that a program needs.
    """

    def __init__(self, folder: Path, files: Path, boot_id: str) -> None:
        library = files / "power_loss.so"
        if not library.exists():
            subprocess.run(
                [
                    *("cc", "-shared", "-fPIC", "-O1", "-pthread"),
                    *("-o", library, _SOURCE),
                ],
                check=True,
            )
        self.path = files / f"{folder.name}.journal"
        boot = files / f"{folder.name}.boot"
        boot.write_text(boot_id + "\n")
        self.variables = {
            "LD_PRELOAD": str(library),
            "POWER_LOSS_BELOW": str(folder),
            "POWER_LOSS_JOURNAL": str(self.path),
            "POWER_LOSS_BOOT_ID": str(boot),
        }

    @property
    def size(self) -> int:
        """In bytes: operations that end there or before are over."""
        return self.path.stat().st_size

    def operations(self) -> Iterator[Operation]:
        journal = self.path.read_bytes()
        end = 0
        while end < len(journal):
            kind, *sizes, inode, folder, to_folder, at = _HEADER.unpack_from(
                journal, end
            )
            end += _HEADER.size
            parts = []
            for size in sizes:
                parts.append(journal[end : end + size])
                end += size
            name, to_name = parts[0].decode(), parts[1].decode()
            yield Operation(
                kind, inode, folder, to_folder, at, name, to_name, parts[2], end
            )


@dataclasses.dataclass(eq=False)
class _File:
    content: bytearray
    pending: list[Operation] = dataclasses.field(default_factory=list)

    def after(self, keep: Callable[[], bool]) -> bytearray:
        content = bytearray(self.content)
        size = len(content)
        for operation in self.pending:
            at, data = operation.at, operation.data
            if operation.kind == RESIZE:
                size = at
                if keep():
                    _resize(content, at)
                continue
            size = max(size, at + len(data))
            for begin in range(at - at % _SECTOR, at + len(data), _SECTOR):
                if not keep():
                    continue
                first, last = max(begin, at), min(begin + _SECTOR, size)
                piece = data[first - at : last - at]
                if len(content) < first:
                    _resize(content, first)
                content[first : first + len(piece)] = piece
        if keep():
            _resize(content, size)
        return content


@dataclasses.dataclass(eq=False)
class _Folder:
    entries: dict[str, "_File | _Folder"] = dataclasses.field(
        default_factory=dict
    )


class _Change(NamedTuple):
    """Changes entries, all or none; a flush of `folder` keeps it."""

    folder: _Folder
    steps: tuple[tuple[_Folder, str, _File | _Folder | None], ...]


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _enter(changes: Iterable[_Change], entries: dict[_Folder, dict]) -> None:
    for change in changes:
        for folder, name, node in change.steps:
            if node is None:
                entries[folder].pop(name, None)
            else:
                entries[folder][name] = node


class Disk:
    """The data that is on a disk for sure, and the data that may be.

    Args:
        folder: The folder. Its present contents are on the disk for sure.
    """

    def __init__(self, folder: Path) -> None:
        self._nodes: dict[int, _File | _Folder] = {}
        self._changes: list[_Change] = []
        self._root = self._read(folder)

    def _read(self, path: Path) -> _File | _Folder:
        node: _File | _Folder
        if path.is_dir():
            node = _Folder({p.name: self._read(p) for p in path.iterdir()})
        else:
            node = _File(bytearray(path.read_bytes()))
        return self._nodes.setdefault(path.stat().st_ino, node)

    def _folder(self, inode: int) -> _Folder:
        node = self._nodes[inode]
        assert isinstance(node, _Folder)
        return node

    def apply(self, operation: Operation) -> None:
        kind = operation.kind
        if kind == CREATE:
            self._nodes[operation.inode] = _File(bytearray())
        elif kind == MAKE_FOLDER:
            self._nodes[operation.inode] = _Folder()
        node = self._nodes[operation.inode]
        if kind in (WRITE, RESIZE):
            assert isinstance(node, _File)
            node.pending.append(operation)
        elif kind == SYNC and isinstance(node, _File):
            node.content = node.after(lambda: True)
            node.pending.clear()
        elif kind == SYNC:
            flushed = [c for c in self._changes if c.folder is node]
            folders = {f for c in flushed for f, _, _ in c.steps}
            _enter(flushed, {f: f.entries for f in folders})
            self._changes = [c for c in self._changes if c.folder is not node]
        else:
            folder = self._folder(operation.folder)
            entry = None if kind in (RENAME, REMOVE) else node
            steps = [(folder, operation.name, entry)]
            if kind in (RENAME, LINK):
                folder = self._folder(operation.to_folder)
                steps = steps if kind == RENAME else []
                steps.append((folder, operation.to_name, node))
            self._changes.append(_Change(folder, tuple(steps)))

    def lose_power(self, keep: Callable[[], bool], to: Path) -> None:
        """Writes what is left.

        Args:
            keep: Whether a change that was not flushed survives.
            to: New folder.
        """
        lost: set[tuple[_Folder, str]] = set()
        kept = []
        for change in self._changes:
            names = {(folder, name) for folder, name, _ in change.steps}
            if lost.isdisjoint(names) and keep():
                kept.append(change)
            else:
                lost |= names
        entries = {
            node: dict(node.entries)
            for node in {
                *self._nodes.values(),
                *(c.folder for c in self._changes),
            }
            if isinstance(node, _Folder)
        }
        _enter(kept, entries)
        written: dict[_File, Path] = {}

        def write(node: _File | _Folder, path: Path) -> None:
            if isinstance(node, _Folder):
                path.mkdir()
                for name, entry in entries[node].items():
                    write(entry, path / name)
            elif node in written:
                os.link(written[node], path)
            else:
                path.write_bytes(node.after(keep))
                written[node] = path

        write(self._root, to)
