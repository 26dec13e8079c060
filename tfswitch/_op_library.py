"""The file of the op library, and the TensorFlow that it was built for.

Nothing here imports TensorFlow.
"""

import re
from pathlib import Path

PATH = Path(__file__).parent.resolve() / "libtfswitch_ops.so"


def built_for() -> str:
    """Reads the version of TensorFlow that the library carries as a mark.

    Raises:
        ImportError: If there is no library.
    """
    try:
        library = PATH.read_bytes()
    except OSError as error:
        raise ImportError(
            f"tfswitch has no op library at {PATH}. Install tfswitch with "
            "`pip install .`, or build it in place with `./scripts/setup`."
        ) from error
    match = re.search(rb"tfswitch_built_for_tensorflow=([^\0]+)\0", library)
    return match[1].decode() if match else "an unknown version"


def minor(version: str) -> str:
    """Returns "2.21" for "2.21.0"."""
    return ".".join(version.split(".")[:2])


def check(version: str) -> None:
    """Checks that the library works with a version of TensorFlow.

    TensorFlow keeps its binary interface within a minor version only; a
    library of another may load and then crash.

    Raises:
        ImportError: If there is no library, or it was built for another minor
            version. The message names both.
    """
    if minor(built_for()) != minor(version):
        raise ImportError(mismatch(version))


def mismatch(version: str) -> str:
    """Returns the text for a TensorFlow that the library does not fit."""
    return (
        f"tfswitch was built for TensorFlow {built_for()}; this is {version}. "
        "Reinstall tfswitch for it."
    )


def missing() -> str:
    """Returns the text for an environment without TensorFlow."""
    version = minor(built_for())
    return (
        f"tfswitch was built for TensorFlow {version}, and there is none: "
        f"run `pip install 'tensorflow=={version}.*'`, or the same with "
        "`tensorflow-cpu`."
    )
