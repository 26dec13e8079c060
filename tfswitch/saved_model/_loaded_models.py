"""Controls which exports the models loaded in this process serve."""

import os
from typing import Any, NamedTuple

from tfswitch import _native
from tfswitch._connection._control_calls import call, integers
from tfswitch._settings._ranges import bad_argument, is_number


class ServedState(NamedTuple):
    """The exports that a loaded model serves.

    A model that looks up on servers (mode "remote") has no exports: their
    numbers and times are 0.

    Attributes:
        number: The number of the export that is served.
        base_number: The number of the base that this export builds on.
        created_ms: When the export began, in milliseconds since 1970. The model
            serves all values that were learned before.
        served_since_ms: Since when the export is served, in milliseconds since
            1970.
        held: Whether `roll_back` prevents a change to newer exports.
        refused: How often a newer export could not be served. In a remote
            model, how many lookups have failed.
        error: The reason of the last failure; None if the last try has
            succeeded.
        mode: "embedded" or "remote".
        addresses: The addresses of the servers of a remote model; else None.
        cached_rows: The number of rows in the cache of a remote model.
        cache_hits: How many ids were found in the cache.
        cache_misses: How many ids were not in the cache, and were requested
            from servers.
    """

    number: int
    base_number: int
    created_ms: int
    served_since_ms: int
    held: bool
    refused: int
    error: str | None
    mode: str
    addresses: str | None
    cached_rows: int
    cache_hits: int
    cache_misses: int


def state(path: str | os.PathLike[str]) -> ServedState:
    """Returns the state of the model that was loaded from `path`.

    Raises:
        KeyError: If this process has loaded no model from `path`.

    Example:

    >>> served = tf.saved_model.load("models/ctr/1")
    >>> tsw.saved_model.state("models/ctr/1").number
    1
    """
    return _steer(path)


def refresh(path: str | os.PathLike[str]) -> ServedState:
    """Looks for newer exports now, and serves them.

    `tfswitch.export.base` and `delta` write exports to the model's folder
    `assets.extra/tfswitch`. Lookups continue meanwhile.

    Raises:
        KeyError: As `state`, or if a file of a newer export is missing.
        OSError, RuntimeError: If a newer export is damaged, does not follow the
            present export, or has another version. The model then continues to
            serve the present export. RuntimeError also if the model looks up on
            servers, because such a model always serves their present rows.

    Example:

    >>> tsw.export.delta("models/ctr/1")
    >>> tsw.saved_model.refresh("models/ctr/1").number
    2
    """
    return _steer(path, refresh=True)


def watch(path: str | os.PathLike[str], interval_secs: float) -> ServedState:
    """Looks for newer exports at intervals from now on.

    If an export cannot be served, `state` and the log contain the error.

    Args:
        path: The folder of the SavedModel.
        interval_secs: Seconds between two checks. 0 ends the checks.

    Raises:
        KeyError: As `state`.
        ValueError: If `interval_secs` is no number of at least 0.
        RuntimeError: If the model looks up on servers.

    Example:

    >>> tsw.saved_model.watch("models/ctr/1", 5.0)
    """
    if not (is_number(interval_secs, int, float) and 0 <= interval_secs < 1e9):
        raise bad_argument(
            "interval_secs", interval_secs, "a number of at least 0"
        )
    return _steer(path, watch_secs=float(interval_secs))


def roll_back(path: str | os.PathLike[str], number: int) -> ServedState:
    """Serves an earlier export, and no newer export until `resume`.

    Raises:
        KeyError: As `state`, or if the export does not exist any more.
        ValueError: If `number` is not an integer of at least 1.
        OSError, RuntimeError: As `refresh`.

    Example:

    >>> state = tsw.saved_model.roll_back("models/ctr/1", 1)
    >>> state.number, state.held
    (1, True)
    """
    if not (is_number(number, int) and number >= 1):
        raise bad_argument("number", number, "the number of an export")
    return _steer(path, roll_back_to=number)


def resume(path: str | os.PathLike[str]) -> ServedState:
    """Serves the newest export again, after `roll_back`.

    Raises:
        KeyError, OSError, RuntimeError: As `refresh`.

    Example:

    >>> tsw.saved_model.resume("models/ctr/1").number
    2
    """
    return _steer(path, resume=True)


_COUNTS = [
    name for name, kind in ServedState.__annotations__.items() if kind is int
]


def _steer(path: str | os.PathLike[str], **request: Any) -> ServedState:
    response = call(_native, "ServedModel", path=os.fspath(path), **request)
    return ServedState(
        held=response["held"],
        error=response.get("error"),
        mode="remote" if response["is_remote"] else "embedded",
        addresses=response.get("addresses"),
        **integers(response, _COUNTS),
    )
