"""The Keras behind `tf.keras`, for modules below `tfswitch.keras`.

The environment variable TF_USE_LEGACY_KERAS chooses this Keras, at the first
use of `tf.keras`. Ray Train sets the variable later, when it has no effect any
more. Only `tfswitch.keras` imports Keras at once; tables work without Keras.
"""

import os

import tensorflow as tf

try:
    IS_LEGACY: bool = tf.keras.Model.__module__.startswith("tf_keras.")
# The import below raises a clearer error.
except (ImportError, AttributeError):
    IS_LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")

if IS_LEGACY:
    import tf_keras as keras
else:
    import keras

__all__ = ["IS_LEGACY", "VERSION", "keras"]

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
# The versions that TensorFlow 2.18 requires, the oldest that tfswitch supports.
_OLDEST = (2, 18) if IS_LEGACY else (3, 5)


def _check_version() -> None:
    """Raises ImportError if Keras is older than the oldest that works."""
    if VERSION >= _OLDEST:
        return
    name = keras.__name__
    remedy = f"{name}>={_OLDEST[0]}.{_OLDEST[1]}"
    if IS_LEGACY:
        # The version is fixed, because the newest tf_keras would also install
        # the newest TensorFlow.
        from tensorflow import __version__ as tensorflow

        remedy = f"{name}=={'.'.join(tensorflow.split('.')[:2])}.*"
    raise ImportError(
        f"tfswitch works with {name} {_OLDEST[0]}.{_OLDEST[1]} and later, and "
        f"this is {name} {keras.__version__}. Run `pip install '{remedy}'`."
    )


_check_version()
