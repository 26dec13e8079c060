"""State on the host that TensorFlow sees as resources, and Keras does not see.

A `tf.Variable` made under a distribution strategy is mirrored, and one that is
an attribute of a layer becomes a weight. Neither is wanted for the state of a
table, which exists once per process.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# The name that asks TensorFlow for a resource of its own.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"

HOST = "CPU:0"

# The workers of a ParameterServerStrategy find their common resources here.
_FIRST_PS = "/job:ps/replica:0/task:0/device:CPU:0"


def has_remote_workers() -> bool:
    """Whether steps run in other processes than this one.

    `tf.distribute.ParameterServerStrategy` traces them here, in the
    coordinator, and runs them on its workers.
    """
    return isinstance(
        tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy
    )


def in_plain_graph() -> bool:
    """Whether operations go to a graph of TensorFlow 1, for sessions to run.

    Nothing of such a graph can refer to a tensor outside of it.
    """
    return not tf.executing_eagerly() and not tf.inside_function()


def destroy_with(owner: Any, handle: tf.Tensor) -> weakref.finalize | None:
    """Frees a resource when `owner` is collected.

    That may be the eager tensor `handle` itself: functions that captured it
    hold it, so they never see it freed. The resource of a plain graph goes with
    the graph's sessions.
    """
    if in_plain_graph():
        return None
    with tf.init_scope():
        same_resource = tf.identity(handle)
    finalizer = weakref.finalize(owner, _destroy, same_resource)
    # At exit the process frees everything, and TensorFlow may be gone already.
    finalizer.atexit = False
    return finalizer


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if not is_eager:
        # Collected while somebody makes a graph, which is of their thread.
        threading.Thread(target=_destroy, args=(handle,), daemon=True).start()
        return
    with tf.init_scope(), tf.device(None):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class HostVariable:
    """An array on the host, or a scalar, that graphs and Python read and write.

    Thread-safe, and usable in eager mode, in graphs and in every replica. Made
    in the scope of a ParameterServerStrategy, it is on the first of the
    strategy's servers, as variables are. Unlike a `tf.Variable` it may be made
    while a function is traced again.
    """

    def __init__(
        self, value: Any, dtype: tf.DType, shape: Sequence[int] = ()
    ) -> None:
        self._dtype = dtype
        device = _FIRST_PS if has_remote_workers() else HOST
        with tf.init_scope(), tf.device(device):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=shape, shared_name=_ANONYMOUS
            )
        destroy_with(self._handle, self._handle)
        self.assign(value)

    def read(self) -> tf.Tensor:
        """Returns the value as a tensor."""
        with tf.device(None):
            return tf.raw_ops.ReadVariableOp(
                resource=self._handle, dtype=self._dtype
            )

    def assign(self, value: Any) -> None:
        """Sets the value, now: also while a graph is being traced."""
        with tf.init_scope(), tf.device(None):
            self.set(tf.constant(value, self._dtype))

    def set(self, value: tf.Tensor) -> None:
        """Sets the value; in a graph, when the graph runs."""
        with tf.device(None):
            tf.raw_ops.AssignVariableOp(
                resource=self._handle, value=tf.cast(value, self._dtype)
            )

    def add(self, value: tf.Tensor) -> None:
        """Adds a value; in a graph, when the graph runs."""
        with tf.device(None):
            tf.raw_ops.AssignAddVariableOp(
                resource=self._handle, value=tf.cast(value, self._dtype)
            )
