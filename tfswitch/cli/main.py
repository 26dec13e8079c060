"""The command line, but for the commands that have modules of their own.

A command imports its modules when it is called, so that help comes at once.
"""

import functools
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tfswitch import _native, _tf_config
from tfswitch._tokens import without_secrets
from tfswitch.cli import _durations, programs

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
    "Default: `checkpoints` in --data_dir if that is given, else the current "
    "folder, unless that is '/'.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "serve, launch: a folder of this server alone, from which it comes back "
    "with its rows after it was stopped or killed; of launch, the folder that "
    "has those of its servers. Default: none, so that rows are in memory only; "
    "of launch, a temporary one, which it removes at the end.",
)
_CHECKPOINT_EVERY = flags.DEFINE_string(
    "checkpoint_every",
    None,
    "serve: how often the state is saved to --data_dir, such as 30s, 10m or "
    "1h; inf: only when the server is stopped. Default: 10m.",
)
_PUSH_LOG = flags.DEFINE_bool(
    "push_log",
    False,
    "serve: keep a log of writes in --data_dir, so that no write is lost that "
    "was acknowledged.",
)
_PUSH_LOG_SYNC = flags.DEFINE_string(
    "push_log_sync",
    None,
    "serve: how often the log is flushed to the disk: the writes that a power "
    "loss may take; always: before each answer. Default: 1s.",
)
_PUSH_LOG_MAX_BYTES = flags.DEFINE_integer(
    "push_log_max_bytes",
    None,
    "serve, size: the longest log; the state is saved when it has half of "
    "that. Default: 8 GiB.",
    lower_bound=1,
)
_CLUSTER_NAME = flags.DEFINE_string(
    "cluster_name",
    None,
    "serve: a name that --data_dir remembers: servers of clusters with other "
    "names refuse the folder.",
)
_FILES = [
    flags.DEFINE_string(name, None, f"serve: {text}")
    for name, text in (
        (
            "tls_cert",
            "a PEM file with the server's certificate chain. Clients then use "
            "grpcs:// (docs/tls.md). Default: no TLS.",
        ),
        ("tls_key", "a PEM file with the key of --tls_cert."),
        (
            "tls_ca",
            "a PEM file with authorities; clients must show a certificate "
            "that one of them has signed. Default: they need none.",
        ),
    )
]
_TOKEN_FILE = flags.DEFINE_string(
    "token_file",
    None,
    "serve, token: a file with the hashes of tokens, one of which clients must "
    "show (docs/access.md). Default: they need none.",
)
_SWITCHES = [
    flags.DEFINE_bool(name, False, f"serve: {text}")
    for name, text in (
        (
            "insecure",
            "serve on an address that other machines can reach, although there "
            "is no TLS, or neither --token_file nor --tls_ca.",
        ),
        (
            "reflection",
            "tell callers which services and messages there are, by gRPC's "
            "reflection service.",
        ),
    )
]
_REMOTE = flags.DEFINE_string(
    "remote",
    None,
    "serve: a folder of an object store, such as s3://bucket/folder, to which "
    "all saves are uploaded, and from which the server comes back if "
    "--data_dir is empty. All servers of a cluster have the same.",
)
_REMOTE_TIMEOUT = _durations.define(
    "remote_timeout",
    "5m",
    "serve: how long --remote is tried at the start, and how long the upload "
    "after the end of the server may take.",
)
_LIMITS = flags.DEFINE_multi_string(
    "limit",
    [],
    "serve, repair: what else bounds the server, as name=value, such as "
    "max_tables=100; docs/server.md has the names. May be repeated.",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "repair: only print what is whole, and how many writes each way out loses.",
)
_TO_SAVE = flags.DEFINE_bool(
    "to_save",
    False,
    "repair: go back to the newest whole save, and keep no record of the push "
    "log. Default: cut the log at its first damage.",
)
_SBOM = flags.DEFINE_bool(
    "sbom",
    False,
    "version: print instead where the software bill of materials is: a file "
    "in CycloneDX's JSON, with the libraries of this build.",
)

