"""`tfswitch stats` and `tfswitch top` print rates and durations of servers."""

import collections
import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import app

from tfswitch._connection import _metric_samples
from tfswitch._connection._reports import format_bytes
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least
from tfswitch.cluster import Cluster

_Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class _Look(NamedTuple):
    """The state of the servers at a time."""

    time: float  # The clock is `time.monotonic`.
    values: _Values
    heats: list[Mapping[str, Any]]  # Messages TableHeat.


# How many hot ids are shown.
_MAX_HOT_IDS = 10
# The columns of tables that are rates: name, and the counter.
_RATES = (
    ("pulled/s", "tfswitch_table_pulled_keys_total"),
    ("pushed/s", "tfswitch_table_pushed_keys_total"),
    ("created/s", "tfswitch_table_created_rows_total"),
    ("evicted/s", "tfswitch_table_evicted_rows_total"),
)
# The upper bound of the last bucket but one, in seconds
# (cc/base/latency_histogram.h).
_LAST_BOUND = 60
_SORT_KEYS = {
    "n": "table",
    "r": "rows",
    "m": "bytes",
    "l": "pulled/s",
    "p": "pushed/s",
}


def stats(words: Sequence[str]) -> int:
    """Prints rates and durations of a few seconds."""
    parser = _parser("stats", "Prints what servers did in the last seconds.")
    _requests.add_json(parser)
    return _requests.run(parser, _stats, words)


def top(words: Sequence[str]) -> int:
    """Shows rates and durations until `q` or Ctrl-C."""
    parser = _parser(
        "top",
        "Shows what servers do, again and again. Keys: n, r, m, l, p sort "
        "tables by name, rows, memory, pulled and pushed keys; q ends it.",
    )
    return _requests.run(parser, _top, words)


def _parser(command: str, about: str) -> Parser:
    parser = Parser(command, about)
    parser.add_argument(
        "--seconds",
        type=at_least(0.1),
        default=2.0,
        metavar="SECONDS",
        help="the time between two looks. Default: %(default)s.",
    )
    _requests.add_cluster(parser, 5.0)
    return parser


def _stats(options: Namespace) -> int:
    with _requests.connected(options) as cluster:
        before = _read(cluster)
        with _requests.waiting(f"looking for {options.seconds:g} s"):
            time.sleep(options.seconds)
        report = _report(before, _read(cluster))
    if options.json:
        _requests.print_json(report)
        return 0
    for name in ("servers", "calls", "tables", "workers", "hot_ids"):
        if report[name]:
            _requests.print_lines([_texts(line) for line in report[name]])
            print()
    return 0


def _top(options: Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise app.UsageError("top needs a terminal; use `tfswitch stats`")
    from rich.live import Live

    terminal = sys.stdin.fileno()
    former = termios.tcgetattr(terminal)
    sort = "pulled/s"
    try:
        tty.setcbreak(terminal)
        with (
            _requests.connected(options) as cluster,
            # A thread that refreshes prints a traceback if the terminal goes.
            Live(screen=True, auto_refresh=False) as live,
        ):
            before = _read(cluster)
            report = _report(before, before)
            while True:
                left = before.time + options.seconds - time.monotonic()
                if left <= 0:
                    now = _read(cluster)
                    report = _report(before, now)
                    before = now
                elif select.select([terminal], [], [], left)[0]:
                    keys = os.read(terminal, 64).decode(errors="replace")
                    if not keys or "q" in keys:  # No keys: it was closed.
                        return 0
                    for key in keys:
                        sort = _SORT_KEYS.get(key, sort)
                report["tables"].sort(
                    key=lambda table: table[sort], reverse=sort != "table"
                )
                live.update(_screen(report, sort), refresh=True)
    finally:
        with contextlib.suppress(termios.error):  # It was closed.
            termios.tcsetattr(terminal, termios.TCSADRAIN, former)


def _screen(report: Mapping[str, Any], sort: str) -> Any:
    from rich.console import Group
    from rich.table import Table

    views = []
    titles = {
        "servers": "servers",
        "tables": f"tables, by {sort}",
        "workers": "workers",
        "hot_ids": "hot ids",
        "calls": "calls",
    }
    for name, title in titles.items():
        view = Table(title=title)
        for column in report[name][0] if report[name] else ():
            view.add_column(column)
        for line in report[name]:
            view.add_row(*_texts(line).values())
        views.append(view)
    return Group(*views)


def _read(cluster: Cluster) -> _Look:
    views = _metric_samples.views_of(cluster._native)
    samples = _metric_samples.samples_of(view["metrics"] for view in views)
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in samples
    }
    heats = [heat for view in views for heat in view["heats"]]
    return _Look(time.monotonic(), values, heats)


def _sums(values: _Values, name: str, label: str) -> collections.Counter[str]:
    """Adds up a series by one of its labels."""
    sums: collections.Counter[str] = collections.Counter()
    for (series, labels), value in values.items():
        if series == name:
            sums[dict(labels)[label]] += value  # type: ignore[assignment]
    return sums


