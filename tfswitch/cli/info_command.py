"""`tfswitch info` asks each server by itself, and prints what it holds."""

import collections
import queue
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from absl import app

from tfswitch import _native
from tfswitch._connection import _tf_config
from tfswitch._connection._control_calls import call
from tfswitch._connection._metric_samples import samples_of
from tfswitch._connection._reports import TableStats, format_bytes
from tfswitch._connection._tokens import without_secrets
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least
from tfswitch.cli.stats_command import hot_ids
from tfswitch.optimizers._conversion import rules_of

_MAX_HOT_IDS = 3


def run(words: Sequence[str]) -> int:
    """Prints servers and tables; returns 1 if a server is not well."""
    parser = Parser("info", "Prints the servers of a cluster and their tables.")
    _requests.add_address(
        parser,
        "of the servers, or of one if --servers or TF_CONFIG has the others",
    )
    parser.add_argument(
        "--servers",
        metavar="ADDRESS",
        help="all servers, if ADDRESS has only one of them.",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        const=2.0,
        type=at_least(0.1),
        metavar="SECONDS",
        help="prints again and again, after so many seconds each. Ends with "
        "Ctrl-C. Default of SECONDS: %(const)s.",
    )
    _requests.add_json(parser)
    _requests.add_timeout(parser, 5.0)
    return _requests.run(parser, _run, words)


def _run(options: Namespace) -> int:
    address = _all_servers(options.address, options.servers)
    while True:
        servers = _ask_all(address, options.timeout)
        tables = _sums(servers)
        # Each server tells of its own ids.
        hottest = hot_ids(
            [heat for server in servers for heat in server.get("heats", ())]
        )
        if options.json:
            report = {
                "servers": [_without_parts(server) for server in servers],
                "tables": tables,
                "hot_ids": hottest,
            }
            _requests.print_json(report, None if options.watch else 2)
        else:
            if options.watch:
                print("\x1b[H\x1b[2J", end="")
            _print(address, servers, tables)
            if hottest:
                print()
            _requests.print_lines(
                [
                    {
                        "table": hot["table"],
                        "hot id": hot["id"],
                        "lookups": f"{hot['share']:.1%}",
                    }
                    for hot in hottest[:_MAX_HOT_IDS]
                ]
            )
        if options.watch is None:
            is_well = not any(server["problem"] for server in servers)
            return 0 if is_well and not any(t["lost"] for t in tables) else 1
        print(end="", flush=True)
        time.sleep(options.watch)


def _all_servers(address: str | None, servers: str | None) -> str:
    if servers is None and address is not None and "," not in address:
        # One address stands for the servers that TF_CONFIG has with it.
        told = _tf_config.ps_addresses()
        if address.rpartition("://")[2] in told:
            servers = ",".join(told)
    if servers is None:
        return _requests.servers_of(address, "ADDRESS")
    scheme, separator, given = (address or "").rpartition("://")
    if "://" not in servers:
        servers = f"{scheme}{separator}{servers}"
    if given and given not in servers.rpartition("://")[2].split(","):
        raise app.UsageError(
            f"--servers must have ADDRESS among them. Received: {address!r} "
            f"and --servers={servers}"
        )
    return _requests.servers_of(servers, "--servers")


def _ask_all(address: str, timeout_secs: float) -> list[dict[str, Any]]:
    """Asks all servers at the same time, so that dead ones cost one wait."""
    scheme, _, rest = address.partition("://")
    names = [name.strip() for name in rest.split(",")]
    answers: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()

    def ask(place: int) -> None:
        server: dict[str, Any] = {"address": names[place], "is_alive": False}
        try:
            server.update(_ask(f"{scheme}://{names[place]}", timeout_secs))
        # The caller waits for an answer after any error.
        except Exception as error:
            is_known = isinstance(error, ValueError | OSError | RuntimeError)
            text = str(error) if is_known else repr(error)
            server["problem"] = " ".join(text.split())
        expected = (place, len(names))
        found = (server.get("shard", place), server.get("num_shards"))
        if found[1] is not None and found != expected:
            server["problem"] = (
                f"is shard {found[0]} of {found[1]}, and stands as shard "
                f"{place} of {len(names)}: list all servers in shard order"
            )
        answers.put((place, server))

    # They are daemons, because Ctrl-C does not end their waits.
    for place in range(len(names)):
        threading.Thread(target=ask, args=(place,), daemon=True).start()
    with _requests.waiting(f"asking {address}"):
        return [
            server
            for _, server in sorted(
                (answers.get() for _ in names), key=lambda answer: answer[0]
            )
        ]