_USAGE = """usage: tfswitch COMMAND [flags]

commands:
  serve            serves tables: one shard of a cluster
  launch PROGRAM   runs servers and workers here; its arguments may follow
  info ADDRESS     prints what servers hold, as of host:port,host:port
  repair DATA_DIR  repairs a folder whose push log has lost writes
  size             prints the memory and the disk that rows need
  token ACTION     create, revoke ID or list: who may do what on servers
  export           writes bases and deltas of tables on servers, at intervals
  cmake-dir        prints where find_package(tfswitch) of CMake finds it
  version          prints the version

`tfswitch COMMAND --help` lists the flags of a command."""


def _place_from_environment() -> tuple[str, int, int]:
    """The ps task of TF_CONFIG: address, shard_index, num_shards."""
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
    host, _, port = servers[task.number].rpartition(":")
    if not port.isdigit():
        raise app.UsageError(
            "TF_CONFIG must name a ps as host:port. Received: "
            f"{servers[task.number]!r}; or pass --address"
        )
    if host not in ("localhost", "127.0.0.1", "[::1]"):
        host = "0.0.0.0"
    return f"{host}:{port}", task.number, len(servers)


def _repair(data_dir: str) -> None:
    kind = (
        "dry_run" if _DRY_RUN.value else "to_save" if _TO_SAVE.value else "cut"
    )
    programs.execute_server(
        [
            f"--data_dir={data_dir}",
            f"--repair={kind}",
            *(f"--{limit}" for limit in _LIMITS.value),
        ]
    )


def _serve() -> int | None:
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
    for flag in (_CHECKPOINT_EVERY, _PUSH_LOG_SYNC):
        if re.fullmatch(r"[0-9.]+", flag.value or ""):
            raise app.UsageError(
                f"--{flag.name} needs a unit, such as {flag.value}s or "
                f"{flag.value}m. Received: --{flag.name}={flag.value}"
            )
    arguments = [
        f"--address={address}",
        f"--shard_index={shard_index}",
        f"--num_shards={num_shards}",
        f"--num_threads={_NUM_THREADS.value}",
        f"--max_message_bytes={_MAX_MESSAGE_BYTES.value}",
        f"--checkpoint_root={_CHECKPOINT_ROOT.value}",
        *(
            f"--{flag.name}={flag.value}"
            for flag in (
                _DATA_DIR,
                _CHECKPOINT_EVERY,
                _CLUSTER_NAME,
                _PUSH_LOG_SYNC,
                _PUSH_LOG_MAX_BYTES,
                *_FILES,
                _TOKEN_FILE,
            )
            if flag.value is not None
        ),
        *(f"--{flag.name}" for flag in (_PUSH_LOG, *_SWITCHES) if flag.value),
        *(f"--{limit}" for limit in _LIMITS.value),
    ]
    if _REMOTE.value is not None:
        return _serve_with_remote(
            _REMOTE.value, arguments, shard_index, num_shards
        )
    programs.execute_server(arguments)
    return None


def _serve_with_remote(
    url: str, arguments: list[str], shard_index: int, num_shards: int
) -> int:
    from tfswitch.cli import remote_server
    from tfswitch.remote.companion import Companion

    if _DATA_DIR.value is None:
        raise app.UsageError(
            "--remote needs --data_dir, the folder whose saves it uploads"
        )
    root = _CHECKPOINT_ROOT.value
    if root and os.path.realpath(root) == "/":
        raise app.UsageError(
            "--remote uploads all checkpoints below --checkpoint_root, which "
            "must not be '/'"
        )
    make_companion = functools.partial(
        Companion,
        url,
        data_dir=_DATA_DIR.value,
        checkpoint_root=root,
        shard_index=shard_index,
        num_shards=num_shards,
        cluster=_CLUSTER_NAME.value or "",
    )
    try:
        return remote_server.run(
            programs.server_command(arguments),
            make_companion,
            hears_requests=shard_index == 0,
            timeout=_REMOTE_TIMEOUT.value,
        )
    except (ValueError, ImportError) as error:
        raise app.UsageError(f"--remote: {error}") from error


def _version(sbom: bool = False) -> None:
    if sbom:
        print(Path(_native.__file__).with_name("sbom.cdx.json"))
    else:
        print(f"tfswitch {_native.version()}")


