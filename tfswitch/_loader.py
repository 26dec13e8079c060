"""Loads the op library, and says so if it is for another TensorFlow."""

import functools
import re
from pathlib import Path
from types import ModuleType

import tensorflow as tf

_OPS_PATH = Path(__file__).parent.resolve() / "libtfswitch_ops.so"


@functools.cache
def load_ops() -> ModuleType:
    """Registers the ops with TensorFlow; the first call loads the library.

    The library opens the core library beside itself when an op first needs
    it, so it does not matter what else was imported before or is after.

    Returns:
        The module of the ops: `tfswitch_lookup` and its like.

    Raises:
        ImportError: If the library is missing, or was built for a TensorFlow
            whose binary interface differs. The message names both versions.
    """
    try:
        built_for = _built_for(_OPS_PATH)
    except OSError as error:
        raise ImportError(
            f"tfswitch has no op library at {_OPS_PATH}. Install tfswitch with "
            "`pip install .`, or build it in place with `./scripts/setup`."
        ) from error
    # TensorFlow keeps its binary interface within a minor version only; a
    # library of another may load and then crash.
    if _minor(built_for) != _minor(tf.__version__):
        raise ImportError(_mismatch(built_for))
    try:
        return tf.load_op_library(str(_OPS_PATH))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"{_mismatch(built_for)} ({error.message})"
        ) from error


def _built_for(path: Path) -> str:
    """Reads the version of TensorFlow that an op library carries as a mark."""
    match = re.search(
        rb"tfswitch_built_for_tensorflow=([^\0]+)\0", path.read_bytes()
    )
    return match[1].decode() if match else "an unknown version"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _mismatch(built_for: str) -> str:
    return (
        f"tfswitch was built for TensorFlow {built_for}; this is "
        f"{tf.__version__}. Reinstall tfswitch for it."
    )
