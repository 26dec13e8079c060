"""Base and delta exports: tables as files that serve."""

import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from tfswitch.cluster import Cluster, default_cluster

# Beneath a SavedModel.
MODEL_FILE = "assets/tfswitch_model.json"
MODEL_ROWS = "assets.extra/tfswitch"

ROW_FORMATS = ("float32", "float16", "int8")


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """Which rows are exported, by their show and click statistics.

    The rule of Paddle's CTR accessor, with its names and defaults
    (`paddle/fluid/distributed/ps/table/ctr_accessor.cc`). A base has the rows
    with a score of at least `base_threshold` that were seen within
    `delta_keep_days` days; a delta those of them whose score has grown by at
    least `delta_threshold` since they were last exported. What a row has
    gained counts as exported once the export is published.

    Args:
        base_threshold: Least score, at least 0.
        delta_threshold: Least gain of score, at least 0.
        delta_keep_days: Days, at least 0.

    Raises:
        ValueError: If a number is out of range.
    """

    base_threshold: float = 1.5
    delta_threshold: float = 0.25
    delta_keep_days: float = 16.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) and not isinstance(
                value, bool
            )
            if not (is_number and 0 <= value < float("inf")):
                raise ValueError(
                    f"`{field.name}` must be a number of at least 0. "
                    f"Received: {field.name}={value!r}"
                )


class ExportReport(NamedTuple):
    """What an export has written.

    Attributes:
        number: Of the export; of the last one if nothing is published.
        published: False for a delta if nothing has changed.
        num_rows: Rows in it.
        num_removed: Ids in it that lost their rows.
        bytes: Of the row files.
    """

    number: int
    published: bool
    num_rows: int
    num_removed: int
    bytes: int


def base(
    path: str | os.PathLike[str],
    *,
    tables: Iterable[Any] | None = None,
    row_format: str = "float32",
    rule: ScoreRule | None = None,
    keep: int | None = None,
    cluster: Cluster | None = None,
) -> ExportReport:
    """Exports all rows of tables, and starts to keep track of changes.

    Training may go on meanwhile: each row is whole, but two rows may be of
    different moments. The export appears under its number, one above the last
    in the folder, when it is complete.

    Args:
        path: A folder of exports on this machine, which is made if need be, or
            a SavedModel of `tfswitch.saved_model.save`, whose rows it then
            has.
        tables: Names, or `EmbeddingTable` objects. None means those of the
            SavedModel, or all that the cluster has. Those of the SavedModel
            must be among them.
        row_format: "float32", "float16", or "int8" with a scale per row.
        rule: Which rows; None means all.
        keep: Remove what is older than so many bases. None removes nothing.
        cluster: Where the tables are; by default that of `tfswitch.connect`.

    Returns:
        What has been written.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If another process is exporting to the folder, or a table
            does not count what `rule` goes by.
        KeyError: If there is no such table.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.export.base("exports")
    >>> tsw.export.delta("exports").published
    False
    """
    if row_format not in ROW_FORMATS:
        raise ValueError(
            f"`row_format` must be one of {', '.join(ROW_FORMATS)}. "
            f"Received: row_format={row_format!r}"
        )
    if keep is not None and (
        isinstance(keep, bool) or not isinstance(keep, int) or keep < 1
    ):
        raise ValueError(
            f"`keep` must be None or at least 1. Received: keep={keep!r}"
        )
    folder = _folder_of(path)
    present = cluster if cluster is not None else default_cluster()
    names = _names_of(tables, folder, present)
    options: dict[str, Any] = {
        "path": folder.rows,
        "delta": False,
        "tables": names,
        "row_format": row_format,
        "keep_bases": keep or 0,
    }
    return _publish(present, options, rule)


def delta(
    path: str | os.PathLike[str],
    *,
    rule: ScoreRule | None = None,
    cluster: Cluster | None = None,
) -> ExportReport:
    """Exports what has changed since the last export in a folder.

    It is of the tables, and in the format, of that export. Without changes
    nothing is published.

    Args:
        path: As for `base`.
        rule: Which rows; None means all that have changed. Ids that lost their
            rows are always in it.
        cluster: Where the tables are; by default that of `tfswitch.connect`.

    Returns:
        What has been written.

    Raises:
        RuntimeError: If there is no export to follow, or what has changed since
            is not known: the server was restarted, the table restored or made
            anew, or there are other servers. Export a base then. Else as
            `base`.
        KeyError: If a table is not there any more.
        ConnectionError, TimeoutError: If a server does not answer.
    """
    present = cluster if cluster is not None else default_cluster()
    options = {"path": _folder_of(path).rows, "delta": True}
    return _publish(present, options, rule)


class _Folder(NamedTuple):
    rows: str
    model_tables: list[str] | None


def _folder_of(path: str | os.PathLike[str]) -> _Folder:
    """The exports of a path, and the tables of a SavedModel there."""
    folder = os.path.abspath(os.fspath(path))
    try:
        with open(os.path.join(folder, MODEL_FILE), encoding="utf-8") as file:
            model = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return _Folder(folder, None)
    if "rows" not in model:
        raise ValueError(
            f"the model in {folder!r} looks rows up on servers, and has no "
            'exports. Save one with mode="embedded", or export to another '
            "folder."
        )
    rows = os.path.join(folder, os.path.dirname(MODEL_FILE), model["rows"])
    return _Folder(os.path.normpath(rows), sorted(model["tables"]))


def _names_of(
    tables: Iterable[Any] | None, folder: _Folder, cluster: Cluster
) -> list[str]:
    if isinstance(tables, str):
        raise ValueError(
            f"`tables` must be a list. Received: tables={tables!r}"
        )
    if tables is None:
        if folder.model_tables is not None:
            return folder.model_tables
        infos = json.loads(cluster._native.list_tables())
        names = [
            info["config"]["name"]
            for info in infos
            if not info["config"].get("layout")
        ]
        if not names:
            raise ValueError(f"{cluster.address!r} has no tables to export")
        return sorted(names)
    names = [getattr(table, "name", table) for table in tables]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "`tables` must have names or tables. Received: "
            f"tables={list(names)!r}"
        )
    missing = sorted(set(folder.model_tables or ()).difference(names))
    if missing:
        raise ValueError(
            f"the model that {folder.rows!r} belongs to looks up "
            f"{', '.join(map(repr, missing))} as well, and could not serve an "
            "export without. Leave `tables` out to export what it looks up. "
            f"Received: tables={names!r}"
        )
    return sorted(set(names))


def _publish(
    cluster: Cluster, options: dict[str, Any], rule: ScoreRule | None
) -> ExportReport:
    if rule is not None:
        if not isinstance(rule, ScoreRule):
            raise ValueError(
                "`rule` must be a tfswitch.export.ScoreRule. "
                f"Received: rule={rule!r}"
            )
        options = {**options, "rule": dataclasses.asdict(rule)}
    report = cluster._native.publish_export(json.dumps(options))
    return ExportReport(**json.loads(report))
