"""`tfswitch info` prints the contents of a cluster."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from tfswitch._reports import TableStats, format_bytes
from tfswitch.cluster import Cluster

_JSON = flags.DEFINE_bool("json", False, "info: writes JSON.")
_TIMEOUT = flags.DEFINE_float(
    "timeout",
    5.0,
    "info: longest wait for a server, in seconds.",
    lower_bound=0.001,
)

_COLUMNS = ("table", "dim", "rows", "memory", "optimizer", "lost")


def run(address: str) -> int:
    """Prints the tables of the servers; returns the exit code."""
    try:
        cluster = Cluster(_with_scheme(address), timeout=_TIMEOUT.value)
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
    if _JSON.value:
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
    return {
        "table": config["name"],
        "dim": config["dim"],
        "rows": stats["num_rows"],
        "memory": stats.memory_bytes,
        "optimizer": next(iter(config["optimizer"])),
        "lost": stats["lost"],
    }


def _as_text(row: Mapping[str, Any]) -> dict[str, str]:
    text = {name: str(value) for name, value in row.items()}
    text["rows"] = f"{row['rows']:,}"
    text["memory"] = format_bytes(row["memory"])
    return text
