"""Rows in TFRecord files, a `tf.train.Example` for each."""

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message as protobuf

from tfswitch._connection._rows import Rows, rows_per_call
from tfswitch._settings._ranges import bad_argument
from tfswitch.io._files import Paths, find_files, published
from tfswitch.io._layout import Layout, Source
from tfswitch.table import EmbeddingTable

# The longest record that is read. A row of 4,096 floats with slots has about 50
# kB.
_MAX_RECORD_BYTES = 16 << 20
# The bytes read at once to look at the lengths of records.
_PIECE_BYTES = 1 << 20


def write_tfrecord(
    table: EmbeddingTable,
    path: str | os.PathLike[str],
    *,
    slots: bool = False,
    id_feature: str = "id",
    embedding_feature: str = "embedding",
    compression: str | None = None,
) -> int:
    """Writes all rows to a TFRecord file, a `tf.train.Example` for each.

    The features are an int64 list of the id, a float list of the embedding, and
    with `slots` a float list `slots`, if the table has any.

    Args:
        table: The table.
        path: The file; an existing file is replaced.
        slots: Whether to write optimizer state and statistics too.
        id_feature: Name of the feature of ids.
        embedding_feature: Name of the feature of embeddings.
        compression: None or "gzip".

    Returns:
        The number of rows written.

    Raises:
        ValueError: If an argument is out of range.
        OSError: If the file cannot be written, such as on a full disk. The
            message names the file; an existing file stays.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.io.write_tfrecord(table, "user.tfrecord")
    3
    """
    layout = Layout(
        "feature", table, slots=slots, ids=id_feature, values=embedding_feature
    )
    options = tf.io.TFRecordOptions(_compression_type(compression))
    with published(path) as temporary:
        try:
            with tf.io.TFRecordWriter(str(temporary), options) as writer:

                def write(rows: dict[str, np.ndarray]) -> None:
                    for example in _examples(rows, layout):
                        writer.write(example.SerializeToString())

                return layout.visit(write)
        except tf.errors.OpError as error:
            raise OSError(
                f"'{os.fspath(path)}' cannot be written: {error.message}"
            ) from error


def read_tfrecord(
    table: EmbeddingTable,
    path: Paths,
    *,
    slots: bool = False,
    id_feature: str = "id",
    embedding_feature: str = "embedding",
    compression: str | None = None,
) -> int:
    """Sets the rows of TFRecord files of `tf.train.Example`.

    Reads and checks one batch of records at a time, and then sets its rows. If
    a later batch has an error, the rows of earlier batches stay set, and the
    message says how many.

    The files do not name the optimizer of `slots`, so only the number of slots
    is checked. Read slots only into a table with the same optimizer and
    statistics.

    Args:
        table: The table.
        path: A file, a pattern such as "part-*", whose files are read in the
            order of their names, or a list of these.
        slots: Whether to set optimizer state and statistics too. Otherwise
            present rows keep their state, and new rows get the initial state.
        id_feature: Name of the feature of ids: an int64 list with one value.
        embedding_feature: Name of the feature of embeddings: a float list with
            `dim` values.
        compression: None or "gzip".

    Returns:
        The number of records in the files.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If a file is damaged, or has another compression, or a record
            of more than 16 MiB.
        ValueError: If a feature is missing, or has another type or length; if a
            value is NaN or Inf.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.io.read_tfrecord(
    ...     table, "user-*.tfrecord.gz", compression="gzip")
    1500000
    """
    layout = Layout(
        "feature", table, slots=slots, ids=id_feature, values=embedding_feature
    )
    compression_type = _compression_type(compression)
    files = find_files(path)
    return layout.assign(
        rows for file in files for rows in _read(file, compression_type, layout)
    )


def _examples(
    rows: dict[str, np.ndarray], layout: Layout
) -> Iterator[tf.train.Example]:
    for row, row_id in enumerate(rows["ids"].tolist()):
        example = tf.train.Example()
        features = example.features.feature
        features[layout.names["ids"]].int64_list.value.append(row_id)
        for what in layout.widths:
            floats = rows[what][row].tolist()
            features[layout.names[what]].float_list.value.extend(floats)
        yield example


