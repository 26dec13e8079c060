"""Manifests of checkpoints: the saves of a folder, and the files of each.

docs/checkpoint_format.md describes manifests. A store may contain anything, so
names of files that lead out of the checkpoint are refused.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NEWEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20

_FORMER = re.compile(r"manifest-\d{6,13}\.json", re.ASCII)
# The folder of files that belong to no table.
_SERVER_FOLDER = "%server"


class DamagedError(OSError):
    """A manifest or a file of a checkpoint is missing, or has changed."""


class VersionError(DamagedError):
    """A manifest has the format of another version of tfswitch."""


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """One file of a save: its path in the checkpoint, size and checksum."""

    name: str
    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Save:
    """One save of a checkpoint, with its manifest `text`."""

    text: bytes
    number: int
    save_id: str
    files: tuple[SavedFile, ...]
    # The count of writes, in a save of a server's own state.
    num_writes: int

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def former_name(number: int) -> str:
    """Returns the name of the manifest of a save that is not the newest."""
    return f"manifest-{number:06d}.json"


def is_manifest(name: str) -> bool:
    """Whether a file of a checkpoint is a manifest."""
    return name == NEWEST or _FORMER.fullmatch(name) is not None


def is_row_file(name: str) -> bool:
    """Whether a path in a checkpoint is that of a file of rows."""
    return re.fullmatch(r"[^/]+/[A-Za-z0-9_-]+\.safetensors", name) is not None


def parse(text: bytes, where: str) -> Save:
    """Reads a manifest.

    Raises:
        DamagedError: If the text is no manifest, or names files that are not
            below the manifest's folder. The message names `where`.
    """
    try:
        manifest = json.loads(text)
        if manifest["format"] != "tfswitch-checkpoint":
            raise ValueError("it is not one of tfswitch")
        if manifest["version"] != 2:
            raise VersionError(
                f"manifest '{where}' has version {manifest['version']!r}, and "
                "this tfswitch reads version 2. Use the tfswitch that wrote it"
            )
        files = [
            _file(entry, folder_of(name))
            for name, table in manifest["tables"].items()
            for entry in table["files"]
        ]
        server = manifest.get("server", {"files": [], "num_writes": "0"})
        files += [_file(entry, _SERVER_FOLDER) for entry in server["files"]]
        return Save(
            text,
            _integer(manifest["save"], 10**12),
            str(manifest["save_id"]),
            tuple(files),
            _integer(server["num_writes"], 2**64 - 1),
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        reason = (
            f"it has no {error}" if isinstance(error, KeyError) else f"{error}"
        )
        raise DamagedError(
            f"manifest '{where}' is damaged: {reason}"
        ) from error
    except AttributeError as error:
        raise DamagedError(f"manifest '{where}' is damaged") from error


def folder_of(table: str) -> str:
    """Returns a table's folder, as `FileNameOf` in cc/base/files.cc."""
    name = ""
    for byte in table.encode("utf-8", "surrogateescape"):
        char = chr(byte)
        is_plain = char.isascii() and (char.isalnum() or char in "_-")
        is_plain = is_plain or (char == "." and name != "")
        name += char if is_plain else f"%{byte:02X}"
    return name


def _file(entry: dict[str, Any], folder: str) -> SavedFile:
    name = entry["name"]
    if (
        not folder
        or not isinstance(name, str)
        or not is_row_file(name)
        or not name.startswith(f"{folder}/")
    ):
        raise ValueError(
            f"expected a file in '{folder}/', which ends in .safetensors, got "
            f"{name!r}"
        )
    return SavedFile(
        name,
        _integer(entry["bytes"], 2**62),
        _integer(entry["crc32"], 2**32 - 1),
    )


def _integer(value: object, most: int) -> int:
    # Numbers of 64 bits are strings.
    if not re.fullmatch(r"[0-9]{1,20}", f"{value}") or int(f"{value}") > most:
        raise ValueError(f"expected a number, got {value!r}")
    return int(f"{value}")


def sort(saves: Iterable[Save]) -> list[Save]:
    """Returns each save once, the newest first."""
    unique = {save.save_id: save for save in saves}
    return sorted(unique.values(), key=lambda save: -save.number)


def on_disk(folder: Path) -> list[Save]:
    """Returns the saves of a folder, the newest first."""
    saves = []
    for name in _names(folder):
        if is_manifest(name):
            try:
                text = (folder / name).read_bytes()
            except FileNotFoundError:
                continue  # It was removed meanwhile.
            saves.append(parse(text, str(folder / name)))
    return sort(saves)


def ids_of(folder: Path) -> set[str]:
    """Returns the ids of a folder's saves, also those that were set aside."""
    ids = set()
    for name in _names(folder):
        if not name.startswith("manifest"):
            continue
        try:
            ids.add(parse((folder / name).read_bytes(), name).save_id)
        except OSError:
            pass  # A manifest that cannot be read has no id.
    return ids


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
