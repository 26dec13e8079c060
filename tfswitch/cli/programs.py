"""Runs the C++ programs that the wheel carries."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfswitch import _installation

_FOLDER = Path(__file__).parents[1] / "bin"


def execute_server(arguments: Sequence[str]) -> None:
    """Replaces this process by the parameter server, `tfswitch-server`.

    Signals then reach it as if it had been started directly.

    Raises:
        FileNotFoundError: If this installation has no such program.
    """
    _execute("tfswitch-server", arguments, os.environ)


def execute_serving(arguments: Sequence[str]) -> None:
    """Replaces this process by the prediction server, `tfswitch-serving`.

    The program uses the TensorFlow of this Python.

    Raises:
        FileNotFoundError: If this installation has no such program.
        ImportError: If there is no supported TensorFlow, or this processor
            cannot run it. The message names the remedy.
    """
    _installation.check_processor()
    package = importlib.util.find_spec("tensorflow")
    if package is None or package.origin is None:
        raise ImportError(_installation.missing_tensorflow())
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            _installation.op_library(importlib.metadata.version(name))
            break
        except importlib.metadata.PackageNotFoundError:
            pass
    folders = [str(Path(package.origin).parent)]
    folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    _execute("tfswitch-serving", arguments, environment)


def server_command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line of the parameter server, to run as a child.

    Raises:
        FileNotFoundError: If this installation has no such program.
    """
    return [str(_find("tfswitch-server")), *arguments]


def _execute(
    name: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    os.execve(_find(name), [name, *arguments], environment)


def _find(name: str) -> Path:
    program = _FOLDER / name
    if not program.is_file():
        raise FileNotFoundError(
            f"there is no program {program}. Install tfswitch-ps with "
            "`pip install .`, or build it in place with `./scripts/setup`."
        )
    return program
