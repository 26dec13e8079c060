"""Writes a SavedModel whose lookups need no trainer."""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfswitch import _loader, export
from tfswitch._connection import _addresses
from tfswitch._settings._ranges import bad_argument, check_seconds, is_number
from tfswitch._which_keras import keras
from tfswitch.cluster import Cluster, cluster_of
from tfswitch.ops import serving_ops
from tfswitch.ops.resources import HOST

_ops = _loader.load_ops()

# The tfswitch ops that the graph of an exported model may contain.
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
    addresses: str | None = None,
    deadline_secs: float = 5.0,
    cache_rows: int = 0,
    cache_secs: float = 10.0,
) -> None:
    """Saves a trained model as a SavedModel for serving.

    With `mode="embedded"` lookups read row files below the model's folder. The
    files are mapped read-only: all processes that serve the model share their
    memory, and open them in milliseconds at any size. These files are the first
    of the model's exports: `tfswitch.export.delta(path)` brings later changes
    to running processes.

    With `mode="remote"` lookups ask the parameter servers, and read their
    present rows. A lookup repeats failed requests until its deadline. Then it
    fails with an error that names the server, and the next lookup tries again.
    When the model is loaded, the servers must answer and have the tables.

    An id without a row reads as in training; lookups never create rows.

    Python loads the model with `tf.saved_model.load` after `import tfswitch`.
    C++ loads the op library with `TF_LoadLibrary`, then the model with
    `LoadSavedModel`. The signature "serving_default" takes and returns tensors
    by name; in Python, `serve` takes the model's inputs.

    Args:
        model: A built Keras model, or a callable that looks up in tables with
            `EmbeddingTable.lookup`, such as a `tf.Module` with `__call__`.
        path: A folder that does not exist yet; for TensorFlow Serving its name
            is a number, such as "models/ctr/1". The folder appears when it is
            complete.
        mode: "embedded" or "remote".
        inputs: The model's inputs, by name. None means the inputs of a
            functional or sequential model. A model with one input gets the
            tensor, others a dict.
        row_format: The format of row files: "float32", "float16", or "int8"
            with a scale per row.
        addresses: The addresses of the servers of a remote model, as for
            `tfswitch.connect`. None means the servers of the training. In a
            process that serves the model, the environment variable
            TFSWITCH_SERVING_ADDRESSES can name other servers.
        deadline_secs: Longest time that a lookup of a remote model may take,
            retries included.
        cache_rows: How many rows a remote model may cache in each process that
            serves it; 0 means none. Rows that are read often stay in the cache.
        cache_secs: How old a cached row may be.

    Raises:
        ValueError: If an argument is out of range or is of the other mode, the
            model is not built, or it has operations or resources that cannot
            be served.
        FileExistsError: If there is something at `path`.
        ConnectionError, TimeoutError: If a server does not answer.

    Example:

    >>> tsw.saved_model.save(model, "models/ctr/1")
    >>> served = tf.saved_model.load("models/ctr/1")
    >>> served.serve({"user": users, "item": items})

    A model that looks up on servers, and caches 100,000 rows for 10 seconds:

    >>> tsw.saved_model.save(
    ...     model, "models/ctr/2", mode="remote", cache_rows=100_000
    ... )
    """
    if mode not in ("embedded", "remote"):
        raise bad_argument("mode", mode, '"embedded" or "remote"')
    if row_format not in export._ROW_FORMATS:
        raise bad_argument(
            "row_format", row_format, f"one of {', '.join(export._ROW_FORMATS)}"
        )
    remote = _Remote(addresses, deadline_secs, cache_rows, cache_secs)
    _check_is_of_mode(mode, row_format, remote)
    target = os.path.abspath(os.fspath(path))
    # A broken link counts as well, because the rename would replace the link.
    if os.path.lexists(target):
        raise FileExistsError(
            f"there is something at {target!r} already. Save each version of a "
            "model to a folder of its own."
        )
    call, structure = _call_of(model, inputs)
    with _published(target) as unfinished:
        _write(
            model,
            call,
            structure,
            unfinished,
            row_format,
            remote if mode == "remote" else None,
        )


