"""`tfswitch export` writes bases and deltas of tables at intervals."""

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Literal

from absl import app

from tfswitch import export
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least, duration, names
from tfswitch.cluster import Cluster

# Longest delay of the reaction to a signal.
_POLL_SECS = 0.2

_RULE = {
    "base_threshold": "with it or one of the next two, rows are chosen by "
    "their show and click statistics: least score. Default: the rule of the "
    "export before.",
    "delta_threshold": "least gain of score for a delta.",
    "delta_keep_days": "most days since a row was seen.",
}


def run(words: Sequence[str]) -> int:
    """Exports until a signal comes, or once; returns the exit code."""
    is_over = threading.Event()
    has_exported = is_hopeless = False

    def log_fn(result: export.ExportReport | Exception) -> None:
        nonlocal has_exported, is_hopeless
        _tell(result)
        if not isinstance(result, Exception):
            has_exported = True
        elif isinstance(result, ValueError) and not has_exported:
            # A flag is wrong, so each export would fail.
            is_hopeless = True
            is_over.set()

    options = _parser().parse_args(words)
    schedule = _schedule(options, log_fn)

    def work() -> int:
        if options.once:
            return 0 if schedule.try_export() else 1
        schedule.run(options.every, is_over.wait)
        return 1 if is_hopeless else 0

    return _run_until_signals(work, is_over)


def _parser() -> Parser:
    parser = Parser(
        "export", "Writes bases and deltas of tables on servers, at intervals."
    )
    _requests.add_cluster(parser, None)
    parser.add_argument(
        "--path", required=True, help="a folder of exports, or a saved model."
    )
    parser.add_argument(
        "--every",
        type=duration,
        default="30s",
        metavar="DURATION",
        help="from the beginning of one export to that of the next. Default: "
        "%(default)s.",
    )
    parser.add_argument(
        "--base_every",
        type=duration,
        metavar="DURATION",
        help="a base comes in place of a delta when the last one is so old. "
        "Default: only where there is none that a delta could follow.",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="writes one export and ends, with 1 if it fails.",
    )
    parser.add_argument(
        "--tables",
        type=names,
        help="names of tables, with commas between them. Default: those of the "
        "saved model, or all.",
    )
    parser.add_argument(
        "--row_format",
        choices=export._ROW_FORMATS,
        help="how rows are kept. Default: as in the export before, or float32.",
    )
    parser.add_argument(
        "--all_rows",
        action="store_true",
        help="all rows, also if the export before had a rule.",
    )
    for name, about in _RULE.items():
        parser.add_argument(
            f"--{name}", type=at_least(0.0), metavar="NUMBER", help=about
        )
    parser.add_argument(
        "--keep_bases",
        type=at_least(1),
        metavar="N",
        help="removes what is older than so many bases. Default: nothing.",
    )
    return parser


def _schedule(
    options: Namespace,
    log_fn: Callable[[export.ExportReport | Exception], None],
) -> export.Schedule:
    # Checks the address now, because a connection is made only later.
    address = _requests.servers_of(options.cluster)
    try:
        return export.Schedule(
            options.path,
            base_every_secs=options.base_every,
            tables=options.tables,
            row_format=options.row_format,
            rule=_rule(options),
            keep_bases=options.keep_bases,
            cluster=functools.partial(Cluster, address),
            log_fn=log_fn,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error


def _rule(options: Namespace) -> export.ScoreRule | Literal["all"] | None:
    numbers = {
        name: number
        for name in _RULE
        if (number := getattr(options, name)) is not None
    }
    if options.all_rows and numbers:
        raise app.UsageError(
            f"--all_rows does not go with --{', --'.join(numbers)}"
        )
    if options.all_rows:
        return "all"
    return export.ScoreRule(**numbers) if numbers else None


def _tell(result: export.ExportReport | Exception) -> None:
    if isinstance(result, Exception):
        print(
            f"tfswitch export: failed: {export._describe(result)}",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(result, flush=True)


def _run_until_signals(
    work: Callable[[], int], is_over: threading.Event
) -> int:
    """Calls `work` in a thread, because handlers run in the main thread.

    Args:
        work: Returns the exit code. At a second signal the program ends without
            waiting for this; an export that was interrupted is never published.
        is_over: Set by the first signal.
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
    """Makes a first signal set `is_over`, and a second one end the program."""
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
