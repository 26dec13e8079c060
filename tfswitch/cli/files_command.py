"""`tfswitch inspect`, `diff` and `convert` work on files, without servers."""

import os
import re
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from tfswitch import _native
from tfswitch._connection._control_calls import call, integers
from tfswitch._connection._reports import format_bytes
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least
from tfswitch.cluster import Cluster

_KINDS = "a checkpoint, a data folder, an export, a SavedModel"
# By suffix, the last words of the functions of tfswitch.io.
_FORMATS = {".npz": "numpy", ".parquet": "parquet", ".tfrecord": "tfrecord"}


def inspect(words: Sequence[str]) -> int:
    """Says what files hold; returns 1 if they are damaged."""
    parser = Parser("inspect", "Says what the files of tables hold.")
    parser.add_argument(
        "path",
        help=f"{_KINDS}, a folder of exports, a push log, or the manifest of "
        "one save.",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="reads all files, and compares their checksums.",
    )
    _requests.add_json(parser)
    return _requests.run(parser, _inspect, words)


def diff(words: Sequence[str]) -> int:
    """Compares the rows of two paths."""
    parser = Parser("diff", "Compares the embeddings of saves or exports.")
    parser.add_argument("before", help=f"{_KINDS}, or one manifest or export.")
    parser.add_argument("after", help="the same, at a later time.")
    _requests.add_json(parser)
    return _requests.run(parser, _diff, words)


def convert(words: Sequence[str]) -> int:
    """Converts rows between checkpoints and the formats of tfswitch.io."""
    parser = Parser(
        "convert",
        "Copies the rows of a table from one kind of file to another: .npz, "
        ".parquet, .tfrecord, or a checkpoint without suffix. Needs "
        "TensorFlow, and memory for the rows.",
    )
    parser.add_argument("source", help="an existing file or checkpoint.")
    parser.add_argument("target", help="the new file or checkpoint.")
    parser.add_argument(
        "--table",
        help="its name in the checkpoint. Default: that of its only table.",
    )
    parser.add_argument(
        "--dim",
        type=at_least(1),
        help="floats of an embedding, if the source is not a checkpoint.",
    )
    parser.add_argument(
        "--optimizer",
        default="sgd",
        help="of the new checkpoint, if the source is not one. Default: "
        "%(default)s.",
    )
    parser.add_argument(
        "--statistics",
        choices=("Usage", "ShowClick"),
        help="of the new checkpoint, if the source is not one. With --slots "
        "the source must have the same.",
    )
    parser.add_argument(
        "--slots",
        action="store_true",
        help="also reads and writes optimizer state and statistics.",
    )
    _requests.add_json(parser)
    return _requests.run(parser, _convert, words)


def _inspect(options: Namespace) -> int:
    verb = "verifying" if options.verify else "reading"
    with _requests.waiting(f"{verb} '{options.path}'"):
        found = call(
            _native, "InspectFiles", path=options.path, verify=options.verify
        )
    for part in found["parts"]:
        part.update(integers(part, ("created_ms", "num_records", "bytes")))
        for table in part["tables"]:
            table.update(integers(table, ("num_rows", "num_removed", "bytes")))
    damaged = [part for part in found["parts"] if part["damage"]]
    if options.json:
        _requests.print_json({**found, "verified": options.verify})
        return 1 if damaged else 0
    note = f" ({found['note']})" if found["note"] else ""
    print(f"{found['kind']} '{options.path}'{note}")
    _requests.print_lines(
        [line for part in found["parts"] for line in _lines_of(part)]
    )
    for part in damaged:
        print(f"damaged: {part['name']}: {part['damage']}")
    if options.verify and not damaged:
        print("all checksums are right")
    return 1 if damaged else 0


def _lines_of(part: Mapping[str, Any]) -> list[dict[str, str]]:
    created = time.localtime(part["created_ms"] / 1000.0)
    head = {
        "part": part["name"],
        "time": time.strftime("%Y-%m-%d %H:%M:%S", created)
        if part["created_ms"]
        else "",
    }
    if not part["tables"]:
        records, size = part["num_records"], format_bytes(part["bytes"])
        text = f"{records:,}" if records else ""
        return [{**head, "records": text, "bytes": size}]
    return [
        {
            **head,
            "table": table["name"],
            "dim": str(table["dim"]),
            "rows": f"{table['num_rows']:,}",
            "removed": f"{table['num_removed']:,}",
            "format": table["row_format"],
            "bytes": format_bytes(table["bytes"]),
        }
        for table in part["tables"]
    ]


def _diff(options: Namespace) -> int:
    counts = ("added", "removed", "changed", "same")
    with _requests.waiting("comparing"):
        tables = call(
            _native, "DiffFiles", before=options.before, after=options.after
        )["tables"]
    for table in tables:
        table.update(integers(table, counts), norm=float(table["norm"]))
    if options.json:
        _requests.print_json({"tables": tables})
        return 0
    lines = []
    for table in tables:
        lines.append(
            {
                "table": table["name"],
                **{name: f"{table[name]:,}" for name in counts},
                "norm of changes": f"{table['norm']:.6g}",
                "": table["note"],
            }
        )
    _requests.print_lines(lines)
    return 0


def _format_of(path: str) -> str | None:
    """Returns the format of a file; None for a checkpoint."""
    suffix = os.path.splitext(re.sub(r"\.gz$", "", path))[1]
    if suffix and suffix not in _FORMATS and not os.path.isdir(path):
        raise app.UsageError(
            f"the suffix must be one of {', '.join(_FORMATS)}, or none for a "
            f"checkpoint. Received: {path!r}"
        )
    return _FORMATS.get(suffix)


def _convert(options: Namespace) -> int:
    source, target = _format_of(options.source), _format_of(options.target)
    if source is not None and options.dim is None:
        raise app.UsageError("--dim must be given: the source is no checkpoint")
    with _requests.waiting(f"converting '{options.source}'"):
        # These modules import TensorFlow.
        from tfswitch import _loader, io, statistics  # noqa: F401
        from tfswitch.table import EmbeddingTable

        with Cluster(f"local://convert-{os.getpid()}") as cluster:
            if source is None:
                table = _restored(cluster, options.source, options.table)
            else:
                table = EmbeddingTable(
                    options.table or "table",
                    options.dim,
                    optimizer=options.optimizer,
                    statistics=options.statistics
                    and getattr(statistics, options.statistics)(),
                    cluster=cluster,
                )
                read = getattr(io, f"read_{source}")
                read(table, options.source, slots=options.slots)
            num_rows = table.size()
            if target is None:
                table.save(options.target)
            else:
                write = getattr(io, f"write_{target}")
                write(table, options.target, slots=options.slots)
    return _requests.tell(
        options,
        {"target": options.target, "rows": num_rows},
        f"wrote {num_rows:,} rows to '{options.target}'",
    )


def _restored(cluster: Cluster, path: str, name: str | None) -> Any:
    """Restores a table with its saved settings, whatever they are."""
    if name is None:
        found = call(_native, "InspectFiles", path=path)
        saved = {t["name"] for p in found["parts"][-1:] for t in p["tables"]}
        if len(saved) != 1:
            raise app.UsageError(
                f"--table must name one of: {', '.join(sorted(saved))}"
            )
        (name,) = saved
    cluster.restore(path, [name], progress=False)
    if _requests.config_of(cluster, name)["layout"]:
        raise ValueError(
            f"table '{name}' of '{path}' is a dense table, which has no rows "
            "to convert; name another one by --table"
        )
    return cluster.table(name)
