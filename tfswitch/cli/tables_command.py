"""`tfswitch save`, `restore`, `shrink` and `drop`: whole tables on servers."""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from tfswitch._connection._control_calls import call
from tfswitch._connection._reports import ShrinkReport
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least, names
from tfswitch.cluster import _STATES

_PATH = "a folder below the --checkpoint_root of the servers, or a URL."
_TABLES = "names of tables, with commas between them. Default: all."


def save(words: Sequence[str]) -> int:
    """Saves tables."""
    parser = _parser("save", "Saves tables to a checkpoint.", "path")
    parser.add_argument(
        "--keep",
        type=at_least(1),
        default=2,
        metavar="N",
        help="how many saves stay in the folder. Default: %(default)s.",
    )
    parser.add_argument(
        "--drop",
        type=names,
        default=(),
        metavar="TABLES",
        help="tables of the last save that this one may leave out.",
    )
    return _requests.run(parser, _save, words)


def restore(words: Sequence[str]) -> int:
    """Restores tables."""
    parser = _parser(
        "restore", "Replaces tables by those of a checkpoint.", "path"
    )
    parser.add_argument(
        "--save",
        type=at_least(1),
        metavar="N",
        help="the number of the save. Default: the newest that can be read.",
    )
    parser.add_argument(
        "--state",
        choices=_STATES,
        default="saved",
        help="of the optimizer and the statistics. Default: %(default)s.",
    )
    return _requests.run(parser, _restore, words)


def shrink(words: Sequence[str]) -> int:
    """Evicts rows by the policy of their table."""
    parser = _parser("shrink", "Evicts rows by the policy of their table.")
    parser.add_argument(
        "--dry_run", action="store_true", help="only counts the rows."
    )
    return _requests.run(parser, _shrink, words)


def drop(words: Sequence[str]) -> int:
    """Removes a table."""
    parser = _parser("drop", "Removes a table with all its rows.")
    parser.add_argument(
        "--yes", action="store_true", help="does not ask whether to do it."
    )
    return _requests.run(parser, _drop, words)


def _parser(command: str, about: str, argument: str = "table") -> Parser:
    parser = Parser(command, about)
    if argument == "table":
        parser.add_argument("table", help="its name.")
    else:
        parser.add_argument(argument, help=_PATH)
        parser.add_argument("--tables", type=names, default=(), help=_TABLES)
    _requests.add_cluster(parser)
    _requests.add_json(parser)
    return parser


def _save(options: Namespace) -> int:
    cluster = _requests.connected(options)
    report = cluster.save(
        options.path, options.tables, keep=options.keep, drop=options.drop
    )
    return _tell(options, "saved {} as", report)


def _restore(options: Namespace) -> int:
    cluster = _requests.connected(options)
    report = cluster.restore(
        options.path, options.tables, save=options.save, state=options.state
    )
    return _tell(options, "restored {} from", report)


def _tell(options: Namespace, done: str, report: Mapping[str, Any]) -> int:
    tables = len(report["tables"])
    what = done.format(f"{report['num_rows']:,} rows of {tables} table(s)")
    return _requests.tell(
        options, report, f"{what} save {report['save']} of '{options.path}'"
    )


def _shrink(options: Namespace) -> int:
    cluster = _requests.connected(options)
    with _requests.waiting(f"shrinking '{options.table}'"):
        response = call(
            cluster._native,
            "Shrink",
            table=options.table,
            dry_run=options.dry_run,
        )
    report = ShrinkReport(response, dry_run=options.dry_run)
    return _requests.tell(options, report, report)


def _drop(options: Namespace) -> int:
    if not options.yes and not (sys.stdin and sys.stdin.isatty()):
        raise app.UsageError("drop needs --yes where no terminal can answer")
    cluster = _requests.connected(options)
    if not options.yes:
        (info,) = cluster._list(options.table)
        rows = int(info["num_rows"])
        question = f"Drop table '{options.table}' with {rows:,} rows? [y/N] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was dropped", file=sys.stderr)
            return 1
    cluster.drop(options.table)
    return _requests.tell(
        options, {"dropped": options.table}, f"dropped '{options.table}'"
    )
