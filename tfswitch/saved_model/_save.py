"""Writes a SavedModel whose lookups need no trainer."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfswitch import export
from tfswitch._which_keras import keras
from tfswitch.ops import serving_ops
from tfswitch.ops.resources import HOST

# What of ours the graph of an exported model may have.
_SERVING_OPS = frozenset(
    f"Tfswitch>{name}"
    for name in (
        "HashStrings",
        "OpenServedModel",
        "PinServedRows",
        "ServedLookup",
        "ServedModel",
    )
)


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    mode: str = "embedded",
    inputs: Mapping[str, tf.TensorSpec] | None = None,
    row_format: str = "float32",
) -> None:
    """Saves a trained model as a SavedModel for serving.

    Lookups of its tables read row files below the model's folder, which are
    mapped read-only: they are shared by all processes that serve the model, and
    opened in milliseconds whatever their size. An id without a row reads as it
    does in training; nothing is ever created. The rows begin a folder of
    exports: `tfswitch.export.delta(path)` brings what changes later to servers
    that run.

    Python loads it with `tf.saved_model.load` after `import tfswitch`. C++
    loads the op library with `TF_LoadLibrary`, then the model with
    `LoadSavedModel`. The signature "serving_default" takes and gives tensors by
    name; in Python, `serve` takes what the model takes.

    Args:
        model: A built Keras model, or a callable that looks up in tables with
            `EmbeddingTable.lookup`, such as a `tf.Module` with `__call__`.
        path: A folder that is not there yet, for TensorFlow Serving a number
            such as "models/ctr/1". It appears when it is complete.
        mode: "embedded", the only one so far.
        inputs: What the model takes, by name. None means the inputs of a
            functional or sequential model. A model with one input gets the
            tensor, others a dict.
        row_format: "float32", "float16", or "int8" with a scale per row.

    Raises:
        ValueError: If an argument is out of range, the model is not built, or
            it has operations that cannot be served.
        FileExistsError: If there is something at `path`.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.saved_model.save(model, "models/ctr/1")
    >>> served = tf.saved_model.load("models/ctr/1")
    >>> served.serve({"user": users, "item": items})
    """
    if mode != "embedded":
        raise ValueError(f'`mode` must be "embedded". Received: mode={mode!r}')
    if row_format not in export.ROW_FORMATS:
        raise ValueError(
            f"`row_format` must be one of {', '.join(export.ROW_FORMATS)}. "
            f"Received: row_format={row_format!r}"
        )
    target = os.path.abspath(os.fspath(path))
    if os.path.exists(target):
        raise FileExistsError(
            f"there is something at {target!r} already. Save each version of a "
            "model to a folder of its own."
        )
    call, structure = _call_of(model, inputs)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    # In the same folder, for the rename; servers of versions skip the name.
    unfinished = tempfile.mkdtemp(
        prefix=f".{os.path.basename(target)}.", dir=os.path.dirname(target)
    )
    try:
        _write(model, call, structure, unfinished, row_format)
        # mkdtemp makes it for its owner alone.
        os.chmod(unfinished, 0o755)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _ServedModel(tf.saved_model.experimental.TrackableResource):
    """The rows in a SavedModel: made and opened when it is loaded."""

    def __init__(self, file: tf.saved_model.Asset) -> None:
        super().__init__(device=HOST)
        self._file = file

    def _create_resource(self) -> tf.Tensor:
        return serving_ops.served_model()

    def _initialize(self) -> None:
        serving_ops.open_served_model(
            self.resource_handle, self._file.asset_path
        )


def _write(
    model: Any,
    call: Callable[[Any], Any],
    structure: Any,
    folder: str,
    row_format: str,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # Its name is that of the asset.
        file = os.path.join(scratch, os.path.basename(export.MODEL_FILE))
        module = tf.Module()
        module.model_file = tf.saved_model.Asset(file)
        module.served_model = _ServedModel(module.model_file)
        # Made now, and not in the first graph that asks for it.
        handle = module.served_model.resource_handle
        module.parts = list(_parts_of(model))
        tables: dict[str, Any] = {}

        def run(given: Any) -> Any:
            with serving_ops.serving(handle) as rows:
                outputs = call(given)
            tables.update(rows.tables)
            return outputs

        specs = tf.nest.flatten(structure)
        # As the model takes it, for Python; by name, for all else.
        module.serve = tf.function(
            run, input_signature=[structure], autograph=False
        )

        def serve_by_name(**given: tf.Tensor) -> dict[str, tf.Tensor]:
            return _named_outputs(
                model,
                run(
                    tf.nest.pack_sequence_as(
                        structure, [given[spec.name] for spec in specs]
                    )
                ),
            )

        signature = tf.function(
            serve_by_name, autograph=False
        ).get_concrete_function(**{spec.name: spec for spec in specs})
        _check_graph(signature)
        with open(file, "w", encoding="utf-8") as model_file:
            json.dump(
                {
                    "format": "tfswitch-model",
                    "version": 1,
                    "mode": "embedded",
                    "rows": os.path.relpath(
                        export.MODEL_ROWS, os.path.dirname(export.MODEL_FILE)
                    ),
                    "tables": {n: t.dim for n, t in sorted(tables.items())},
                },
                model_file,
            )
        clusters = {t.cluster.address: t.cluster for t in tables.values()}
        if len(clusters) != 1:
            raise ValueError(
                "the model must look up in tables of one cluster. Received: "
                f"{sorted(clusters) or 'no lookup at all'}"
            )
        tf.saved_model.save(
            module, folder, signatures={"serving_default": signature}
        )
    export.base(
        folder,
        tables=tables,
        row_format=row_format,
        cluster=next(iter(clusters.values())),
    )


def _call_of(
    model: Any, inputs: Mapping[str, tf.TensorSpec] | None
) -> tuple[Callable[[Any], Any], Any]:
    """What to trace, and the structure of specs that it takes."""
    if not callable(model):
        raise ValueError(
            "`model` must be a Keras model or another callable. "
            f"Received: model={model!r}"
        )
    is_keras = isinstance(model, keras.Model)

    def call(given: Any) -> Any:
        return model(given, training=False) if is_keras else model(given)

    if inputs is None:
        symbolic = getattr(model, "inputs", None) if is_keras else None
        if not symbolic:
            raise ValueError(
                f"what {getattr(model, 'name', model)!r} takes is not known. "
                "Pass `inputs`, such as "
                '{"ids": tf.TensorSpec([None, 26], tf.int64)}.'
            )
        return call, tf.nest.map_structure(_spec_of, model.input)
    if not inputs or not all(
        isinstance(spec, tf.TensorSpec) for spec in inputs.values()
    ):
        raise ValueError(
            "`inputs` must be a dict of tf.TensorSpec by name. "
            f"Received: inputs={inputs!r}"
        )
    named = {
        name: tf.TensorSpec(spec.shape, spec.dtype, name)
        for name, spec in inputs.items()
    }
    if is_keras and not model.built:
        raise ValueError(
            f"model '{model.name}' is not built; call it on data first"
        )
    return call, next(iter(named.values())) if len(named) == 1 else named


def _spec_of(symbolic: Any) -> tf.TensorSpec:
    if getattr(symbolic, "sparse", False) or getattr(symbolic, "ragged", False):
        raise ValueError(
            f"input '{symbolic.name}' is sparse or ragged, and signatures have "
            "dense inputs. Wrap the model in one that takes its parts, such as "
            "values and row lengths."
        )
    name = symbolic.name.split(":")[0]
    return tf.TensorSpec(symbolic.shape, symbolic.dtype, name)


def _named_outputs(model: Any, outputs: Any) -> dict[str, tf.Tensor]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    flat = tf.nest.flatten(outputs)
    names = getattr(model, "output_names", None)
    if not names or len(names) != len(flat) or len(set(names)) != len(flat):
        names = [f"output_{i}" for i in range(len(flat))]
    return dict(zip(names, flat, strict=True))


def _parts_of(model: Any) -> Iterator[Any]:
    """Variables and lookup tables that the graph may capture."""
    if not isinstance(model, keras.Model):
        yield model
        return
    for variable in model.variables:
        is_tensorflows = isinstance(variable, tf.Variable)
        yield variable if is_tensorflows else variable.value
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            if isinstance(value, tf.saved_model.experimental.TrackableResource):
                yield value


def _check_graph(function: Any) -> None:
    graph = function.graph.as_graph_def()
    nodes = [*graph.node]
    for each in graph.library.function:
        nodes += each.node_def
    for node in nodes:
        if node.op.startswith("Tfswitch>") and node.op not in _SERVING_OPS:
            raise ValueError(
                f"the model has the operation {node.op} ('{node.name}'), which "
                "cannot be served. Look up with the layers or with "
                "EmbeddingTable.lookup, and not in a tf.function of the "
                "model's that was traced before."
            )
