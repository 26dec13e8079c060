"""Decides which rows are evicted when a table is shrunk.

`EmbeddingTable.shrink` evicts rows by the table's policy; with `every_secs` the
server also does so by itself. A row counts as seen when it is made and when it
is pushed to, but not when it is looked up. Ids that wait for admission are
evicted by the same rules of age and score.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from tfswitch._settings._policy import Policy, Registry
from tfswitch._settings._ranges import (
    NonNegative,
    Range,
    bad_argument,
    choices,
    integers,
)
from tfswitch._types import Config

__all__ = [
    "AnyOf",
    "Eviction",
    "L2Norm",
    "MaxRows",
    "ShowClickScore",
    "Ttl",
    "get",
]

_SECS = Range(
    "0, or from 0.001 to 1e9 seconds",
    lambda v: v == 0.0 or 0.001 <= v <= 1e9,
)


@dataclasses.dataclass(frozen=True)
class _Eviction(Policy):
    _: dataclasses.KW_ONLY
    # How often the server shrinks the table by itself; 0: never.
    every_secs: Annotated[float, _SECS] = 0.0

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `eviction` field of a table config."""
        return self.get_config()


@dataclasses.dataclass(frozen=True)
class Ttl(_Eviction):
    """Evicts rows that were not seen for more than so many days.

    Args:
        delete_after_unseen_days: Days, at least 0; fractions are allowed, with
            a precision of three minutes.
        every_secs: How often the server evicts by itself; 0: only `shrink`.
    """

    delete_after_unseen_days: NonNegative = 30.0


@dataclasses.dataclass(frozen=True)
class ShowClickScore(_Eviction):
    """Evicts rows whose score, on the present day, is below a threshold.

    The score is that of `tfswitch.statistics.ShowClick`. This policy and `Ttl`,
    combined by `AnyOf`, are the daily shrink of Paddle's CTR accessor.

    Args:
        delete_threshold: At least 0.
        every_secs: As for `Ttl`.
    """

    delete_threshold: NonNegative = 0.8


@dataclasses.dataclass(frozen=True)
class L2Norm(_Eviction):
    """Evicts rows whose embedding has a Euclidean norm below `min_l2_norm`.

    Args:
        min_l2_norm: At least 0.
        every_secs: As for `Ttl`.
    """

    min_l2_norm: NonNegative


@dataclasses.dataclass(frozen=True)
class MaxRows(_Eviction):
    """Keeps a table at `max_rows` rows or fewer.

    In a table that has `max_rows` rows, a new id evicts the least used ones, or
    gets no row, by `when_full` of the table (docs/memory.md). A shrink evicts
    the rows beyond `max_rows`; among rows that `order` does not distinguish,
    those whose ids have the smallest hashes first. Each server keeps its share
    of `max_rows`, rounded up.

    Args:
        max_rows: At least 0.
        order: The rows that are evicted first: "lru", the rows that were seen
            longest ago, or "lfu", the rows with the fewest occurrences.
        every_secs: As for `Ttl`.
    """

    max_rows: Annotated[int, integers(0, 2**62)]
    order: Annotated[str, choices("lru", "lfu")] = "lru"

    def to_table_config(self) -> dict[str, Any]:
        return {**self.get_config(), "order": self.order.upper()}


@dataclasses.dataclass(frozen=True)
class AnyOf(_Eviction):
    """Evicts rows that at least one of several policies evicts.

    `MaxRows` counts the rows that the other policies leave.

    Args:
        policies: At most one of each kind, without `every_secs`.
        every_secs: As for `Ttl`.

    Example:

    >>> eviction = tsw.eviction.AnyOf(
    ...     [tsw.eviction.ShowClickScore(0.8), tsw.eviction.Ttl(30)],
    ...     every_secs=86400)
    """

    policies: Sequence[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.policies, (str, Mapping)) or not self.policies:
            raise bad_argument("policies", self.policies, "a list of policies")
        policies = tuple(get(policy) for policy in self.policies)
        object.__setattr__(self, "policies", policies)
        kinds = [type(policy).__name__ for policy in policies]
        if len(set(kinds)) < len(kinds) or "AnyOf" in kinds:
            raise ValueError(
                "`policies` must be of different kinds, and none an AnyOf. "
                f"Received: {kinds}"
            )
        if any(policy is None or policy.every_secs for policy in policies):
            raise ValueError(
                "`every_secs` belongs to AnyOf, not to one of its policies. "
                f"Received: policies={self.policies!r}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            "policies": [policy.to_config() for policy in self.policies],
            "every_secs": self.every_secs,
        }

    def to_table_config(self) -> dict[str, Any]:
        rules: dict[str, Any] = {}
        for policy in self.policies:
            rules.update(policy.to_table_config())
        return {**rules, "every_secs": self.every_secs}


Eviction = Ttl | ShowClickScore | L2Norm | MaxRows | AnyOf

_registry = Registry("eviction", Ttl, ShowClickScore, L2Norm, MaxRows, AnyOf)


def get(identifier: Eviction | Config | None) -> Eviction | None:
    """Returns the policy that a user's value means.

    Args:
        identifier: An object of this module, a config that `to_config`
            returned, or None for no policy.

    Raises:
        ValueError: If it is something else.
    """
    return _registry.get(identifier)
