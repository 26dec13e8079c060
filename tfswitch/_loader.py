"""Loads the op library, and says which TensorFlow it needs if that is not here.

`tfswitch` imports this before anything else of it imports TensorFlow.
"""

import functools
from types import ModuleType

from tfswitch import _op_library

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":  # TensorFlow is there, and a part is not.
        raise
    raise ImportError(_op_library.missing()) from error


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
    _op_library.check(tf.__version__)
    try:
        return tf.load_op_library(str(_op_library.PATH))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"{_op_library.mismatch(tf.__version__)} ({error.message})"
        ) from error
