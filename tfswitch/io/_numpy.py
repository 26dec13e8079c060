"""Rows in `.npz` files of NumPy."""

import contextlib
import math
import os
import shutil
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import cast

import numpy as np

from tfswitch._connection._rows import Rows, rows_per_call
from tfswitch.io._files import published
from tfswitch.io._layout import Layout, Source
from tfswitch.table import EmbeddingTable

_COPY_BYTES = 1 << 20


def write_numpy(
    table: EmbeddingTable,
    path: str | os.PathLike[str],
    *,
    slots: bool = False,
) -> int:
    """Writes all rows to an `.npz` file.

    The file has the arrays int64 `ids`, `[num_rows]`; float32 `values`,
    `[num_rows, dim]`; `metadata`, a string of JSON; with `slots` float32
    `slots`, `[num_rows, slot_floats]`, if the table has any.

    Args:
        table: The table.
        path: The file; an existing file is replaced.
        slots: Whether to write optimizer state and statistics too.

    Returns:
        The number of rows written.

    Raises:
        ValueError: If `table` is no `EmbeddingTable`.
        OSError: If the file cannot be written, such as on a full disk. The
            message names the file; an existing file stays.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.io.write_numpy(table, "user.npz")
    3
    >>> np.load("user.npz")["values"].shape
    (3, 8)
    """
    layout = Layout("array", table, slots=slots)
    with published(path) as temporary, contextlib.ExitStack() as stack:
        # In an archive the arrays follow each other, and each begins with its
        # number of rows. So the arrays are first written to files without a
        # name.
        parts = {
            what: stack.enter_context(
                tempfile.TemporaryFile(dir=temporary.parent)
            )
            for what in layout.names
        }

        def write(rows: dict[str, np.ndarray]) -> None:
            for what, part in parts.items():
                part.write(rows[what].data)

        num_rows = layout.visit(write)
        # Writes what np.savez would write, but np.savez needs whole arrays in
        # memory.
        archive = stack.enter_context(zipfile.ZipFile(temporary, "w"))
        with archive.open("metadata.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.array(layout.metadata()))
        for what, name in layout.names.items():
            width = layout.widths.get(what)
            header = {
                "descr": "<i8" if width is None else "<f4",
                "fortran_order": False,
                "shape": (num_rows,) if width is None else (num_rows, width),
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                parts[what].seek(0)
                shutil.copyfileobj(parts[what], member, _COPY_BYTES)
    return num_rows


def read_numpy(
    table: EmbeddingTable,
    path: str | os.PathLike[str],
    *,
    slots: bool = False,
) -> int:
    """Sets the rows of an `.npz` file, all or none.

    Reads the file twice, a batch at a time: the first pass checks the whole
    file before any row is set. A whole array in Fortran order is kept in
    memory.

    Args:
        table: The table.
        path: A file of `write_numpy`, or another `.npz` file with the arrays
            `ids`, integers of shape `[num_rows]`, and `values`, floats of shape
            `[num_rows, dim]`.
        slots: Whether to set optimizer state and statistics too. Otherwise
            present rows keep their state, and new rows get the initial state.

    Returns:
        The number of rows in the file.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If the file is damaged, or no `.npz` file, or has metadata of
            more than 1 MiB.
        ValueError: If an array is missing, or has another shape or dtype; if a
            value is NaN or Inf; if `slots` are of another optimizer.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> np.savez("user.npz", ids=[7, 9], values=np.ones((2, 8)))
    >>> tsw.io.read_numpy(table, "user.npz")
    2
    """
    layout = Layout("array", table, slots=slots)
    file = os.fspath(path)
    # Checks the whole file before any row is set.
    for _ in _read(file, layout):
        pass
    return layout.assign(_read(file, layout))


# The metadata of write_numpy() has some hundred bytes.
_MAX_METADATA_BYTES = 1 << 20
# NumPy refuses a header of more than 10,000 bytes only after inflating it.
_MAX_HEADER_BYTES = 1 << 16


class _Array:
    """An array of an archive, read from its beginning.

    If the archive has fewer bytes for the array than the array's header needs,
    this is an error. Bytes beyond the length in the archive's directory are not
    read.

    Attributes:
        shape: The array's shape.
        dtype: The array's dtype.
        num_bytes: The array's size.
    """

    def __init__(self, archive: zipfile.ZipFile, file: str, name: str) -> None:
        self._file = file
        self._name = name
        self._whole: np.ndarray | None = None
        self._next = 0
        with self._readable():
            info = archive.getinfo(f"{name}.npy")
            # zipfile would decompress other formats without a limit.
            if info.compress_type not in _COMPRESSIONS:
                raise ValueError("it is not compressed as NumPy does it")
            self._member = cast(zipfile.ZipExtFile, archive.open(info))
            version = np.lib.format.read_magic(self._member)
            if version not in _READ_HEADER:
                raise ValueError(f"it is of version {version} of the format")
            length = int.from_bytes(self._member.peek(4)[:4], "little")
            if version == (2, 0) and length > _MAX_HEADER_BYTES:
                raise ValueError(f"it has a header of {length} bytes")
            header = _READ_HEADER[version](self._member)
            self.shape, self._is_fortran, self.dtype = header
            if self.dtype.hasobject:
                raise ValueError("it holds Python objects")
            if min(self.shape, default=0) < 0:
                raise ValueError(f"it is of shape {self.shape}")
            self.num_bytes = math.prod(self.shape) * self.dtype.itemsize
            if self.num_bytes > info.file_size - self._member.tell():
                raise ValueError("it ends early")

    def text(self) -> str:
        """Returns the whole array, which contains a text."""
        with self._readable():
            if self.num_bytes > _MAX_METADATA_BYTES:
                raise ValueError(
                    f"it has {self.num_bytes} bytes, and at most "
                    f"{_MAX_METADATA_BYTES} are read"
                )
        whole = self._read_flat(math.prod(self.shape)).reshape(self.shape)
        self._end()
        return str(whole)

    def read(self, num_rows: int) -> np.ndarray:
        """Returns the next rows. REQUIRES: enough rows are left."""
        if self._is_fortran and len(self.shape) > 1:
            # In Fortran order each row is spread over the file, so the whole
            # array is read.
            if self._whole is None:
                flat = self._read_flat(math.prod(self.shape))
                self._whole = flat.reshape(self.shape[::-1]).T
            rows = self._whole[self._next : self._next + num_rows]
        else:
            width = self.shape[1:]
            flat = self._read_flat(num_rows * math.prod(width))
            rows = flat.reshape(num_rows, *width)
        self._next += num_rows
        if self._next == self.shape[0]:
            self._end()
        return rows

    def _end(self) -> None:
        with self._readable():
            self._member.read(1)  # zipfile checks the checksum at the end.

    def _read_flat(self, size: int) -> np.ndarray:
        num_bytes = size * self.dtype.itemsize
        with self._readable():
            data = self._member.read(num_bytes)
            if len(data) < num_bytes:
                raise ValueError("it ends early")
            return np.frombuffer(data, self.dtype)

    def _readable(self) -> contextlib.AbstractContextManager[None]:
        return _readable(self._file, f"array '{self._name}'")


# The compressions that NumPy writes.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# The header versions that NumPy writes for numbers; the third version is for
# names of fields.
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _read(file: str, layout: Layout) -> Iterator[Rows]:
    """Yields the rows of a file, after a check of metadata and shapes."""
    if not os.path.exists(file):
        raise FileNotFoundError(f"there is no file '{file}'")
    if not zipfile.is_zipfile(file):
        raise OSError(f"'{file}' is no .npz file, or it is damaged")
    with _readable(file, "the list of its arrays"):
        archive = zipfile.ZipFile(file)
    with archive:
        source = Source(layout, file)
        present = [
            name.removesuffix(".npy")
            for name in archive.namelist()
            if name.endswith(".npy")
        ]
        if "metadata" in present:
            source.check_state(_Array(archive, file, "metadata").text())
        source.check_names(present)
        arrays = {
            what: _Array(archive, file, name)
            for what, name in layout.names.items()
        }
        ids = arrays["ids"]
        if len(ids.shape) != 1:
            raise ValueError(
                f"'{file}': array 'ids' must be of rank 1, got shape "
                f"{ids.shape}"
            )
        if ids.dtype.kind not in "iu":
            source.refuse_ids(str(ids.dtype))
        num_rows = ids.shape[0]
        for what, width in layout.widths.items():
            if arrays[what].shape != (num_rows, width):
                raise ValueError(
                    f"'{file}': array '{what}' must be of shape "
                    f"{(num_rows, width)} for {num_rows} ids and table "
                    f"'{layout.table.name}', got {arrays[what].shape}"
                )
            source.check_floats(what, arrays[what].dtype)
        step = rows_per_call(sum(layout.widths.values()))
        # The loop runs once even without rows, to check checksums and dtypes.
        for begin in range(0, max(1, num_rows), step):
            size = min(step, num_rows - begin)
            yield source.to_rows(
                source.to_ids(ids.read(size)),
                {what: arrays[what].read(size) for what in layout.widths},
            )


# The errors that zipfile, its decompressors and NumPy raise for a damaged file.
# A damaged bit may also look like encryption or an unknown compression.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
)


@contextlib.contextmanager
def _readable(file: str, what: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        # Some of these errors have no message.
        why = str(error) or f"it is damaged ({type(error).__name__})"
        raise OSError(f"'{file}': {what} cannot be read: {why}") from error
