"""Checks of arguments that several classes of this package take."""

from collections.abc import Sequence
from typing import Any

from tfswitch._settings import _ranges
from tfswitch.cluster import Cluster

_MAX_WORKERS = 1_000_000


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `least`."""
    _ranges.integers(least, _MAX_WORKERS).check(name, value)


def check_seconds(**arguments: Any) -> None:
    """Raises ValueError unless all are positive numbers of seconds."""
    for name, value in arguments.items():
        _ranges.check_seconds(name, value, most=1e9)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        raise _ranges.bad_argument(name, value, expected)


def check_replicas(replicas: Any, name: str, num_workers: Any) -> None:
    """Checks `replicas_to_aggregate`, and the number of workers of that name.

    Raises:
        ValueError: If a number is no integer of at least 1, or more gradients
            than workers are wanted.
    """
    check_count("replicas_to_aggregate", replicas, 1)
    check_count(name, num_workers, 1)
    if replicas > num_workers:
        raise ValueError(
            f"`replicas_to_aggregate` must be at most `{name}`: a worker has "
            "one gradient in each step. Received: "
            f"replicas_to_aggregate={replicas}, {name}={num_workers}"
        )


def check_cluster(cluster: Any) -> None:
    """Raises ValueError if `cluster` is neither a cluster nor None."""
    if not isinstance(cluster, Cluster | None):
        raise _ranges.bad_argument(
            "cluster", cluster, "what tfswitch.connect returned"
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
