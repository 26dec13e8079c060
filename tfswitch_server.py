"""The command `tfswitch-server`.

A module of its own, because importing anything below `tfswitch` imports
TensorFlow, which the server program does not need.
"""

import importlib.util
import pathlib
import runpy


def main() -> None:
    """Becomes the server program, with the arguments of this process."""
    package = importlib.util.find_spec("tfswitch")
    assert package is not None and package.origin is not None
    launcher = pathlib.Path(package.origin).parent / "cli" / "server_binary.py"
    runpy.run_path(str(launcher))["main"]()
