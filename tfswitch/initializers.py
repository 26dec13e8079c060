"""The first value of a row.

Each value depends on the table's seed and the row's id alone, so a row starts
with the same value on any server and in any order of ids. Names and arguments
are those of `keras.initializers`. The `seed` of a Keras initializer is ignored,
because the table has a seed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfswitch._settings._policy import Policy
from tfswitch._settings._ranges import Finite, NonNegative
from tfswitch._types import Config, KerasFunction

__all__ = [
    "Constant",
    "GlorotUniform",
    "Initializer",
    "InitializerLike",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Zeros",
    "get",
]


@dataclasses.dataclass(frozen=True)
class Initializer(Policy):
    """Base of all initializers. Immutable; equal if all arguments are equal."""

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `initializer` field of a table config."""
        return {self._KIND: self.get_config()}


@dataclasses.dataclass(frozen=True)
class Constant(Initializer):
    """All values are `value`."""

    _KIND = "constant"
    value: Finite = 0.0


@dataclasses.dataclass(frozen=True)
class Zeros(Initializer):
    """All values are 0."""

    def to_table_config(self) -> dict[str, Any]:
        return {"constant": {"value": 0.0}}


@dataclasses.dataclass(frozen=True)
class Ones(Initializer):
    """All values are 1."""

    def to_table_config(self) -> dict[str, Any]:
        return {"constant": {"value": 1.0}}


@dataclasses.dataclass(frozen=True)
class RandomUniform(Initializer):
    """Uniform in [minval, maxval)."""

    _KIND = "uniform"
    minval: Finite = -0.05
    maxval: Finite = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minval > self.maxval:
            raise ValueError(
                "`minval` must not be above `maxval`. Received: "
                f"minval={self.minval}, maxval={self.maxval}"
            )


@dataclasses.dataclass(frozen=True)
class RandomNormal(Initializer):
    """Normal with `mean` and `stddev`."""

    _KIND = "normal"
    mean: Finite = 0.0
    stddev: NonNegative = 0.05


@dataclasses.dataclass(frozen=True)
class TruncatedNormal(RandomNormal):
    """Normal; values beyond two standard deviations are drawn again."""

    _KIND = "truncated_normal"


@dataclasses.dataclass(frozen=True)
class GlorotUniform(Initializer):
    """Uniform in +-sqrt(6 / (1 + dim)).

    This is Glorot's rule with fan_in 1, because an id selects one input unit,
    and with fan_out dim. Keras takes the size of the vocabulary as fan_in, but
    the vocabulary of a table has no fixed size.
    """

    _KIND = "glorot_uniform"


_NAMES: dict[str, type[Initializer]] = {
    "constant": Constant,
    "glorot_uniform": GlorotUniform,
    "normal": RandomNormal,
    "ones": Ones,
    "random_normal": RandomNormal,
    "random_uniform": RandomUniform,
    "truncated_normal": TruncatedNormal,
    "uniform": RandomUniform,
    "zeros": Zeros,
}
_CLASSES = {cls.__name__: cls for cls in _NAMES.values()}


def _is_known(name: str) -> bool:
    """Whether `get` takes the name."""
    return name in _NAMES or name in _CLASSES


InitializerLike = Initializer | str | KerasFunction | Config


def get(
    identifier: InitializerLike, argument: str = "initializer"
) -> Initializer:
    """Returns the initializer that a user's value means.

    Args:
        identifier: A name such as "uniform", an initializer of this module, a
            Keras initializer of the same kind, or a config that `to_config`
            returned.
        argument: The name of the argument, for the error.

    Raises:
        ValueError: If there is no such initializer.
    """
    if isinstance(identifier, Initializer):
        return identifier
    if isinstance(identifier, str):
        found = _NAMES.get(identifier) or _CLASSES.get(identifier)
        if found is not None:
            return found()
    elif isinstance(identifier, Mapping):
        found = _CLASSES.get(str(identifier.get("class_name")))
        if found is not None:
            return _convert(found, identifier.get("config", {}))
    elif hasattr(identifier, "get_config"):  # Keras 3 or tf_keras.
        found = _CLASSES.get(type(identifier).__name__)
        if found is not None:
            return _convert(found, identifier.get_config())
    raise ValueError(
        f"`{argument}` must be one of "
        + ", ".join(repr(name) for name in sorted(_NAMES))
        + ", an object of tfswitch.initializers, or the Keras initializer of "
        f"that kind. Received: {identifier!r}"
    )


def _convert(cls: type[Initializer], config: Mapping[str, Any]) -> Initializer:
    names = {field.name for field in dataclasses.fields(cls)}
    return cls.from_config({k: v for k, v in config.items() if k in names})
