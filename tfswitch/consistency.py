"""Decides when the gradients of several workers are applied."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from tfswitch._settings._policy import Policy
from tfswitch._settings._ranges import choices, integers
from tfswitch._types import Config


@dataclasses.dataclass(frozen=True)
class Consistency(Policy):
    """How much workers that train one model wait for each other. Immutable.

    The class methods `asp`, `ssp` and `bsp` make objects. Tables and workers
    each have a consistency. A worker's consistency must be at least as strict
    as that of each table to which the worker pushes.

    Sources: BSP is Valiant's bulk-synchronous model (1990); SSP is Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NIPS 2013.

    Example:

    >>> tsw.train.Consistency.ssp(staleness=3)
    Consistency(kind='ssp', staleness=3, reduction='mean')
    """

    kind: Annotated[str, choices("asp", "ssp", "bsp")] = "asp"
    staleness: Annotated[int, integers(0, 2**32 - 1)] = 0
    reduction: Annotated[str, choices("mean", "sum")] = "mean"

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

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `consistency` field of a table config."""
        return {
            "kind": self.kind.upper(),
            "staleness": self.staleness,
            "reduction": self.reduction.upper(),
        }


_FIELDS = {field.name for field in dataclasses.fields(Consistency)}
ConsistencyLike = Consistency | Literal["asp", "bsp"] | Config


def get(identifier: ConsistencyLike | None) -> Consistency:
    """Returns the consistency that a user's value means.

    Args:
        identifier: None for `Consistency.asp()`, "asp", "bsp", a `Consistency`,
            or a config that its `get_config` or `to_config` returned.

    Raises:
        ValueError: If it is none of these.
    """
    if identifier is None:
        return Consistency.asp()
    if isinstance(identifier, Consistency):
        return identifier
    if isinstance(identifier, str) and identifier in ("asp", "bsp"):
        return Consistency(identifier)
    if isinstance(identifier, Mapping):
        config = identifier.get("config", identifier)
        if isinstance(config, Mapping) and config.keys() <= _FIELDS:
            return Consistency.from_config(config)
    raise ValueError(
        '`consistency` must be "asp", "bsp" or what '
        "tfswitch.train.Consistency.asp(), .ssp(staleness) or .bsp() returns. "
        f"Received: consistency={identifier!r}"
    )
