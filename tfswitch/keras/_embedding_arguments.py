"""Arguments of `keras.layers.Embedding`, as what they mean for a table."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import numpy as np

from tfswitch import initializers as initializers_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch.keras._backend import keras


class Translated(NamedTuple):
    """What a layer makes of the arguments.

    Attributes:
        initializer: The first value of a row.
        rows: float32 of rank 2: row i is that of id i from the beginning. None
            if there are none.
        options: Options of `tfswitch.optimizers`.
    """

    initializer: initializers_lib.Initializer
    rows: np.ndarray | None
    options: dict[str, float]


def dims(
    positional: tuple[Any, ...], output_dim: Any, input_dim: Any
) -> tuple[Any, Any]:
    """Returns `output_dim` and `input_dim` of a call that may have both.

    `Embedding(10_000, 16)` has `input_dim` before `output_dim`, and a
    `DynamicEmbedding(16)` has only the other.
    """
    names = (
        ("output_dim",) if len(positional) == 1 else ("input_dim", "output_dim")
    )
    given = {"output_dim": output_dim, "input_dim": input_dim}
    if len(positional) > len(names):
        raise TypeError(
            "DynamicEmbedding takes `output_dim`, or `input_dim` and "
            f"`output_dim`, without names. Received: {positional!r}"
        )
    for name, value in zip(names, positional, strict=False):
        if given[name] is not None:
            raise TypeError(
                f"`{name}` is given twice: {given[name]!r}, {value!r}"
            )
        given[name] = value
    if given["output_dim"] is None:
        raise TypeError("DynamicEmbedding needs `output_dim`")
    input_dim = given["input_dim"]
    if input_dim is not None and (
        isinstance(input_dim, bool)
        or not isinstance(input_dim, (int, np.integer))
        or input_dim < 1
    ):
        raise ValueError(
            "`input_dim` must be None or a positive integer, of any size. "
            f"Received: input_dim={input_dim!r}"
        )
    return given["output_dim"], input_dim


def translate(
    initializer: Any,
    regularizer: Any,
    constraint: Any,
    weights: Any,
    output_dim: int,
) -> Translated:
    """Returns what arguments of an `Embedding` mean here.

    Raises:
        ValueError: If one has no meaning for a table.
    """
    rows = None
    if weights is not None:
        (rows,) = weights if isinstance(weights, (list, tuple)) else (weights,)
    elif type(initializer).__name__ == "Constant":
        value = np.asarray(getattr(initializer, "value", 0.0))
        if value.ndim == 2:  # Vectors that somebody else has trained.
            rows, initializer = value, "uniform"
    if rows is not None:
        rows = np.asarray(rows, np.float32)
        if rows.ndim != 2 or rows.shape[1] != output_dim:
            raise ValueError(
                "`weights` must be one matrix with a row of length "
                f"{output_dim} for each id from 0. Received: shape {rows.shape}"
            )
    return Translated(
        initializers_lib.get(initializer),
        rows,
        _options_of(keras.regularizers.get(regularizer))
        | _bounds_of(keras.constraints.get(constraint)),
    )


def with_options(
    optimizer: optimizers_lib.Optimizer, options: dict[str, float]
) -> optimizers_lib.Optimizer:
    """Returns the optimizer with options that the layer adds.

    Raises:
        ValueError: If it has others of its own, or none.
    """
    for name in options:
        if not hasattr(optimizer, name):
            raise ValueError(
                f"{type(optimizer).__name__} has no option `{name}`, which "
                "`embeddings_regularizer` or `embeddings_constraint` needs. "
                "Set it in the parts."
            )
        if getattr(optimizer, name):
            raise ValueError(
                f"`{name}` is an option of the optimizer already. Leave out "
                "`embeddings_regularizer` or `embeddings_constraint`. "
                f"Received: optimizer={optimizer!r}"
            )
    return dataclasses.replace(optimizer, **options) if options else optimizer


def drop_unused(arguments: dict[str, Any]) -> None:
    """Takes arguments away that say nothing here.

    Raises:
        ValueError: If one asks for what a table does not do.
    """
    if arguments.pop("input_length", None) is not None:
        warnings.warn(
            "`input_length` says nothing, as for keras.layers.Embedding. Leave "
            "it out.",
            stacklevel=3,
        )
    for name, remedy in {
        "sparse": "Gradients of a table are always those of the batch's rows.",
        "lora_rank": "A table has no full matrix to add a product to.",
        "quantization_config": "Export int8 rows with tfswitch.export.",
    }.items():
        if arguments.pop(name, None):
            raise ValueError(
                f"`{name}` is not for DynamicEmbedding. {remedy} Leave it out."
            )


def _options_of(regularizer: Any) -> dict[str, float]:
    if regularizer is None:
        return {}
    l1 = float(getattr(regularizer, "l1", 0.0) or 0.0)
    l2 = float(getattr(regularizer, "l2", 0.0) or 0.0)
    if type(regularizer).__name__ not in ("L2", "L1L2") or l1:
        raise ValueError(
            "`embeddings_regularizer` must be None or keras.regularizers.L2: a "
            f"table knows no other. Received: {regularizer!r}. For L1, see "
            "tfswitch.optimizers.Ftrl."
        )
    # Keras has the gradient of l2 |w|^2, and the option is the factor of w.
    return {"l2": 2.0 * l2} if l2 else {}


def _bounds_of(constraint: Any) -> dict[str, float]:
    if constraint is None:
        return {}
    if type(constraint).__name__ == "NonNeg":
        return {"min_weight": 0.0}
    raise ValueError(
        "`embeddings_constraint` must be None or keras.constraints.NonNeg: a "
        f"table keeps no other. Received: {constraint!r}. For rows of length "
        "1, put a keras.layers.UnitNormalization behind the layer."
    )
