"""Embeddings without a fixed vocabulary, in this process or on servers.

Importing this registers the TensorFlow ops and the Keras layer, so that
`tf.saved_model.load` and `keras.models.load_model` find them.
"""

import importlib
import warnings
from typing import Any

from tfswitch import (
    _loader,  # noqa: F401  First: it says which TensorFlow to install.
    _native,
    admission,
    data,
    eviction,
    export,
    ids,
    initializers,
    io,
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
from tfswitch.server import Server
from tfswitch.storage_dtype import StorageDtype
from tfswitch.table import EmbeddingTable

__version__ = _native.version()


def __getattr__(name: str) -> Any:
    """Returns what a former name stands for, with a warning."""
    if name == "interchange":
        return importlib.import_module("tfswitch.interchange")
    if name == "RowType":
        warnings.warn(
            "`tfswitch.RowType` is called `tfswitch.StorageDtype` now",
            DeprecationWarning,
            stacklevel=2,
        )
        return StorageDtype
    raise AttributeError(f"module 'tfswitch' has no attribute '{name}'")


__all__ = [
    "Cluster",
    "DenseTable",
    "EmbeddingTable",
    "Server",
    "StorageDtype",
    "__version__",
    "admission",
    "connect",
    "data",
    "eviction",
    "export",
    "ids",
    "initializers",
    "io",
    "keras",
    "nn",
    "ops",
    "optimizers",
    "saved_model",
    "statistics",
    "train",
]
