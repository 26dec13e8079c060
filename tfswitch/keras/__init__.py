"""The Keras layers, optimizer and callbacks, for Keras 3 and for tf_keras.

With TF_USE_LEGACY_KERAS=1 in the environment, which also selects `tf.keras`,
they are classes of tf_keras, else of Keras 3.
"""

from tfswitch.keras import _going_on, callbacks
from tfswitch.keras._saved_rows import load_without_rows
from tfswitch.keras.checkpoint import Checkpoint
from tfswitch.keras.dynamic_embedding import DynamicEmbedding
from tfswitch.keras.dynamic_embeddings import DynamicEmbeddings
from tfswitch.keras.export_tables import ExportTables
from tfswitch.keras.parameter_server_optimizer import ParameterServerOptimizer
from tfswitch.keras.sampled_losses import NCE, SampledSoftmax
from tfswitch.keras.sync_epochs import SyncEpochs
from tfswitch.keras.warm_start import from_embedding, to_embedding

_going_on.install()

__all__ = [
    "NCE",
    "Checkpoint",
    "DynamicEmbedding",
    "DynamicEmbeddings",
    "ExportTables",
    "ParameterServerOptimizer",
    "SampledSoftmax",
    "SyncEpochs",
    "callbacks",
    "from_embedding",
    "load_without_rows",
    "to_embedding",
]