def _compression_type(compression: Any) -> str:
    if compression not in (None, "gzip"):
        raise bad_argument("compression", compression, 'None or "gzip"')
    return "" if compression is None else "GZIP"


def _check_lengths(file: str, compression_type: str) -> None:
    """Raises OSError if a record is longer than any row, or is cut off.

    Without this check TensorFlow would end the process if there is no memory
    for a record. It would also accept a file in which the header of the last
    record is cut off. For all other damage it raises an error.
    """
    opener = gzip.open if compression_type else open
    why = ""
    try:
        with opener(file, "rb") as stream:
            piece, place = b"", 0  # A record begins at `place`.
            while not why:
                if place + 8 > len(piece):
                    more = stream.read(_PIECE_BYTES)
                    if not more and place == len(piece):
                        return
                    if not more:
                        why = "its last record is cut off"
                    piece, place = (
                        piece[place:] + more,
                        max(0, place - len(piece)),
                    )
                    continue
                (length,) = struct.unpack_from("<Q", piece, place)
                if length > _MAX_RECORD_BYTES:
                    why = (
                        f"a record has {length} bytes, and at most "
                        f"{_MAX_RECORD_BYTES} are read"
                    )
                # In the file a record is: a length, its checksum of 4 bytes,
                # the bytes, and their checksum of 4 bytes.
                place += 16 + length
    except (EOFError, OSError, zlib.error):
        return
    raise OSError(
        f"'{file}' is no TFRecord file, compressed otherwise than "
        f"{compression_type or None}, or damaged: {why}"
    )


def _read(file: str, compression_type: str, layout: Layout) -> Iterator[Rows]:
    _check_lengths(file, compression_type)
    source = Source(layout, file)
    features = {
        name: tf.io.RaggedFeature(
            tf.int64 if what == "ids" else tf.float32, row_splits_dtype=tf.int64
        )
        for what, name in layout.names.items()
    }
    dataset = tf.data.TFRecordDataset(file, compression_type)
    batches = iter(dataset.batch(rows_per_call(sum(layout.widths.values()))))
    while True:
        try:
            records = next(batches, None)
        except tf.errors.OpError as error:
            raise OSError(
                f"'{file}' is no TFRecord file, compressed otherwise than "
                f"{compression_type or None}, or damaged: {error.message}"
            ) from error
        if records is None:
            return
        try:
            parsed = tf.io.parse_example(records, features)
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
            # TensorFlow quotes the record in its message. If the record is not
            # UTF-8, this leads to a UnicodeDecodeError.
            _refuse(records, file, source, layout)
            raise ValueError(f"'{file}': {error}") from error
        ids = _values_of(parsed, source, layout, "ids")
        ids = source.to_ids(ids.reshape(-1))
        yield source.to_rows(
            ids,
            {
                what: _values_of(parsed, source, layout, what, ids)
                for what in layout.widths
            },
        )


def _values_of(
    parsed: dict[str, tf.RaggedTensor],
    source: Source,
    layout: Layout,
    what: str,
    ids: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the values of a feature, a row for each record."""
    values = parsed[layout.names[what]]
    lengths = values.row_lengths().numpy()
    if not lengths.any():  # No record of the batch has the feature.
        source.refuse_missing(layout.names[what])
    source.check_lengths(what, lengths, ids)
    width = layout.widths.get(what, 1)
    return values.flat_values.numpy().reshape(len(lengths), width)


def _refuse(
    records: tf.Tensor, file: str, source: Source, layout: Layout
) -> None:
    """Raises ValueError for the first record whose features have other types.

    TensorFlow's own message does not name the record.
    """
    for row, record in enumerate(records.numpy()):
        try:
            example = tf.train.Example.FromString(record)
        except protobuf.DecodeError as error:
            raise ValueError(
                f"'{file}': there is no tf.train.Example {source.where(row)}"
            ) from error
        for what, name in layout.names.items():
            kind = "int64_list" if what == "ids" else "float_list"
            feature = example.features.feature.get(name)
            got = None if feature is None else feature.WhichOneof("kind")
            if got not in (None, kind):
                raise ValueError(
                    f"'{file}': feature '{name}' must be of kind {kind}, got "
                    f"{got} {source.where(row)}"
                )
