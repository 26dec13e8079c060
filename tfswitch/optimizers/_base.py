"""The common part of all optimizers: learning rate, options, configs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from tfswitch._settings._policy import Policy
from tfswitch._settings._ranges import (
    FINITE_NON_NEGATIVE,
    NUMBERS,
    FiniteOrNone,
    NonNegative,
    NonNegativeOrNone,
    PositiveOrNone,
    bad_argument,
)
from tfswitch._types import RateLike
from tfswitch.optimizers._cowclip import CowClip

# The classes by name, in the order of their definition.
CLASSES: dict[str, type["Optimizer"]] = {}
# Options that have other names in the messages.
_WIRE_NAMES = {"clipvalue": "clip_value", "clipnorm": "clip_norm"}
_PYTHON_NAMES = {wire: python for python, wire in _WIRE_NAMES.items()}


def check_learning_rate(value: Any) -> float:
    """Returns `value` as a float.

    Raises:
        ValueError: If the value is not a finite number of at least 0.
    """
    return float(FINITE_NON_NEGATIVE.check("learning_rate", value))


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer(Policy):
    """Base of all optimizers. Immutable."""

    KIND: ClassVar[str] = ""
    IS_IN_KERAS: ClassVar[bool] = False
    _MIXES_COORDINATES: ClassVar[bool] = False

    learning_rate: RateLike = 0.01

    def __init_subclass__(
        cls,
        *,
        kind: str = "",
        is_in_keras: bool = False,
        mixes_coordinates: bool = False,
    ) -> None:
        """Enters a class into `CLASSES`.

        Args:
            kind: The class's field of the message OptimizerConfig.
            is_in_keras: Whether Keras has an optimizer of that name.
            mixes_coordinates: Whether a coordinate of its step depends on other
                coordinates.
        """
        super().__init_subclass__()
        # A class without a `kind` is a user's subclass of one of tfswitch's
        # optimizers.
        if kind:
            cls.KIND = kind
            cls.IS_IN_KERAS = is_in_keras
            cls._MIXES_COORDINATES = mixes_coordinates
            CLASSES[cls.__name__] = cls

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if isinstance(rate, NUMBERS):  # Or a bool, which is refused.
            object.__setattr__(self, "learning_rate", check_learning_rate(rate))
        elif not callable(rate) and not hasattr(rate, "assign"):
            raise ValueError(
                "`learning_rate` must be a number, a schedule, a variable or a "
                f"function. Received: learning_rate={rate!r}"
            )
        super().__post_init__()

    @property
    def is_elementwise(self) -> bool:
        """Whether each weight's step depends on its own gradient alone.

        A block of a `tfswitch.DenseTable` contains unrelated weights, so the
        table's optimizer must be elementwise.
        """
        return self._mixing() is None

    def _mixing(self) -> str | None:
        """Returns the setting that makes weights depend on each other."""
        if self._MIXES_COORDINATES:
            return f"optimizer={type(self).__name__}"
        return None

    def check_elementwise(self, user: str) -> None:
        """Raises ValueError, which names `user`, if not elementwise."""
        if (mixing := self._mixing()) is not None:
            raise ValueError(
                f"{user} needs an optimizer that steps each weight by its own "
                "gradient alone, as its blocks are no rows of anything. "
                f"Received: {mixing}"
            )

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `optimizer` field of a table config.

        The config has no learning rate, because each push carries one.
        """
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.get_config() == other.get_config()

    __hash__ = None  # type: ignore[assignment]  # A schedule may have no hash.


@dataclasses.dataclass(frozen=True, eq=False)
class Rule(Optimizer):
    """An optimizer with options.

    The optimizer's own arguments come before the options and may be passed by
    position; options are passed by keyword only.
    """

    _: dataclasses.KW_ONLY
    l2: NonNegative = 0.0
    cowclip: CowClip | None = None
    clipvalue: PositiveOrNone = None
    clipnorm: PositiveOrNone = None
    weight_decay: NonNegativeOrNone = None
    min_weight: FiniteOrNone = None
    max_weight: FiniteOrNone = None
    min_norm: NonNegativeOrNone = None
    max_norm: PositiveOrNone = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cowclip, Mapping):
            object.__setattr__(self, "cowclip", CowClip(**self.cowclip))
        if self.cowclip is not None and not isinstance(self.cowclip, CowClip):
            raise bad_argument(
                "cowclip", self.cowclip, "a tfswitch.optimizers.CowClip or None"
            )
        for low_name, high_name in (
            ("min_weight", "max_weight"),
            ("min_norm", "max_norm"),
        ):
            low, high = getattr(self, low_name), getattr(self, high_name)
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"`{low_name}` must be at most `{high_name}`. Received: "
                    f"{low_name}={low!r}, {high_name}={high!r}"
                )

    def _mixing(self) -> str | None:
        options = (
            f"{name}={value!r}"
            for name in ("clipnorm", "cowclip", "min_norm", "max_norm")
            if (value := getattr(self, name)) is not None
        )
        return super()._mixing() or next(options, None)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, with the learning rate as the user gave it."""
        config = super().get_config()
        if self.cowclip is not None:
            config["cowclip"] = dataclasses.asdict(self.cowclip)
        return config

    def to_table_config(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if not field.kw_only:
                arguments[name] = value
            elif isinstance(value, CowClip):
                options.update(cowclip_r=value.r, cowclip_zeta=value.zeta)
            # 0 turns an option off, but `min_weight` and `max_weight` may be 0.
            elif value or (value == 0.0 and name.endswith("_weight")):
                options[_WIRE_NAMES.get(name, name)] = value
        del arguments["learning_rate"]
        segment = {self.KIND: arguments}
        if options:
            segment["options"] = options
        return {"segments": [segment]}

    @classmethod
    def from_table_config(
        cls, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> "Rule":
        """Returns the rule whose `to_table_config` returns these values."""
        given = {_PYTHON_NAMES.get(k, k): v for k, v in options.items()}
        # Servers leave out a `zeta` that is the default.
        cowclip = {
            name: given.pop(f"cowclip_{name}")
            for name in ("r", "zeta")
            if f"cowclip_{name}" in given
        }
        if cowclip:
            given["cowclip"] = CowClip(**cowclip)
        return cls(**arguments, **given)
