"""Rows in `.npz` files of NumPy."""

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from tfswitch.interchange._files import published
from tfswitch.interchange._layout import Layout, Source
from tfswitch.table import EmbeddingTable


def write_numpy(
    table: EmbeddingTable,
    path: str | os.PathLike[str],
    *,
    slots: bool = False,
) -> int:
    """Writes all rows to an `.npz` file.

    Its arrays: int64 `ids`, `[num_rows]`; float32 `values`,
    `[num_rows, dim]`; `metadata`, a string of JSON; with `slots` float32
    `slots`, `[num_rows, slot_floats]`, if the table has any.

    Args:
        table: The table.
        path: The file; one that is there is replaced.
        slots: Whether to write optimizer state and statistics too.

    Returns:
        The number of rows written.

    Raises:
        ValueError: If `table` is no `EmbeddingTable`.
        OSError: If the file cannot be written.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.interchange.write_numpy(table, "user.npz")
    3
    >>> np.load("user.npz")["values"].shape
    (3, 8)
    """
    layout = Layout("array", table, slots=slots)
    with published(path) as temporary:
        rows = layout.sorted_rows()
        arrays = {
            name: getattr(rows, what) for what, name in layout.names.items()
        }
        with open(temporary, "wb") as file:
            np.savez(file, metadata=np.array(layout.metadata()), **arrays)
    return len(rows.ids)


def read_numpy(
    table: EmbeddingTable,
    path: str | os.PathLike[str],
    *,
    slots: bool = False,
) -> int:
    """Sets the rows of an `.npz` file, all or none.

    Args:
        table: The table.
        path: A file of `write_numpy`, or any with the arrays `ids`, integers of
            shape `[num_rows]`, and `values`, floats of shape `[num_rows, dim]`.
        slots: Whether to set optimizer state and statistics too. Otherwise rows
            that are there keep theirs, and new rows have a fresh one.

    Returns:
        The number of rows in the file.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If it is damaged, or no `.npz` file.
        ValueError: If an array is missing, or has another shape or dtype; if a
            value is NaN or Inf; if `slots` are of another optimizer.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> np.savez("user.npz", ids=[7, 9], values=np.ones((2, 8)))
    >>> tsw.interchange.read_numpy(table, "user.npz")
    2
    """
    layout = Layout("array", table, slots=slots)
    file = os.fspath(path)
    source = Source(layout, file)
    arrays = _load(file, source, list(layout.names.values()))
    ids = arrays["ids"]
    if ids.ndim != 1:
        raise ValueError(
            f"'{file}': array 'ids' must be of rank 1, got shape {ids.shape}"
        )
    ids = source.to_ids(ids)
    for name, width in layout.widths.items():
        if arrays[name].shape != (len(ids), width):
            raise ValueError(
                f"'{file}': array '{name}' must be of shape "
                f"{(len(ids), width)} for {len(ids)} ids and table "
                f"'{table.name}', got {arrays[name].shape}"
            )
    rows = source.to_rows(ids, {name: arrays[name] for name in layout.widths})
    return layout.assign([rows])


def _load(
    file: str, source: Source, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Reads arrays of a file whose metadata fit."""
    if not os.path.exists(file):
        raise FileNotFoundError(f"there is no file '{file}'")
    # NumPy would take anything else for a pickle.
    if not zipfile.is_zipfile(file):
        raise OSError(f"'{file}' is no .npz file, or it is damaged")
    with _readable(file, "the list of its arrays"):
        archive = np.load(file, allow_pickle=False)
    with archive:
        if "metadata" in archive.files:
            with _readable(file, "array 'metadata'"):
                metadata = str(archive["metadata"])
            source.check_state(metadata)
        source.check_names(archive.files)
        arrays = {}
        for name in names:
            with _readable(file, f"array '{name}'"):
                arrays[name] = np.asarray(archive[name])
    return arrays


@contextlib.contextmanager
def _readable(file: str, what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise OSError(f"'{file}': {what} cannot be read: {error}") from error
