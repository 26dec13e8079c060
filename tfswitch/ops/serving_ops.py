"""The lookup ops of exported models as Python functions."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# Tells TensorFlow's functions whether they are traced for a SavedModel.
from tensorflow.python.saved_model import save_context

from tfswitch import _loader

_library = _loader.load_ops()

# The rows of the model that is being exported in this context.
_rows: contextvars.ContextVar["ServedRows | None"] = contextvars.ContextVar(
    "tfswitch_served_rows", default=None
)


class ServedRows:
    """The rows of a model, fixed for one run of a graph.

    All lookups of the run then read the same export.

    Attributes:
        tables: The tables looked up so far, by name.
    """

    def __init__(self, model: tf.Tensor) -> None:
        self._rows = _library.tfswitch_pin_served_rows(model=model)
        self.tables: dict[str, Any] = {}

    def lookup(
        self, tables: Sequence[Any], ids: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Reads embeddings of each table: float32, `ids.shape + [dim]`.

        Raises:
            ValueError: If tables of two clusters have the same name.
        """
        for table in tables:
            if self.tables.setdefault(table.name, table) is not table and (
                self.tables[table.name].cluster.address != table.cluster.address
            ):
                raise ValueError(
                    f"the model has a table '{table.name}' in "
                    f"{self.tables[table.name].cluster.address!r} and in "
                    f"{table.cluster.address!r}, and one cluster serves it"
                )
        with tf.device(None):
            return _library.tfswitch_served_lookup(
                rows=self._rows,
                ids=[tf.cast(each, tf.int64) for each in ids],
                tables=[table.name for table in tables],
                dims=[table.dim for table in tables],
            )


@contextlib.contextmanager
def serving(model: tf.Tensor) -> Iterator[ServedRows]:
    """Makes lookups in this context read the rows that the model serves.

    A `tf.function` called in this context is traced again. The new trace looks
    up in rows that the serving graph contains. Earlier traces look up in the
    trainer's tables, so TensorFlow must not reuse them here, or the new trace
    elsewhere.
    """
    rows = ServedRows(model)
    token = _rows.set(rows)
    try:
        with _traced_apart():
            yield rows
    finally:
        _rows.reset(token)


@contextlib.contextmanager
def _traced_apart() -> Iterator[None]:
    """Gives functions called in this context a trace of their own.

    TensorFlow keeps separate traces for each policy of saving variables. So
    the context sets a new policy object, which saves as the default one does.
    """
    if save_context.in_save_context():
        options = save_context.get_save_options()
        policy = options.experimental_variable_policy
        options.experimental_variable_policy = object()
        try:
            yield
        finally:
            options.experimental_variable_policy = policy
        return
    options = tf.saved_model.SaveOptions()
    options.experimental_variable_policy = object()
    with save_context.save_context(options):
        yield


def present_rows() -> ServedRows | None:
    """Returns the rows that lookups read while a model is being exported."""
    return _rows.get()
