"""Decides when the gradients of several workers are applied."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tfswitch._settings._ranges import bad_argument, is_number
from tfswitch._types import Config

_KINDS = ("asp", "ssp", "bsp")
_REDUCTIONS = ("mean", "sum")


@dataclasses.dataclass(frozen=True)
class Consistency:
    """How much workers that train one model wait for each other. Immutable.

    The class methods `asp`, `ssp` and `bsp` make objects. Tables and workers
    each have a consistency. That of a worker must be at least as strict as that
    of each table to which it pushes.

    Sources: BSP is Valiant's bulk-synchronous model (1990); SSP is Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NIPS 2013.

    Example:

    >>> tsw.train.Consistency.ssp(staleness=3)
    Consistency(kind='ssp', staleness=3, reduction='mean')
    """

    kind: str = "asp"
    staleness: int = 0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise bad_argument("kind", self.kind, f"one of {_KINDS}")
        steps = self.staleness
        if not (is_number(steps, int) and 0 <= steps < 2**32):
            expected = "a number of steps of at least 0"
            raise bad_argument("staleness", steps, expected)
        if self.reduction not in _REDUCTIONS:
            raise bad_argument("reduction", self.reduction, '"mean" or "sum"')

    @classmethod
    def asp(cls) -> "Consistency":
        """Applies gradients as they arrive; no worker waits."""
        return cls("asp")

    @classmethod
    def ssp(cls, staleness: int) -> "Consistency":
        """As `asp`, but no worker is far ahead of the slowest.

        Args:
            staleness: By how many steps a worker may be ahead, at least 0.

        Raises:
            ValueError: If `staleness` is out of range.
        """
        return cls("ssp", staleness=staleness)

    @classmethod
    def bsp(cls, reduction: str = "mean") -> "Consistency":
        """Applies the gradients of all workers of one step together.

        Args:
            reduction: "mean": gradients are weighted by the numbers of samples,
                so that N workers train as one with the union of their batches,
                if losses are means over the batch. Or "sum".

        Raises:
            ValueError: If `reduction` is neither.
        """
        return cls("bsp", reduction=reduction)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return dataclasses.asdict(self)

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `consistency` field of a table config."""
        if self.kind == "ssp":
            return {"ssp": {"staleness": self.staleness}}
        if self.kind == "bsp":
            return {"bsp": {"reduction": self.reduction.upper()}}
        return {"asp": {}}


_FIELDS = {field.name for field in dataclasses.fields(Consistency)}
ConsistencyLike = Consistency | Literal["asp", "bsp"] | Config


def get(identifier: ConsistencyLike | None) -> Consistency:
    """Returns the consistency that a user's value means.

    Args:
        identifier: None for `Consistency.asp()`, "asp", "bsp", a `Consistency`,
            or a config that its `get_config` returned.

    Raises:
        ValueError: If it is none of these.
    """
    if identifier is None:
        return Consistency.asp()
    if isinstance(identifier, Consistency):
        return identifier
    if isinstance(identifier, str) and identifier in ("asp", "bsp"):
        return Consistency(identifier)
    if isinstance(identifier, Mapping) and identifier.keys() <= _FIELDS:
        return Consistency(**identifier)
    raise ValueError(
        '`consistency` must be "asp", "bsp" or what '
        "tfswitch.train.Consistency.asp(), .ssp(staleness) or .bsp() returns. "
        f"Received: consistency={identifier!r}"
    )
