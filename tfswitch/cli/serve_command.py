"""`tfswitch serve` and `tfswitch repair`, which start the server program.

The server reads its own flags, and its help lists them. This file has only the
flags of the companion, which uploads saves, and takes address and shard from
TF_CONFIG.
"""

import functools
import os
import subprocess
from argparse import Namespace
from collections.abc import Sequence

from absl import app

from tfswitch._connection import _tf_config
from tfswitch._connection._tokens import has_token
from tfswitch.cli import programs
from tfswitch.cli._arguments import Parser, at_least, duration


def serve(words: Sequence[str]) -> int | None:
    """Becomes the server, or runs its companion and returns the exit code."""
    parser = Parser(
        "serve",
        "Serves one shard of a cluster. In a ps task, --address, --shard_index "
        "and --num_shards are those of TF_CONFIG unless they are given.",
    )
    parser.add_argument(
        "--remote",
        metavar="URL",
        help="a folder of an object store, such as s3://bucket/folder, to "
        "which all saves are uploaded, and from which the server comes back "
        "if --data_dir is empty. All servers of a cluster have the same.",
    )
    parser.add_argument(
        "--remote_timeout",
        type=duration,
        default="5m",
        metavar="DURATION",
        help="how long --remote is tried at the start, and how long the upload "
        "after the end of the server may take. Default: %(default)s.",
    )
    if _asks_for_help(words):
        parser.epilog = "All other flags are those of tfswitch-server, below."
        parser.print_help()
        print(flush=True)
        programs.execute_server(["--help"])
    options, others = _split(parser, words)
    arguments = [*_place_from_environment(others), *others]
    if options.remote is None:
        programs.execute_server(arguments)
        return None
    return _serve_with_remote(options.remote, options.remote_timeout, arguments)


def repair(words: Sequence[str]) -> None:
    """Becomes the server program, which repairs a folder."""
    parser = Parser(
        "repair", "Repairs a folder whose push log has lost writes."
    )
    parser.add_argument("data_dir", help="the --data_dir of the server.")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--dry_run",
        action="store_true",
        help="only print what is whole, and how many writes each way out loses",
    )
    way.add_argument(
        "--to_save",
        action="store_true",
        help="go back to the newest whole save, and keep no record of the push "
        "log. Default: cut the log at its first damage.",
    )
    parser.epilog = "The server's flags that bound it may follow."
    options, others = _split(parser, words)
    for word in others:
        if word.startswith(("--data_dir", "--repair")):
            raise app.UsageError(
                "DATA_DIR names the folder, and --dry_run or --to_save the "
                f"way. Received: {word}"
            )
    kind = "cut"
    if options.dry_run:
        kind = "dry_run"
    elif options.to_save:
        kind = "to_save"
    programs.execute_server(
        [f"--data_dir={options.data_dir}", f"--repair={kind}", *others]
    )


def _split(parser: Parser, words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Returns the companion's flags, and the words for the server.

    A token among the words is an error, because the server would print it.
    """
    if any(map(has_token, words)):
        raise app.UsageError(
            "a token is no value of a flag, where others can see it; give "
            f"--token_file=FILE. Received: {' '.join(words)!r}"
        )
    return parser.parse_known_args(words)


def _asks_for_help(words: Sequence[str]) -> bool:
    return not {"--help", "-h"}.isdisjoint(words)


def _place_from_environment(given: Sequence[str]) -> list[str]:
    """Returns the flags that TF_CONFIG sets and `given` does not."""
    task = _tf_config.task()
    servers = _tf_config.ps_addresses()
    if task is None or task.type != "ps" or not servers:
        return []
    if task.number >= len(servers):
        raise app.UsageError(
            f"TF_CONFIG names {len(servers)} ps addresses, and this is ps "
            f"number {task.number}"
        )
    # Only the port is used, because this host may be unable to resolve its own
    # name.
    host, _, port = servers[task.number].rpartition(":")
    if not port.isdigit():
        raise app.UsageError(
            "TF_CONFIG must name a ps as host:port. Received: "
            f"{servers[task.number]!r}; or pass --address"
        )
    if host not in ("localhost", "127.0.0.1", "[::1]"):
        host = "0.0.0.0"
    names = {word.split("=")[0] for word in given}
    place = {
        "--address": f"{host}:{port}",
        "--shard_index": task.number,
        "--num_shards": len(servers),
    }
    return [f"{k}={v}" for k, v in place.items() if k not in names]


def _serve_with_remote(
    url: str, timeout_secs: float, arguments: list[str]
) -> int:
    from tfswitch.cli import remote_server
    from tfswitch.remote.companion import Companion

    command = programs.server_command(arguments)
    # Checks the flags before anything is fetched.
    checked = subprocess.run([*command, "--check_flags"])
    if checked.returncode != 0:
        return checked.returncode
    parser = Parser("serve", "")
    for name in ("data_dir", "checkpoint_root", "cluster_name"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--shard_index", type=at_least(0), default=0)
    parser.add_argument("--num_shards", type=at_least(1), default=1)
    options, _ = parser.parse_known_args(arguments)
    if not options.data_dir:
        raise app.UsageError(
            "--remote needs --data_dir, the folder whose saves it uploads"
        )
    root = options.checkpoint_root
    if root and os.path.realpath(root) == "/":
        raise app.UsageError(
            "--remote uploads all checkpoints below --checkpoint_root, which "
            "must not be '/'"
        )
    make_companion = functools.partial(
        Companion,
        url,
        data_dir=options.data_dir,
        checkpoint_root=root,
        shard_index=options.shard_index,
        num_shards=options.num_shards,
        cluster=options.cluster_name,
    )
    try:
        return remote_server.run(
            command,
            make_companion,
            hears_requests=options.shard_index == 0,
            timeout_secs=timeout_secs,
        )
    except (ValueError, ImportError) as error:
        raise app.UsageError(f"--remote: {error}") from error
