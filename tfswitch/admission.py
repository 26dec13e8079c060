"""Decides when an id gets a row.

Without a policy an id gets a row at its first training lookup. With a policy,
the push that satisfies the policy makes the row, which takes its first step
with the gradient of this push. Until then, lookups of the id return
`not_admitted`, in training and outside of it.

The table counts the occurrences of an id in pushes. A push counts once, even if
it is sent again because its answer was lost. Under consistency `bsp` a round
counts the occurrences of all its workers together.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

from tfswitch._settings._policy import Policy, Registry
from tfswitch._settings._ranges import (
    FINITE,
    Fraction,
    NonNegative,
    Share,
    integers,
)
from tfswitch._types import Config

__all__ = [
    "Admission",
    "Always",
    "BloomMinCount",
    "MinCount",
    "Probability",
    "ShowClick",
    "get",
]


@dataclasses.dataclass(frozen=True)
class _Admission(Policy):
    # The values of `not_admitted` besides numbers.
    _NAMES: ClassVar[tuple[str, ...]] = ("zeros", "shared")

    _: dataclasses.KW_ONLY
    # The value that lookups return for an id without a row.
    not_admitted: str | float = "zeros"

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.not_admitted
        if not isinstance(value, str) or value not in self._NAMES:
            names = ", ".join(f'"{name}"' for name in self._NAMES)
            number = FINITE._replace(text=f"{names} or a finite number")
            value = number.check("not_admitted", value)
            object.__setattr__(self, "not_admitted", value)

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `admission` field of a table config."""
        arguments = self.get_config()
        value = arguments.pop("not_admitted")
        read_as = (
            {"kind": value.upper()}
            if isinstance(value, str)
            else {"kind": "CONSTANT", "constant": value}
        )
        return {self._KIND: arguments, "not_admitted": read_as}


@dataclasses.dataclass(frozen=True)
class Always(_Admission):
    """Admits every id at its first training lookup: the default."""

    _KIND = "always"


@dataclasses.dataclass(frozen=True)
class MinCount(_Admission):
    """Admits an id at its `min_count`-th occurrence.

    The counts are exact, because each waiting id has a record of 16 to 32 bytes
    and an entry in an index. `EmbeddingTable.shrink` evicts waiting ids by the
    same rules as rows. (DeepRec's `CounterFilter`.)

    Args:
        min_count: 1 to 2^24.
        not_admitted: The value that an id without a row reads as: "zeros", a
            number, "shared" or "weight". "shared" is one row for all these ids,
            which is drawn once from the initializer and does not learn. With
            "weight" the first element is the id's own and learns from the first
            push on; the other elements are zeros. "weight" needs an optimizer
            for the first element alone: `tfswitch.optimizers.Segments([(1, a),
            (None, b)])`.

    Example:

    >>> table = tsw.EmbeddingTable(
    ...     "word", 2, optimizer=tsw.optimizers.SGD(1.0),
    ...     initializer="zeros", admission=tsw.admission.MinCount(3))
    >>> table.push([7, 7], [[1.0, 1.0], [1.0, 1.0]]); table.size()
    0
    >>> table.push([7], [[1.0, 1.0]]); table.lookup([7]).numpy()
    array([[-1., -1.]], dtype=float32)
    """

    _KIND = "min_count"
    _NAMES = ("zeros", "shared", "weight")

    # Counts are float32.
    min_count: Annotated[int, integers(1, 2**24)]


@dataclasses.dataclass(frozen=True)
class BloomMinCount(_Admission):
    """`MinCount` with a fixed size, inexact for about one id in a hundred.

    A counting Bloom filter replaces the records of waiting ids. The filter has
    `m = n |ln p| / (ln 2)^2` cells and `k = ceil(|log2 p|)` hashes, for n =
    `capacity` ids and p = `false_positive_rate`. A count is never too low;
    while at most `capacity` ids have been counted, a share of about p is
    admitted too early. A cell has one byte, or two if `min_count` is above 255,
    and its count stops at `min_count`. Cells are not evicted: an id whose row
    was evicted gets a row again at its next push. (Fan et al., 2000; only the
    least cells are raised: Estan and Varghese, 2002.)

    The cells of 100 million ids take 958 MB, divided among the servers.

    Args:
        min_count: 1 to 65535.
        capacity: How many ids are expected.
        false_positive_rate: Between 0 and 1.
        not_admitted: The value that an id without a row reads as: "zeros", a
            number, or "shared": one row for all these ids, which is drawn once
            from the initializer and does not learn.
    """

    _KIND = "bloom_min_count"

    min_count: Annotated[int, integers(1, 2**16 - 1)]
    capacity: Annotated[int, integers(1, 2**48)] = 100_000_000
    false_positive_rate: Fraction = 0.01


@dataclasses.dataclass(frozen=True)
class Probability(_Admission):
    """Gives an id a row with probability `probability` at each occurrence.

    After c occurrences an id has a row with probability 1 - (1 - p)^c.
    (PERSIA's `admit_probability`.) The draw depends on the seed, the id and the
    order of pushes at its server.

    Args:
        probability: Above 0, at most 1.
        not_admitted: As for `BloomMinCount`.
    """

    _KIND = "probability"

    probability: Share


@dataclasses.dataclass(frozen=True)
class ShowClick(_Admission):
    """Admits an id when its score of shows and clicks reaches a threshold.

    The score is that of `tfswitch.statistics.ShowClick`, and decays from day to
    day. A table without the argument `statistics` counts shows and clicks by
    itself. With `not_admitted="weight"` this is the two-stage growth of
    Paddle's CTR accessor: a weight first, the whole embedding once the score is
    high enough.

    Args:
        embedx_threshold: At least 0.
        not_admitted: As for `MinCount`.

    Example:

    >>> admission = tsw.admission.ShowClick(10, not_admitted="weight")
    """

    _KIND = "show_click"
    _NAMES = ("zeros", "shared", "weight")

    embedx_threshold: NonNegative = 10.0


Admission = Always | MinCount | BloomMinCount | Probability | ShowClick

_registry = Registry(
    "admission", Always, MinCount, BloomMinCount, Probability, ShowClick
)


def get(identifier: Admission | Config | None) -> Admission:
    """Returns the policy that a user's value means.

    Args:
        identifier: An object of this module, a config that `to_config`
            returned, or None for `Always()`.

    Raises:
        ValueError: If it is something else.
    """
    return _registry.get(identifier) or Always()