def _report(first: _Look, second: _Look) -> dict[str, Any]:
    """Returns lines of servers, calls, tables, workers and hot ids."""
    before, now = first.values, second.values
    secs = second.time - first.time or 1.0  # Without time nothing has changed.
    uptime = _sums(now, "tfswitch_uptime_seconds", "shard")
    old_uptime = _sums(before, "tfswitch_uptime_seconds", "shard")
    # A server that was started again has counted from 0 since then.
    restarted = {s for s in uptime if uptime[s] < old_uptime[s]}
    before = {
        (series, labels): value
        for (series, labels), value in before.items()
        if dict(labels)["shard"] not in restarted
    }

    def rates(name: str, label: str) -> Mapping[str, float]:
        old = _sums(before, name, label)
        return collections.defaultdict(
            float,
            {
                key: (value - old[key]) / secs
                for key, value in _sums(now, name, label).items()
            },
        )

    cpu = rates("process_cpu_seconds_total", "shard")
    memory = _sums(now, "process_resident_memory_bytes", "shard")
    calls = rates("tfswitch_calls_total", "shard")
    servers = [
        {
            "server": int(shard),
            "uptime_secs": round(uptime[shard]),
            "bytes": int(memory[shard]),
            "cpu": round(cpu[shard], 2),
            "calls/s": round(calls[shard], 1),
        }
        for shard in sorted(uptime, key=int)
    ]
    by_table = {name: rates(series, "table") for name, series in _RATES}
    num_bytes = _sums(now, "tfswitch_table_bytes", "table")
    rows = _sums(now, "tfswitch_table_rows", "table")
    tables = [
        {
            "table": table,
            "rows": int(rows[table]),
            "bytes": int(num_bytes[table]),
            **{name: round(of[table], 1) for name, of in by_table.items()},
        }
        for table in sorted(rows)
    ]
    return {
        "seconds": round(secs, 3),
        "servers": servers,
        "calls": _calls(before, now, secs),
        "tables": tables,
        "workers": _workers(before, now, secs),
        "hot_ids": hot_ids(second.heats),
    }


def _workers(
    before: _Values, now: _Values, secs: float
) -> list[dict[str, object]]:
    """Returns the workers that have ended steps."""
    return [
        {
            "group": dict(labels)["group"],
            "worker": dict(labels)["worker"],
            "steps": int(steps),
            # A worker may continue from a checkpoint, with steps above 0.
            "steps/s": round(
                (steps - before.get((name, labels), steps)) / secs, 1
            ),
        }
        for (name, labels), steps in now.items()
        if name == "tfswitch_worker_steps_total"
    ]


def hot_ids(heats: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Returns the ids with the largest shares of the lookups of their table."""
    totals: collections.Counter[str] = collections.Counter()
    for heat in heats:
        totals[heat["table"]] += heat["sampled_keys"]
    found = [
        {
            "table": heat["table"],
            "id": int(hot["key"]),
            "share": round(
                hot["share"] * heat["sampled_keys"] / totals[heat["table"]], 4
            ),
        }
        for heat in heats
        for hot in heat["hot_keys"]
    ]
    found.sort(key=lambda each: each["share"], reverse=True)
    return found[:_MAX_HOT_IDS]


def _calls(
    before: _Values, now: _Values, secs: float
) -> list[dict[str, object]]:
    """Returns rates and percentiles of the calls that were made."""
    histograms: dict[str, collections.Counter[float]] = {}
    for (series, labels), value in now.items():
        if series == "tfswitch_call_duration_seconds_bucket":
            of = dict(labels)
            buckets = histograms.setdefault(of["call"], collections.Counter())
            old = before.get((series, labels), 0.0)
            buckets[float(of["le"])] += round(value - old)
    return [
        {
            "call": call,
            "calls/s": round(buckets[float("inf")] / secs, 1),
            "p50_ms": _percentile(buckets, 0.5),
            "p99_ms": _percentile(buckets, 0.99),
        }
        for call, buckets in sorted(histograms.items())
        if buckets[float("inf")] > 0
    ]


def _percentile(buckets: Mapping[float, int], share: float) -> float | None:
    """Returns the bound of the bucket with the percentile, in ms.

    None stands for the last bucket, which has no bound.
    """
    wanted = share * max(buckets.values())
    bound = min(b for b in buckets if buckets[b] >= wanted)
    return 1000 * bound if math.isfinite(bound) else None


def _texts(line: Mapping[str, object]) -> dict[str, str]:
    return {
        name: f"> {1000 * _LAST_BOUND:,.0f}"
        if value is None
        else format_bytes(value)
        if name == "bytes" and isinstance(value, int)
        else f"{value:,}"
        if isinstance(value, int | float)
        else str(value)
        for name, value in line.items()
    }
