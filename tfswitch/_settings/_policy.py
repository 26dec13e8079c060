"""The common part of optimizers and policies."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from tfswitch._settings._ranges import check_fields

_Policy = TypeVar("_Policy", bound="Policy")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A named set of arguments that is part of a table's config.

    The types of its fields define their ranges: see `_ranges`.
    """

    # The field of the policy's config message.
    _KIND: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def to_config(self) -> dict[str, Any]:
        """Returns the config from which `get` makes this policy."""
        return {
            "class_name": type(self).__name__,
            "config": self.get_config(),
        }

    @classmethod
    def from_config(cls: type[_Policy], config: Mapping[str, Any]) -> _Policy:
        """Makes a policy from the config that `get_config` returned."""
        return cls(**config)


class Registry:
    """The policies of one kind, by the names that users may give.

    Args:
        argument: The argument that takes these policies, and the module of
            tfswitch that has them; used in messages.
        classes: The policies.
    """

    def __init__(self, argument: str, *classes: type[Policy]) -> None:
        self._argument = argument
        self._classes = {cls.__name__: cls for cls in classes}

    @property
    def classes(self) -> Collection[type[Policy]]:
        """The policies."""
        return self._classes.values()

    def get(self, identifier: Any) -> Any:
        """Returns the policy that a user's value means; None stays None."""
        if identifier is None or type(identifier) in self._classes.values():
            return identifier
        if isinstance(identifier, Mapping):
            found = self._classes.get(str(identifier.get("class_name")))
            if found is not None:
                return found.from_config(identifier.get("config", {}))
        names = ", ".join(self._classes)
        raise ValueError(
            f"`{self._argument}` must be one of tfswitch.{self._argument}: "
            f"{names}. Received: {self._argument}={identifier!r}"
        )
