"""Defines the range of an argument once, in the type of its field.

For type checkers a field `beta_1: Decay = 0.9` is a float; `check_fields`
raises an error for values outside [0, 1). The names are those of
`cc/base/config_fields.h`.
"""

import dataclasses
import math
import os
import threading
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

# bool is left out: for Python, True is an int.
NUMBERS = (int, float, np.integer, np.floating)
_TYPES: dict[type, tuple[Any, ...]] = {
    float: NUMBERS,
    int: (int, np.integer),
    bool: (bool,),
    str: (str,),
}


class Range(NamedTuple):
    """The range of an argument, and its name in a message."""

    text: str
    contains: Callable[[Any], bool]
    kind: type = float
    or_none: bool = False

    # Python shows this text in signatures.
    def __repr__(self) -> str:
        return f"{self.text}, or None" if self.or_none else self.text

    def check(self, name: str, value: Any, owner: str = "") -> Any:
        """Returns the value as an object of `kind`.

        Raises:
            ValueError: If the value is not in the range. The message names the
                argument, and the owner of the argument if it has one.
        """
        if value is None and self.or_none:
            return None
        if (
            not isinstance(value, _TYPES[self.kind])
            or isinstance(value, bool) != (self.kind is bool)
            or not self.contains(value)
            or (self.kind is float and not math.isfinite(value))
        ):
            raise ValueError(
                f"`{name}`{owner} must be {self!r}. Received: {name}={value!r}"
            )
        return self.kind(value)


FINITE = Range("a finite number", lambda v: True)
POSITIVE = Range("positive", lambda v: v > 0.0)
NON_NEGATIVE = Range("at least 0", lambda v: v >= 0.0)
FINITE_NON_NEGATIVE = Range(
    "a finite number of at least 0", NON_NEGATIVE.contains
)
FLAG = Range("a bool", lambda v: True, bool)
POSITIVE_INT = Range("a positive integer", POSITIVE.contains, int)
NON_NEGATIVE_INT = Range("an integer of at least 0", NON_NEGATIVE.contains, int)
NON_NEGATIVE_INT64 = Range(
    "an integer from 0 to 2**63 - 1", lambda v: 0 <= v < 2**63, int
)

Flag = Annotated[bool, FLAG]
Finite = Annotated[float, FINITE]
Unit = Annotated[float, Range("in [0, 1]", lambda v: 0.0 <= v <= 1.0)]
Decay = Annotated[float, Range("in [0, 1)", lambda v: 0.0 <= v < 1.0)]
Rate = Annotated[float, Range("in (0, 1]", lambda v: 0.0 < v <= 1.0)]
# The same range as `Rate`, with the words of the policies' error messages.
Share = Annotated[
    float, Range("above 0 and at most 1", lambda v: 0.0 < v <= 1.0)
]
Fraction = Annotated[float, Range("between 0 and 1", lambda v: 0.0 < v < 1.0)]
Positive = Annotated[float, POSITIVE]
NonNegative = Annotated[float, NON_NEGATIVE]
NonPositive = Annotated[float, Range("at most 0", lambda v: v <= 0.0)]
FiniteOrNone = Annotated[float | None, FINITE._replace(or_none=True)]
PositiveOrNone = Annotated[float | None, POSITIVE._replace(or_none=True)]
NonNegativeOrNone = Annotated[float | None, NON_NEGATIVE._replace(or_none=True)]


def is_number(value: Any, *kinds: type) -> bool:
    """Whether a value is a number of one of these types, and no bool."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_seconds(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    most: float = threading.TIMEOUT_MAX,
) -> None:
    """Raises ValueError unless `value` is a possible number of seconds."""
    if not (
        is_number(value, int, float) and 0 < value <= most and value >= least
    ):
        raise bad_argument(name, value, "a positive number of seconds")


def bad_argument(
    name: str, value: Any, expected: str, owner: str = ""
) -> ValueError:
    """Returns the error for an argument that has a wrong value."""
    return ValueError(
        f"{owner}`{name}` must be {expected}. Received: {name}={value!r}"
    )


def checked_text(name: str, value: str | os.PathLike[str]) -> str:
    """Checks and returns a text, or the text of a path.

    Raises:
        ValueError: If `value` is not valid Unicode. The error has no cause, and
            its message does not contain the value, because that may be a
            secret.
    """
    text = os.fsdecode(value)
    if text.encode(errors="replace").decode() != text:
        raise ValueError(f"`{name}` is not valid Unicode; give it as UTF-8")
    return text


def integers(low: int, high: int) -> Range:
    """Returns the range of all integers from `low` to `high`."""
    return Range(
        f"an integer from {low} to {high}", lambda v: low <= v <= high, int
    )


PUSH_DEPTH = integers(0, 64)


def choices(*names: str) -> Range:
    """Returns the range of one of several texts."""
    *others, last = (f'"{name}"' for name in names)
    return Range(f"{', '.join(others)} or {last}", lambda v: v in names, str)


_WIRE_DTYPE = choices("float32", "float16", "bfloat16")


def check_wire_dtype(value: Any) -> str:
    """Returns the name of a type in which rows travel to and from servers."""
    name = getattr(value, "name", value)  # tf.bfloat16
    return str(_WIRE_DTYPE.check("wire_dtype", name))


def check_fields(made: Any, owner: str = "") -> None:
    """Checks and converts the fields of a frozen dataclass.

    Raises:
        ValueError: If a field is not in its range.
    """
    for field in dataclasses.fields(made):
        for expected in getattr(field.type, "__metadata__", ()):
            value = getattr(made, field.name)
            value = expected.check(field.name, value, owner)
            object.__setattr__(made, field.name, value)
