"""`tfswitch export`: bases and deltas of tables on servers, at intervals."""

import contextlib
import functools
import queue
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Literal

from absl import app, flags

from tfswitch import _tf_config, export
from tfswitch.cluster import Cluster

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _DurationParser(flags.ArgumentParser[float]):
    """Seconds, from text such as "30s", "5m", "24h" or "1d"."""

    syntactic_help = "a duration, such as 30s, 5m, 24h or 1d"

    def parse(self, argument: str | float) -> float:
        if isinstance(argument, (int, float)):
            return float(argument)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", argument.strip())
        if match is None or not float(match[1]) > 0:
            raise ValueError(f"expected {self.syntactic_help}")
        return float(match[1]) * _UNITS[match[2]]

    def flag_type(self) -> str:
        return "duration"


class _DurationSerializer(flags.ArgumentSerializer[float]):
    """The text of a default."""

    def serialize(self, value: float) -> str:
        return f"{value:g}s"


_CLUSTER = flags.DEFINE_string(
    "cluster",
    None,
    "export: the servers, as grpc://host:port,host:port in shard order or "
    "grpc+unix:///path. Default: the ps of TF_CONFIG.",
)
_PATH = flags.DEFINE_string(
    "path", None, "export: a folder of exports, or a saved model."
)
_EVERY = flags.DEFINE(
    _DurationParser(),
    "every",
    "30s",
    "export: from the beginning of one export to that of the next.",
    serializer=_DurationSerializer(),
)
_BASE_EVERY = flags.DEFINE(
    _DurationParser(),
    "base_every",
    None,
    "export: a base comes in place of a delta when the last one is so old. "
    "Default: only where there is none that a delta could follow.",
    serializer=_DurationSerializer(),
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
    allow_override=True,  # Of TensorFlow's debugger for TPUs.
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
    schedule = _schedule()
    if _ONCE.value:
        return 0 if schedule.try_export() else 1
    with _stop_signals() as stopped:

        def wait(seconds: float) -> bool:
            try:
                stopped.get(timeout=seconds)
            except queue.Empty:
                return False
            return True

        schedule.run(_EVERY.value, wait)
    return 0


def _schedule() -> export.Schedule:
    address = _CLUSTER.value
    if address is None:
        servers = _tf_config.ps_addresses()
        if not servers:
            raise app.UsageError(
                "--cluster must be given where TF_CONFIG names no ps"
            )
        address = "grpc://" + ",".join(servers)
    if not address.startswith(("grpc://", "grpc+unix://")):
        raise app.UsageError(
            "--cluster must be of servers, as grpc://host:port. Received: "
            f"--cluster={address}"
        )
    if _PATH.value is None:
        raise app.UsageError("--path must be given")
    return export.Schedule(
        _PATH.value,
        base_every_seconds=_BASE_EVERY.value,
        tables=_TABLES.value,
        row_format=_ROW_FORMAT.value,
        rule=_rule(),
        keep_bases=_KEEP_BASES.value,
        cluster=functools.partial(Cluster, address),
        tell=_tell,
    )


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


@contextlib.contextmanager
def _stop_signals() -> Iterator["queue.SimpleQueue[None]"]:
    """Yields a queue that gets something when the program is to end.

    A second signal ends the program at once, which leaves no half export.
    """
    # Its `put` may interrupt its `get`, which an Event does not promise.
    stopped: queue.SimpleQueue[None] = queue.SimpleQueue()

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopped.put(None)

    former = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stopped
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
