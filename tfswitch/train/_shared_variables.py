"""Shares variables that steps change without a gradient.

Moving averages of batch normalization are such variables, for example. The
servers keep the variables in a dense table whose optimizer adds changes. A
worker pushes the changes that its step has made. Under `bsp` the servers
average these changes by samples, as they average gradients, and in the same
round. So if a step is dropped, repeated or withdrawn, the same happens to its
changes.

Many variables without a gradient never change: those of a frozen part of a
model. The servers have these variables too, so that all workers begin with the
same values, but a step sends and fetches only the variables that it writes. The
graph shows which these are; in eager mode the values are compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

# TensorFlow uses this module to order the operations of a function.
from tensorflow.python.framework import auto_control_deps_utils

from tfswitch.consistency import Consistency
from tfswitch.dense import DensePush, DenseTable, pull_many
from tfswitch.ops.resources import HostVariable
from tfswitch.optimizers import SGD
from tfswitch.train.worker import Worker


class SharedVariables:
    """Keeps variables equal on all workers.

    Not thread-safe.

    Args:
        table: Name of the dense table.
        variables: `tf.Variable` or Keras variables of floats, by name. All
            workers begin with the values of the first worker.
        worker: This process's worker. Under `bsp` changes are averaged by
            samples; else each change is multiplied by 1 / `num_workers` when it
            arrives.
        finds_writes: Whether to send only the variables that the step writes.
            The graph of the step shows these variables; in eager mode values
            are compared. If false, all variables are sent.

    Raises:
        ValueError: If the servers hold other variables under this name.
        ConnectionError, TimeoutError: If a server does not answer.
    """

    def __init__(
        self,
        table: str,
        variables: Mapping[str, Any],
        worker: Worker,
        *,
        finds_writes: bool,
    ) -> None:
        is_bsp = worker.consistency.kind == "bsp"
        self._variables = list(variables.values())
        self.table = DenseTable(
            table,
            {name: tuple(v.shape) for name, v in variables.items()},
            optimizer=SGD(1.0),
            consistency=Consistency.bsp() if is_bsp else worker.consistency,
            cluster=worker.cluster,
        )
        self._share = 1.0 if is_bsp else 1.0 / worker.num_workers
        self._finds_writes = finds_writes
        # The variables that steps may write, if that is known for all steps.
        self._known: set[int] | None = None
        # The variables that eager steps have written so far.
        self._changed: set[int] = set()
        # The last values that this worker got from the servers, by the indices
        # of the variables.
        self._taken: dict[int, HostVariable] = {}
        self.table.initialize([v.numpy() for v in self._variables])
        self.pull()

    def pull(self, *, after_step: bool = False) -> None:
        """Sets the variables to their present values on the servers.

        Args:
            after_step: Whether the servers have all changes of this worker. If
                not, changes since the last step are kept, and are sent with the
                next step.
        """
        arrays = self._all() if self._known is None else sorted(self._known)
        if not arrays:
            return
        kept = () if after_step else [i for i in arrays if i in self._taken]
        changes = {i: self._change(i) for i in kept}
        self.take(arrays, pull_many([(self.table, arrays)])[0])
        for i, change in changes.items():
            variable = self._variables[i]
            variable.assign_add(tf.cast(change, variable.dtype))

    def assign(self) -> None:
        """Sets the values on the servers to those of the variables."""
        self.table.assign([v.numpy() for v in self._variables])
        for i, taken in self._taken.items():
            taken.set(tf.convert_to_tensor(self._variables[i]))

    def written(self) -> list[int]:
        """Returns the indices of the variables that the step has written."""
        if not self._finds_writes:
            return self._all()
        if tf.executing_eagerly():
            self._known = None
            self._changed |= {
                i
                for i in self._all()
                if bool(tf.reduce_any(self._change(i) != 0.0))
            }
            return sorted(self._changed)
        found = _written_by_graph(self._variables)
        self._known = (self._known or set()) | set(found)
        for i in set(self._taken) - self._known:
            del self._taken[i]
        return found

    def changes(self, arrays: Sequence[int]) -> DensePush:
        """Returns the push that sends the changes of the step.

        Args:
            arrays: The result of `written`.
        """
        gradients: list[Any] = [None] * len(self._variables)
        for i in arrays:
            gradients[i] = -self._share * self._change(i)
        return DensePush(self.table, gradients, 1.0, arrays=arrays)

    def take(self, arrays: Sequence[int], values: Sequence[Any]) -> None:
        """Sets variables to values of the servers.

        Args:
            arrays: The indices of the variables.
            values: float32, one for each.
        """
        for i, value in zip(arrays, values, strict=True):
            variable = self._variables[i]
            value = tf.cast(value, variable.dtype)
            variable.assign(value)
            # The rounded value is kept, so that the rounding does not count as
            # a change by the next step.
            if i in self._taken:
                self._taken[i].set(value)
            else:
                self._keep(i, value)

    def _all(self) -> list[int]:
        return list(range(len(self._variables)))

    def _change(self, place: int) -> tf.Tensor:
        if place not in self._taken:
            with tf.init_scope():
                self._keep(place, pull_many([(self.table, [place])])[0][0])
        value = tf.cast(self._variables[place], tf.float32)
        return value - self._taken[place].read()

    def _keep(self, place: int, value: tf.Tensor) -> None:
        value = tf.cast(value, tf.float32)
        self._taken[place] = HostVariable(value, tf.float32, value.shape)


def _written_by_graph(variables: Sequence[Any]) -> list[int]:
    """Returns the indices of the variables that the traced functions write."""
    if tf.distribute.has_strategy():  # A variable may have several handles.
        return list(range(len(variables)))
    graphs = []
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graphs.append(graph)
        graph = graph.outer_graph
    outside = {
        id(inside): tensor
        for each in graphs
        for tensor, inside in each.captures
    }
    handles = set()
    for each in graphs:
        for op in each.get_operations():
            if all(t.dtype != tf.resource for t in op.inputs):
                continue
            _, writes = auto_control_deps_utils.get_read_write_resource_inputs(
                op
            )
            for handle in writes:
                while id(handle) in outside:
                    handle = outside[id(handle)]
                handles.add(id(handle))
    return [i for i, v in enumerate(variables) if id(v.handle) in handles]
