"""TensorFlow ops on embedding tables. Importing this registers them."""

from tfswitch.ops.embedding_ops import (
    TrainingLookup,
    end_step,
    lookup,
    push,
    push_unique,
    size,
    table_handle,
    training_lookup,
)

__all__ = [
    "TrainingLookup",
    "end_step",
    "lookup",
    "push",
    "push_unique",
    "size",
    "table_handle",
    "training_lookup",
]
