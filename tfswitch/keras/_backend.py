"""Hides the differences between Keras 3, tf_keras and their versions."""

import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfswitch._which_keras import IS_LEGACY, VERSION, keras

Layer: Any = keras.layers.Layer
Model: Any = keras.Model
Optimizer: Any = keras.optimizers.Optimizer
Callback: Any = keras.callbacks.Callback
register_keras_serializable = keras.saving.register_keras_serializable
serialize = keras.saving.serialize_keras_object
deserialize = keras.saving.deserialize_keras_object


def optimizer_config(
    optimizer: Any, present_rate: Callable[[], float]
) -> dict[str, Any]:
    """Returns the config of a `tfswitch.optimizers` object, for Keras."""
    config = optimizer.to_config()
    rate = config["config"]["learning_rate"]
    if not isinstance(rate, float):
        # A file can describe a schedule. If any other rate is not a number, the
        # file contains the present value of the rate.
        config["config"]["learning_rate"] = (
            serialize(rate) if hasattr(rate, "get_config") else present_rate()
        )
    return config


def load_rate(config: Mapping[str, Any]) -> dict[str, Any]:
    """Restores the schedule in a config that `optimizer_config` returned."""
    arguments = dict(config["config"])
    rate = arguments.get("learning_rate")
    if isinstance(rate, Mapping):
        arguments["learning_rate"] = deserialize(rate)
    return {**config, "config": arguments}


def check_backend() -> None:
    """Raises RuntimeError if Keras does not run on TensorFlow."""
    if not IS_LEGACY and keras.config.backend() != "tensorflow":
        raise RuntimeError(
            "tfswitch.keras needs Keras on TensorFlow, and it runs on "
            f"{keras.config.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )


def is_building() -> bool:
    """Whether Keras calls a layer only to learn the shape of its output."""
    if tf.executing_eagerly():
        return False
    return "scratch_graph" in getattr(
        tf.compat.v1.get_default_graph(), "name", ""
    )


def is_called_by(*modules: str) -> bool:
    """Whether a caller is code of these modules. Names end with a dot."""
    return any(
        f"{frame.f_globals.get('__name__')}.".startswith(modules)
        for frame, _ in traceback.walk_stack(None)
    )


def spec(shape: Any, dtype: str, ragged: bool) -> Any:
    """Returns the symbolic tensor of an output in a Keras 3 model."""
    # Keras 3.9 added this argument; earlier models have no ragged tensors.
    options = {"ragged": True} if ragged else {}
    return keras.KerasTensor(shape, dtype=dtype, **options)


# Arguments of `add_weight` for a variable that keeps its type.
NO_AUTOCAST: dict[str, Any] = (
    {"experimental_autocast": False} if IS_LEGACY else {"autocast": False}
)


def variable_path(variable: Any) -> str:
    """The variable's name, after the names of the layers that contain it."""
    path = getattr(variable, "path", None)
    return path if path is not None else variable.name.split(":")[0]


def has_value(variable: Any) -> bool:
    """Whether a variable has its first value.

    A variable that is made while `tf.function` traces gets its value after the
    trace. The function is then traced again.
    """
    inner = tf_variable(variable)
    with tf.init_scope():
        return not tf.executing_eagerly() or bool(inner.is_initialized())


def tf_variable(variable: Any) -> tf.Variable:
    """The TensorFlow variable of a Keras variable."""
    return variable if IS_LEGACY else variable.value


def trainer() -> Any:
    """The class that defines `compile` for all models."""
    if IS_LEGACY:
        return Model
    from keras.src.trainers.trainer import Trainer

    return Trainer


def layer_of(node: Any) -> Any:
    """The layer, or the operation, of a node of a functional model."""
    return node.layer if IS_LEGACY else node.operation


def first_argument(node: Any) -> Any:
    """The placeholders of `inputs` in the call of a node."""
    if IS_LEGACY:
        args, kwargs = node.call_args, node.call_kwargs
    else:
        args, kwargs = node.arguments.args, node.arguments.kwargs
    return args[0] if args else kwargs["inputs"]


def layers_before(node: Any) -> list[Any]:
    """The layers whose outputs a node depends on, without inputs."""
    found: dict[int, Any] = {}
    nodes = list(node.parent_nodes)
    while nodes:
        each = nodes.pop()
        if not each.is_input and id(each) not in found:
            found[id(each)] = layer_of(each)
            nodes += each.parent_nodes
    return list(found.values())


def part_of(model: Any, outputs: Any) -> Any:
    """The functional model from the inputs of `model` to some placeholders."""
    inputs = model._nested_inputs if IS_LEGACY else model._inputs_struct
    return keras.Model(inputs, outputs)


def init_optimizer(
    optimizer: Any, init: Any, *, learning_rate: Any, name: str, **clips: Any
) -> None:
    """Calls `init`, the constructor of Keras's base class of `optimizer`."""
    if not IS_LEGACY:
        init(learning_rate=learning_rate, name=name, **clips)
        return
    init(name=name, **clips)
    optimizer._learning_rate = optimizer._build_learning_rate(learning_rate)


def not_equal(x: Any, y: Any) -> Any:
    """Returns `x != y` for tensors and placeholders of Keras 3 and tf_keras."""
    if IS_LEGACY:
        return tf.not_equal(x, y)
    return keras.ops.not_equal(x, y)


class _FirstEpoch:
    """Tells tf_keras the first epoch, as a BackupAndRestore's state does."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def maybe_load_initial_counters_from_ckpt(
        self, *unused: Any, **unused_too: Any
    ) -> tuple[int, int]:
        return self._epoch, 0


def begin_fit_at(model: Any, epoch: int | None) -> None:
    """Sets the first epoch of the `fit` that begins; None removes the setting.

    Keras's `BackupAndRestore` sets the same attributes. Call this function in
    `on_train_begin`.
    """
    if IS_LEGACY:
        model._training_state = None if epoch is None else _FirstEpoch(epoch)
    else:
        model._initial_epoch = epoch


def file_of(store: Any) -> Any:
    """Returns a value that identifies the file of a layer's store, or None.

    Args:
        store: The argument of `save_own_variables`.
    """
    if IS_LEGACY:
        return getattr(store, "file", None)  # An open HDF5 file.
    if VERSION < (3, 10):  # Each layer has a store of its own.
        store = getattr(store, "h5_file", store)
    try:
        return weakref.ref(store)
    except TypeError:  # A dict, for example, names no file.
        return None


def metric_variables(model: Any, batch: Any = None) -> list[Any]:
    """The variables of the model's metrics.

    The first batch makes these variables. Before the first batch, and for
    tf_keras, the list is empty.

    Args:
        model: The model.
        batch: A batch to make the variables with, if there are none yet.
    """
    if IS_LEGACY:
        return []
    if batch is not None:
        model._symbolic_build(data_batch=batch)
    return list(model.metrics_variables)


def steps_per_execution(model: Any) -> int:
    """How many batches a call of the model's `train_function` takes."""
    if IS_LEGACY:
        return int(model._steps_per_execution.numpy())
    return int(model.steps_per_execution)


def last_batch(model: Any, batch: int) -> int:
    """Returns the last batch of the execution that has just ended."""
    if not IS_LEGACY and VERSION < (3, 11):  # These pass the first batch.
        return batch + steps_per_execution(model) - 1
    return batch
