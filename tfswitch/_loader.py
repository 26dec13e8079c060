"""Loads the op library; an error names the TensorFlow that it needs.

`tfswitch` imports this module before all others that import TensorFlow.
"""

import functools
from types import ModuleType

from tfswitch import _installation

_installation.check_files()
_installation.check_module()
_installation.check_processor()
try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":  # A module of TensorFlow is missing.
        raise
    raise ImportError(_installation.missing_tensorflow()) from error


def library_path() -> str:
    """Returns the path of the op library, for programs in C and C++.

    ```c++
    TF_Library* ops = TF_LoadLibrary(path, status);  // Before the model.
    ```

    Raises:
        ImportError: If there is no library for this TensorFlow.
    """
    return str(_installation.op_library(tf.__version__))


@functools.cache
def load_ops() -> ModuleType:
    """Registers the ops with TensorFlow; the first call loads the library.

    The op library opens the core library, in the same folder, when an op first
    needs it. So the order in which a program imports other modules does not
    matter.

    Returns:
        The module of the ops: `tfswitch_push_many` and others.

    Raises:
        ImportError: If there is no library for the installed version of
            TensorFlow, or the installed TensorFlow has another binary interface
            than the official release of that version.
    """
    path = library_path()
    try:
        return tf.load_op_library(path)
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"{path} does not fit this TensorFlow {tf.__version__}, which is "
            "not built as the release is. Build tfswitch for it: see "
            f"docs/building.md ({error.message})"
        ) from error
