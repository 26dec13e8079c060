"""TensorFlow ops on embedding tables. Importing this registers them."""

from tfswitch._loader import library_path
from tfswitch.ops.embedding_ops import (
    TableLookup,
    TrainingLookup,
    TrainingLookups,
    end_step,
    lookup,
    lookup_many,
    push,
    push_unique,
    size,
    table_handle,
    training_lookup,
    training_lookup_many,
)

__all__ = [
    "TableLookup",
    "TrainingLookup",
    "TrainingLookups",
    "end_step",
    "library_path",
    "lookup",
    "lookup_many",
    "push",
    "push_unique",
    "size",
    "table_handle",
    "training_lookup",
    "training_lookup_many",
]
