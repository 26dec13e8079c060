"""TensorFlow ops on embedding tables. Importing this registers them."""

from tfswitch._loader import library_path
from tfswitch.ops.embedding_ops import (
    Pushed,
    TablePush,
    end_step,
    is_of_rows,
    lookup_many,
    push_many,
    size,
    table_handle,
    tie_to_weight,
)

__all__ = [
    "Pushed",
    "TablePush",
    "end_step",
    "is_of_rows",
    "library_path",
    "lookup_many",
    "push_many",
    "size",
    "table_handle",
    "tie_to_weight",
]
