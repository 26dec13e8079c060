"""The Keras layer, for Keras 3 and for tf_keras.

With TF_USE_LEGACY_KERAS=1 in the environment, which is also what decides what
`tf.keras` is, the layer is one of tf_keras; else one of Keras 3.
"""

from tfswitch.keras.dynamic_embedding import DynamicEmbedding

__all__ = ["DynamicEmbedding"]
