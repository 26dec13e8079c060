"""`tfswitch size` prints how much memory and disk the rows of a table take.

The command makes a table with the given settings in this process, gives it rows
up to _SAMPLE_BYTES, and reads the table's own figures. Each further row needs
as much memory: all rows have the same stride. The 16 stripes of an index grow
at different times, so the index has the same bytes per row at any size
(cc/table/embedding_table.cc).
"""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app

from tfswitch import _native, statistics, storage_dtype
from tfswitch._connection._control_calls import call, integers
from tfswitch._connection._reports import format_bytes
from tfswitch._settings._table_spec import TableSpec
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least, names, quantity
from tfswitch.optimizers import _rules

_MIB = 1 << 20
_SAMPLE_BYTES = 256 * _MIB
_SAMPLE_STEP = 1 << 17
# The bytes of the time of a row's last change: RowStore::InitStamps() in
# cc/table.
_STAMP_BYTES = 4
# The memory of a server without rows: 20 MiB when idle, and memory that was
# freed but is kept by the allocator.
_PROCESS_BYTES = 64 * _MIB
# One eighth of the bytes of all rows is planned for copies of rows that change
# during a save.
_SAVE_SHARE = 8
_MIN_SAVE_BYTES = 64 * _MIB
# A save adds changed rows to the files of the last save, until these files have
# more than 1.5 times the bytes of all rows. If each save has half of the rows,
# the files grow to twice these bytes. The next save then writes all rows to new
# files, while the old files and those before them still exist: 2 + 2 + 1
# (docs/durability.md).
_SAVES = 5


def run(words: Sequence[str]) -> None:
    """Prints what one server needs, and what all servers need."""
    options = _parser().parse_args(words)
    plan = _plan(options, _config(options))
    print(json.dumps(plan, indent=2) if options.json else _as_text(plan))


# Flags of the server: name, least value, default, and help.
_SERVER_BOUNDS = (
    (
        "max_buffer_bytes",
        2 * _MIB,
        "512Mi",
        "bound for requests that arrive, and for answers that are not read "
        "yet. Two of the longest messages must fit.",
    ),
    (
        "max_bloom_bytes",
        0,
        "0",
        "bound for the Bloom filters of all tables, such as 256Mi. They are "
        "what BloomMinCount needs.",
    ),
    ("push_log_max_bytes", 1, "8Gi", "longest log."),
)


def _parser() -> Parser:
    parser = Parser("size", "Prints the memory and the disk that rows need.")
    parser.add_argument(
        "--rows",
        type=quantity(1),
        required=True,
        help="rows of the table on all servers, such as 100M.",
    )
    parser.add_argument(
        "--dim",
        type=at_least(1),
        required=True,
        help="floats of a row's embedding, such as 16.",
    )
    parser.add_argument(
        "--optimizer",
        choices=[name.lower() for name in _rules.__all__],
        default="adam",
        help="the optimizer, whose state lies in the row. Default: "
        "%(default)s.",
    )
    parser.add_argument(
        "--servers",
        type=at_least(1),
        default=1,
        help="how many servers there are. Default: %(default)s.",
    )
    parser.add_argument(
        "--storage_dtype",
        type=names,
        default="float32",
        help="how floats are kept: float32, bfloat16 or float16; after a "
        "comma, the same for the optimizer's state. Default: %(default)s.",
    )
    parser.add_argument(
        "--statistics",
        choices=("usage", "show_click"),
        help="what is counted for each row. Default: nothing.",
    )
    for name, least, default, about in _SERVER_BOUNDS:
        parser.add_argument(
            f"--{name}",
            type=quantity(least),
            default=default,
            help=f"the server's {about} Default: {default}.",
        )
    _requests.add_json(parser)
    return parser


def _config(options: Namespace) -> dict[str, Any]:
    """Returns the table's config, as the flags set it."""
    dtypes = options.storage_dtype
    types = dict(zip(("embeddings", "slots"), dtypes, strict=False))
    try:
        if len(dtypes) > 2:
            raise ValueError(
                "expected one type, or two with a comma between them. "
                f"Received: {','.join(dtypes)!r}"
            )
        stored = storage_dtype.StorageDtype(**types)
    except ValueError as error:
        raise app.UsageError(f"--storage_dtype: {error}") from error
    spec = TableSpec(
        optimizer=options.optimizer,
        storage_dtype=stored,
        statistics={
            None: None,
            "usage": statistics.Usage(),
            "show_click": statistics.ShowClick(),
        }[options.statistics],
        seed=0,
    )
    return spec.to_table_config("size", options.dim)


