"""State on the host that TensorFlow sees as resources, and Keras does not see.

The state of a table exists once per process and is no weight of a model. The
state is not in a `tf.Variable`, because a distribution strategy would mirror
the variable, and Keras would count the variable as a weight of its layer.
"""

import threading
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfswitch._types import TensorLike

# With this name TensorFlow makes a new resource that nobody else can look up.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"

HOST = "CPU:0"

# All workers of a ParameterServerStrategy can reach resources on this device.
_FIRST_PS = "/job:ps/replica:0/task:0/device:CPU:0"


def has_remote_workers() -> bool:
    """Whether steps run in other processes than this process.

    `tf.distribute.ParameterServerStrategy` traces steps in this process, the
    coordinator, and runs them on its workers.
    """
    return isinstance(
        tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy
    )


def in_plain_graph() -> bool:
    """Whether operations are added to a graph that TensorFlow 1 sessions run.

    Operations of that graph cannot use tensors of other graphs.
    """
    return not tf.executing_eagerly() and not tf.inside_function()


def destroy_with(owner: object, handle: tf.Tensor) -> weakref.finalize | None:
    """Frees a resource when `owner` is collected.

    `owner` may be the eager tensor `handle` itself. A function that captured
    the tensor keeps it alive, and with it the resource. In a plain graph
    nothing is done, because the sessions of the graph free its resources.
    """
    if in_plain_graph():
        return None
    with tf.init_scope():
        same_resource = tf.identity(handle)
    finalizer = weakref.finalize(owner, _destroy, same_resource)
    # The finalizer is not called at exit: TensorFlow may be unloaded then, and
    # the end of the process frees everything.
    finalizer.atexit = False
    return finalizer


def _destroy(handle: tf.Tensor) -> None:
    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if not is_eager:
        # This thread is making a graph while the owner is collected. A new
        # thread executes eagerly.
        threading.Thread(target=_destroy, args=(handle,), daemon=True).start()
        return
    with tf.init_scope(), tf.device(None):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class HostVariable:
    """A scalar or array on the host that graphs and Python read and write.

    Thread-safe, and usable in eager mode, in graphs and in every replica. In
    the scope of a ParameterServerStrategy the value is on the strategy's first
    server. Unlike a `tf.Variable` this object may be made while a function is
    traced again.
    """

    def __init__(
        self, value: TensorLike, dtype: tf.DType, shape: Sequence[int] = ()
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

    def assign(self, value: TensorLike) -> None:
        """Sets the value at once, even while a graph is being traced."""
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
