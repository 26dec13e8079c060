"""Makes optimizers from names, configs and Keras's optimizers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfswitch._types import Config, KerasOptimizer
from tfswitch.optimizers._base import CLASSES, Optimizer, Rule
from tfswitch.optimizers._rules import Adam, AdamW, AMSGrad

OptimizerLike = Optimizer | str | KerasOptimizer | Config

# Settings of Keras's optimizers that a table does not support.
_UNSUPPORTED = (
    "decay",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "loss_scale_factor",
    "use_ema",
)
# Entries of Keras optimizers' configs that do not change a step.
_NO_SETTINGS = (
    "name",
    "ema_momentum",
    "ema_overwrite_frequency",
    "is_legacy_optimizer",
    "jit_compile",
)
# Keras 3 and tf_keras store the arguments of `exclude_from_weight_decay` in
# these attributes.
_EXCLUSIONS = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_names",
    "_exclude_from_weight_decay_pattern",
)


def have_equal_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two optimizers keep the same state and can replace each other.

    Args:
        a: The config that `to_table_config` returned for the first optimizer,
            maybe in an earlier program.
        b: The config of the second optimizer.

    Returns:
        True if both have the same rules and segments; other arguments may
        differ. The caller also checks that both states have the same length.
    """
    return _states_of(a) == _states_of(b)


def _states_of(config: Mapping[str, Any]) -> list[tuple[int, str]]:
    # AdamW has the state of Adam.
    return [
        (segment.get("dim", 0), "adam" if rule == "adamw" else rule)
        for segment, rule in zip(
            _segments_of(config), rules_of(config), strict=True
        )
    ]


def rules_of(config: Mapping[str, Any]) -> list[str]:
    """Returns the names of the rules of a `to_table_config`, by segment."""
    beside = {"dim", "learning_rate_scale", "options"}
    return [min(segment.keys() - beside) for segment in _segments_of(config)]


def _segments_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "segments" not in config:
        raise ValueError(
            "the optimizer of saved rows is written as another version of "
            "tfswitch writes it. Load them with that version, or export and "
            f"import them with tfswitch.io. Received: {dict(config)!r}"
        )
    return list(config["segments"])


class KerasRate:
    """The learning rate of a Keras optimizer at the time of the call."""

    def __init__(self, optimizer: KerasOptimizer) -> None:
        self._optimizer: Any = optimizer

    def __call__(self) -> Any:
        # tf_keras keeps a schedule's rate in a variable, which a step updates.
        update = getattr(
            self._optimizer, "_compute_current_learning_rate", None
        )
        if update is not None:
            update()
        return self._optimizer.learning_rate

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KerasRate):
            return NotImplemented
        return self._optimizer is other._optimizer

    def __hash__(self) -> int:
        return id(self._optimizer)

    def __repr__(self) -> str:
        return f"the learning rate of {self._optimizer!r}"


def get(identifier: OptimizerLike | None) -> Optimizer:
    """Returns the optimizer that a user's value means.

    Args:
        identifier: None for `Adam()`, a name ("sgd", "rowwise_adagrad" or
            "RowwiseAdagrad"), an object of `tfswitch.optimizers`, a Keras
            optimizer of the same name as one of these, or a config that
            `to_config` returned.

    ValueError: If there is no such optimizer, a Keras optimizer has a setting
        that tables do not have, or a config has an unknown setting.
    """
    if identifier is None:
        return Adam()
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        for name, cls in _rules().items():
            if identifier.lower() in (name.lower(), cls.KIND):
                return cls()
    elif isinstance(identifier, Mapping):
        found = CLASSES.get(str(identifier.get("class_name")))
        if found is not None:
            return _convert(found, identifier.get("config", {}))
    elif hasattr(identifier, "get_config"):  # Keras 3 or tf_keras.
        rule = from_keras(identifier)
        if not isinstance(rule.learning_rate, float):
            return rule
        return dataclasses.replace(rule, learning_rate=KerasRate(identifier))
    raise _not_known(identifier)


def from_table_config(config: Mapping[str, Any]) -> Optimizer | None:
    """Returns the rule of a table config, with its default learning rate.

    Returns None if the config has segments, or a rule that is not known here.
    """
    segment, *others = _segments_of(config)
    scale = segment.get("learning_rate_scale", 1.0)
    if others or segment.get("dim") or scale != 1.0:
        return None
    return rules_from_table_config(config)[0]


def rules_from_table_config(config: Mapping[str, Any]) -> list[Rule | None]:
    """Returns the rule of each segment, with its default learning rate.

    A rule that is not known here is None.
    """
    known = {cls.KIND: cls for cls in _rules().values()}
    return [
        known[kind].from_table_config(part[kind], part.get("options", {}))
        if kind in known
        else None
        for part, kind in zip(
            _segments_of(config), rules_of(config), strict=True
        )
    ]


