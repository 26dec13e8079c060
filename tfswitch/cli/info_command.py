"""`tfswitch info` prints the contents of a cluster."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app

from tfswitch._connection._reports import TableStats, format_bytes
from tfswitch.cli._arguments import Parser, at_least
from tfswitch.cluster import Cluster
from tfswitch.optimizers._conversion import rules_of

_COLUMNS = ("table", "dim", "rows", "memory", "optimizer", "lost")


def run(words: Sequence[str]) -> int:
    """Prints the tables of the servers; returns the exit code."""
    parser = Parser("info", "Prints what servers hold.")
    parser.add_argument("address", help="of all servers: host:port,host:port.")
    parser.add_argument("--json", action="store_true", help="writes JSON.")
    parser.add_argument(
        "--timeout",
        type=at_least(0.001),
        default=5.0,
        metavar="SECONDS",
        help="longest wait for a server. Default: %(default)s.",
    )
    options = parser.parse_args(words)
    address = options.address
    try:
        cluster = Cluster(_with_scheme(address), timeout_secs=options.timeout)
        if not cluster.is_remote:
            raise app.UsageError(
                f"ADDRESS must be of servers. Received: {address!r}"
            )
        tables = cluster._list()
        servers = cluster._servers()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"tfswitch info: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    rows = [_describe(table) for table in tables]
    if options.json:
        addresses = cluster.address.split("://", 1)[1].split(",")
        print(
            json.dumps(
                {"servers": addresses, "security": servers, "tables": rows},
                indent=2,
            )
        )
        return 0
    insecure = sum(server["is_insecure"] for server in servers)
    print(
        f"{cluster.num_shards} server(s) at {cluster.address}"
        + (f", {insecure} of them with --insecure" if insecure else "")
    )
    columns = _COLUMNS if any(row["lost"] for row in rows) else _COLUMNS[:-1]
    lines = [dict(zip(columns, columns, strict=True)), *map(_as_text, rows)]
    widths = {c: max(len(line[c]) for line in lines) for c in columns}
    for line in lines if rows else ():
        print("  ".join(line[c].ljust(widths[c]) for c in columns).rstrip())
    return 0


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"grpc://{address}"


def _describe(table: Mapping[str, Any]) -> dict[str, Any]:
    config, stats = table["config"], TableStats(table)
    rules = rules_of(config["optimizer"])
    return {
        "table": config["name"],
        "dim": config["dim"],
        "rows": stats["num_rows"],
        "memory": stats.memory_bytes,
        "optimizer": rules[0] if len(rules) == 1 else "segments",
        "lost": stats["lost"],
    }


def _as_text(row: Mapping[str, Any]) -> dict[str, str]:
    text = {name: str(value) for name, value in row.items()}
    text["rows"] = f"{row['rows']:,}"
    text["memory"] = format_bytes(row["memory"])
    return text
