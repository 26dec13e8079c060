"""The command line: finds the command, and runs it.

Each command has a function that takes its words and returns the exit code. A
command imports its modules when it is called, so that help is quick.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, logging

from tfswitch import _native
from tfswitch._connection._tf_config import TfConfigError
from tfswitch._connection._tokens import without_secrets
from tfswitch.cli._arguments import Parser


def _version(words: Sequence[str]) -> None:
    parser = Parser("version", "Prints the version.")
    parser.add_argument(
        "--sbom",
        action="store_true",
        help="print instead where the software bill of materials is: a file in "
        "CycloneDX's JSON, with the libraries of this build.",
    )
    if parser.parse_args(words).sbom:
        print(Path(_native.__file__).with_name("sbom.cdx.json"))
    else:
        print(f"tfswitch {_native.version()}")


def _cmake_dir(words: Sequence[str]) -> None:
    about = "Prints where find_package(tfswitch) of CMake finds it."
    Parser("cmake-dir", about).parse_args(words)
    print(Path(_native.__file__).parent)


def _imported(module: str, function: str = "run") -> Callable[..., int | None]:
    def run(words: Sequence[str]) -> int | None:
        name = f"tfswitch.cli.{module}_command"
        return getattr(importlib.import_module(name), function)(words)

    return run


class _Command(NamedTuple):
    synopsis: str
    about: str
    run: Callable[[Sequence[str]], int | None]


_OF_SERVERS_AND_FILES = (
    ("info [ADDRESS]", "prints servers, dead ones too, and tables", "info.run"),
    ("stats", "prints rates and durations of servers", "stats.stats"),
    ("top", "shows rates and durations, live", "stats.top"),
    ("get TABLE ID...", "prints rows, with slots and statistics", "rows.get"),
    ("set TABLE ID...", "sets the embeddings of ids", "rows.set_rows"),
    ("remove TABLE ID...", "removes rows", "rows.remove"),
    ("save PATH", "saves tables to a checkpoint", "tables.save"),
    ("restore PATH", "brings tables of a checkpoint back", "tables.restore"),
    ("shrink TABLE", "evicts rows by the table's policy", "tables.shrink"),
    ("drop TABLE", "removes a table with its rows", "tables.drop"),
    ("inspect PATH", "says what files of tables hold", "files.inspect"),
    ("diff BEFORE AFTER", "compares rows of saves or exports", "files.diff"),
    ("convert SOURCE TARGET", "copies rows to other files", "files.convert"),
    ("bench [ADDRESS]", "says whether servers are healthy", "bench.run"),
    ("completion bash", "prints a script for bash", "completion.run"),
)

_COMMANDS = {
    command.synopsis.split()[0]: command
    for command in (
        _Command(
            "serve",
            "serves tables: one shard of a cluster",
            _imported("serve", "serve"),
        ),
        _Command(
            "launch PROGRAM",
            "runs servers and workers here; its arguments may follow",
            _imported("launch"),
        ),
        *(
            _Command(synopsis, about, _imported(*where.split(".")))
            for synopsis, about, where in _OF_SERVERS_AND_FILES
        ),
        _Command(
            "repair DATA_DIR",
            "repairs a folder whose push log has lost writes",
            _imported("serve", "repair"),
        ),
        _Command(
            "size",
            "prints the memory and the disk that rows need",
            _imported("size"),
        ),
        _Command(
            "token ACTION",
            "create, revoke ID or list: who may do what on servers",
            _imported("token"),
        ),
        _Command(
            "export",
            "writes bases and deltas of tables on servers, at intervals",
            _imported("export"),
        ),
        _Command(
            "cmake-dir",
            "prints where find_package(tfswitch) of CMake finds it",
            _cmake_dir,
        ),
        _Command("version", "prints the version", _version),
    )
}

_USAGE = (
    "usage: tfswitch COMMAND [flags]\n\ncommands:\n"
    + "".join(f"  {c.synopsis:21}  {c.about}\n" for c in _COMMANDS.values())
    + "\n`tfswitch COMMAND --help` lists the flags of a command."
)


def run(words: Sequence[str]) -> int | None:
    """Runs the command that the words name; returns the exit code.

    Raises:
        absl.app.UsageError: If the words are wrong.
    """
    if not words:
        raise app.UsageError(f"a command is missing.\n\n{_USAGE}")
    name, *others = words
    if name in ("--help", "-h"):
        print(_USAGE)
        return None
    if name == "--version":
        name = "version"
    if name not in _COMMANDS:
        raise app.UsageError(
            f"there is no command {name!r}. Commands: {', '.join(_COMMANDS)}. "
            "`tfswitch --help` says what they do."
        )
    return _COMMANDS[name].run(others)


def main() -> None:
    """The entry point of the `tfswitch` program."""
    logging.use_absl_handler()
    try:
        try:
            code = run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the output, such as `head`, has gone. At exit Python
        # would write the rest to this reader, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except (app.UsageError, TfConfigError) as error:
        # The words of the user may contain a token.
        print(f"tfswitch: {without_secrets(str(error))}", file=sys.stderr)
        code = 2
    sys.exit(code)
