"""Warnings that are given once, and not for each of many layers or tables."""

import warnings
from typing import Any

_scopes: dict[str, Any] = {}  # The scope of the last warning of each cause.


def warn_once(scope: Any, cause: str, message: str, stacklevel: int) -> None:
    """Warns, unless the last warning of this cause had an equal scope.

    A scope of None always warns.
    """
    if scope is None or _scopes.get(cause) != scope:
        _scopes[cause] = scope
        message += " Others may be like it: this is said of the first one."
        warnings.warn(message, stacklevel=stacklevel + 1)
