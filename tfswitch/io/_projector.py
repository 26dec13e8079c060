"""Rows and labels in the files of TensorBoard's projector."""

import json
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfswitch import statistics as statistics_lib
from tfswitch._settings._ranges import POSITIVE_INT, bad_argument
from tfswitch._table_summary import sample_rows
from tfswitch._types import TensorLike
from tfswitch.io._files import published
from tfswitch.io._layout import Layout
from tfswitch.ops.id_tensors import to_array
from tfswitch.table import EmbeddingTable

_CONFIG = "projector_config.pbtxt"

# The label of a row: a value, or one value for each column.
Label = Any
# Labels by id, or in the order of `ids`, or a function of an array of ids.
Metadata = (
    Mapping[Any, Label]
    | Sequence[Label]
    | Callable[[np.ndarray], Sequence[Label]]
)


def write_projector(
    log_dir: str | os.PathLike[str],
    table: EmbeddingTable,
    ids: TensorLike | None = None,
    *,
    top: int = 10_000,
    metadata: Metadata | None = None,
    columns: Sequence[str] | None = None,
) -> int:
    """Writes rows and labels for the projector of TensorBoard.

    Writes `projector/NAME/tensors.tsv` and `metadata.tsv`, where NAME is the
    table's, and adds them to `projector_config.pbtxt`.

    Args:
        log_dir: The folder that TensorBoard gets as `--logdir`, or one in it.
            It is made if it does not exist.
        table: The table.
        ids: The ids to write; those without a row read as `lookup` says. None
            means `top` rows.
        top: How many rows are written if `ids` is None. If the table has
            `statistics`, the rows with the highest `count` are written; to find
            them, all rows are read once. Otherwise a sample is written, like
            that of `EmbeddingTable.describe`.
        metadata: The labels: a dict from ids to labels, a sequence with one
            label for each of `ids`, or a function that gets an array of ids and
            returns their labels. A label is a value, or a list or tuple with a
            value for each column. An id without label, or with None, is its own
            label.
        columns: The names of the columns, if labels have several values. None
            means "label 1", "label 2" and so on.

    Returns:
        The number of rows written.

    Raises:
        ValueError: If an argument is out of range, the numbers of labels or
            columns do not fit, or there are no rows.
        OSError: If a file cannot be written.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.io.write_projector(
    ...     "logs", table, [7, 9], metadata={7: "Up", 9: "Cars"})
    2
    """
    Layout("array", table, slots=False)  # Checks the type of the table.
    top = POSITIVE_INT.check("top", top)
    is_ordered = not (
        metadata is None or isinstance(metadata, Mapping) or callable(metadata)
    )
    if ids is not None:
        given = to_array(ids, table._owner, "ids").reshape(-1)
        values = table.lookup(ids).numpy().reshape(-1, table.dim)
    elif is_ordered:
        kind = type(metadata).__name__
        raise bad_argument(
            "metadata", kind, "a dict or a function if there are no `ids`"
        )
    elif table.statistics is not None:
        given, values = _most_used(table, top)
    else:
        given, values = sample_rows(table, top)
    if not len(given):
        raise ValueError(
            f"table '{table.name}' has no rows to write, and the projector "
            "reads no empty file. Train it first, or pass `ids`"
        )
    lines = _metadata_lines(given, metadata, columns)
    quoted = urllib.parse.quote(table.name, safe="")
    folder = Path(log_dir) / "projector" / quoted
    folder.mkdir(parents=True, exist_ok=True)
    with published(folder / "tensors.tsv") as file:
        np.savetxt(file, values, fmt="%.9g", delimiter="\t")
    _write(folder / "metadata.tsv", "\n".join([*lines, ""]))
    _add_to_config(Path(log_dir) / _CONFIG, table.name, f"projector/{quoted}")
    return len(given)


def _most_used(
    table: EmbeddingTable, top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that were pushed most often, the first one first."""
    ids = np.zeros(0, np.int64)
    values = np.zeros((0, table.dim), np.float32)
    counts = np.zeros(0, np.float32)
    # Statistics are the last slots, and the first of them is the count.
    place = -statistics_lib._width(table.statistics)

    def keep(
        some_ids: np.ndarray, rows: np.ndarray, slots: np.ndarray | None
    ) -> None:
        nonlocal ids, values, counts
        assert slots is not None
        counts = np.concatenate([counts, slots[:, place]])
        # Equal counts are ordered by id, so that the result is always the same.
        joined = np.concatenate([ids, some_ids])
        kept = np.lexsort([joined, -counts])[:top]
        ids, counts = joined[kept], counts[kept]
        values = np.concatenate([values, rows])[kept]

    table._native.visit_rows(True, keep)
    return ids, values


def _metadata_lines(
    ids: np.ndarray,
    metadata: Metadata | None,
    columns: Sequence[str] | None,
) -> list[str]:
    keys = [
        each.decode(errors="replace") if isinstance(each, bytes) else each
        for each in ids.tolist()
    ]
    names = [str(key) for key in keys]
    labels: Sequence[Any] = names
    if isinstance(metadata, Mapping):
        labels = [metadata.get(key) for key in keys]
    elif metadata is not None:
        labels = list(metadata(ids) if callable(metadata) else metadata)
    if len(labels) != len(ids):
        raise ValueError(
            f"`metadata` must have one label for each of {len(ids)} ids. "
            f"Received: {len(labels)} labels"
        )
    cells = [
        list(each) if isinstance(each, (list, tuple, np.ndarray)) else [each]
        for each in labels
    ]
    width = len(columns or max(cells, key=len))
    for name, row in zip(names, cells, strict=True):
        if row == [None]:
            row[:] = [name, *[""] * (width - 1)]
        if len(row) != width:
            raise ValueError(
                f"the label of id {name} must have {width} values, as the "
                f"columns have. Received: {row!r}"
            )
    if width > 1:  # Files of one column have no header.
        names = [f"label {i}" for i in range(1, width + 1)]
        cells.insert(0, list(columns or names))
    return ["\t".join(map(_text, row)) for row in cells]


def _text(value: Any) -> str:
    """Returns a value as a cell: in one line, without tabs, never blank."""
    text = str(value).replace("\\", "\\\\").replace("\t", "\\t")
    # The projector removes blanks from both ends of a line, and skips a line
    # that is then empty.
    return "\\n".join(text.splitlines()).strip() or "-"


def _write(path: Path, text: str) -> None:
    with published(path) as file:
        file.write_text(text, encoding="utf-8")


def _add_to_config(path: Path, name: str, folder: str) -> None:
    # A JSON string is a string of protobuf's text format, too.
    entry = (
        "embeddings {\n"
        f"  tensor_name: {json.dumps(name, ensure_ascii=False)}\n"
        f"  tensor_path: {json.dumps(folder + '/tensors.tsv')}\n"
        f"  metadata_path: {json.dumps(folder + '/metadata.tsv')}\n"
        "}\n"
    )
    present = path.read_text(encoding="utf-8") if path.exists() else ""
    if entry not in present:
        between = "\n" if present and not present.endswith("\n") else ""
        _write(path, present + between + entry)
