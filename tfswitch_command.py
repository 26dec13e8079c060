"""The commands `tfswitch`, `tfswitch-server` and `tfswitch-serving`.

A module of its own, because importing `tfswitch` imports TensorFlow. That takes
seconds and writes to the error stream, and no command needs it.
"""

import importlib.util
import sys


def _put_package() -> None:
    """Makes `tfswitch` the package without what its __init__.py imports."""
    spec = importlib.util.find_spec("tfswitch")
    assert spec is not None
    sys.modules["tfswitch"] = importlib.util.module_from_spec(spec)


def main() -> None:
    """Runs the command line, with the modules of `tfswitch` that it needs."""
    _put_package()
    from tfswitch.cli import main as cli

    cli.main()


def server() -> None:
    """Becomes the parameter server, with the arguments of this process."""
    _put_package()
    from tfswitch.cli import programs

    programs.execute_server(sys.argv[1:])


def serving() -> None:
    """Becomes the prediction server, with the arguments of this process."""
    _put_package()
    from tfswitch.cli import programs

    try:
        programs.execute_serving(sys.argv[1:])
    except ImportError as error:
        sys.exit(f"tfswitch-serving: {error}")
