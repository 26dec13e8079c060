"""Parts of the commands that ask servers or read files.

Exit codes: 0 if all is well, 1 if the command failed or found something
unhealthy, 2 if it was called in a wrong way, 130 after Ctrl-C.
"""

import contextlib
import json
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import app

from tfswitch._connection import _addresses, _tf_config
from tfswitch._connection._tokens import without_secrets
from tfswitch.cli._arguments import Parser, at_least
from tfswitch.cluster import Cluster

# A call that takes longer shows on a terminal that it runs.
_QUIET_SECS = 1.0

# The remedies that errors name for programs, and those that a command prints in
# their place.
_REMEDIES = {
    "`timeout_secs` in tfswitch.connect": "--timeout",
    "pass some with the call, or make": "make",
    "with slots=True": "with --slots",
    "with slots=False": "without --slots",
}


def run(
    parser: Parser, act: Callable[[Namespace], int], words: Sequence[str]
) -> int:
    """Parses the words and acts; an error is one line. Returns the code."""
    options = parser.parse_args(words)

    def complain(error: object) -> None:
        text = " ".join(str(error).split())
        for old, new in _REMEDIES.items():
            text = text.replace(old, new)
        print(f"{parser.prog}: {without_secrets(text)}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RuntimeWarning)
            warnings.showwarning = lambda text, *_: complain(f"warning: {text}")
            return act(options)
    except (BrokenPipeError, _tf_config.TfConfigError):
        raise
    except KeyError as error:
        complain(error.args[0])  # The text of a KeyError has quotes around it.
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        complain(error)
    except (MemoryError, OverflowError) as error:
        complain(str(error) or "there is too little memory")
    return 1


def add_address(parser: Parser, about: str) -> None:
    """Adds the argument of commands without `--cluster`."""
    parser.add_argument(
        "address",
        nargs="?",
        help=f"{about}: host:port,host:port in shard order. Default: the ps "
        "of TF_CONFIG.",
    )


def add_cluster(parser: Parser, timeout_secs: float | None = 30.0) -> None:
    """Adds the flags that `connected` reads."""
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="the servers, as host:port,host:port in shard order, also with "
        "grpc://, grpcs:// for TLS or grpc+unix://. Default: the ps of "
        "TF_CONFIG.",
    )
    if timeout_secs is not None:
        add_timeout(parser, timeout_secs)


def add_timeout(parser: Parser, timeout_secs: float) -> None:
    parser.add_argument(
        "--timeout",
        type=at_least(0.001),
        default=timeout_secs,
        metavar="SECONDS",
        help="longest wait for a server. Default: %(default)s.",
    )


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="writes JSON.")


def servers_of(address: str | None, name: str = "--cluster") -> str:
    """Returns the address with its scheme; by default that of TF_CONFIG."""
    if address is None:
        address = _tf_config.cluster_address()
        if address is None:
            raise app.UsageError(f"{name} must be given: TF_CONFIG has no ps")
    address = address if "://" in address else f"grpc://{address}"
    try:
        _addresses.check_has_no_token(name, address)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    why = _addresses.why_no_servers(address)
    if why is not None:
        raise app.UsageError(
            f"{name} must be {_addresses.SERVERS}: {why}. Received: {address!r}"
        )
    return address


def connected(options: Namespace) -> Cluster:
    """Connects to all servers of `--cluster`."""
    return Cluster(servers_of(options.cluster), timeout_secs=options.timeout)


def config_of(cluster: Cluster, table: str) -> dict[str, Any]:
    """Returns the config of a table; KeyError if there is none."""
    (info,) = cluster._list(table)
    return info["config"]


def print_json(value: object, indent: int | None = 2) -> None:
    """Prints JSON, which has no infinite floats and no NaN: they are null."""
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    print(json.dumps(value, indent=indent))


def tell(options: Namespace, report: object, text: object) -> int:
    """Prints the report with `--json`, and else the text. Returns 0."""
    if options.json:
        print_json(report)
    else:
        print(text)
    return 0


def print_lines(lines: Sequence[Mapping[str, object]]) -> None:
    """Prints texts in columns, under their names; no columns without texts."""
    columns = [
        column
        for column in dict.fromkeys(name for line in lines for name in line)
        if any(line.get(column, "") != "" for line in lines)
    ]
    texts = [dict(zip(columns, columns, strict=True))] if lines else []
    texts += [{c: str(line.get(c, "")) for c in columns} for line in lines]
    widths = {c: max(len(text[c]) for text in texts) for c in columns}
    for text in texts:
        print("  ".join(text[c].ljust(widths[c]) for c in columns).rstrip())


@contextlib.contextmanager
def waiting(task: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal that a task runs, if it takes over a second.

    Yields:
        A function that replaces the text of the task.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda text: None
        return
    # These modules are slow to import, as in _progress_bar.py.
    from rich import console, markup

    with contextlib.ExitStack() as stack:
        status = console.Console(stderr=True).status(markup.escape(task))
        timer = threading.Timer(_QUIET_SECS, status.start)
        timer.daemon = True
        timer.start()
        stack.callback(status.stop)
        stack.callback(timer.cancel)
        yield lambda text: status.update(markup.escape(text))
