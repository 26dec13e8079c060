"""Embeddings without a fixed vocabulary, in this process or on servers.

Importing this registers the TensorFlow ops and the Keras layer, so that
`tf.saved_model.load` and `keras.models.load_model` find them.
"""

from tfswitch import (
    _loader,  # noqa: F401  First: it says which TensorFlow to install.
    _native,
    admission,
    data,
    eviction,
    export,
    ids,
    initializers,
    interchange,
    keras,
    nn,
    ops,
    optimizers,
    saved_model,
    statistics,
    train,
)
from tfswitch.cluster import Cluster, connect
from tfswitch.dense import DenseTable
from tfswitch.row_type import RowType
from tfswitch.server import Server
from tfswitch.table import EmbeddingTable

__version__ = _native.version()

__all__ = [
    "Cluster",
    "DenseTable",
    "EmbeddingTable",
    "RowType",
    "Server",
    "__version__",
    "admission",
    "connect",
    "data",
    "eviction",
    "export",
    "ids",
    "initializers",
    "interchange",
    "keras",
    "nn",
    "ops",
    "optimizers",
    "saved_model",
    "statistics",
    "train",
]
