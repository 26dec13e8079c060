"""Embeddings without a fixed vocabulary, in this process or on servers.

Importing this registers the TensorFlow ops and the Keras layer, so that
`tf.saved_model.load` and `keras.models.load_model` find them.
"""

import importlib
import sys
from typing import Any

from tfswitch._installation import build_info

# `python -m tfswitch` imports this package before its __main__.py; argv[0] is
# "-m" then. In this case nothing is imported here, because a command imports
# the modules that it needs.
_behind_m = sys.orig_argv[-len(sys.argv) :][:1]
if sys.argv[:1] != ["-m"] or _behind_m != ["tfswitch"]:
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
        metrics,
        nn,
        ops,
        optimizers,
        saved_model,
        statistics,
        tracing,
        train,
    )
    from tfswitch._connection._tls import Tls
    from tfswitch.cluster import Cluster, connect
    from tfswitch.dense import DenseTable
    from tfswitch.server import Server
    from tfswitch.storage import TieredStorage
    from tfswitch.storage_dtype import StorageDtype
    from tfswitch.table import EmbeddingTable

    __version__ = _native.version()


def __getattr__(name: str) -> Any:
    """Returns the part that needs Ray."""
    if name == "ray":
        return importlib.import_module("tfswitch.ray")
    raise AttributeError(f"module 'tfswitch' has no attribute '{name}'")


__all__ = [
    "Cluster",
    "DenseTable",
    "EmbeddingTable",
    "Server",
    "StorageDtype",
    "TieredStorage",
    "Tls",
    "__version__",
    "admission",
    "build_info",
    "connect",
    "data",
    "eviction",
    "export",
    "ids",
    "initializers",
    "io",
    "keras",
    "metrics",
    "nn",
    "ops",
    "optimizers",
    "saved_model",
    "statistics",
    "tracing",
    "train",
]
