"""What admission, eviction and statistics policies have in common."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

_Policy = TypeVar("_Policy", bound="Policy")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A named set of numbers that goes into a table's config."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def to_config(self) -> dict[str, Any]:
        """Returns what `get` makes this policy from."""
        return {
            "class_name": type(self).__name__,
            "config": self.get_config(),
        }

    @classmethod
    def from_config(cls: type[_Policy], config: Mapping[str, Any]) -> _Policy:
        """Makes a policy from what `get_config` returned."""
        return cls(**config)

    def _check_number(
        self, name: str, ok: Callable[[float], bool], expected: str
    ) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not math.isfinite(value) or not ok(value):
            raise ValueError(
                f"`{name}` must be {expected}. Received: {name}={value!r}"
            )
        object.__setattr__(self, name, float(value))

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, np.integer))
            or not low <= value <= high
        ):
            raise ValueError(
                f"`{name}` must be an integer from {low} to {high}. "
                f"Received: {name}={value!r}"
            )
        object.__setattr__(self, name, int(value))


class Registry:
    """The policies of one kind, by the names that users may give.

    Args:
        argument: What users pass them as, for messages.
        module: Where they are.
        classes: By name.
    """

    def __init__(
        self, argument: str, module: str, classes: Mapping[str, type[Policy]]
    ) -> None:
        self._argument = argument
        self._module = module
        self._classes = classes

    def get(self, identifier: Any) -> Any:
        """Returns the policy that a user means; None stays None."""
        if identifier is None or type(identifier) in self._classes.values():
            return identifier
        if isinstance(identifier, Mapping):
            found = self._classes.get(str(identifier.get("class_name")))
            if found is not None:
                return found.from_config(identifier.get("config", {}))
        names = ", ".join(self._classes)
        raise ValueError(
            f"`{self._argument}` must be one of {self._module}: {names}. "
            f"Received: {self._argument}={identifier!r}"
        )


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(
        value, (int, float, np.integer, np.floating)
    )
