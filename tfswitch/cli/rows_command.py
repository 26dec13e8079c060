"""`tfswitch get`, `set` and `remove`: single rows of a table on servers."""

import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app

from tfswitch import _native
from tfswitch._connection._control_calls import call
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, names

# How many rows one call reads. Their slots fit into any message.
_READ_ROWS = 128
_STATES = ("no row", "waits for admission", "row")
_USAGE = ("count", "last_seen_day", "show", "click", "delta_score")


def get(words: Sequence[str]) -> int:
    """Prints rows."""
    parser = _parser("get", "Prints rows, with their slots and statistics.")
    return _requests.run(parser, _get, words)


def set_rows(words: Sequence[str]) -> int:
    """Sets rows to the same values."""
    parser = _parser("set", "Sets the embeddings of ids; slots stay.")
    parser.add_argument(
        "--values",
        type=_floats,
        required=True,
        metavar="X,X",
        help="the embedding, with commas between its numbers. If the first is "
        "negative, write --values=-1,2.",
    )
    return _requests.run(parser, _set, words)


def remove(words: Sequence[str]) -> int:
    """Removes rows."""
    parser = _parser("remove", "Removes the rows of ids.")
    return _requests.run(parser, _remove, words)


def _parser(command: str, about: str) -> Parser:
    parser = Parser(command, about)
    parser.add_argument("table", help="its name.")
    parser.add_argument("ids", nargs="+", metavar="ID", help="an integer.")
    parser.add_argument(
        "--strings",
        action="store_true",
        help="each ID is a string, and its id is that of "
        "tfswitch.ids.hash_strings. Needs TensorFlow.",
    )
    _requests.add_cluster(parser)
    _requests.add_json(parser)
    return parser


def _floats(text: str) -> list[float]:
    try:
        return [float(part) for part in names(text)]
    except ValueError:
        raise ArgumentTypeError(
            f"expected numbers with commas between them. Received: {text!r}"
        ) from None


def _ids(options: Namespace) -> np.ndarray:
    if options.strings:
        from tfswitch.ids import hash_strings

        return np.asarray(hash_strings(options.ids))
    try:
        return np.array([int(text) for text in options.ids], np.int64)
    except (ValueError, OverflowError):
        raise app.UsageError(
            "each ID must be an integer of 64 bits; with --strings it is a "
            f"string. Received: {' '.join(options.ids)}"
        ) from None


def _open(options: Namespace) -> tuple[_native.Table, dict[str, Any]]:
    cluster = _requests.connected(options)
    config = _requests.config_of(cluster, options.table)
    return cluster._native.open_table(json.dumps(config)), config


def _get(options: Namespace) -> int:
    ids = _ids(options)
    table, config = _open(options)
    dim = table.dim
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for begin in range(0, len(ids), _READ_ROWS):
        part = [str(i) for i in ids[begin : begin + _READ_ROWS]]
        rows = call(table, "ReadRows", table=options.table, keys=part)
        # Infinite floats and NaN are texts in protobuf's JSON.
        values = np.array(rows["values"], float).reshape(-1, dim)
        slots = np.array(rows["slots"], float).reshape(
            len(values), table.slot_floats
        )
        found.update(
            zip(
                map(int, rows["keys"]),
                zip(values, slots, strict=True),
                strict=True,
            )
        )
    usage, states = table.read_usage(ids)
    counted = _counted(config)
    report = []
    for place, (text, number) in enumerate(
        zip(options.ids, ids.tolist(), strict=True)
    ):
        row: dict[str, Any] = {"id": number, "state": _STATES[states[place]]}
        if options.strings:
            row["string"] = text
        if number in found:
            embedding, slots = found[number]
            end = len(slots) - len(counted)
            row["values"] = embedding.tolist()
            row["slots"] = slots[:end].tolist()
        if states[place]:
            row.update(zip(counted, usage[place].tolist(), strict=False))
        report.append(row)
    if options.json:
        _requests.print_json({"table": options.table, "rows": report})
        return 0
    for row in report:
        number, state = row.pop("id"), row.pop("state")
        text = row.pop("string", None)
        print(f"{number}{'' if text is None else f' ({text})'}: {state}")
        for name, value in row.items():
            print(f"  {name} {_text(value)}")
    return 0


def _counted(config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the names of the statistics, which are the last slots."""
    kind = config["statistics"]["kind"]
    return _USAGE[: {"NONE": 0, "USAGE": 2, "SHOW_CLICK": 5}[kind]]


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{number:.7g}" for number in value)
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _set(options: Namespace) -> int:
    ids = _ids(options)
    table, _ = _open(options)
    if len(options.values) != table.dim:
        raise app.UsageError(
            f"--values must have {table.dim} numbers, the dim of table "
            f"'{options.table}'. Received: {len(options.values)}"
        )
    values = np.array(options.values, np.float32)
    table.assign(ids, np.tile(values, (len(ids), 1)))
    return _tell(options, "set", len(np.unique(ids)))


def _remove(options: Namespace) -> int:
    ids = _ids(options)
    table, _ = _open(options)
    return _tell(options, "removed", table.erase(ids))


def _tell(options: Namespace, done: str, num_rows: int) -> int:
    return _requests.tell(
        options,
        {"table": options.table, done: num_rows},
        f"{done} {num_rows} row(s) of '{options.table}'",
    )
