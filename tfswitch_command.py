"""The command `tfswitch`.

A module of its own, because importing `tfswitch` imports TensorFlow. That takes
seconds and writes to the error stream, and no command needs it.
"""

import importlib.util
import sys


def main() -> None:
    """Runs the command line, with the modules of `tfswitch` that it needs."""
    spec = importlib.util.find_spec("tfswitch")
    assert spec is not None
    # The package without what its __init__.py imports.
    sys.modules["tfswitch"] = importlib.util.module_from_spec(spec)

    from tfswitch.cli import main as cli

    cli.main()
