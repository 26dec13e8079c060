"""`tfswitch serve`, `tfswitch export` and `tfswitch version`."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags

import tfswitch
from tfswitch import _tf_config
from tfswitch.cli import export_command, server_binary

_ADDRESS = flags.DEFINE_string(
    "address",
    None,
    "serve: host:port (port 0: any free one) or unix:/path to listen on. "
    "Default: what the TF_CONFIG of a ps task says, else 127.0.0.1:7077.",
)
_SHARD_INDEX = flags.DEFINE_integer(
    "shard_index",
    None,
    "serve: which shard of the cluster this is. Default: from TF_CONFIG, or 0.",
    lower_bound=0,
)
_NUM_SHARDS = flags.DEFINE_integer(
    "num_shards",
    None,
    "serve: how many servers the cluster has. Default: from TF_CONFIG, or 1.",
    lower_bound=1,
)
_NUM_THREADS = flags.DEFINE_integer(
    "num_threads",
    0,
    "serve: threads that serve; 0: one per core.",
    lower_bound=0,
)
_MAX_MESSAGE_BYTES = flags.DEFINE_integer(
    "max_message_bytes",
    1 << 30,
    "serve: longest message in either direction.",
    lower_bound=1,
)

_CHECKPOINT_ROOT = flags.DEFINE_string(
    "checkpoint_root",
    "",
    "serve: the folder below which checkpoints are saved and restored. "
    "Default: the current folder, unless that is '/'.",
)
_LIMITS = flags.DEFINE_multi_string(
    "limit",
    [],
    "serve: what else bounds the server, as name=value, such as "
    "max_tables=100; docs/server.md has the names. May be repeated.",
)

_USAGE = (
    "usage: tfswitch serve|export|version [flags]; tfswitch --help lists flags"
)


def _place_from_environment() -> tuple[str, int, int]:
    """What TF_CONFIG says of a ps task: address, shard_index, num_shards."""
    task = _tf_config.task()
    servers = _tf_config.ps_addresses()
    if task is None or task.type != "ps" or not servers:
        return "127.0.0.1:7077", 0, 1
    if task.number >= len(servers):
        raise app.UsageError(
            f"TF_CONFIG names {len(servers)} ps addresses, and this is ps "
            f"number {task.number}"
        )
    # The name in the cluster may be one that only others can resolve.
    port = servers[task.number].rsplit(":", 1)[-1]
    if not port.isdigit():
        raise app.UsageError(
            "TF_CONFIG must name a ps as host:port. Received: "
            f"{servers[task.number]!r}; or pass --address"
        )
    return f"0.0.0.0:{port}", task.number, len(servers)


def _serve() -> None:
    address, shard_index, num_shards = _place_from_environment()
    if _ADDRESS.value is not None:
        address = _ADDRESS.value
    if _SHARD_INDEX.value is not None:
        shard_index = _SHARD_INDEX.value
    if _NUM_SHARDS.value is not None:
        num_shards = _NUM_SHARDS.value
    if shard_index >= num_shards:
        raise app.UsageError(
            "--shard_index must be below --num_shards. Received: "
            f"--shard_index={shard_index} --num_shards={num_shards}"
        )
    for limit in _LIMITS.value:
        if "=" not in limit:
            raise app.UsageError(
                f"--limit must be name=value. Received: --limit={limit}"
            )
    server_binary.execute(
        [
            f"--address={address}",
            f"--shard_index={shard_index}",
            f"--num_shards={num_shards}",
            f"--num_threads={_NUM_THREADS.value}",
            f"--max_message_bytes={_MAX_MESSAGE_BYTES.value}",
            f"--checkpoint_root={_CHECKPOINT_ROOT.value}",
            *(f"--{limit}" for limit in _LIMITS.value),
        ]
    )


def _version() -> None:
    print(f"tfswitch {tfswitch.__version__}")


# What they return is the exit code.
_COMMANDS: dict[str, Callable[[], int | None]] = {
    "serve": _serve,
    "export": export_command.run,
    "version": _version,
}


def _run(argv: Sequence[str]) -> int | None:
    if len(argv) != 2 or argv[1] not in _COMMANDS:
        raise app.UsageError(f"{_USAGE}. Received: {' '.join(argv[1:])!r}")
    return _COMMANDS[argv[1]]()


def main() -> None:
    """The entry point of the `tfswitch` program."""
    # `--help` lists those of the program's own file, which is a small script.
    for module in (__name__, export_command.__name__):
        for flag in flags.FLAGS.get_flags_for_module(module):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(_run, argv=["tfswitch", *sys.argv[1:]])