def _imported(command: str) -> Any:
    """The module of a command, which defines its flags."""
    return importlib.import_module(f"tfswitch.cli.{command}_command")


def _cmake_dir() -> None:
    print(Path(_native.__file__).parent)


# With how many arguments they may have; their return value is the exit code.
_COMMANDS: dict[str, tuple[range, Callable[..., int | None]]] = {
    "serve": (range(1), _serve),
    "launch": (
        range(1, sys.maxsize),
        lambda *words: _imported("launch").run(*words),
    ),
    "info": (range(1, 2), lambda address: _imported("info").run(address)),
    "repair": (range(1, 2), _repair),
    "size": (range(1), lambda: _imported("size").run()),
    "export": (range(1), lambda: _imported("export").run()),
    "token": (range(1, 3), lambda *words: _imported("token").run(*words)),
    "cmake-dir": (range(1), _cmake_dir),
    "version": (range(1), lambda: _version(_SBOM.value)),
}


def _run(argv: Sequence[str]) -> int | None:
    if len(argv) < 2:
        raise app.UsageError(f"a command is missing.\n\n{_USAGE}")
    command, *arguments = argv[1:]
    if command not in _COMMANDS:
        raise app.UsageError(
            f"there is no command {command!r}. Commands: "
            f"{', '.join(_COMMANDS)}. `tfswitch --help` says what they do."
        )
    num_arguments, call = _COMMANDS[command]
    if len(arguments) not in num_arguments:
        raise app.UsageError(
            f"expected `tfswitch {_line_of(command).split('  ')[0]}`, with "
            f"flags or none. Received: {' '.join(argv[1:])!r}"
        )
    return call(*arguments)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    command = next((word for word in argv if word in _COMMANDS), "")
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise app.UsageError(
            f"{error}. `{f'tfswitch {command}'.strip()} --help` lists what "
            "there is."
        ) from error


def _split_at_program(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the words of `launch`: its own, and the program with arguments."""
    has_command = False
    i = 0
    while i < len(words):
        name = words[i].lstrip("-")
        if words[i] == "--":
            return words[:i], words[i + 1 :]
        if name != words[i]:
            if name in flags.FLAGS and not flags.FLAGS[name].boolean:
                i += 1  # Its value.
        elif has_command:
            break
        else:
            has_command = True
        i += 1
    return words[:i], words[i:]


def _line_of(command: str) -> str:
    """The usage's description of the command."""
    lines = map(str.strip, _USAGE.splitlines()[3:])
    return next(line for line in lines if line.split()[:1] == [command])


def _help(command: str | None) -> str:
    if command is None:
        return _USAGE
    values = flags.FLAGS
    for flag in [values[name] for name in values]:
        # That of an enum begins with its values, such as "<read|train>: ".
        text = re.sub(r"^<.*?>: ", "", flag.help or "")
        if command in text.split(":")[0].split(", "):
            values.register_key_flag_for_module(command, flag)
    listed = values.module_help(command).split("\n", 2)[2:]
    head = f"tfswitch {_line_of(command)}\n"
    return head + "".join(f"\n{flag}" for flag in listed)


def _explain(call: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> Any:
    """Calls it, and ends with 2 and one message if it was called wrongly."""
    try:
        return call(argv)
    except (app.UsageError, _tf_config.TfConfigError) as error:
        # A token may be anywhere in the words of the user.
        print(f"tfswitch: {without_secrets(str(error))}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """The entry point of the `tfswitch` program."""
    try:
        try:
            _main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has gone. Python flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _main() -> None:
    arguments = sys.argv[1:]
    command = next((word for word in arguments if word in _COMMANDS), None)
    if command in ("launch", "info", "size", "export", "token"):
        _imported(command)
    of_program: list[str] = []
    if command == "launch":
        arguments, of_program = _split_at_program(arguments)
    if not {"--help", "-h", "-help"}.isdisjoint(arguments):
        print(_help(command))
    elif arguments == ["--version"]:
        _version()
    else:
        app.run(
            functools.partial(_explain, _run),
            argv=["tfswitch", *arguments, "--", *of_program],
            flags_parser=functools.partial(_explain, _parse_flags),
        )
