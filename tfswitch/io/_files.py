"""Publishes files when they are complete, and finds the files of a path."""

import contextlib
import errno
import glob
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@contextlib.contextmanager
def published(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path; without an error, renames its file to `path`.

    Raises:
        FileNotFoundError: If the folder of `path` does not exist.
        IsADirectoryError: If `path` is a folder.
        OSError: If the file cannot be written, such as on a full disk. The
            message names `path`.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"'{target}' cannot be written, for there is no folder "
            f"'{target.parent}'; make it first"
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"'{target}' is a folder; pass the name of a file in it"
        )
    temporary = target.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        # Flushes the file before the rename. Otherwise a power cut could leave
        # the final name without its bytes.
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        # The error of a full disk names no file, or only the temporary file.
        if type(error) is not OSError or f"'{target}'" in str(error):
            raise
        raise OSError(
            error.errno or errno.EIO,
            f"'{target}' cannot be written: {error.strerror or error}",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def find_files(path: Paths, suffix: str | None = None) -> list[str]:
    """Returns the files of a path, of a pattern, or of a list of both.

    Args:
        path: The value that the user gave.
        suffix: The suffix of the files to take from folders; None if folders
            are refused.

    Raises:
        FileNotFoundError: If there are none.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else path
    files = [file for each in paths for file in _find(os.fspath(each), suffix)]
    if not files:
        raise FileNotFoundError(f"no files to read. Received: path={path!r}")
    return files


def _find(path: str, suffix: str | None) -> list[str]:
    if os.path.isdir(path):
        if suffix is None:
            raise IsADirectoryError(
                f"'{path}' is a folder; pass its files, or a pattern such as "
                f"'{os.path.join(path, '*')}'"
            )
        found = sorted(
            str(file)
            for file in Path(path).rglob(f"*{suffix}")
            if not _is_hidden(file.relative_to(path))
        )
        if not found:
            raise FileNotFoundError(f"there is no *{suffix} file in '{path}'")
        return found
    if os.path.exists(path):
        return [path]
    found = sorted(glob.glob(path)) if glob.has_magic(path) else []
    if not found:
        raise FileNotFoundError(f"there is no file '{path}'")
    return found


def _is_hidden(file: Path) -> bool:
    # Spark and other programs mark unfinished files with these characters.
    return any(part.startswith((".", "_")) for part in file.parts)
