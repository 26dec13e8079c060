"""Makes Keras's optimizers handle the weight of a layer's rows.

An optimizer scales, checks, clips and accumulates the gradient of rows as a
tensor with one row for each id; this module keeps the ids. Where the optimizer
would step the variable, the gradients of all tables are pushed instead.
An optimizer without a weight of rows works as before.

The wrapped methods are those of Keras 3.5 to 3.15, and of tf_keras 2.18 to
2.21. `install` fails if one is missing.
"""

import contextvars
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfswitch.keras import _backend, _row_weights
from tfswitch.keras._row_weights import RowGradient, is_rows
from tfswitch.ops import is_of_rows
from tfswitch.optimizers._conversion import KerasRate
from tfswitch.table import finish_pushes

# The ids of the gradients that an optimizer is applying, by variable.
_ids: contextvars.ContextVar[dict[int, tf.Tensor]] = contextvars.ContextVar(
    "tfswitch_row_gradients"
)

# The gradients of the steps since the last update, for optimizers that
# accumulate gradients.
_accumulated: weakref.WeakKeyDictionary[
    Any, dict[int, tuple[tf.Variable, tf.Variable]]
] = weakref.WeakKeyDictionary()


def install() -> None:
    """Wraps the methods of the optimizers. Call this once.

    Raises:
        ImportError: If Keras has no such method.
    """
    _wrap(_backend.trainer(), "compile", _compile)
    for end in ("on_epoch_end", "on_train_end"):
        _wrap(_backend.keras.callbacks.CallbackList, end, _finish_pushes)
    if _backend.IS_LEGACY:
        from tf_keras.src.optimizers import optimizer
        from tf_keras.src.optimizers.legacy import optimizer_v2

        new, old = optimizer.Optimizer, optimizer_v2.OptimizerV2
        _wrap(new, "_deduplicate_sparse_grad", _deduplicate)
        _wrap(new, "_distributed_apply_gradients_fn", _distributed_apply)
        _wrap(new, "aggregate_gradients", _aggregate)
        _wrap(old, "_distributed_apply", _distributed_apply)
        _wrap(old, "_aggregate_gradients", _aggregate)
        return
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

    _wrap(BaseOptimizer, "apply", _apply)
    _wrap(TFOptimizer, "_backend_update_step", _update_step)
    _wrap(TFOptimizer, "_backend_increment_gradient_accumulators", _increment)
    _wrap(LossScaleOptimizer, "check_finite", _check_finite)


