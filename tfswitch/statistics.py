"""Counts of how often, and when, the rows of a table were used.

Each push updates the counts of its rows. The counts are the last numbers of a
row, after the optimizer state, and are saved with the row. Policies of
admission and eviction use the counts.
"""

import dataclasses
from typing import Any, TypeVar

import numpy as np

from tfswitch._settings._policy import Policy, Registry
from tfswitch._settings._ranges import NonNegative, Share
from tfswitch._types import Config

_Numbers = TypeVar("_Numbers", float, np.ndarray)

__all__ = ["ShowClick", "Statistics", "Usage", "get"]


@dataclasses.dataclass(frozen=True)
class Usage(Policy):
    """Counts how often an id occurred, and stores the last day: 8 bytes a row.

    `count` is the number of occurrences of the id in batches, exact up to 2^24;
    `last_seen_day` is in days since 1970, with a precision of three minutes.
    """

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `statistics` field of a table config."""
        return {"kind": "USAGE"}


@dataclasses.dataclass(frozen=True)
class ShowClick(Policy):
    """`Usage`, and how often an id was shown and clicked: 20 bytes a row.

        score = (show - click) * nonclk_coeff + click * click_coeff

    For each day that passes, show and click are multiplied by
    `show_click_decay_rate`. This happens when a row is next pushed to or read,
    without a daily pass over the table. `delta_score` sums the scores of pushes
    and does not decay. Rules and defaults are those of Paddle's CTR accessor
    (`the_one_ps.proto`, `ctr_accessor.cc`).

    Args:
        nonclk_coeff: The worth of a show without a click, at least 0.
        click_coeff: The worth of a click, at least 0.
        show_click_decay_rate: The share of show and click that is left after a
            day; above 0, at most 1.

    Example:

    >>> table = tsw.EmbeddingTable(
    ...     "ad", 8, statistics=tsw.statistics.ShowClick())
    >>> table.push([3], [[0.0] * 8], shows=[10], clicks=[1])
    >>> table.usage([3])["score"]
    array([1.9], dtype=float32)
    """

    nonclk_coeff: NonNegative = 0.1
    click_coeff: NonNegative = 1.0
    show_click_decay_rate: Share = 0.98

    def score(self, show: _Numbers, click: _Numbers) -> _Numbers:
        """Returns the score of numbers or arrays of shows and clicks."""
        return (show - click) * self.nonclk_coeff + click * self.click_coeff

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `statistics` field of a table config."""
        return {"kind": "SHOW_CLICK", **self.get_config()}


Statistics = Usage | ShowClick

_registry = Registry("statistics", Usage, ShowClick)


def get(identifier: Statistics | Config | None) -> Statistics | None:
    """Returns the statistics that a user's value means.

    Args:
        identifier: An object of this module, a config that `to_config`
            returned, or None for no statistics.

    Raises:
        ValueError: If it is something else.
    """
    return _registry.get(identifier)


def _width(statistics: Statistics | None) -> int:
    """Returns how many floats the counts take at the end of a row."""
    if statistics is None:
        return 0
    return 5 if isinstance(statistics, ShowClick) else 2
