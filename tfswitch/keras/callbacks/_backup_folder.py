"""The files of the `BackupAndRestore` callback.

A checkpoint is a file of the dense variables, a save of the tables (in a folder
below this one, or on servers), and a manifest that names both. The manifest is
written last: without it the checkpoint does not exist.
"""

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfswitch.io._files import published

_FORMAT = "tfswitch-keras-checkpoint"
_VERSION = 1
_NAME = re.compile(r"checkpoint-(\d{6,})\.json")

# The parts of the model, such as "optimizer", with their variables: (name,
# value).
Variables = Mapping[str, Sequence[tuple[str, np.ndarray]]]


class CheckpointFolder:
    """A folder of checkpoints, by their numbers. One writer at a time."""

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        self._path = Path(os.path.abspath(path))
        self._keep = keep

    def numbers(self) -> list[int]:
        """Returns the numbers of the checkpoints, the newest first."""
        if not self._path.is_dir():
            return []
        found = map(_NAME.fullmatch, os.listdir(self._path))
        return sorted((int(m[1]) for m in found if m), reverse=True)

    def read(self, number: int) -> tuple[dict[str, Any], Variables]:
        """Returns a manifest, and the variables of its checkpoint.

        Raises:
            OSError: If a file is damaged or missing. The message names it.
        """
        manifest = self.manifest(number)
        path = self._path / manifest["dense"]["file"]
        try:
            with np.load(path, allow_pickle=False) as arrays:
                variables = {
                    part: [
                        (each["name"], _from_plain(arrays[f"{part}/{i}"], each))
                        for i, each in enumerate(described)
                    ]
                    for part, described in manifest["dense"]["parts"].items()
                }
        except (EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise OSError(f"'{path}' is damaged: {error}") from error
        return manifest, variables

    def manifest(self, number: int) -> dict[str, Any]:
        """Returns a manifest.

        Raises:
            OSError: If the manifest is damaged, or of a later version.
        """
        path = self._manifest_path(number)
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            known = (manifest["format"], manifest["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise OSError(f"'{path}' is damaged: {error!r}") from error
        if known != (_FORMAT, _VERSION):
            raise OSError(
                f"'{path}' is no {_FORMAT} of version {_VERSION}, but "
                f"{known[0]!r} of version {known[1]!r}"
            )
        return manifest

    def publish(self, manifest: Mapping[str, Any], parts: Variables) -> None:
        """Writes a checkpoint, and removes those that are not kept.

        Raises:
            OSError: If a file cannot be written. Older checkpoints stay.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        number = max(self.numbers(), default=0) + 1
        dense = f"dense-{number:06}.npz"
        arrays: dict[str, Any] = {
            f"{part}/{i}": _to_plain(value)
            for part, variables in parts.items()
            for i, (_, value) in enumerate(variables)
        }
        with published(self._path / dense) as path, open(path, "wb") as file:
            np.savez(file, **arrays)
        described = {
            part: [
                {"name": n, "shape": v.shape, "dtype": v.dtype.name}
                for n, v in variables
            ]
            for part, variables in parts.items()
        }
        text = json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                **manifest,
                "dense": {"file": dense, "parts": described},
            },
            indent=1,
        )
        _flush_folder(self._path)
        with published(self._manifest_path(number)) as path:
            path.write_text(text, encoding="utf-8")
        _flush_folder(self._path)
        self._remove_old()

    def remove(self) -> None:
        """Removes all checkpoints. Saves of tables stay."""
        for number in self.numbers():
            self._manifest_path(number).unlink()
        for path in self._path.glob("dense-*.npz"):
            path.unlink()

    def _remove_old(self) -> None:
        numbers = self.numbers()
        for number in numbers[self._keep :]:
            self._manifest_path(number).unlink()
        kept = {f"dense-{number:06}.npz" for number in numbers[: self._keep]}
        for path in self._path.glob("dense-*.npz"):
            if path.name not in kept:
                path.unlink()

    def _manifest_path(self, number: int) -> Path:
        return self._path / f"checkpoint-{number:06}.json"


def _to_plain(value: np.ndarray) -> np.ndarray:
    """Returns bits if NumPy has no name for the dtype, such as bfloat16."""
    return (
        value.view(f"u{value.itemsize}") if value.dtype.kind == "V" else value
    )


def _from_plain(value: np.ndarray, described: Mapping[str, Any]) -> np.ndarray:
    return value.view(tf.as_dtype(described["dtype"]).as_numpy_dtype)


def _flush_folder(path: Path) -> None:
    # Makes the names of the folder's files durable; some file systems cannot.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
