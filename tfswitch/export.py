"""Base and delta exports: files of table rows, for serving."""

import atexit
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from absl import logging

from tfswitch import _native
from tfswitch._connection._control_calls import call, integers
from tfswitch._settings._ranges import bad_argument, check_seconds, is_number
from tfswitch._types import TableOrName, Variable
from tfswitch.cluster import Cluster, cluster_of, default_cluster, names_of

__all__ = ["ExportReport", "Schedule", "ScoreRule", "base", "delta"]

# Paths inside a SavedModel.
_MODEL_FILE = "assets/tfswitch_model.json"
_MODEL_ROWS = "assets.extra/tfswitch"

_ROW_FORMATS = ("float32", "float16", "int8")

# The errors with which an export may fail although the next export may succeed.
_FAILURES = (KeyError, OSError, RuntimeError, ValueError)

# How long `stop`, and the end of the program, wait for an export that runs in a
# thread. The next export removes the files of an interrupted export.
_STOP_SECS = 3600.0
_EXIT_SECS = 5.0

# Dense variables that an optimizer of this process steps together with a table.
# The outer key has the address of the table's cluster and the table's name; the
# inner key is the `id` of the variable.
_stepped: dict[tuple[str, str], weakref.WeakValueDictionary[int, Any]] = {}
_models_told: set[str] = set()  # Models that a warning has named.


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """Selects the exported rows by their show and click statistics.

    This is the rule of Paddle's CTR accessor, with its names and defaults
    (`paddle/fluid/distributed/ps/table/ctr_accessor.cc`). A base has the rows
    with a score of at least `base_threshold` that were seen within
    `delta_keep_days` days. A delta has only such rows whose score has also
    grown by at least `delta_threshold` since they were last exported. A row
    counts as exported once the export is published.

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
            if not (is_number(value, int, float) and 0 <= value < math.inf):
                raise bad_argument(field.name, value, "a number of at least 0")


class ExportReport(NamedTuple):
    """The result of an export.

    Attributes:
        number: The number of this export, or of the last one if nothing is
            published.
        published: False if this is a delta and nothing has changed.
        num_rows: The number of rows in the export.
        num_removed: The number of ids in the export that lost their rows.
        bytes: The size of the row files.
        kind: "base" or "delta".
        why_base: Why a `Schedule` has written a base, although a delta was due;
            else empty.
    """

    number: int
    published: bool
    num_rows: int
    num_removed: int
    bytes: int
    kind: str
    why_base: str

    def __str__(self) -> str:
        if not self.published:
            return f"nothing has changed since export {self.number}"
        why = f", because {self.why_base}" if self.why_base else ""
        return (
            f"{self.kind} {self.number}: {self.num_rows} rows, "
            f"{self.num_removed} removed{why}"
        )


def base(
    path: str | os.PathLike[str],
    *,
    tables: Iterable[TableOrName] | None = None,
    row_format: str | None = None,
    rule: ScoreRule | Literal["all"] | None = None,
    keep: int | None = None,
    cluster: Cluster | None = None,
) -> ExportReport:
    """Exports all rows of tables, and starts to keep track of changes.

    Training may continue meanwhile. Each row is exported as it was at one
    moment, but the moments of two rows may differ. A complete export appears in
    the folder under the next free number.

    Args:
        path: A folder of exports on this machine, which is made if it does not
            exist. Or a SavedModel of `tfswitch.saved_model.save`, which then
            serves the exported rows.
        tables: Names, or table objects. If `path` is a SavedModel, all tables
            of the model must be among `tables`, and None means exactly the
            model's tables. In other folders, None means all tables of the
            cluster and of the previous export. It is an error if a server has
            lost one of these tables.
        row_format: "float32", "float16", or "int8" with a scale per row. None
            means the format of the previous export in the folder, or "float32".
        rule: Which rows are exported; "all" means all rows. None means the rule
            of the previous export or, without one, all rows.
        keep: How many bases are kept, with their deltas; older files are
            removed. None removes nothing.
        cluster: Where the tables are. By default the cluster of the table
            objects; with names only, the one of `tfswitch.connect`.

    Returns:
        The result of the export.

    Raises:
        ValueError: If an argument is out of range, or a table object is of
            another cluster.
        RuntimeError: If another process is exporting to the folder, or a table
            does not count the numbers that `rule` needs.
        KeyError: If a table does not exist, or there are no tables at all.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.export.base("exports")
    >>> tsw.export.delta("exports").published
    False
    """
    options = _options_of(row_format, rule, keep)
    folder = _folder_of(path)
    given = None if tables is None else _checked_tables(tables)
    options.update(_names_of(given, folder))
    return _publish(cluster_of(given or (), cluster), folder, options)


def delta(
    path: str | os.PathLike[str],
    *,
    cluster: Cluster | None = None,
) -> ExportReport:
    """Exports the changes since the last export in a folder.

    The delta has the tables, the format and the rule of that export. Ids that
    have lost their rows are always in the delta. Without changes nothing is
    published.

    The processes that keep the tables remember which rows have changed. A
    restart, a restore or `load_model` makes the processes forget these changes.
    The next delta then compares all rows with the exported files, which takes
    no longer than a base. If there is a rule, this delta has all rows that a
    base would have.

    A delta has no dense weights. If this process has trained dense weights of a
    SavedModel since it was saved, a warning names them, once for each model.

    Args:
        path: As for `base`.
        cluster: The cluster of the tables. By default that of
            `tfswitch.connect`.

    Returns:
        The result of the export.

    Raises:
        RuntimeError: If there is no earlier export. If the changes were
            forgotten and most of the exported ids have no row any more, as in a
            table that was not loaded. Also as for `base`.
        KeyError: If a table does not exist any more.
        ConnectionError, TimeoutError: If a server does not answer.
    """
    present = cluster if cluster is not None else default_cluster()
    return _publish(present, _folder_of(path), {"delta": True})


class Schedule:
    """Exports to a folder again and again: bases, and deltas between them.

    `export` writes the export that is due; `run` and `start` do so at
    intervals. A failed export is reported and tried again the next time.

    A base is written in place of a delta if the delta cannot follow the last
    export: a file is damaged, a table was made again without its rows, or the
    last export had other tables, another format or another rule. A missing
    table is an error, so that no base leaves it out. If a due base fails, a
    delta is written meanwhile.

    Thread-safe. Training may continue meanwhile, as for `base`. One process at
    a time exports to a folder.

    Args:
        path: As for `base`.
        base_every_secs: A base is written when the last base is this many
            seconds old. None means that a base is written only if a delta
            cannot follow.
        tables: As for `base`. If None, a new table also leads to a base, except
            in a SavedModel.
        row_format: As for `base`.
        rule: As for `base`.
        keep_bases: As `keep` of `base`.
        cluster: As for `base`; or a function that connects and returns a
            cluster. After an error of this function the next export calls it
            again.
        log_fn: Called after each export of `run`, `start` or `try_export` with
            its result or its error. By default both are logged. If `log_fn`
            raises an error, that is logged.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> schedule = tsw.export.Schedule("exports", base_every_secs=86400)
    >>> schedule.start(every_secs=30)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        base_every_secs: float | None = None,
        tables: Iterable[TableOrName] | None = None,
        row_format: str | None = None,
        rule: ScoreRule | Literal["all"] | None = None,
        keep_bases: int | None = None,
        cluster: Cluster | Callable[[], Cluster] | None = None,
        log_fn: Callable[[ExportReport | Exception], None] | None = None,
    ) -> None:
        if base_every_secs is not None:
            check_seconds("base_every_secs", base_every_secs)
        self._options = _options_of(row_format, rule, keep_bases, "keep_bases")
        self._path = path
        self._base_every_secs = base_every_secs
        self._tables = None if tables is None else _checked_tables(tables)
        # Connects only once, so a change of the default cluster has no effect.
        self._connect = functools.cache(_connector(cluster, self._tables))
        self._log_fn = log_fn if log_fn is not None else _log
        self._export_lock = threading.Lock()
        self._thread_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def export(self) -> ExportReport:
        """Writes a base if one is due, else a delta.

        Returns:
            The result of the export.

        Raises:
            As `base`. If a base was due, a delta may have been written instead.
        """
        report, failure = self._export()
        if failure is not None:
            raise failure
        return report

    def try_export(self) -> bool:
        """Exports as `export`, and passes the result or the error to `log_fn`.

        Returns:
            Whether there was no error.
        """
        # Catches any error, because the next export may succeed.
        try:
            report, failure = self._export()
        except Exception as error:
            self._try_log(error)
            return False
        if failure is not None:
            self._try_log(failure)
        self._try_log(report)
        return failure is None

    def run(self, every_secs: float, wait: Callable[[float], bool]) -> None:
        """Exports now, and then at intervals.

        Args:
            every_secs: Seconds from the start of one export to the start of
                the next. If an export takes longer, the next starts at once.
            wait: A function that is called with the seconds to wait, and
                returns True to end `run`.
        """
        check_seconds("every_secs", every_secs)
        due = time.monotonic()
        while True:
            self.try_export()
            due = max(due + every_secs, time.monotonic())
            if wait(max(due - time.monotonic(), 0.0)):
                return

    def start(self, every_secs: float) -> None:
        """Starts a thread that exports at intervals, first after one interval.

        The thread ends with `stop`, or with the program.

        Args:
            every_secs: As for `run`.

        Raises:
            ValueError: If `every_secs` is out of range.
            RuntimeError: If the thread has been started already.
        """
        check_seconds("every_secs", every_secs)
        with self._thread_lock:
            if self._thread is not None:
                raise RuntimeError(
                    f"exports to {os.fspath(self._path)!r} have been started "
                    "already; call stop() first"
                )
            self._is_over.clear()

            def run() -> None:
                if not self._is_over.wait(every_secs):
                    self.run(every_secs, self._is_over.wait)

            # A daemon thread: at exit Python waits for all other threads before
            # it calls `_stop_at_exit`.
            self._thread = threading.Thread(
                target=run, name="tfswitch_export", daemon=True
            )
            self._thread.start()
            atexit.register(self._stop_at_exit)

    def stop(self, timeout_secs: float = _STOP_SECS) -> None:
        """Ends the thread when its present export is written.

        Args:
            timeout_secs: The longest wait, in seconds.

        Raises:
            TimeoutError: If the export is still being written after this time.
        """
        with self._thread_lock:
            if self._thread is None:
                return
            self._is_over.set()
            self._thread.join(timeout_secs)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"an export to {os.fspath(self._path)!r} has not ended "
                    f"within {timeout_secs:g} s"
                )
            self._thread = None
            atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        # In a forked child the thread does not run, and `_thread_lock` may stay
        # locked.
        if self._thread is None or not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            self.stop(_EXIT_SECS)

    def _export(self) -> tuple[ExportReport, Exception | None]:
        """Returns the result and, if a due base has failed, its error."""
        # In a forked child the lock may belong to a thread of the parent.
        _native.check_process()
        with self._export_lock:
            folder = _folder_of(self._path)
            options = {
                **self._options,
                **_names_of(self._tables, folder),
            }
            a_delta = {**options, "delta": True}
            cluster = self._connect()
            if not self._is_base_due(folder.rows):
                a_delta["base_if_broken"] = True
                return _publish(cluster, folder, a_delta), None
            try:
                return _publish(cluster, folder, options), None
            except Exception as error:
                failure = error
            # Until a base succeeds, deltas keep the served model up to date.
            try:
                return _publish(cluster, folder, a_delta), failure
            except Exception:
                raise failure from None

    def _try_log(self, result: ExportReport | Exception) -> None:
        if isinstance(result, Exception) and not isinstance(result, _FAILURES):
            logging.error(
                "tfswitch: an unexpected error of an export", exc_info=result
            )
        try:
            self._log_fn(result)
        except Exception:
            logging.exception("tfswitch: the `log_fn` of an export has failed")

    def _is_base_due(self, rows: str) -> bool:
        created = _last_base_seconds(rows)
        if created is None:
            return True
        if self._base_every_secs is None:
            return False
        return time.time() - created >= self._base_every_secs


