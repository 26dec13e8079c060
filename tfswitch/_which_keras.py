"""The Keras that TF_USE_LEGACY_KERAS chooses, for whom needs it below `keras`.

Only `tfswitch.keras` imports it at once; tables work without Keras.
"""

import os

IS_LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")

if IS_LEGACY:
    import tf_keras as keras
else:
    import keras

__all__ = ["IS_LEGACY", "keras"]