def _plan(options: Namespace, config: dict[str, Any]) -> dict[str, Any]:
    servers = options.servers
    cluster = _native.Cluster("local://tfswitch-size", 30.0)
    try:
        table = cluster.open_table(json.dumps(config))
    except ValueError as error:  # The dimension is too large.
        raise app.UsageError(f"--dim={config['dim']}: {error}") from error
    # Each server has a range of virtual shards; some servers have one more than
    # others.
    (info,) = call(cluster, "ListTables")["tables"]
    shards = info["config"]["num_virtual_shards"]
    on_server = math.ceil(options.rows * math.ceil(shards / servers) / shards)
    table_bytes, slot_floats = _measure(cluster, table, on_server)
    row_bytes = table_bytes["rows"]
    save_bytes = max(_MIN_SAVE_BYTES, row_bytes // _SAVE_SHARE // _MIB * _MIB)
    memory = {
        **table_bytes,
        "stamps": _STAMP_BYTES * on_server,
        "messages": 2 * options.max_buffer_bytes,
        "saving": save_bytes,
        "bloom": options.max_bloom_bytes,
        "process": _PROCESS_BYTES,
    }
    # A saved row has a key, and float32 for any storage dtype
    # (docs/checkpoint_format.md).
    saved_bytes = on_server * (8 + 4 * (config["dim"] + slot_floats))
    log_bytes = options.push_log_max_bytes
    disk = {"saves": _SAVES * saved_bytes, "push_log": log_bytes}
    return {
        "rows": options.rows,
        "dim": config["dim"],
        "optimizer": options.optimizer,
        "servers": servers,
        "rows_per_server": on_server,
        "row_stride_bytes": row_bytes // on_server,
        "memory_bytes": memory,
        "disk_bytes": disk,
        "server_flags": [
            f"--max_message_bytes={options.max_buffer_bytes // 2}",
            f"--max_buffer_bytes={options.max_buffer_bytes}",
            f"--max_save_bytes={save_bytes}",
            # Never 0, which would mean half of the memory. 1 allows no filter,
            # because each filter has more than one byte.
            f"--max_bloom_bytes={options.max_bloom_bytes or 1}",
            f"--push_log_max_bytes={log_bytes}",
        ],
        "kubernetes": {
            "memory": _quantity(sum(memory.values())),
            "storage": _quantity(sum(disk.values())),
        },
    }


def _measure(
    cluster: _native.Cluster, table: _native.Table, rows: int
) -> tuple[dict[str, int], int]:
    """Returns a table's bytes with `rows` rows, and a row's state floats."""
    made = 0
    while True:
        (info,) = call(cluster, "ListTables")["tables"]
        sizes = integers(
            info,
            ("row_bytes", "index_bytes", "reserved_bytes", "row_stride_bytes"),
        )
        if made == rows or sizes["row_bytes"] + sizes["index_bytes"] >= (
            _SAMPLE_BYTES
        ):
            break
        # For wide rows the steps are short.
        step = max(1, _SAMPLE_BYTES // 8 // sizes["row_stride_bytes"])
        step = min(rows - made, step, _SAMPLE_STEP)
        table.pull(np.arange(made, made + step), True)
        made += step
    return {
        "rows": rows * sizes["row_stride_bytes"],
        "index": sizes["index_bytes"] * rows // made,
        # Memory that is prepared for later rows. It does not grow with the
        # rows.
        "reserved": sizes["reserved_bytes"],
    }, info["slot_floats"]


def _quantity(num_bytes: int) -> str:
    """Returns a Kubernetes text, rounded up: in Gi, below 16 Gi in quarters."""
    step = 256 if num_bytes < 16 << 30 else 1024
    mib = math.ceil(num_bytes / _MIB / step) * step
    return f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"


def _as_text(plan: dict[str, Any]) -> str:
    memory, disk = plan["memory_bytes"], plan["disk_bytes"]
    lines = [
        (f"rows, {plan['row_stride_bytes']} B each", memory["rows"]),
        ("index", memory["index"]),
        ("touched ahead of use", memory["reserved"]),
        ("stamps of changes", memory["stamps"]),
        ("requests and answers", memory["messages"]),
        ("copies during a save", memory["saving"]),
        ("Bloom filters", memory["bloom"]),
        ("the process", memory["process"]),
        ("memory", sum(memory.values())),
        ("saves", disk["saves"]),
        ("push log", disk["push_log"]),
        ("disk of --data_dir", sum(disk.values())),
    ]
    servers = plan["servers"]
    text = [
        f"{plan['rows']:,} rows of {plan['dim']} floats, {plan['optimizer']}, "
        f"on {servers} server(s): up to {plan['rows_per_server']:,} on each",
        "",
        f"{'':22}{'one server':>13}{'all':>13}",
        *(
            f"{name:22}{format_bytes(each):>13}"
            f"{format_bytes(each * servers):>13}"
            for name, each in lines
        ),
        "",
        "Flags of tfswitch-server, whose defaults depend on the machine:",
        *(f"  {flag}" for flag in plan["server_flags"]),
        "In Kubernetes, for each server:",
        f"  memory: {plan['kubernetes']['memory']}   # request and limit",
        f"  storage: {plan['kubernetes']['storage']}",
    ]
    return "\n".join(text)