def _connector(
    cluster: Cluster | Callable[[], Cluster] | None,
    tables: list[TableOrName] | None,
) -> Callable[[], Cluster]:
    objects = [each for each in tables or () if not isinstance(each, str)]
    if callable(cluster):
        connect = cluster
        return lambda: cluster_of(objects, connect())
    if objects:
        cluster_of(objects, cluster)  # Reports mistakes at once.
    return lambda: cluster_of(objects, cluster)


def _log(result: ExportReport | Exception) -> None:
    if isinstance(result, Exception):
        logging.warning(
            "tfswitch: an export has failed, and is tried again the next "
            "time: %s",
            _describe(result),
        )
    else:
        logging.info("tfswitch: %s", result)


def _describe(error: Exception) -> str:
    """Returns the text of an error, without the quotes of a KeyError."""
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    return str(error)


def _last_base_seconds(rows: str) -> float | None:
    """Returns the start of the last base, in seconds since 1970, or None."""
    try:
        names = os.listdir(rows)
    except FileNotFoundError:
        return None
    bases = [name for name in names if re.fullmatch(r"base-\d{8,}", name)]
    if not bases:
        return None
    last = max(bases, key=lambda name: int(name.removeprefix("base-")))
    try:
        with open(
            os.path.join(rows, last, "manifest.json"), encoding="utf-8"
        ) as file:
            return int(json.load(file)["content"]["created_ms"]) / 1000
    except (OSError, ValueError, LookupError, TypeError):
        return None  # The base is damaged, so no delta can follow it.


