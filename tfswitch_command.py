"""The commands `tfswitch`, `tfswitch-server` and `tfswitch-serving`.

A module of its own, because importing `tfswitch` imports TensorFlow. That takes
seconds and writes to the error stream, and no command needs it.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path


def _put_package() -> None:
    """Makes `tfswitch` the package without what its __init__.py imports."""
    spec = importlib.util.find_spec("tfswitch")
    assert spec is not None and spec.submodule_search_locations is not None
    found = spec.submodule_search_locations[0]
    own = Path(__file__).with_name("tfswitch")
    if not own.samefile(found):
        raise ImportError(
            f"`import tfswitch` finds {found} in place of {own}. If it is "
            "another package, run `pip uninstall tfswitch`."
        )
    sys.modules["tfswitch"] = importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def _saying(command: str) -> Iterator[None]:
    """Ends with the text of an error of the installation."""
    try:
        _put_package()
        yield
    except (ImportError, FileNotFoundError) as error:
        sys.exit(f"{command}: {error}")


def main() -> None:
    """Runs the command line, with the modules of `tfswitch` that it needs."""
    with _saying("tfswitch"):
        from tfswitch import _installation

        _installation.check_module()
        from tfswitch.cli import main as cli
    cli.main()


def server() -> None:
    """Becomes the parameter server, with the arguments of this process."""
    with _saying("tfswitch-server"):
        from tfswitch.cli import programs

        programs.execute_server(sys.argv[1:])


def serving() -> None:
    """Becomes the prediction server, with the arguments of this process."""
    with _saying("tfswitch-serving"):
        from tfswitch.cli import programs

        programs.execute_serving(sys.argv[1:])
