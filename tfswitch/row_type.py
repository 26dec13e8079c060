"""How a table keeps its rows in memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfswitch._policy import Policy

_TYPES = ("float32", "float16", "bfloat16")
_ROUNDINGS = ("stochastic", "nearest")


@dataclasses.dataclass(frozen=True)
class RowType(Policy):
    """The types of a row's floats: 32 bits, or 16 for half the memory.

    Lookups and pushes are float32 in any case. A step reads the row as float32,
    computes in float32, and rounds what it stores.

    Rounding to nearest loses a step that is smaller than half of the last bit,
    each time again: with bfloat16 what changes a weight by less than 1/512 of
    it. Stochastic rounding takes such a step up or down by chance so that the
    expected value is exact, as in "Deep Learning with Limited Numerical
    Precision" (arXiv 1502.02551). What is drawn depends on the table's seed,
    the id and the number of the step: the same training run gives the same
    rows.

    New and assigned rows are rounded to nearest. Finite numbers beyond the
    range of float16 (65,504) are stored as the largest one.

    Args:
        embeddings: "float32", "float16" (11 significant bits, from 6e-8 to
            65,504) or "bfloat16" (8 significant bits, the range of float32).
        slots: The same for what the optimizer keeps per coordinate. What it
            keeps per row (Adam's count of steps) and statistics stay float32.
            Squares of gradients underflow in float16: prefer bfloat16.
        rounding: "stochastic" or "nearest".

    Raises:
        ValueError: If an argument is something else.

    Example:

    >>> table = tsw.EmbeddingTable(
    ...     "word", 16, optimizer="adagrad",
    ...     row_type=tsw.RowType("bfloat16", slots="bfloat16"))
    >>> table.stats()["row_stride_bytes"]  # 128 in float32
    64
    """

    embeddings: str = "float32"
    slots: str = "float32"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        for name, values in (
            ("embeddings", _TYPES),
            ("slots", _TYPES),
            ("rounding", _ROUNDINGS),
        ):
            value = getattr(self, name)
            if value not in values:
                names = ", ".join(f'"{v}"' for v in values)
                raise ValueError(
                    f"`{name}` must be one of {names}. "
                    f"Received: {name}={value!r}"
                )

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `row_type` field of a table config."""
        return {
            name: value.upper() for name, value in self.get_config().items()
        }


def get(identifier: Any) -> RowType:
    """Returns the row type that a user means.

    Args:
        identifier: A `RowType`; the type of the embeddings, with float32 slots;
            what `RowType.get_config` returned; or None for float32.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(identifier, RowType):
        return identifier
    if identifier is None:
        return RowType()
    if isinstance(identifier, Mapping):
        return RowType.from_config(identifier)
    name = getattr(identifier, "name", identifier)  # tf.bfloat16
    if name in _TYPES:
        return RowType(name)
    raise ValueError(
        '`row_type` must be a tfswitch.RowType, or "float32", "float16" or '
        f'"bfloat16". Received: row_type={identifier!r}'
    )
