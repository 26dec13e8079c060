"""Several optimizers in one row."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfswitch._settings._ranges import is_number
from tfswitch._types import RateLike
from tfswitch.optimizers._base import Optimizer
from tfswitch.optimizers._conversion import get


@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Optimizer, kind="segments", mixes_coordinates=True):
    """Parts of a row, each with an optimizer of its own.

    Example: a row of a wide-and-deep model, whose first float is the wide
    weight:

    >>> tsw.optimizers.Segments([
    ...     (1, tsw.optimizers.Ftrl(0.1, l1_regularization_strength=0.01)),
    ...     (None, tsw.optimizers.Adagrad(0.05)),
    ... ])

    Options are arguments of the parts' optimizers. `clipnorm` and `cowclip` use
    the norm of their part.

    Args:
        parts: Pairs of a dimension and an optimizer, in the order of the floats
            of the row. The dimensions must sum to the table's, but the last one
            may be None, which means the rest of the row. An optimizer is any
            value that `get` takes; its learning rate must be a number.
        learning_rate: A factor that multiplies the rates of all parts. It may
            be a schedule, as for other optimizers.

    Raises:
        ValueError: If a part is malformed. When the table is created: if the
            dimensions do not sum to the table's.
    """

    parts: Any = ()
    learning_rate: RateLike = 1.0

    def __init__(
        self, parts: Sequence[Any], learning_rate: RateLike = 1.0
    ) -> None:
        object.__setattr__(self, "parts", _to_parts(parts))
        object.__setattr__(self, "learning_rate", learning_rate)
        super().__post_init__()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, with the learning rate as the user gave it."""
        return {
            "parts": [[dim, part.to_config()] for dim, part in self.parts],
            "learning_rate": self.learning_rate,
        }

    def to_table_config(self) -> dict[str, Any]:
        segments = [
            {
                "dim": dim or 0,
                "learning_rate_scale": part.learning_rate,
                **part.to_table_config()["segments"][0],
            }
            for dim, part in self.parts
        ]
        return {self.KIND: segments}


def _to_parts(parts: Any) -> tuple[tuple[int | None, Optimizer], ...]:
    try:
        pairs = [tuple(part) for part in parts]
    except TypeError:
        pairs = []
    if not pairs or not all(len(pair) == 2 for pair in pairs):
        raise ValueError(
            "`parts` must be pairs of a dimension and an optimizer, at least "
            f"one. Received: parts={parts!r}"
        )
    found = []
    for i, (dim, optimizer) in enumerate(pairs):
        is_last = i + 1 == len(pairs)
        if not (dim is None and is_last) and not (
            is_number(dim, int, np.integer) and dim >= 1
        ):
            raise ValueError(
                "the dimension of a part must be a positive integer, or None "
                f"for the last one. Received: parts[{i}]={pairs[i]!r}"
            )
        part = get(optimizer)
        if isinstance(part, Segments):
            raise ValueError(
                "a part has no parts of its own. "
                f"Received: parts[{i}]={pairs[i]!r}"
            )
        if not isinstance(part.learning_rate, float):
            raise ValueError(
                "the learning rate of a part must be a number: a schedule is "
                "that of all parts, Segments(..., learning_rate=schedule). "
                f"Received: parts[{i}]={pairs[i]!r}"
            )
        found.append((None if dim is None else int(dim), part))
    return tuple(found)