def _options_of(
    row_format: str | None,
    rule: ScoreRule | Literal["all"] | None,
    keep: int | None,
    keep_name: str = "keep",
) -> dict[str, Any]:
    """Checks and returns those options of a base that need no cluster."""
    if row_format is not None and row_format not in _ROW_FORMATS:
        expected = f"None or one of {', '.join(_ROW_FORMATS)}"
        raise bad_argument("row_format", row_format, expected)
    if keep is not None and not (is_number(keep, int) and keep >= 1):
        raise bad_argument(keep_name, keep, "None or at least 1")
    options: dict[str, Any] = {"delta": False, "keep_bases": keep or 0}
    if row_format is not None:
        options["row_format"] = row_format
    if isinstance(rule, ScoreRule):
        options["rule"] = dataclasses.asdict(rule)
    elif rule == "all":
        options["all_rows"] = True
    elif rule is not None:
        raise bad_argument(
            "rule", rule, 'None, "all" or a tfswitch.export.ScoreRule'
        )
    return options


class _Folder(NamedTuple):
    path: str
    rows: str
    model_tables: list[str] | None


def _folder_of(path: str | os.PathLike[str]) -> _Folder:
    """Finds the exports of a path, and the tables of a SavedModel."""
    folder = os.path.abspath(os.fspath(path))
    try:
        with open(os.path.join(folder, _MODEL_FILE), encoding="utf-8") as file:
            model = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        versions = _versions_in(folder)
        if versions:
            raise ValueError(
                f"{folder!r} has versions of a model: "
                f"{', '.join(map(str, versions))}. Give the path of one of "
                "them; servers of versions serve the highest one. Received: "
                f"path={os.fspath(path)!r}; write "
                f"{os.path.join(os.fspath(path), str(versions[-1]))!r}"
            ) from None
        return _Folder(folder, folder, None)
    if model.get("version") != 2:
        raise ValueError(
            f"the model in {folder!r} has version {model.get('version')!r} of "
            "its format, and this tfswitch reads version 2. Save it again"
        )
    if "embedded" not in model:
        raise ValueError(
            f"the model in {folder!r} looks rows up on servers, and has no "
            'exports. Save one with mode="embedded", or export to another '
            "folder."
        )
    rows = os.path.join(
        folder, os.path.dirname(_MODEL_FILE), model["embedded"]["rows"]
    )
    return _Folder(folder, os.path.normpath(rows), sorted(model["tables"]))


