"""The learning rate of a table, as the ops read it at each push."""

import inspect
from typing import Any, NamedTuple

import tensorflow as tf

from tfswitch.ops.resources import HostVariable, in_plain_graph
from tfswitch.optimizers._base import check_learning_rate


class _Source(NamedTuple):
    value: Any
    # A constant rate is in a variable, so that graphs need no new trace when it
    # changes.
    constant: HostVariable | None
    is_schedule: bool


class LearningRate:
    """A number, a schedule, a variable or a function, read as a tensor.

    Thread-safe. In a `tf.compat.v1.Graph` a constant rate keeps the value that
    it has when the graph is made, and steps are not counted.

    Args:
        source: The value that `tfswitch.optimizers` takes as `learning_rate`.
    """

    def __init__(self, source: Any) -> None:
        self.follow(source)
        self._steps = HostVariable(0, tf.int64)

    def follow(self, source: Any) -> None:
        """Uses another source, in functions that are traced from now on."""
        self._source = _Source(
            source,
            HostVariable(source, tf.float32)
            if isinstance(source, float)
            else None,
            callable(source) and _takes_a_step(source),
        )

    def read(self) -> tf.Tensor:
        """Returns the rate at the present step, a float32 scalar."""
        value, constant, is_schedule = self._source
        if constant is not None:
            if in_plain_graph():
                return tf.constant(value, tf.float32)
            return constant.read()
        if is_schedule and in_plain_graph():
            raise ValueError(
                "the learning rate is a schedule of steps that are counted "
                "outside this tf.compat.v1.Graph. Pass `learning_rate=` of the "
                f"graph's own step. Received: {value!r}"
            )
        if is_schedule:
            rate = value(self._steps.read())
        elif callable(value):
            rate = value()
        else:
            rate = value
        return tf.cast(tf.convert_to_tensor(rate), tf.float32)

    def advance(self) -> None:
        """Counts one step, once for all replicas of a strategy."""
        if in_plain_graph():
            return
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            self._steps.add(tf.constant(1, tf.int64))
            return
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        self._steps.add(tf.cast(is_first, tf.int64))

    def number(self) -> tf.Tensor:
        """Returns the number of the present step, from 1, an int64 scalar.

        The number is 0 in a `tf.compat.v1.Graph`, where steps are not counted.
        """
        if in_plain_graph():
            return tf.constant(0, tf.int64)
        return self._steps.read() + 1

    def set_steps(self, steps: int) -> None:
        """Sets how many steps have been counted."""
        self._steps.assign(steps)

    def skip(self, steps: int) -> None:
        """Adds steps that other workers have made to the count."""
        self._steps.assign(self.steps + steps)

    @property
    def steps(self) -> int:
        """How many steps have been counted."""
        return int(self._steps.read())

    def assign(self, value: Any) -> None:
        """Replaces a constant rate.

        Raises:
            ValueError: If `value` is not a finite number of at least 0.
            TypeError: If the rate is not a constant.
        """
        value = check_learning_rate(value)
        source, constant, _ = self._source
        if constant is None:
            raise TypeError(
                f"the learning rate comes from {source!r} and cannot be set; "
                "change it there, or make the table with a number as "
                "`learning_rate`"
            )
        self._source = _Source(value, constant, is_schedule=False)
        constant.assign(value)


def _takes_a_step(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A builtin without a signature.
        return True
    return any(
        parameter.default is inspect.Parameter.empty
        and parameter.kind
        in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        for parameter in parameters
    )
