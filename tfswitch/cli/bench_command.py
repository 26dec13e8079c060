"""`tfswitch bench` measures lookups and pushes on a table of its own."""

import contextlib
import json
import secrets
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# NumPy would import this module at its first use, during the measurement. The
# import sometimes drops the KeyboardInterrupt of a Ctrl-C.
import numpy.random
from absl import app

from tfswitch import _native
from tfswitch._settings._table_spec import TableSpec
from tfswitch.cli import _requests
from tfswitch.cli._arguments import Parser, at_least, quantity
from tfswitch.cluster import Cluster

# A cluster whose calls take longer at the 99th percentile is not healthy: each
# step of a worker waits for one lookup and one push.
_MAX_P99_MS = 1000.0


def run(words: Sequence[str]) -> int:
    """Prints keys per second and times; returns 1 if they are not healthy."""
    parser = Parser(
        "bench",
        "Measures lookups and pushes from this machine, on a table of its own "
        "that is removed at the end.",
    )
    _requests.add_address(parser, "of all servers")
    parser.add_argument(
        "--seconds",
        type=at_least(0.1),
        default=60.0,
        metavar="SECONDS",
        help="how long it measures. Default: %(default)s.",
    )
    for name, default, about in (
        ("batch", 4096, "ids of a lookup and of a push"),
        ("ids", 1_000_000, "different ids"),
        ("dim", 16, "floats of an embedding"),
    ):
        parser.add_argument(
            f"--{name}",
            type=quantity(1),
            default=default,
            metavar="N",
            help=f"{about}. Default: %(default)s.",
        )
    parser.add_argument(
        "--max_p99_ms",
        type=at_least(0.001),
        default=_MAX_P99_MS,
        metavar="MS",
        help="the verdict is healthy if 99 of 100 calls take no longer. "
        "Default: %(default)s.",
    )
    _requests.add_json(parser)
    _requests.add_timeout(parser, 30.0)
    return _requests.run(parser, _run, words)


def _run(options: Namespace) -> int:
    address = _requests.servers_of(options.address, "ADDRESS")
    if options.dim > 4096:
        raise app.UsageError(f"--dim is at most 4096. Received: {options.dim}")
    with (
        Cluster(address, timeout_secs=options.timeout) as cluster,
        _own_table(cluster, options.dim) as table,
    ):
        took = _measure(table, options)
    report: dict[str, Any] = {"address": address}
    for name, secs in took.items():
        p50, p99 = np.percentile(secs, (50, 99)) * 1000.0
        report[name] = {
            "calls": len(secs),
            "keys_per_sec": round(options.batch * len(secs) / sum(secs)),
            "p50_ms": round(float(p50), 3),
            "p99_ms": round(float(p99), 3),
        }
    slow = [n for n in took if report[n]["p99_ms"] > options.max_p99_ms]
    report["healthy"] = not slow
    if options.json:
        _requests.print_json(report)
        return 1 if slow else 0
    _requests.print_lines(
        [
            {
                "": name,
                "keys/s": f"{report[name]['keys_per_sec']:,}",
                "p50 ms": report[name]["p50_ms"],
                "p99 ms": report[name]["p99_ms"],
            }
            for name in took
        ]
    )
    over = f"the p99 of {' and '.join(slow)} is over {options.max_p99_ms:g} ms"
    print(f"unhealthy: {over}" if slow else "healthy: no call failed")
    return 1 if slow else 0


@contextlib.contextmanager
def _own_table(cluster: Cluster, dim: int) -> Iterator[_native.Table]:
    """Makes a table, and drops it also after an error or Ctrl-C.

    If both the block and the drop fail, the error is that of the block.
    """
    name = f"tfswitch_bench_{secrets.token_hex(6)}"
    config = TableSpec(optimizer="adagrad", seed=1).to_table_config(name, dim)
    try:
        yield cluster._native.open_table(json.dumps(config))
    finally:
        first = sys.exc_info()[1]
        try:
            cluster.drop(name)
        except KeyError:
            pass
        except (Exception, KeyboardInterrupt) as error:
            warnings.warn(
                f"table '{name}' could not be removed; `tfswitch drop {name} "
                "--yes` does it",
                RuntimeWarning,
                stacklevel=2,
            )
            if first is None or isinstance(error, KeyboardInterrupt):
                raise


def _measure(
    table: _native.Table, options: Namespace
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"lookups": [], "pushes": []}
    generator = numpy.random.default_rng()
    gradients = np.full((options.batch, options.dim), 1e-3, np.float32)
    begin = time.perf_counter()
    with _requests.waiting("bench") as show:
        while not took["pushes"] or (
            time.perf_counter() - begin < options.seconds
        ):
            ids = generator.integers(options.ids, size=options.batch)
            start = time.perf_counter()
            table.pull(ids, True)
            middle = time.perf_counter()
            table.push(ids, gradients, 0.01, True)
            end = time.perf_counter()
            took["lookups"].append(middle - start)
            took["pushes"].append(end - middle)
            show(f"bench: {end - begin:.0f} of {options.seconds:.0f} s")
    return took
