"""Loads the op library, and says which TensorFlow it needs if that is not here.

`tfswitch` imports this before anything else of it imports TensorFlow.
"""

import functools
import re
from pathlib import Path
from types import ModuleType

_OPS_PATH = Path(__file__).parent.resolve() / "libtfswitch_ops.so"


def _built_for(path: Path) -> str:
    """Reads the version of TensorFlow that an op library carries as a mark.

    Raises:
        ImportError: If there is no library.
    """
    try:
        library = path.read_bytes()
    except OSError as error:
        raise ImportError(
            f"tfswitch has no op library at {path}. Install tfswitch with "
            "`pip install .`, or build it in place with `./scripts/setup`."
        ) from error
    match = re.search(rb"tfswitch_built_for_tensorflow=([^\0]+)\0", library)
    return match[1].decode() if match else "an unknown version"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":  # TensorFlow is there, and a part is not.
        raise
    _version = _minor(_built_for(_OPS_PATH))
    raise ImportError(
        f"tfswitch was built for TensorFlow {_version}, and there is none: "
        f"run `pip install 'tensorflow=={_version}.*'`, or the same with "
        "`tensorflow-cpu`."
    ) from error


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
    built_for = _built_for(_OPS_PATH)
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


def _mismatch(built_for: str) -> str:
    return (
        f"tfswitch was built for TensorFlow {built_for}; this is "
        f"{tf.__version__}. Reinstall tfswitch for it."
    )
