"""`tfswitch serve` and `tfswitch version`."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags

import tfswitch
from tfswitch.cli import server_binary

_ADDRESS = flags.DEFINE_string(
    "address",
    "127.0.0.1:7077",
    "serve: host:port (port 0: any free one) or unix:/path to listen on.",
)
_SHARD_INDEX = flags.DEFINE_integer(
    "shard_index",
    0,
    "serve: which shard of the cluster this is.",
    lower_bound=0,
)
_NUM_SHARDS = flags.DEFINE_integer(
    "num_shards",
    1,
    "serve: how many servers the cluster has.",
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

_USAGE = "usage: tfswitch serve|version [flags]; tfswitch --help lists flags"


def _serve() -> None:
    if _SHARD_INDEX.value >= _NUM_SHARDS.value:
        raise app.UsageError(
            "--shard_index must be below --num_shards. Received: "
            f"--shard_index={_SHARD_INDEX.value} "
            f"--num_shards={_NUM_SHARDS.value}"
        )
    server_binary.execute(
        [
            f"--address={_ADDRESS.value}",
            f"--shard_index={_SHARD_INDEX.value}",
            f"--num_shards={_NUM_SHARDS.value}",
            f"--num_threads={_NUM_THREADS.value}",
            f"--max_message_bytes={_MAX_MESSAGE_BYTES.value}",
        ]
    )


def _version() -> None:
    print(f"tfswitch {tfswitch.__version__}")


_COMMANDS: dict[str, Callable[[], None]] = {
    "serve": _serve,
    "version": _version,
}


def _run(argv: Sequence[str]) -> None:
    if len(argv) != 2 or argv[1] not in _COMMANDS:
        raise app.UsageError(f"{_USAGE}. Received: {' '.join(argv[1:])!r}")
    _COMMANDS[argv[1]]()


def main() -> None:
    """The entry point of the `tfswitch` program."""
    app.run(_run, argv=["tfswitch", *sys.argv[1:]])
