"""Makes a layer's table learn as the optimizer of the layer's model."""

import dataclasses
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfswitch import optimizers as optimizers_lib
from tfswitch._warn_once import warn_once
from tfswitch.keras import _backend
from tfswitch.optimizers._conversion import KerasRate

# Settings that change the gradient before it is applied.
_OF_THE_GRADIENT = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "loss_scale_factor",
)


def outermost_layer(layer: Any) -> Any:
    """Finds the model that is calling `layer`, or the layer itself."""
    layers = [x for x in _callers() if isinstance(x, _backend.Layer)]
    return layers[-1] if layers else layer


def is_exporting() -> bool:
    """Whether a layer is called for a SavedModel, TFLite or ONNX."""
    keras = ("keras.src.export.", "tf_keras.src.export.")
    return _backend.is_called_by(*keras, "tensorflow.lite.", "tf2onnx.")


def _callers() -> Iterator[Any]:
    """Yields the objects whose methods are running, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        # Reads local variables only of functions whose first argument is
        # `self`.
        if frame.f_code.co_varnames[:1] == ("self",):
            yield frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]


def rule_of(layer: Any, optimizer: Any) -> optimizers_lib.Optimizer:
    """Returns the rule that steps rows as a Keras optimizer steps variables.

    The rule's learning rate is always the present rate of the Keras optimizer.

    Args:
        layer: The layer whose weight the optimizer trains; messages name it.
        optimizer: The optimizer that applies the layer's gradients.

    Raises:
        ValueError: If tables have no such rule. The message names the remedy.
    """
    # In a float16 model another optimizer wraps the optimizer that takes the
    # steps.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # A ParameterServerOptimizer has this attribute.
    on_servers = getattr(inner, "_server_optimizer", None)
    try:
        # Reads the values of variables eagerly, even while a function is
        # traced.
        with tf.init_scope():
            rule: Any = on_servers or _converted(layer, inner)
    except ValueError as error:
        raise ValueError(
            f"layer '{layer.name}' learns as the model's optimizer "
            f'(optimizer="auto"), and cannot do so here: {error} Or pass the '
            "layer an `optimizer` of its own, such as "
            "tfswitch.optimizers.Adam(0.001)."
        ) from error
    return dataclasses.replace(rule, learning_rate=KerasRate(inner))


def update_of(layer: Any, rule: Any) -> str:
    """Returns which rows a push moves: if possible, those that Keras moves.

    With `update="auto"`, the Keras rule may also move rows outside of the
    batch. If tables cannot do this, a warning says so.

    Args:
        layer: Its `update` is "auto", "sparse" or "dense".
        rule: The rule by which its rows learn.
    """
    if layer._update != "auto":
        return str(layer._update)
    kind = type(rule).__name__
    has_momentum = bool(getattr(rule, "momentum", 0.0))
    if rule.l2:
        reason = "with L2 the steps of other rows have no short form"
    elif (
        rule.weight_decay
        or has_momentum
        or kind not in _LEAVE_OTHER_ROWS
        # FTRL computes weights from the present rate, so a new rate moves all
        # rows.
        or (kind == "Ftrl" and _has_schedule(rule))
    ):
        if (kind in _HAVE_DENSE_UPDATES) and not (
            has_momentum and kind == "RMSprop"
        ):
            return "dense"
        reason = f"tables have no dense updates of {kind}"
    else:
        return "sparse"
    warn_once(
        weakref.ref(outermost_layer(layer)),
        "sparse",
        f"layer '{layer.name}': each step moves the rows of its batch alone, "
        "where the optimizer moves all rows of a keras.layers.Embedding, "
        f"because {reason}. Rare ids may learn less. If this is meant, pass "
        'update="sparse" to the layer.',
        stacklevel=2,
    )
    return "sparse"


def _has_schedule(rule: Any) -> bool:
    source = getattr(rule.learning_rate, "_optimizer", None)
    return callable(getattr(source, "_learning_rate", None))


# Rules whose step with a gradient of zero changes nothing.
_LEAVE_OTHER_ROWS = ("SGD", "Momentum", "Adagrad", "Ftrl")
_HAVE_DENSE_UPDATES = (
    "SGD",
    "Momentum",
    "Adagrad",
    "Adam",
    "AdamW",
    "AMSGrad",
    "RMSprop",
    "Adadelta",
)


def _converted(layer: Any, optimizer: Any) -> optimizers_lib.Optimizer:
    # Whether the optimizer's weight decay also applies to the layer's weight.
    decays = getattr(optimizer, "_use_weight_decay", None)
    if decays is None or decays(layer._rows_weight):
        return optimizers_lib.from_keras(optimizer, ignore=_OF_THE_GRADIENT)
    rule: Any = optimizers_lib.from_keras(
        optimizer, ignore=(*_OF_THE_GRADIENT, "weight_decay")
    )
    return dataclasses.replace(rule, weight_decay=0.0)
