"""The rows of layers in the files of Keras: `.keras` and `.weights.h5`."""

import contextlib
import contextvars
import json
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfswitch import statistics as statistics_lib
from tfswitch._warn_once import warn_once
from tfswitch.keras import _backend, _weights
from tfswitch.optimizers._conversion import have_equal_state
from tfswitch.table import EmbeddingTable

_without_rows: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfswitch_load_without_rows", default=False
)


@contextlib.contextmanager
def load_without_rows() -> Iterator[None]:
    """Allows models to load without their rows on servers.

    A file of Keras does not contain the rows of tables on servers. It is an
    error to load the file without a connection to these servers, because the
    model would predict without its rows. In this context the load succeeds, and
    the tables are empty.

    Example:

    >>> with tsw.keras.load_without_rows():
    ...     model = keras.models.load_model("model.keras")
    >>> cluster.restore("/checkpoints/model")
    """
    token = _without_rows.set(True)
    try:
        yield
    finally:
        _without_rows.reset(token)


def save(layer: Any, store: Any) -> None:
    """Stores the rows of the layer's table, or the address of its servers."""
    # The layer's weight has no values, but Keras expects an entry for it.
    store["0"] = np.zeros((), np.float32)
    table = layer._table
    if table is None:
        # The table does not exist yet; it will be made with these rows.
        store["ids"], store["values"] = layer._first_rows
        return
    if table.cluster.is_remote:
        if table.size() == 0:
            return
        warn_once(
            _backend.file_of(store),
            "rows on servers",
            f"layer '{layer.name}': the rows of table '{table.name}' are on "
            f"{table.cluster.address} and do not go into the file. Save them "
            "there with Cluster.save, and restore them with Cluster.restore "
            "where the model is loaded.",
            stacklevel=2,
        )
        store["servers"] = _to_bytes({"address": table.cluster.address})
        return
    if not _stores_rows(layer, table, store):
        return
    ids, values, slots = table._export_with_slots()
    store["ids"] = ids
    store["values"] = values
    store["slots"] = slots
    store["optimizer"] = _to_bytes(table._optimizer_of(table._spec))
    store["statistics"] = _to_bytes(
        table.statistics.to_config() if table.statistics else {}
    )


def load(layer: Any, store: Any) -> None:
    """Replaces the rows of the layer's table by those that `save` stored.

    Raises:
        ValueError: If the file has nothing for the layer, or other code uses
            the layer's table. In both cases nothing has changed.
        RuntimeError: If the rows are on servers that are not connected.
    """
    names = set(store.keys())
    if "0" not in names:
        raise ValueError(
            f"layer '{layer.name}': there is nothing for it in the file; "
            f"expected '0' (its weight), got {sorted(names)}"
        )
    if "servers" in names:
        address = _from_bytes(store["servers"])["address"]
        if _without_rows.get() or layer._has_rows_on_servers():
            return
        raise RuntimeError(
            f"layer '{layer.name}': its rows were on {address} when the model "
            "was saved, and are not in the file. Connect to servers that hold "
            "them, with tfswitch.connect (and Cluster.restore), before the "
            "model is loaded; or load it without rows, in `with "
            "tfswitch.keras.load_without_rows():`."
        )
    if "ids" not in names:
        return  # Another layer of the same table has stored the rows.
    if "slots" not in names:  # The table was not made yet.
        layer._set_rows(
            _weights.Rows(np.asarray(store["ids"]), np.asarray(store["values"]))
        )
        return
    saved = _from_bytes(store["optimizer"])
    layer._use_optimizer_of(saved)
    table = layer.table
    if layer._found_rows:
        raise ValueError(
            f"layer '{layer.name}': its table '{table.name}' was there before "
            f"the model was loaded, with {layer._found_rows} rows that others "
            "use, and to load the model would replace them. Load it beside, "
            'in `with tfswitch.connect("local://other"):`, or drop the table '
            f"first, with `tfswitch.connect({table.cluster.address!r}).drop("
            f"{table.name!r})`."
        )
    slots = _slots_for(table, store, saved)
    if slots is None:
        warn_once(
            _backend.file_of(store),
            "state of another optimizer",
            f"layer '{layer.name}': the rows were saved with the optimizer "
            f"{saved}, whose state is not that of the layer's, so state "
            "starts from its initial values.",
            stacklevel=2,
        )
    table._replace_rows(
        np.asarray(store["ids"]), np.asarray(store["values"]), slots
    )


def _slots_for(
    table: EmbeddingTable, store: Any, saved: Mapping[str, Any]
) -> np.ndarray | None:
    """Returns slots for a table, or None if another optimizer stored them.

    Args:
        table: The table.
        store: The store that `save` has filled.
        saved: The optimizer of the stored slots.
    """
    statistics = _from_bytes(store["statistics"])
    # The optimizer's part of the slots comes first, and the statistics' last.
    slots = np.asarray(store["slots"])
    place = slots.shape[1] - statistics_lib._width(
        statistics_lib.get(statistics or None)
    )
    width = table._slot_floats - statistics_lib._width(table.statistics)
    present = table._optimizer_of(table._spec)
    if place != width or not have_equal_state(saved, present):
        return None
    usage = _fit_usage(table, slots[:, place:])
    return np.concatenate([slots[:, :place], usage], axis=1)


def _fit_usage(table: EmbeddingTable, usage: np.ndarray) -> np.ndarray:
    """Converts saved statistics to those of this table."""
    width = statistics_lib._width(table.statistics)
    fitted = np.zeros((len(usage), width), np.float32)
    common = min(width, usage.shape[1])
    fitted[:, :common] = usage[:, :common]
    if width and not common:
        # Rows that were saved without a day count as seen now.
        day = table.cluster.day
        fitted[:, 1] = time.time() / 86400 if day is None else day
    return fitted


# For each table the last file with its rows, and the layer that stored them.
_stored_by: weakref.WeakKeyDictionary[
    EmbeddingTable, tuple[Any, weakref.ref[Any]]
] = weakref.WeakKeyDictionary()


def _stores_rows(layer: Any, table: EmbeddingTable, store: Any) -> bool:
    """Whether `layer` is the one layer of its table that stores the rows."""
    file = _backend.file_of(store)
    if file is None:
        return True
    last_file, last_layer = _stored_by.get(table, (None, None))
    if last_file == file and last_layer is not None:
        return last_layer() is layer
    _stored_by[table] = (file, weakref.ref(layer))
    return True


def _to_bytes(config: Mapping[str, Any]) -> np.ndarray:
    text = json.dumps(config, sort_keys=True)
    return np.frombuffer(text.encode(), np.uint8)


def _from_bytes(stored: Any) -> Any:
    return json.loads(bytes(np.asarray(stored)))