def _wrap(cls: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a method by `wrapper(original, self, ...)`."""
    original = getattr(cls, name, None)
    if original is None:
        raise ImportError(
            f"{_backend.keras.__name__} {_backend.keras.__version__} has no "
            f"{cls.__name__}.{name}, which tfswitch.keras needs so that rows "
            "learn. Install a version that docs/wheels.md names."
        )

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(cls, name, method)


def _compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tells a ParameterServerOptimizer the model that is compiled with it."""
    result = original(self, *args, **kwargs)
    optimizer = self.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    note = getattr(optimizer, "_is_compiled_with", None)
    if note is not None:
        note(self)
    return result


def _finish_pushes(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Ends the pushes in flight before callbacks see the end of an epoch."""
    finish_pushes()
    return original(self, *args, **kwargs)


# --- Keras 3 ---------------------------------------------------------------


def _apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Gives Keras the values of the gradients of rows, and keeps the ids."""
    grads = list(grads)
    variables = (
        getattr(self, "_trainable_variables", [])
        if trainable_variables is None
        else list(trainable_variables)
    )
    if not any(map(is_rows, variables)):
        return original(self, grads, trainable_variables)
    _check_settings(self)
    if self.gradient_accumulation_steps and not self.built:
        with _backend.keras.name_scope(self.name):
            self.build(variables)
        self.built = True
    known: dict[int, tf.Tensor] = {}
    for i, (gradient, variable) in enumerate(
        zip(grads, variables, strict=False)
    ):
        if gradient is None or not is_rows(variable):
            continue
        found = _row_weights.row_gradient(variable, gradient)
        if self.gradient_accumulation_steps:
            found = _accumulate(self, found)
        known[id(variable)] = found.ids
        grads[i] = found.values
    token = _ids.set(known)
    try:
        return original(
            self,
            grads,
            trainable_variables if trainable_variables is None else variables,
        )
    finally:
        _ids.reset(token)


def _check_settings(optimizer: Any) -> None:
    if getattr(optimizer, "use_ema", False):
        raise ValueError(
            f"optimizer '{optimizer.name}' has use_ema=True, and tables keep "
            "no moving averages of rows. Leave it out, or apply the gradients "
            "of the layers' weights with an optimizer of their own."
        )


class _Nothing:
    """An empty accumulator for rows, which Keras adds to a gradient."""

    __array_priority__ = 1000  # TensorFlow then asks `__radd__`.
    shape = ()
    dtype = "float32"

    def __radd__(self, gradient: Any) -> Any:
        return gradient

    def assign(self, value: Any) -> None:
        pass


def _accumulate(optimizer: Any, gradient: RowGradient) -> RowGradient:
    """Returns the sum of the gradients since the last update."""
    variable = gradient.variable
    kept = _accumulated.setdefault(optimizer, {})
    if id(variable) not in kept:
        with tf.init_scope():
            kept[id(variable)] = (
                tf.Variable(
                    tf.zeros([0], tf.int64), trainable=False, shape=[None]
                ),
                tf.Variable(
                    tf.zeros(variable.shape),
                    trainable=False,
                    shape=[None, variable.shape[1]],
                ),
            )
    before_ids, before = kept[id(variable)]
    ids = tf.concat([before_ids, gradient.ids], axis=0)
    values = tf.concat([before, gradient.values], axis=0)
    # `_iterations` counts all steps, and `iterations` only the updates.
    count = tf.convert_to_tensor(optimizer._iterations) + 1
    is_update = tf.equal(count % optimizer.gradient_accumulation_steps, 0)
    left = tf.where(is_update, 0, tf.size(ids))
    before_ids.assign(ids[:left])
    before.assign(values[:left])
    place = optimizer._get_variable_index(variable)
    optimizer._accumulated_gradients[place] = _Nothing()
    # Keras clips by the norm of sums, with one row for each id. So the sum of
    # an id is put where the id first occurs, and zeros at its other
    # occurrences. All ids keep their positions, because shows and clicks are
    # found by the order of the ids.
    distinct = tf.unique(ids)
    first = tf.math.unsorted_segment_min(
        tf.range(tf.size(ids)), distinct.idx, tf.size(distinct.y)
    )
    sums = tf.math.unsorted_segment_sum(
        values, distinct.idx, tf.size(distinct.y)
    )
    values = tf.scatter_nd(first[:, tf.newaxis], sums, tf.shape(values))
    return RowGradient(variable, ids, values)


def _increment(
    original: Any, self: Any, grads: Sequence[Any], acc_grads: Sequence[Any]
) -> Any:
    """Leaves rows out, because `_accumulate` keeps them."""
    pairs = [
        (gradient, kept)
        for gradient, kept in zip(grads, acc_grads, strict=True)
        if not isinstance(kept, _Nothing)
    ]
    if pairs:
        original(self, [g for g, _ in pairs], [kept for _, kept in pairs])


def _update_step(
    original: Any,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any],
    learning_rate: Any,
) -> Any:
    pairs = list(zip(grads, trainable_variables, strict=True))
    rows = [(g, v) for g, v in pairs if is_rows(v)]
    if not rows:
        return original(self, grads, trainable_variables, learning_rate)
    known = _ids.get()
    _row_weights.push(
        [RowGradient(v, known[id(v)], gradient) for gradient, v in rows],
        self,
        tf.convert_to_tensor(learning_rate),
    )
    rest = [(g, v) for g, v in pairs if not is_rows(v)]
    if rest:
        original(
            self, [g for g, _ in rest], [v for _, v in rest], learning_rate
        )
    return None


def _check_finite(original: Any, self: Any, grads: Sequence[Any]) -> Any:
    return original(self, [g.values if is_of_rows(g) else g for g in grads])


# --- tf_keras --------------------------------------------------------------


def _deduplicate(original: Any, self: Any, grads: Sequence[Any]) -> Any:
    """Does not sum gradients of rows by id, because tables do this."""
    result = original(self, [None if is_of_rows(g) else g for g in grads])
    return [
        g if is_of_rows(g) else r for g, r in zip(grads, result, strict=True)
    ]


def _aggregate(original: Any, self: Any, grads_and_vars: Any) -> Any:
    """Sums over replicas, except gradients of rows.

    Each process pushes the gradients of its own rows.
    """
    pairs = list(grads_and_vars)
    strategy = tf.distribute.get_strategy()
    if not strategy.extended._in_multi_worker_mode():
        return original(self, pairs)
    summed = iter(original(self, [p for p in pairs if not is_rows(p[1])]))
    is_v2 = not hasattr(self, "aggregate_gradients")
    return [
        (p[0] if is_v2 else p) if is_rows(p[1]) else next(summed) for p in pairs
    ]


def _distributed_apply(
    original: Any,
    self: Any,
    distribution: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    pairs = list(grads_and_vars)
    rows = [(g, v) for g, v in pairs if is_rows(v) and g is not None]
    rest = [(g, v) for g, v in pairs if not is_rows(v)]
    if rows:
        _check_settings(self)
        _row_weights.push(
            [
                _row_weights.row_gradient(
                    v, distribution.experimental_local_results(g)[0]
                )
                for g, v in rows
            ],
            self,
            KerasRate(self)(),
        )
    return original(self, distribution, rest, *args, **kwargs)