def _ask(address: str, timeout_secs: float) -> dict[str, Any]:
    answer = call(
        _native, "AskServer", address=address, timeout_secs=timeout_secs
    )
    said = answer["server"]
    tables = {info["config"]["name"]: info for info in answer["tables"]}
    stats = [TableStats(info) for info in tables.values()]
    view = answer["view"]
    totals: dict[str, float] = collections.defaultdict(float)
    for sample in samples_of([view["metrics"]] if view else []):
        totals[sample.labels.get("direction", sample.name)] += sample.value
    return {
        "is_alive": True,
        "problem": "",
        "version": said["version"],
        "uptime_secs": int(said["uptime_ms"]) / 1000.0,
        "shard": said["shard_index"],
        "num_shards": said["num_shards"],
        "rows": sum(each["num_rows"] for each in stats),
        "bytes": sum(each.memory_bytes for each in stats),
        "max_memory": int(said["max_memory"]) or None,
        # Since the start of the server.
        "keys": sum(s["pulled_keys"] + s["pushed_keys"] for s in stats),
        "cpu_secs": totals["process_cpu_seconds_total"],
        "received_bytes": int(totals["received"]),
        "sent_bytes": int(totals["sent"]),
        "heats": view["heats"] if view else [],
        "last_save": int(said["last_save_ms"]) / 1000.0 or None,
        "workers": int(said["num_workers"]),
        **said["security"],
        "tables": tables,
    }


def _without_parts(server: Mapping[str, Any]) -> dict[str, Any]:
    parts = ("tables", "heats")
    return {name: of for name, of in server.items() if name not in parts}


def _sums(servers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each table, summed over the servers without a problem."""
    well = [server for server in servers if not server["problem"]]
    names = sorted({name for server in well for name in server["tables"]})
    tables = []
    for name in names:
        parts = [s["tables"][name] for s in well if name in s["tables"]]
        stats = [TableStats(part) for part in parts]
        rules = rules_of(parts[0]["config"]["optimizer"])
        lost = [s["address"] for s in well if name not in s["tables"]]
        tables.append(
            {
                "table": name,
                "dim": parts[0]["config"]["dim"],
                "rows": sum(each["num_rows"] for each in stats),
                "on_disk": sum(each["cold_rows"] for each in stats),
                "bytes": sum(each.memory_bytes for each in stats),
                "optimizer": rules[0] if len(rules) == 1 else "segments",
                "refused": sum(each["refused_keys"] for each in stats),
                "lost": f"on {', '.join(lost)}" if lost else "",
            }
        )
    return tables


def _print(
    address: str,
    servers: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Any]],
) -> None:
    insecure = sum(server.get("is_insecure", False) for server in servers)
    dead = sum(not server["is_alive"] for server in servers)
    print(
        f"{len(servers)} server(s) at {address}"
        + (f", {insecure} of them with --insecure" if insecure else "")
        + (f", {dead} of them dead" if dead else "")
    )
    keys = sum(server.get("keys", 0) for server in servers)
    _requests.print_lines([_server_line(server, keys) for server in servers])
    if tables:
        print()
    _requests.print_lines(
        [
            {
                **table,
                "rows": f"{table['rows']:,}",
                "bytes": format_bytes(table["bytes"]),
                # Empty columns are left out.
                "on_disk": f"{table['on_disk']:,}" if table["on_disk"] else "",
                "refused": table["refused"] or "",
            }
            for table in tables
        ]
    )
    for server in servers:
        if server["problem"]:
            text = without_secrets(server["problem"])
            print(
                f"tfswitch info: {server['address']}: {text}", file=sys.stderr
            )


def _server_line(server: Mapping[str, Any], all_keys: int) -> dict[str, object]:
    line: dict[str, object] = {"server": server["address"]}
    if not server["is_alive"]:
        return {**line, "shard": "dead"}
    saved = server["last_save"]
    most = server["max_memory"]
    return {
        **line,
        "shard": f"{server['shard']} of {server['num_shards']}",
        "version": server["version"] or "older",
        "up": _duration(server["uptime_secs"]),
        "rows": f"{server['rows']:,}",
        "bytes": format_bytes(server["bytes"])
        + (f" of {format_bytes(most)}" if most else ""),
        # Empty columns are left out.
        "keys": f"{server['keys'] / all_keys:.0%}" if all_keys else "",
        "cpu": _duration(server["cpu_secs"]) if server["cpu_secs"] else "",
        "traffic": format_bytes(server["received_bytes"] + server["sent_bytes"])
        if all_keys
        else "",
        "last save": f"{datetime.fromtimestamp(saved):%Y-%m-%d %H:%M:%S}"
        if saved
        else "none known",
        # Only shard 0 has the groups of workers.
        "workers": server["workers"] if server["shard"] == 0 else "",
    }


def _duration(secs: float) -> str:
    """Returns the two largest units, such as "3d 4h"."""
    whole = int(secs)
    parts = (whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60)
    texts = [f"{n}{unit}" for n, unit in zip(parts, "dhms", strict=True)]
    first = next((i for i, n in enumerate(parts) if n), 3)
    return " ".join(texts[first : first + 2])
