"""The types of parameters that several modules take.

The types name classes of TensorFlow and Keras without an import, because these
modules are also used by programs that need neither library.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:
    import numpy.typing as npt
    import tensorflow as tf

    from tfswitch.dense import DenseTable
    from tfswitch.table import EmbeddingTable

# Numbers or strings: a tensor, variable, array, list or scalar.
TensorLike = Union["tf.Tensor", "tf.Variable", "npt.ArrayLike"]
# The same, and ragged and sparse tensors.
IdsLike = Union["tf.RaggedTensor", "tf.SparseTensor", TensorLike]
Gradient = Union["tf.Tensor", "tf.IndexedSlices", None]
# A variable of TensorFlow or of Keras 3, which have no common class.
Variable = Union["tf.Variable", "KerasVariable"]
# A number, a variable, a schedule of steps, or a function without arguments.
RateLike = Variable | Callable[..., Any] | float
Shape = Union["tf.TensorShape", Sequence[int | None]]
# The logs that Keras gives to callbacks, which may change them.
Logs = dict[str, Any]
# A config that `get_config` or `to_config` returned.
Config = Mapping[str, Any]
TableOrName = Union["EmbeddingTable", "DenseTable", str]


class KerasVariable(Protocol):
    """A variable of Keras 3."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def assign(self, value: Any, /) -> Any: ...

    def numpy(self) -> Any: ...


class KerasFunction(Protocol):
    """An initializer, regularizer or constraint of Keras 3 or tf_keras."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...


class KerasModel(Protocol):
    """A model of Keras 3 or tf_keras."""

    def save_weights(self, filepath: str) -> Any: ...

    def load_weights(self, filepath: str) -> Any: ...


class KerasOptimizer(Protocol):
    """An optimizer of Keras 3 or tf_keras."""

    def apply_gradients(self, grads_and_vars: Any, /) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...


class Placeholder(Protocol):
    """A tensor of a Keras model that has no values: a `keras.KerasTensor`."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


class Named(Protocol):
    """A dtype of TensorFlow or NumPy, which has a name such as "float16"."""

    @property
    def name(self) -> str: ...
