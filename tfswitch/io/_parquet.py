"""Rows in Parquet files, by pyarrow."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from tfswitch._connection._rows import Rows, rows_per_call
from tfswitch._settings._ranges import POSITIVE_INT, bad_argument
from tfswitch.io._files import Paths, find_files, published
from tfswitch.io._layout import Layout, Source
from tfswitch.table import EmbeddingTable

# The key of the schema's metadata under which the table is described.
_METADATA_KEY = b"tfswitch"

_COMPRESSIONS = (None, "snappy", "gzip", "zstd", "lz4", "brotli")
_GROUP_ROWS = POSITIVE_INT._replace(text="None or a positive integer")
_GROUP_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20


def write_parquet(
    table: EmbeddingTable,
    path: str | os.PathLike[str],
    *,
    slots: bool = False,
    id_column: str = "id",
    embedding_column: str = "embedding",
    compression: str | None = "snappy",
    rows_per_group: int | None = None,
) -> int:
    """Writes all rows to a Parquet file. Needs `pyarrow`.

    The columns are an int64 and a `fixed_size_list<float32>[dim]`, and with
    `slots` the column `slots`, of the same kind, if the table has any. The
    schema's metadata has a JSON object under "tfswitch": the table's name, dim,
    optimizer and statistics.

    Args:
        table: The table.
        path: The file; an existing file is replaced.
        slots: Whether to write optimizer state and statistics too.
        id_column: Name of the column of ids.
        embedding_column: Name of the column of embeddings.
        compression: "snappy", "gzip", "zstd", "lz4", "brotli" or None.
        rows_per_group: Rows in a row group; None means as many as have 16 MiB.

    Returns:
        The number of rows written.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If an argument is out of range.
        OSError: If the file cannot be written, such as on a full disk. The
            message names the file; an existing file stays.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.io.write_parquet(table, "user.parquet")
    3
    >>> pandas.read_parquet("user.parquet").columns.tolist()
    ['id', 'embedding']
    """
    pa, pq = _import_pyarrow()
    layout = Layout(
        "column", table, slots=slots, ids=id_column, values=embedding_column
    )
    if compression not in _COMPRESSIONS:
        expected = f"one of {_COMPRESSIONS}"
        raise bad_argument("compression", compression, expected)
    if rows_per_group is None:
        floats = sum(layout.widths.values())
        rows_per_group = max(1, _GROUP_BYTES // (8 + 4 * floats))
    else:
        _GROUP_ROWS.check("rows_per_group", rows_per_group)
    schema = _schema_of(pa, layout)
    with (
        published(path) as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression=compression or "none",
            # Writes no dictionaries, because values hardly ever repeat, and no
            # statistics, because rows have no order.
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        ) as writer,
    ):
        waiting = schema.empty_table()

        def write(rows: dict[str, np.ndarray]) -> None:
            nonlocal waiting
            columns = [pa.array(rows["ids"])]
            for what, width in layout.widths.items():
                values = pa.array(rows[what].reshape(-1))
                columns.append(pa.FixedSizeListArray.from_arrays(values, width))
            waiting = pa.concat_tables(
                [waiting, pa.Table.from_arrays(columns, schema=schema)]
            )
            full = waiting.num_rows - waiting.num_rows % rows_per_group
            if full:
                writer.write_table(waiting.slice(0, full), rows_per_group)
                waiting = waiting.slice(full)

        num_rows = layout.visit(write)
        if waiting.num_rows:
            writer.write_table(waiting, rows_per_group)
    return num_rows


def read_parquet(
    table: EmbeddingTable,
    path: Paths,
    *,
    slots: bool = False,
    id_column: str = "id",
    embedding_column: str = "embedding",
) -> int:
    """Sets the rows of Parquet files. Needs `pyarrow`.

    Reads a batch of rows at a time, so the files may be larger than the memory.
    The columns of all files are checked before the first row is set, and each
    batch before its rows are set. If a later batch has an error, the rows of
    earlier batches stay set, and the message says how many.

    Args:
        table: The table.
        path: A file, a folder whose `.parquet` files are read in the order of
            their names, a pattern such as "part-*.parquet", or a list of these.
        slots: Whether to set optimizer state and statistics too. Otherwise
            present rows keep their state, and new rows get the initial state.
        id_column: Name of the column of ids: integers.
        embedding_column: Name of the column of embeddings: lists of `dim`
            floats, of fixed size or not, of 16, 32 or 64 bits.

    Returns:
        The number of rows in the files.

    Raises:
        ImportError: If pyarrow is not installed.
        FileNotFoundError: If there is no such file.
        OSError: If a file is damaged, or no Parquet file.
        ValueError: If a column is missing, or has another type or length of
            lists; if a value is null, NaN or Inf; if `slots` are of another
            optimizer.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.io.read_parquet(
    ...     table, "exports/", id_column="user_id", embedding_column="vector")
    1500000
    """
    pa, pq = _import_pyarrow()
    layout = Layout(
        "column", table, slots=slots, ids=id_column, values=embedding_column
    )
    files = find_files(path, ".parquet")
    for file in files:
        with _open(pa, pq, file) as parquet:
            schema = parquet.schema_arrow
        source = Source(layout, file)
        source.check_state((schema.metadata or {}).get(_METADATA_KEY))
        _check_schema(pa, schema, source, layout)
    return layout.assign(
        rows for file in files for rows in _read(pa, pq, file, layout)
    )


def _import_pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"Parquet files need pyarrow, and it cannot be imported ({error}). "
            "Install it: pip install 'pyarrow>=16.1'"
        ) from error
    return pyarrow, pyarrow.parquet


def _schema_of(pa: ModuleType, layout: Layout) -> Any:
    floats = [
        (layout.names[what], pa.list_(pa.float32(), width))
        for what, width in layout.widths.items()
    ]
    return pa.schema(
        [(layout.names["ids"], pa.int64()), *floats],
        metadata={_METADATA_KEY: layout.metadata()},
    )


def _open(pa: ModuleType, pq: ModuleType, file: str) -> Any:
    with _readable(pa, file):
        return pq.ParquetFile(
            file,
            # Without a buffer size pyarrow reads a whole row group at once,
            # which may be the whole file.
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,
        )


@contextlib.contextmanager
def _readable(pa: ModuleType, file: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise OSError(
            f"'{file}' is no Parquet file, or it is damaged: {error}"
        ) from error


def _check_schema(
    pa: ModuleType, schema: Any, source: Source, layout: Layout
) -> None:
    """Raises ValueError unless a file has the columns, of the right types."""
    source.check_names(schema.names)
    ids = schema.field(layout.names["ids"]).type
    if not pa.types.is_integer(ids):
        source.refuse_ids(str(ids))
    for what in layout.widths:
        lists = schema.field(layout.names[what]).type
        has_one_size = pa.types.is_fixed_size_list(lists)
        if not (
            has_one_size
            or pa.types.is_list(lists)
            or pa.types.is_large_list(lists)
        ) or not pa.types.is_floating(lists.value_type):
            source.refuse_floats(what, str(lists))
        if has_one_size:
            source.check_width(what, lists.list_size)


def _read(
    pa: ModuleType, pq: ModuleType, file: str, layout: Layout
) -> Iterator[Rows]:
    source = Source(layout, file)
    with _open(pa, pq, file) as parquet:
        batches = parquet.iter_batches(
            batch_size=rows_per_call(sum(layout.widths.values())),
            columns=list(layout.names.values()),
        )
        while True:
            with _readable(pa, file):
                batch = next(batches, None)
            if batch is None:
                return
            column = batch.column(layout.names["ids"])
            if column.null_count:
                source.refuse_null("ids", _first_null(column))
            ids = source.to_ids(column.to_numpy())
            yield source.to_rows(
                ids,
                {
                    what: _values_of(
                        batch.column(layout.names[what]),
                        source,
                        what,
                        width,
                        ids,
                    )
                    for what, width in layout.widths.items()
                },
            )


def _values_of(
    lists: Any, source: Source, what: str, width: int, ids: np.ndarray
) -> np.ndarray:
    """Returns the floats of a column of lists, `[len(ids), width]`."""
    if lists.null_count:
        source.refuse_null(what, _first_null(lists), ids)
    lengths = lists.value_lengths().to_numpy()
    source.check_lengths(what, lengths, ids)
    # Not `lists.values`, which also has the floats of other rows if `lists` is
    # a slice.
    floats = lists.flatten()
    if floats.null_count:
        row = _first_null(floats) // int(lengths[0])
        source.refuse_null(what, row, ids)
    return floats.to_numpy().reshape(len(ids), width)


def _first_null(array: Any) -> int:
    return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
