"""The Keras layers, optimizer and callbacks, for Keras 3 and for tf_keras.

With TF_USE_LEGACY_KERAS=1 in the environment, they are based on the classes of
tf_keras, otherwise on those of Keras 3. The variable also selects `tf.keras`.
"""

from tfswitch.keras import _resuming, callbacks, layers
from tfswitch.keras._saved_rows import load_without_rows
from tfswitch.keras.callbacks import ExportTables, SyncEpochs
from tfswitch.keras.layers import (
    NCE,
    DynamicEmbedding,
    DynamicEmbeddings,
    SampledSoftmax,
)
from tfswitch.keras.parameter_server_optimizer import ParameterServerOptimizer
from tfswitch.keras.warm_start import from_embedding, to_embedding

_resuming.install()

__all__ = [
    "NCE",
    "DynamicEmbedding",
    "DynamicEmbeddings",
    "ExportTables",
    "ParameterServerOptimizer",
    "SampledSoftmax",
    "SyncEpochs",
    "callbacks",
    "from_embedding",
    "layers",
    "load_without_rows",
    "to_embedding",
]