def from_keras(
    optimizer: KerasOptimizer, *, ignore: Sequence[str] = ()
) -> Optimizer:
    """Returns the optimizer that corresponds to a Keras optimizer.

    Here, `clipnorm` bounds the gradient of each row, and `weight_decay` changes
    only the rows of a push.

    Args:
        optimizer: A Keras SGD, Adagrad, Adam, AdamW, RMSprop, Adadelta, Ftrl or
            Lion.
        ignore: Settings that do not matter here.

    Raises:
        ValueError: If `optimizer` is of another kind, has a setting without
            counterpart (such as `exclude_from_weight_decay`), or a learning
            rate that cannot be described.
    """
    name = type(optimizer).__name__
    cls = _rules().get(name)
    if cls is None or not cls.IS_IN_KERAS:
        raise _not_known(optimizer)
    if "weight_decay" not in ignore and any(
        getattr(optimizer, place, None) for place in _EXCLUSIONS
    ):
        raise ValueError(
            "variables excluded from weight decay have no counterpart on a "
            "table: all that it holds decays. Received: a Keras "
            f"{name} with `exclude_from_weight_decay`. Leave that call out, or "
            "pass an object of tfswitch.optimizers without `weight_decay`."
        )
    rate = _keras_learning_rate(optimizer)
    try:
        described = optimizer.get_config()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"a Keras {name} does not tell its settings. Pass an object "
            f"tfswitch.optimizers.{name}(learning_rate, ...) instead. "
            f"Received: learning_rate={rate!r}. The reason: {error}"
        ) from error
    config = {
        key: value
        for key, value in described.items()
        # A setting with the value None is off, even a setting that only a later
        # Keras has.
        if key not in ignore and value is not None
    }
    config["learning_rate"] = rate
    return _convert(cls, config)


def _rules() -> dict[str, type[Rule]]:
    return {name: cls for name, cls in CLASSES.items() if issubclass(cls, Rule)}


def _not_known(identifier: Any) -> ValueError:
    rules = _rules()
    names = ", ".join(name.lower() for name in rules)
    in_keras = ", ".join(name for name in rules if rules[name].IS_IN_KERAS)
    return ValueError(
        f"`optimizer` must be one of the names {names}; an object of "
        f"tfswitch.optimizers; or a Keras {in_keras}. Received: {identifier!r}"
    )


def _keras_learning_rate(optimizer: Any) -> Any:
    # The rate as it was given; `learning_rate` of a legacy optimizer returns
    # only its present value.
    legacy = getattr(optimizer, "_hyper", {}).get("learning_rate")
    rate = getattr(optimizer, "_learning_rate", legacy)
    # A schedule is not evaluated here: the Keras optimizer may never step, and
    # its rate would not change.
    if callable(rate):
        return rate
    try:
        rate = optimizer.learning_rate
        # NumPy cannot convert the variable of a strategy itself.
        return float(
            np.asarray(rate.numpy() if hasattr(rate, "numpy") else rate)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`learning_rate` of a Keras optimizer must be a number, a schedule "
            f"or a function. Received: {type(optimizer).__name__} with "
            f"learning_rate={optimizer.learning_rate!r}"
        ) from error


def _convert(cls: type[Optimizer], config: Mapping[str, Any]) -> Optimizer:
    config = {k: v for k, v in config.items() if k not in _NO_SETTINGS}
    # AMSGrad keeps the weight decay of an AdamW.
    if cls in (Adam, AdamW) and config.pop("amsgrad", False):
        cls = AMSGrad
    for name in _UNSUPPORTED:
        value = config.pop(name, None)
        # tf_keras writes False and 0 for "off" in places.
        if value not in (False, 0, None):
            raise ValueError(
                f"`{name}` of a Keras optimizer has no counterpart in an "
                f"embedding table. Received: {name}={value!r}. Leave it out, "
                "or pass an object of tfswitch.optimizers."
            )
    for name in ("clipnorm", "clipvalue"):
        if not config.get(name):
            config.pop(name, None)
    # 0.0 is kept, because AdamW would replace a missing value by its default.
    if any(config.get("weight_decay") is off for off in (None, False)):
        config.pop("weight_decay", None)
    names = [field.name for field in dataclasses.fields(cls)]
    for name in config:
        if name not in names:
            raise ValueError(
                f"{cls.__name__} has no setting `{name}`; it has "
                f"{', '.join(names)}. Received: {name}={config[name]!r}"
            )
    return cls.from_config(config)
