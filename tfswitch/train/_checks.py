"""Arguments that several classes of training with others take."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_MAX_WORKERS = 1_000_000


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `least`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not least <= value <= _MAX_WORKERS
    ):
        raise ValueError(
            f"`{name}` must be an integer from {least} to {_MAX_WORKERS}. "
            f"Received: {name}={value!r}"
        )


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a positive number of seconds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0.0 < value <= 1e9
    ):
        raise ValueError(
            f"`{name}` must be a positive number of seconds. "
            f"Received: {name}={value!r}"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={value!r}"
        )


def group_options(
    *,
    num_workers: int,
    lease_secs: float,
    join_secs: float,
    contributions_per_round: int,
    late: str,
    settings: str = "",
) -> dict[str, Any]:
    """Returns a message GroupOptions."""
    return {
        "num_workers": num_workers,
        "lease_ms": max(1, round(lease_secs * 1000)),
        "join_timeout_ms": max(1, round(join_secs * 1000)),
        "contributions_per_round": contributions_per_round,
        "carries_late_contributions": late == "carry",
        "settings": settings,
    }
