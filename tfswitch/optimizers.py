"""How a table learns: one optimizer step per id and push, where the row lives.

Names, arguments and defaults are those of `keras.optimizers`, and so is the
arithmetic on the rows that a push touches. Rows that it does not touch stay as
they are: a momentum does not carry them on, as Keras's dense updates would.

`learning_rate` is a number, a Keras `LearningRateSchedule` (or any function of
the step), a variable, or a function without arguments; see
`tfswitch.EmbeddingTable.learning_rate`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """Base of all optimizers. Immutable."""

    # The field of the wire's OptimizerConfig.
    _KIND: ClassVar[str] = ""

    learning_rate: Any = 0.01

    def __post_init__(self) -> None:
        if isinstance(
            self.learning_rate, (bool, int, float, np.integer, np.floating)
        ):
            rate = check_learning_rate(self.learning_rate)
            object.__setattr__(self, "learning_rate", rate)
        elif not callable(self.learning_rate) and not hasattr(
            self.learning_rate, "assign"
        ):
            raise ValueError(
                "`learning_rate` must be a number, a schedule, a variable or a "
                "function. Received: "
                f"learning_rate={self.learning_rate!r}"
            )

    def _check(self, name: str, ok: Any, expected: str) -> None:
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float, np.integer, np.floating))
            or not math.isfinite(value)
            or not ok(value)
        ):
            raise ValueError(
                f"`{name}` must be {expected}. Received: {name}={value!r}"
            )
        object.__setattr__(self, name, float(value))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the learning rate as it was given."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def to_config(self) -> dict[str, Any]:
        """Returns what `get` makes this optimizer from."""
        return {
            "class_name": type(self).__name__,
            "config": self.get_config(),
        }

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `optimizer` field of a table config.

        It has no learning rate: that comes with each push.
        """
        fields = self.get_config()
        del fields["learning_rate"]
        return {self._KIND: fields}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Optimizer":
        """Makes an optimizer from what `get_config` returned."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.get_config() == other.get_config()

    __hash__ = None  # type: ignore[assignment]  # A schedule may not have one.


@dataclasses.dataclass(frozen=True, eq=False)
class SGD(Optimizer):
    """Gradient descent, with momentum if it is above 0.

    Args:
        learning_rate: See the module's description.
        momentum: In [0, 1]. Above 0 a row holds its velocity.
        nesterov: Whether to apply Nesterov momentum.
    """

    _KIND = "sgd"

    learning_rate: Any = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", lambda v: 0.0 <= v <= 1.0, "in [0, 1]")
        if not isinstance(self.nesterov, bool):
            raise ValueError(
                "`nesterov` must be a bool. "
                f"Received: nesterov={self.nesterov!r}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum(SGD):
    """`SGD` with a momentum of 0.9 unless another is given."""

    momentum: float = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class Adagrad(Optimizer):
    """Adagrad: steps shrink with the squares of a row's past gradients.

    Args:
        learning_rate: See the module's description.
        initial_accumulator_value: Not negative.
        epsilon: Positive.
    """

    _KIND = "adagrad"

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            "initial_accumulator_value", lambda v: v >= 0.0, "at least 0"
        )
        self._check("epsilon", lambda v: v > 0.0, "positive")


@dataclasses.dataclass(frozen=True, eq=False)
class Adam(Optimizer):
    """Adam. Each row counts its own steps, so bias correction fits new rows.

    Args:
        learning_rate: See the module's description.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Positive.
    """

    _KIND = "adam"

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("beta_1", lambda v: 0.0 <= v < 1.0, "in [0, 1)")
        self._check("beta_2", lambda v: 0.0 <= v < 1.0, "in [0, 1)")
        self._check("epsilon", lambda v: v > 0.0, "positive")


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW(Adam):
    """Adam with weight decay beside the gradient (Loshchilov and Hutter, 2019).

    A row decays when it is pushed to, not in between.

    Args:
        learning_rate: See the module's description.
        weight_decay: Not negative.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Positive.
    """

    _KIND = "adamw"

    weight_decay: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("weight_decay", lambda v: v >= 0.0, "at least 0")


_CLASSES: dict[str, type[Optimizer]] = {
    cls.__name__: cls for cls in (SGD, Momentum, Adagrad, Adam, AdamW)
}
# What Keras's optimizers can be told that a table does not do, with the value
# that turns it off.
_UNSUPPORTED: dict[str, Any] = {
    "amsgrad": False,
    "clipnorm": None,
    "clipvalue": None,
    "ema_overwrite_frequency": None,
    "global_clipnorm": None,
    "gradient_accumulation_steps": None,
    "loss_scale_factor": None,
    "use_ema": False,
    "weight_decay": None,
}


def check_learning_rate(value: Any) -> float:
    """Returns `value` as a float.

    Raises:
        ValueError: If it is not a finite number of at least 0.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.integer, np.floating))
        or not math.isfinite(value)
        or value < 0.0
    ):
        raise ValueError(
            "`learning_rate` must be a finite number of at least 0. "
            f"Received: learning_rate={value!r}"
        )
    return float(value)


