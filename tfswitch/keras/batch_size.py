"""Tells optimizers how many samples the present step has.

An optimizer sees gradients but no batch. The layers see the batch and record
its size in a variable on the host, where the optimizer finds it in eager mode
and in any graph.
"""

import tensorflow as tf

from tfswitch._types import IdsLike
from tfswitch.ops.resources import HostVariable

_size: HostVariable | None = None


def start_recording() -> None:
    """Makes layers that are called from now on record their batch size."""
    global _size
    if _size is None:
        _size = HostVariable(0.0, tf.float64)


def record(inputs: IdsLike, training: bool | tf.Tensor | None) -> None:
    """Records the first dimension of a layer's `inputs`, if it is training."""
    if _size is None:
        return
    if tf.is_tensor(training):
        # If `training` is not known while the graph is made, it counts as true.
        known = tf.get_static_value(training)
        training = known is None or bool(known)
    if not training:
        return
    if isinstance(inputs, tf.RaggedTensor):
        size = inputs.nrows()
    elif isinstance(inputs, tf.SparseTensor):
        size = inputs.dense_shape[0]
    else:
        inputs = tf.convert_to_tensor(inputs)
        if inputs.shape.rank == 0:
            return
        size = tf.shape(inputs)[0]
    _size.set(size)


def read() -> tf.Tensor:
    """Returns the last recorded size, a float64 scalar; at first 0."""
    if _size is None:
        return tf.zeros([], tf.float64)
    return _size.read()
