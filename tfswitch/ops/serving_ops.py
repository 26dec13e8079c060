"""The ops of exported models as Python functions, and what an export traces."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfswitch import _loader

_library = _loader.load_ops()

# Of the model that is being exported in this context.
_rows: contextvars.ContextVar["ServedRows | None"] = contextvars.ContextVar(
    "tfswitch_served_rows", default=None
)


def served_model() -> tf.Tensor:
    """Returns the resource of a model's rows, still to be opened."""
    return _library.tfswitch_served_model()


def open_served_model(model: tf.Tensor, file: tf.Tensor) -> Any:
    """Opens the rows that a model file names."""
    return _library.tfswitch_open_served_model(model=model, file=file)


class ServedRows:
    """The rows that a graph looks up in while it runs once.

    Attributes:
        tables: What has been looked up so far: tables by name.
    """

    def __init__(self, model: tf.Tensor) -> None:
        self._rows = _library.tfswitch_pin_served_rows(model=model)
        self.tables: dict[str, Any] = {}

    def lookup(
        self, tables: Sequence[Any], ids: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Reads embeddings of each table: float32, `ids.shape + [dim]`.

        Raises:
            ValueError: If two tables of different clusters have one name.
        """
        for table in tables:
            if self.tables.setdefault(table.name, table) is not table and (
                self.tables[table.name].cluster.address != table.cluster.address
            ):
                raise ValueError(
                    f"the model has a table '{table.name}' in "
                    f"{self.tables[table.name].cluster.address!r} and in "
                    f"{table.cluster.address!r}; give one of them another name"
                )
        if len({each.dtype for each in ids}) > 1:
            ids = [tf.cast(each, tf.int64) for each in ids]
        with tf.device(None):
            return _library.tfswitch_served_lookup(
                rows=self._rows,
                ids=list(ids),
                tables=[table.name for table in tables],
                dims=[table.dim for table in tables],
            )


@contextlib.contextmanager
def serving(model: tf.Tensor) -> Iterator[ServedRows]:
    """Lookups made in it read the rows that the model serves when they run."""
    rows = ServedRows(model)
    token = _rows.set(rows)
    try:
        yield rows
    finally:
        _rows.reset(token)


def present_rows() -> ServedRows | None:
    """What lookups have to read, if a model is being exported."""
    return _rows.get()
