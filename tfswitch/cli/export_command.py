"""`tfswitch export`: bases and deltas of tables on servers, at intervals."""

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

from absl import app, flags

from tfswitch import _addresses, _tf_config, export
from tfswitch.cli import _durations
from tfswitch.cluster import Cluster

# The longest that a signal is not heard.
_POLL_SECS = 0.2

_CLUSTER = flags.DEFINE_string(
    "cluster",
    None,
    "export: the servers, as grpc://host:port,host:port in shard order, "
    "grpcs:// for TLS, or grpc+unix:///path. Default: the ps of TF_CONFIG.",
)
_PATH = flags.DEFINE_string(
    "path", None, "export: a folder of exports, or a saved model."
)
_EVERY = _durations.define(
    "every",
    "30s",
    "export: from the beginning of one export to that of the next.",
)
_BASE_EVERY = _durations.define(
    "base_every",
    None,
    "export: a base comes in place of a delta when the last one is so old. "
    "Default: only where there is none that a delta could follow.",
)
_ONCE = flags.DEFINE_bool(
    "once", False, "export: writes one export and ends, with 1 if it fails."
)
_TABLES = flags.DEFINE_list(
    "tables",
    None,
    "export: names of tables. Default: those of the saved model, or all.",
)
_ROW_FORMAT = flags.DEFINE_enum(
    "row_format",
    None,
    export.ROW_FORMATS,
    "export: how rows are kept. Default: as in the export before, or float32.",
)
_ALL_ROWS = flags.DEFINE_bool(
    "all_rows",
    False,
    "export: all rows, also if the export before had a rule.",
)
_BASE_THRESHOLD = flags.DEFINE_float(
    "base_threshold",
    None,
    "export: with it or one of the next two, rows are chosen by their show and "
    "click statistics: least score. Default: the rule of the export before.",
    lower_bound=0.0,
)
_DELTA_THRESHOLD = flags.DEFINE_float(
    "delta_threshold",
    None,
    "export: least gain of score for a delta.",
    lower_bound=0.0,
    allow_override=True,  # TensorFlow's debugger for TPUs has it.
)
_DELTA_KEEP_DAYS = flags.DEFINE_float(
    "delta_keep_days",
    None,
    "export: most days since a row was seen.",
    lower_bound=0.0,
)
_KEEP_BASES = flags.DEFINE_integer(
    "keep_bases",
    None,
    "export: removes what is older than so many bases. Default: nothing.",
    lower_bound=1,
)


def run() -> int:
    """Exports until a signal comes, or once; returns the exit code."""
    is_over = threading.Event()
    has_exported = is_hopeless = False

    def log_fn(result: export.ExportReport | Exception) -> None:
        nonlocal has_exported, is_hopeless
        _tell(result)
        if not isinstance(result, Exception):
            has_exported = True
        elif isinstance(result, ValueError) and not has_exported:
            # A wrong flag, which the next time is none the better.
            is_hopeless = True
            is_over.set()

    schedule = _schedule(log_fn)

    def work() -> int:
        if _ONCE.value:
            return 0 if schedule.try_export() else 1
        schedule.run(_EVERY.value, is_over.wait)
        return 1 if is_hopeless else 0

    return _run_until_signals(work, is_over)


def _schedule(
    log_fn: Callable[[export.ExportReport | Exception], None],
) -> export.Schedule:
    address = _CLUSTER.value
    if address is None:
        address = _tf_config.cluster_address()
        if address is None:
            raise app.UsageError(
                "--cluster must be given where TF_CONFIG names no ps"
            )
    try:
        _addresses.check_has_no_token("--cluster", address)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    # A connection is made only later.
    why = _addresses.why_no_servers(address)
    if why is not None:
        raise app.UsageError(
            f"--cluster must be {_addresses.SERVERS}: {why}. Received: "
            f"--cluster={address}"
        )
    if _PATH.value is None:
        raise app.UsageError("--path must be given")
    try:
        return export.Schedule(
            _PATH.value,
            base_every_secs=_BASE_EVERY.value,
            tables=_TABLES.value,
            row_format=_ROW_FORMAT.value,
            rule=_rule(),
            keep_bases=_KEEP_BASES.value,
            cluster=functools.partial(Cluster, address),
            log_fn=log_fn,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def _rule() -> export.ScoreRule | Literal["all"] | None:
    numbers = {
        flag.name: flag.value
        for flag in (_BASE_THRESHOLD, _DELTA_THRESHOLD, _DELTA_KEEP_DAYS)
        if flag.value is not None
    }
    if _ALL_ROWS.value and numbers:
        raise app.UsageError(
            f"--all_rows does not go with --{', --'.join(numbers)}"
        )
    if _ALL_ROWS.value:
        return "all"
    return export.ScoreRule(**numbers) if numbers else None


def _tell(result: export.ExportReport | Exception) -> None:
    if isinstance(result, Exception):
        print(
            f"tfswitch export: failed: {export.describe(result)}",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(result, flush=True)


def _run_until_signals(
    work: Callable[[], int], is_over: threading.Event
) -> int:
    """Calls `work` in a thread, for a handler waits for the main one's Python.

    Args:
        work: Returns the exit code. A second signal does not wait for it, which
            leaves no half export.
        is_over: Set by a first signal.
    """
    results: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run() -> None:
        code = 1
        try:
            code = work()
        finally:
            results.put(code)

    with _stop_signals(is_over):
        threading.Thread(
            target=run, name="tfswitch_export_command", daemon=True
        ).start()
        while True:
            # A signal that another thread gets does not interrupt a wait.
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=_POLL_SECS)


@contextlib.contextmanager
def _stop_signals(is_over: threading.Event) -> Iterator[None]:
    """Has a first signal set `is_over`, and a second one end the program."""
    has_come = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            os._exit(128 + number)
        has_come = True
        is_over.set()

    former = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