def get(identifier: Any) -> Optimizer:
    """Returns the optimizer that a user means.

    Args:
        identifier: None for `Adagrad()`, a name ("sgd", "momentum", "adagrad",
            "adam", "adamw"), an optimizer of this module, a Keras SGD, Adagrad,
            Adam or AdamW, or what `to_config` returned.

    Raises:
        ValueError: If there is no such optimizer, or a Keras optimizer has a
            setting that tables do not have.
    """
    if identifier is None:
        return Adagrad()
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        for name, cls in _CLASSES.items():
            if identifier.lower() == name.lower():
                return cls()
    elif isinstance(identifier, Mapping):
        found = _CLASSES.get(str(identifier.get("class_name")))
        if found is not None:
            return _convert(found, identifier.get("config", {}))
    elif hasattr(identifier, "get_config"):  # Keras 3 or tf_keras.
        return from_keras(identifier)
    raise _not_known(identifier)


def from_keras(optimizer: Any, *, ignore: Sequence[str] = ()) -> Optimizer:
    """Returns the optimizer that a Keras one stands for.

    Args:
        optimizer: A Keras SGD, Adagrad, Adam or AdamW.
        ignore: Settings that do not matter here.

    Raises:
        ValueError: If it is another one, or has a setting without counterpart.
    """
    found = _CLASSES.get(type(optimizer).__name__)
    if found is None:
        raise _not_known(optimizer)
    config = {
        key: value
        for key, value in optimizer.get_config().items()
        if key not in ignore
    }
    config["learning_rate"] = _keras_learning_rate(optimizer)
    return _convert(found, config)


def _not_known(identifier: Any) -> ValueError:
    return ValueError(
        '`optimizer` must be "sgd", "momentum", "adagrad", "adam", "adamw", an '
        "object of tfswitch.optimizers, or a Keras SGD, Adagrad, Adam or "
        "AdamW. "
        f"Received: {identifier!r}"
    )


def _keras_learning_rate(optimizer: Any) -> Any:
    # A schedule stays one; anything else is the number that it is now.
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate):
        return rate
    return float(np.asarray(optimizer.learning_rate))


def _convert(cls: type[Optimizer], config: Mapping[str, Any]) -> Optimizer:
    names = {field.name for field in dataclasses.fields(cls)}
    for name, off in _UNSUPPORTED.items():
        if name in names:
            continue
        value = config.get(name, off)
        # tf_keras writes False and 0 for "off" in places.
        if value != off and value not in (False, 0, None):
            raise ValueError(
                f"`{name}` of a Keras optimizer has no counterpart in an "
                f"embedding table. Received: {name}={value!r}. Leave it out, "
                "or pass an object of tfswitch.optimizers."
            )
    return cls.from_config({k: v for k, v in config.items() if k in names})