def _versions_in(folder: str) -> list[int]:
    """Returns the version numbers of a folder's SavedModels with rows."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(
            int(name)
            for name in os.listdir(folder)
            if re.fullmatch("[1-9][0-9]*", name)
            and os.path.exists(os.path.join(folder, name, _MODEL_FILE))
        )
    return []


def _names_of(
    tables: list[TableOrName] | None, folder: _Folder
) -> dict[str, Any]:
    """Returns the fields of an export request that name its tables."""
    if tables is None:
        if folder.model_tables is None:
            return {"all_tables": True}
        return {"tables": folder.model_tables}
    names = sorted(set(names_of("tables", tables)))
    missing = sorted(set(folder.model_tables or ()).difference(names))
    if missing:
        raise ValueError(
            f"the model that {folder.rows!r} belongs to looks up "
            f"{', '.join(map(repr, missing))} as well, and could not serve an "
            "export without. Leave `tables` out to export what it looks up. "
            f"Received: tables={names!r}"
        )
    return {"tables": names}


def _checked_tables(tables: Iterable[TableOrName]) -> list[TableOrName]:
    given = tables if isinstance(tables, str) else list(tables)
    if not names_of("tables", given):
        raise ValueError("`tables` must have names or tables. Received: []")
    return list(given)


def _note_step(cluster: str, table: str, variables: Iterable[Variable]) -> None:
    """Notes which dense variables are stepped together with a table.

    Args:
        cluster: The address of the table's cluster.
        table: The table's name.
        variables: Keras variables.
    """
    noted = _stepped.setdefault((cluster, table), weakref.WeakValueDictionary())
    noted.update({id(variable): variable for variable in variables})


def _moved(model: str, variables: Iterable[Any]) -> list[str]:
    """Returns the names of variables whose values a SavedModel lacks.

    Variables have other names in the SavedModel, so each variable is compared
    with all saved tensors of its shape.
    """
    import numpy as np  # `tfswitch export` needs neither module.
    import tensorflow as tf

    saved = tf.train.load_checkpoint(f"{model}/variables/variables")
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shape in saved.get_variable_to_shape_map().items():
        names.setdefault(tuple(shape), []).append(name)
    moved = set()
    for variable in variables:
        value = variable.numpy()
        alike = names.get(value.shape, [])  # Empty: of another model.
        if alike and not any(
            np.array_equal(saved.get_tensor(name), value) for name in alike
        ):
            moved.add(str(getattr(variable, "path", variable.name)))
    return sorted(moved)


def _warn_of_dense_weights(cluster: Cluster, folder: _Folder) -> None:
    """Warns if variables have been trained since a SavedModel was saved."""
    if folder.model_tables is None or folder.path in _models_told:
        return
    variables = [
        variable
        for table in folder.model_tables
        for variable in _stepped.get((cluster.address, table), {}).values()
    ]
    if not variables:
        return
    # The export has succeeded, so an error of this check is only logged.
    try:
        moved = _moved(folder.path, variables)
    except Exception as error:
        logging.warning(
            "tfswitch: the dense weights of %r cannot be compared with those "
            "that are trained: %s",
            folder.path,
            error,
        )
        return
    if not moved:
        return
    _models_told.add(folder.path)
    warnings.warn(
        f"a delta to {folder.path!r} has rows only, and dense weights of the "
        f"model have been trained since it was saved there: "
        f"{', '.join(map(repr, moved[:3]))}"
        f"{f' and {len(moved) - 3} more' if len(moved) > 3 else ''}. Their "
        "former values are served on. Save a new version with "
        "tfswitch.saved_model.save to serve the new ones.",
        RuntimeWarning,
        stacklevel=4,
    )


def _publish(
    cluster: Cluster, folder: _Folder, options: dict[str, Any]
) -> ExportReport:
    report = call(cluster._native, "PublishExport", path=folder.rows, **options)
    if report["delta"] and report["published"]:
        _warn_of_dense_weights(cluster, folder)
    counts = ("number", "num_rows", "num_removed", "bytes")
    return ExportReport(
        kind="delta" if report["delta"] else "base",
        published=report["published"],
        why_base=report["why_base"],
        **integers(report, counts),
    )
