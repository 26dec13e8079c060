"""Converts optimizers of TensorFlow 1 to those of the servers."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfswitch import optimizers

_v1 = tf.compat.v1.train


def _sgd(opt: Any) -> tuple[Any, Any]:
    return optimizers.SGD(0.0), opt._learning_rate


def _momentum(opt: Any) -> tuple[Any, Any]:
    momentum = _number(opt, "momentum")
    server = optimizers.SGD(
        0.0, momentum=momentum, nesterov=bool(opt._use_nesterov)
    )
    if not isinstance(_called(opt._learning_rate), (int, float)):
        raise ValueError(
            "MomentumOptimizer must have a constant learning rate: on the "
            "servers a velocity holds steps, as Keras's does, and not "
            "gradients, so a rate that changes would not give the same. "
            f"Received: learning_rate={opt._learning_rate!r}"
        )
    return server, opt._learning_rate


def _adagrad(opt: Any) -> tuple[Any, Any]:
    # TensorFlow's Adagrad has no epsilon. An epsilon of 1e-20 has no effect:
    # the rounding of any accumulator of at least 1e-12 removes it.
    server = optimizers.Adagrad(
        0.0,
        initial_accumulator_value=_number(opt, "initial_accumulator_value"),
        epsilon=1e-20,
    )
    return server, opt._learning_rate


def _adam(opt: Any) -> tuple[Any, Any]:
    server = optimizers.Adam(
        0.0,
        beta_1=_number(opt, "beta1"),
        beta_2=_number(opt, "beta2"),
        epsilon=_number(opt, "epsilon"),
    )
    return server, opt._lr


_KINDS: dict[type, Callable[[Any], tuple[Any, Any]]] = {
    _v1.GradientDescentOptimizer: _sgd,
    _v1.MomentumOptimizer: _momentum,
    _v1.AdagradOptimizer: _adagrad,
    _v1.AdamOptimizer: _adam,
}


def to_server_optimizer(opt: Any) -> tuple[optimizers.Optimizer, Any]:
    """Returns the servers' optimizer for `opt`, and the learning rate.

    Args:
        opt: A `tf.compat.v1.train` GradientDescent-, Momentum-, Adagrad- or
            AdamOptimizer.

    Returns:
        The optimizer, whose own learning rate is not used, and the rate: a
        number or a tensor, or a function that returns a number or tensor.

    Raises:
        ValueError: If `opt` is of another kind, or has a setting without
            counterpart.
    """
    convert = _KINDS.get(type(opt))
    if convert is None:
        names = ", ".join(kind.__name__ for kind in _KINDS)
        raise ValueError(
            "the servers take the steps, and know these optimizers of "
            f"tf.compat.v1.train: {names}. Received: {opt!r}"
        )
    return convert(opt)


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _number(opt: Any, name: str) -> float:
    value = _called(getattr(opt, f"_{name}"))
    if isinstance(value, (int, float)):
        return float(value)
    raise ValueError(
        f"`{name}` of {type(opt).__name__} must be a number, as the servers "
        f"have it from the start. Received: {name}={value!r}"
    )
