"""Runs the `tfswitch-server` program that the wheel carries."""

import os
import pathlib
import sys
from collections.abc import Sequence

_PROGRAM = pathlib.Path(__file__).parents[1] / "bin" / "tfswitch-server"


def execute(arguments: Sequence[str]) -> None:
    """Puts the program in the place of this process.

    Signals then reach it as if it had been started directly.

    Raises:
        FileNotFoundError: If this installation has no server program.
    """
    if not _PROGRAM.is_file():
        raise FileNotFoundError(
            f"there is no server program at {_PROGRAM}. Install tfswitch with "
            "`pip install .`, or build it in place with `./scripts/setup`."
        )
    os.execv(_PROGRAM, [_PROGRAM.name, *arguments])


def main() -> None:
    """The entry point of `tfswitch-server` in an installed package."""
    execute(sys.argv[1:])