@contextlib.contextmanager
def _published(target: str) -> Iterator[str]:
    """Yields a new folder, which becomes `target` unless an error occurs."""
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    # The new folder is beside `target`, so that it can be renamed. Servers that
    # look for version numbers skip the name of the new folder.
    unfinished = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        yield unfinished
        # mkdtemp gives access to its owner only.
        os.chmod(unfinished, 0o755)
        # Flushes before the rename, so that a folder with the final name is
        # complete even after a power failure.
        _flush(unfinished)
        os.rename(unfinished, target)
        _flush_one(parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@dataclasses.dataclass(frozen=True)
class _Remote:
    """The servers, the deadline and the cache of a remote model's lookups."""

    addresses: str | None = None
    deadline_secs: float = 5.0
    cache_rows: int = 0
    cache_secs: float = 10.0

    def __post_init__(self) -> None:
        if self.addresses is not None:
            _addresses.check_has_no_token("addresses", self.addresses)
            why = _addresses.why_no_servers(self.addresses)
            if why is not None:
                raise bad_argument(
                    "addresses", self.addresses, f"{_addresses.SERVERS}: {why}"
                )
        for name in ("deadline_secs", "cache_secs"):
            check_seconds(name, getattr(self, name), least=1e-6, most=1e9)
        rows = self.cache_rows
        if not (is_number(rows, int) and 0 <= rows <= 2**32):
            raise bad_argument(
                "cache_rows", rows, "a number of rows, or 0 for no cache"
            )

    def on(self, cluster: Cluster) -> "_Remote":
        """Returns the settings, with addresses of `cluster` by default."""
        if self.addresses is not None:
            return self
        if not cluster.is_remote:
            raise ValueError(
                f"the tables of the model are in {cluster.address!r}, in "
                "this process, where no other can look them up. Train on "
                'servers, as with tfswitch.connect("grpc://host:port"), '
                "say in `addresses` which servers the tables will be on, "
                'or save with `mode="embedded"`.'
            )
        if cluster.address.startswith("ray://"):
            raise ValueError(
                f"the tables of the model are in {cluster.address!r}, "
                "which only processes of that Ray cluster find. Say in "
                "`addresses` which servers they will be on, or save with "
                '`mode="embedded"`.'
            )
        return dataclasses.replace(self, addresses=cluster.address)


def _check_is_of_mode(mode: str, row_format: str, remote: _Remote) -> None:
    if mode == "embedded" and remote != _Remote():
        raise ValueError(
            "`addresses`, `deadline_secs`, `cache_rows` and `cache_secs` "
            'are of models with `mode="remote"`. '
            f"Received: mode={mode!r}, {remote}"
        )
    if mode == "remote" and row_format != "float32":
        raise ValueError(
            "`row_format` is of row files, which a model with "
            f'`mode="remote"` has none of. Received: row_format={row_format!r}'
        )


def _flush(folder: str) -> None:
    """Flushes a folder, and all that is below it, to the disk."""
    for parent, _, files in os.walk(folder):
        for file in files:
            _flush_one(os.path.join(parent, file))
        _flush_one(parent)


def _flush_one(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot flush folders, and return this error.
        if not (os.path.isdir(path) and error.errno == errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


class _ServedModel(tf.saved_model.experimental.TrackableResource):
    """The resource of a SavedModel's rows, opened when the model is loaded."""

    def __init__(self, file: tf.saved_model.Asset) -> None:
        super().__init__(device=HOST)
        self._file = file

    def _create_resource(self) -> tf.Tensor:
        return _ops.tfswitch_served_model()

    def _initialize(self) -> None:
        _ops.tfswitch_open_served_model(
            model=self.resource_handle, file=self._file.asset_path
        )


def _write(
    model: Any,
    call: Callable[[Any], Any],
    structure: Any,
    folder: str,
    row_format: str,
    remote: _Remote | None,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # Its name is that of the asset.
        file = os.path.join(scratch, os.path.basename(export._MODEL_FILE))
        traced = _Traced(model, call, structure, file)
        cluster = cluster_of(traced.tables.values())
        if remote is not None:
            remote = remote.on(cluster)
        with open(file, "w", encoding="utf-8") as model_file:
            json.dump(_model_file(traced.tables, remote), model_file)
        traced.save(folder)
    if remote is None:
        export.base(
            folder, tables=traced.tables, row_format=row_format, cluster=cluster
        )


def _model_file(
    tables: Mapping[str, Any], remote: _Remote | None
) -> dict[str, Any]:
    """Returns `ModelFile` of protos/tfswitch/v1/export.proto."""
    if remote is None:
        rows = os.path.relpath(
            export._MODEL_ROWS, os.path.dirname(export._MODEL_FILE)
        )
        place: dict[str, Any] = {"embedded": {"rows": rows}}
    else:
        place = {"remote": dataclasses.asdict(remote)}
    return {
        "format": "tfswitch-model",
        "version": 2,
        # Distinguishes this model from a later one at the same path.
        "id": secrets.token_hex(8),
        "tables": {n: t.dim for n, t in sorted(tables.items())},
        **place,
    }


class _Traced:
    """The graph of a model that looks up in a `_ServedModel`.

    Args:
        model: The model.
        call: Calls it.
        structure: The structure of the specs of its inputs.
        file: The model file, which need not be there yet.

    Attributes:
        tables: The tables in which the model looks up, by name.

    Raises:
        ValueError: If the graph cannot be served.
    """

    def __init__(
        self, model: Any, call: Callable[[Any], Any], structure: Any, file: str
    ) -> None:
        self.tables: dict[str, Any] = {}
        self._module = module = tf.Module()
        module.model_file = tf.saved_model.Asset(file)
        module.served_model = _ServedModel(module.model_file)
        # Makes the handle before any graph: it must not belong to one graph.
        handle = module.served_model.resource_handle
        module.parts = list(_parts_of(model))

        def run(given: Any) -> Any:
            with serving_ops.serving(handle) as rows:
                outputs = call(given)
            self.tables.update(rows.tables)
            return outputs

        specs = tf.nest.flatten(structure)
        # `serve` takes the inputs as the model does; the signature takes them
        # by name.
        module.serve = tf.function(
            run, input_signature=[structure], autograph=False
        )

        def serve_by_name(**given: tf.Tensor) -> dict[str, tf.Tensor]:
            inputs = [given[spec.name] for spec in specs]
            outputs = run(tf.nest.pack_sequence_as(structure, inputs))
            return _named_outputs(model, outputs)

        self._signature = tf.function(
            serve_by_name, autograph=False
        ).get_concrete_function(**{spec.name: spec for spec in specs})
        _check_graph(self._signature)
        module.parts.extend(_captured_besides(self._signature, module))
        if not self.tables:
            raise ValueError("the model has no lookup at all in a table")

    def save(self, folder: str) -> None:
        signatures = {"serving_default": self._signature}
        try:
            tf.saved_model.save(self._module, folder, signatures=signatures)
        except AssertionError as error:
            # The graph may read objects that are not in the module.
            lost = _captured(self._signature, _handles_in(self._module))
            if not lost:
                raise
            raise ValueError(
                "the model reads what cannot be saved with it, for no "
                "tf.Variable or lookup table has it: "
                f"{', '.join(map(str, lost))}. "
                "Keep it in a tf.Module or a Keras model."
            ) from error


def _call_of(
    model: Any, inputs: Mapping[str, tf.TensorSpec] | None
) -> tuple[Callable[[Any], Any], Any]:
    """Returns the function to trace, and the structure of its specs."""
    if not callable(model):
        raise bad_argument("model", model, "a Keras model or another callable")
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
        # A Sequential has no `input` before its first call.
        is_sequential = isinstance(model, keras.Sequential)
        taken = model.inputs[0] if is_sequential else model.input
        return call, tf.nest.map_structure(_spec_of, taken)
    if not inputs or not all(
        isinstance(spec, tf.TensorSpec) for spec in inputs.values()
    ):
        raise bad_argument("inputs", inputs, "a dict of tf.TensorSpec by name")
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


# Objects that the graph may capture, besides those Keras keeps as weights.
_RESOURCES = (
    tf.saved_model.Asset,
    tf.saved_model.experimental.TrackableResource,
)
_PARTS = (tf.Variable, *_RESOURCES)


def _parts_of(model: Any) -> Iterator[Any]:
    """Yields variables and lookup tables that the graph may capture.

    The functions of a `tf.Module` are left out. They would be saved as well,
    and may have been traced with the tables of the training.
    """
    seen = set()
    stack = [model]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _PARTS):
            yield value
        elif isinstance(value, keras.layers.Layer):
            for variable in value.variables:
                is_tensorflows = isinstance(variable, tf.Variable)
                yield variable if is_tensorflows else variable.value
            for layer in value._flatten_layers():
                stack += [
                    v for v in vars(layer).values() if isinstance(v, _RESOURCES)
                ]
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, (list, tuple, set)):
            stack += value
        elif isinstance(value, tf.Module):
            stack += vars(value).values()


def _captured_besides(function: Any, module: tf.Module) -> Iterator[Any]:
    """Yields objects that a graph has captured and a module does not have yet.

    Examples are the variables of a model that a lambda calls, or of an object
    that is no `tf.Module`. The graph reads these objects, so they must be
    saved.
    """
    known = _handles_in(module)
    for variable in function.variables:
        if id(variable.handle) not in known:
            known.add(id(variable.handle))
            yield variable
    for handle in _captured(function, known):
        # TensorFlow stores the owner of a handle in this attribute, for its
        # errors.
        owner = getattr(handle, "_parent_trackable", lambda: None)()
        if owner is not None:
            yield owner


def _captured(function: Any, known: set[int]) -> list[tf.Tensor]:
    return [
        tensor
        for tensor, _ in function.graph.captures
        if tensor.dtype in (tf.resource, tf.variant) and id(tensor) not in known
    ]


def _handles_in(module: tf.Module) -> set[int]:
    """Returns the identities of all resources below a module."""
    handles = set()
    for each in tf.train.TrackableView(module).descendants():
        if isinstance(each, tf.Variable):
            handles.add(id(each.handle))
        elif isinstance(each, tf.saved_model.experimental.TrackableResource):
            handles.add(id(each.resource_handle))
    return handles


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
                "EmbeddingTable.lookup, and not in a concrete function of "
                "the model's that was traced before."
            )
