"""Reads the rows of a dataset's next batches while a step computes."""

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfswitch._settings._ranges import PUSH_DEPTH, bad_argument
from tfswitch.keras import _backend, _row_weights
from tfswitch.keras.layers import (
    NCE,
    DynamicEmbedding,
    DynamicEmbeddings,
    SampledSoftmax,
    id_inputs,
)
from tfswitch.ops.resources import has_remote_workers
from tfswitch.table import EmbeddingTable, drop_prefetches, prefetch_many

_LAYERS = (DynamicEmbedding, DynamicEmbeddings)
_sources = itertools.count(1)

# Returns what a layer is called with, for what its model is called with.
_InputsOf = Callable[[Any], Any]


class _Call(NamedTuple):
    """A call of a layer in a model."""

    layer: Any
    inputs_of: _InputsOf


def prefetch_embeddings(
    dataset: tf.data.Dataset,
    model_or_layers: Any,
    depth: int = 1,
    *,
    exact: bool = True,
    features: Mapping[str, DynamicEmbedding] | None = None,
) -> tf.data.Dataset:
    """Reads the rows of the next batches while a step computes.

    The result is a dataset of the same batches, for `fit`, `evaluate`,
    `predict` and loops. Make it the last stage of the input pipeline. The model
    does not change: a lookup takes the rows that were read for its ids, and if
    there are none, it reads them, as always.

    Rows of sampled ids are not read ahead. Dense updates change all rows with
    each push, and `bsp` with each round, so such rows are read when the push or
    the round has ended. `EmbeddingTable.stats` counts the lookups that found
    their rows.

    Args:
        dataset: Batches as for `fit`: inputs, or a tuple that begins with them.
        model_or_layers: A functional or Sequential model: its layers between
            inputs and ids, such as `StringLookup`, then run in the input
            pipeline, too. Or a `DynamicEmbedding` or `DynamicEmbeddings` whose
            ids are the inputs of the dataset. With `features`, any model.
        depth: How many batches are read ahead, 0 to 64. 0 returns `dataset`.
        exact: Whether the model computes and learns the same, to the bit, as
            without prefetch. Rows that a step changes are then read again after
            its push. With False, rows may lack the pushes of the last `depth`
            steps of this process. In both cases a lookup may not see what other
            workers have pushed since the rows were read.
        features: For models that are not functional: the columns of a dict of
            inputs that are ids, and the layer of each.

    Returns:
        The dataset.

    Raises:
        ValueError: If an argument is out of range, the model has no embedding
            layers or a layer whose ids cannot be followed to the inputs, the
            dataset has no batches, or a strategy has several replicas.

    Example:

    >>> dataset = dataset.shuffle(10_000).batch(2048)
    >>> model.fit(tsw.data.prefetch_embeddings(dataset, model))
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise bad_argument("dataset", dataset, "a tf.data.Dataset")
    depth = PUSH_DEPTH.check("depth", depth)
    strategies = (
        tf.distribute.get_strategy(),
        getattr(model_or_layers, "distribute_strategy", None),
    )
    if has_remote_workers() or any(
        each is not None and each.num_replicas_in_sync > 1
        for each in strategies
    ):
        raise ValueError(
            "prefetch_embeddings: a tf.distribute strategy has several "
            "replicas, which split the batches that would be read ahead. Use "
            "`dataset` itself with this strategy."
        )
    spec = dataset.element_spec
    inputs_spec = spec[0] if isinstance(spec, tuple) else spec
    _check_batches(inputs_spec)
    calls = _calls_of(model_or_layers, features, inputs_spec)
    if depth == 0:
        return dataset
    sources: dict[tuple[int, int], int] = {}

    def read_ahead(*components: Any) -> Any:
        # A dataset passes the components of a tuple one by one.
        batch = components if type(spec) is tuple else components[0]
        inputs = batch[0] if isinstance(spec, tuple) else batch
        lookups: list[tuple[int, EmbeddingTable, tf.Tensor]] = []
        for number, each in enumerate(calls):
            given = each.inputs_of(inputs)
            for part, (table, ids) in enumerate(_lookups(each.layer, given)):
                source = sources.setdefault((number, part), next(_sources))
                lookups.append((source, table, ids))
        for begin in range(0, len(lookups), _row_weights.MAX_TABLES):
            some = lookups[begin : begin + _row_weights.MAX_TABLES]
            prefetch_many(
                [table for _, table, _ in some],
                [ids for _, _, ids in some],
                sources=[source for source, _, _ in some],
                exact=exact,
                # One batch is in use, and one waits for its place.
                limit=depth + 2,
            )
        return batch

    result = dataset.map(read_ahead).prefetch(depth)
    weakref.finalize(result, drop_prefetches, sources.values()).atexit = False
    return result


def _lookups(layer: Any, given: Any) -> list[tuple[EmbeddingTable, tf.Tensor]]:
    """Returns the lookups that a training call of a layer makes."""
    if isinstance(layer, DynamicEmbedding):
        batch = id_inputs.to_batch(layer, given, None, None, None)
        groups = [[(layer, batch)]]
    else:
        groups = layer._lookups(given)
    return [
        (table, ids)
        for group in groups
        for table, ids in _row_weights.join(group).items()
    ]


def _check_batches(spec: Any) -> None:
    for component in tf.nest.flatten(spec):
        shape = getattr(component, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0:
            raise ValueError(
                "prefetch_embeddings: `dataset` has no batches: an input is a "
                "scalar. Call `dataset.batch(...)` before."
            )


def _calls_of(
    given: Any, features: Mapping[str, Any] | None, spec: Any
) -> list[_Call]:
    """Returns the calls of embedding layers, and how to find their inputs."""
    if features is not None:
        return _calls_of_columns(features, spec)
    if isinstance(given, _LAYERS):
        return [_Call(given, lambda inputs: inputs)]
    if isinstance(given, Sequence) and all(
        isinstance(g, _LAYERS) for g in given
    ):
        return [_Call(layer, lambda inputs: inputs) for layer in given]
    if not isinstance(given, _backend.keras.Model):
        raise bad_argument(
            "model_or_layers",
            given,
            "a Keras model, or a DynamicEmbedding or DynamicEmbeddings",
        )
    calls = []
    if _has_lookups(given):
        calls = list(_calls_in_model(given, lambda inputs: inputs))
    if not calls:
        raise ValueError(
            f"prefetch_embeddings: model '{given.name}' has no "
            "DynamicEmbedding and no DynamicEmbeddings whose ids are in the "
            "dataset, so there are no rows to read."
        )
    return calls


def _calls_of_columns(features: Mapping[str, Any], spec: Any) -> list[_Call]:
    columns = sorted(spec) if isinstance(spec, Mapping) else []
    for column, layer in features.items():
        if column not in columns:
            raise ValueError(
                f"prefetch_embeddings: `features` names the column {column!r}, "
                f"and the inputs of the dataset have the columns {columns}."
            )
        if not isinstance(layer, DynamicEmbedding):
            raise bad_argument(
                f"features[{column!r}]", layer, "a DynamicEmbedding"
            )
    return [
        _Call(layer, operator.itemgetter(column))
        for column, layer in features.items()
    ]


def _all_layers(layer: Any) -> Iterable[Any]:
    flatten = getattr(layer, "_flatten_layers", None)  # Not of Keras's ops.
    return flatten(include_self=False, recursive=True) if flatten else ()


def _calls_in_model(model: Any, inputs_of: _InputsOf) -> Iterable[_Call]:
    if isinstance(model, _backend.keras.Sequential):
        yield from _calls_in_sequence(model, inputs_of)
        return
    nodes = getattr(model, "_nodes_by_depth", None)
    if nodes is None:
        raise _cannot_follow(
            f"model '{model.name}' is not functional, so the way of its inputs "
            "to its layers is not known"
        )
    for node in itertools.chain.from_iterable(nodes.values()):
        layer = _backend.layer_of(node)
        if not _has_lookups(layer):
            continue
        tensors = _backend.first_argument(node)
        for earlier in _backend.layers_before(node):
            _check_is_pure(earlier, layer)
        part = _backend.part_of(model, tensors)
        yield from _calls_of_layer(
            layer, _then(inputs_of, functools.partial(part, training=False))
        )


def _then(first: _InputsOf, then: _InputsOf) -> _InputsOf:
    return lambda inputs: then(first(inputs))


def _calls_in_sequence(model: Any, inputs_of: _InputsOf) -> Iterable[_Call]:
    for place, layer in enumerate(model.layers):
        if _has_lookups(layer):
            for earlier in model.layers[:place]:
                _check_is_pure(earlier, layer)
            yield from _calls_of_layer(layer, inputs_of)
        inputs_of = _then(inputs_of, layer)


def _calls_of_layer(layer: Any, inputs_of: _InputsOf) -> Iterable[_Call]:
    if isinstance(layer, _LAYERS):
        yield _Call(layer, inputs_of)
    elif isinstance(layer, _backend.keras.Model):
        yield from _calls_in_model(layer, inputs_of)
    else:
        raise _cannot_follow(
            f"layer '{layer.name}' has embedding layers inside, and is no model"
        )


def _has_lookups(layer: Any) -> bool:
    if isinstance(layer, (SampledSoftmax, NCE)):
        return False  # Their ids are drawn in the step.
    return isinstance(layer, _LAYERS) or any(
        isinstance(each, _LAYERS) for each in _all_layers(layer)
    )


def _check_is_pure(layer: Any, user: Any) -> None:
    """Refuses a layer that must not run once more in the input pipeline."""
    parts = [layer, *_all_layers(layer)]
    for part in parts:
        draws = getattr(part, "seed_generator", None) or getattr(
            part, "_random_generator", None
        )
        if getattr(part, "variables", None) or draws or _has_lookups(part):
            kind = "draws random numbers" if draws else "has variables"
            raise _cannot_follow(
                f"layer '{layer.name}', which makes the ids of layer "
                f"'{user.name}', {kind}, and must not run twice"
            )


def _cannot_follow(why: str) -> ValueError:
    return ValueError(
        f"prefetch_embeddings: {why}. Make the ids in the dataset, and name "
        "their columns: features={'user': layer}."
    )


__all__ = ["prefetch_embeddings"]
