"""Translates arguments of `keras.layers.Embedding` to settings of a table."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfswitch import initializers as initializers_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch._settings._ranges import POSITIVE_INT
from tfswitch.keras._backend import keras
from tfswitch.table import check_dim

_INPUT_DIM = POSITIVE_INT._replace(
    text="None or a positive integer, of any size"
)

# The standard deviation of a standard normal variable truncated to [-2, 2].
_TRUNCATED_STDDEV = 0.87962566103423978


class Translated(NamedTuple):
    """The table settings that follow from a layer's arguments.

    Attributes:
        initializer: The first value of a row.
        rows: float32, `[n, output_dim]`: row i is the first value of id i.
        options: Options of `tfswitch.optimizers`.
    """

    initializer: initializers_lib.Initializer
    rows: np.ndarray
    options: dict[str, float]


class Matrix(NamedTuple):
    """The arguments of a `keras.layers.Embedding` about its matrix."""

    embeddings_initializer: Any = None
    embeddings_regularizer: Any = None
    embeddings_constraint: Any = None
    weights: Any = None

    def translate(self, input_dim: int | None, output_dim: int) -> Translated:
        """Returns the table settings that follow.

        Raises:
            ValueError: If an argument has no meaning for a table.
        """
        initializer, regularizer, constraint, weights = self
        initializer = "uniform" if initializer is None else initializer
        rows = np.zeros((0, output_dim), np.float32)
        if isinstance(initializer, Mapping) and "module" in initializer:
            # A Constant that Keras has serialised.
            with contextlib.suppress(ValueError, TypeError):
                initializer = keras.initializers.get(initializer)
        if weights is not None:
            many = isinstance(weights, (list, tuple))
            (rows,) = weights if many else (weights,)
        elif type(initializer).__name__ == "Constant":
            value = np.asarray(getattr(initializer, "value", 0.0))
            if value.ndim == 2:  # Vectors that were trained elsewhere.
                rows, initializer = value, "uniform"
        rows = np.asarray(rows, np.float32)
        if rows.ndim != 2 or rows.shape[1] != output_dim:
            raise ValueError(
                "`weights` must be one matrix with a row of length "
                f"{output_dim} for each id from 0. Received: shape {rows.shape}"
            )
        initializer = _scaled(initializer, input_dim, output_dim)
        return Translated(
            initializers_lib.get(initializer, "embeddings_initializer"),
            rows,
            _options_of(keras.regularizers.get(regularizer))
            | _bounds_of(keras.constraints.get(constraint)),
        )


def dims(
    positional: tuple[Any, ...], output_dim: Any, input_dim: Any
) -> tuple[Any, Any]:
    """Returns `output_dim` and `input_dim` of a layer's arguments.

    `Embedding(10_000, 16)` gives `input_dim` and `output_dim`, in this order.
    `DynamicEmbedding(16)` gives only `output_dim`.
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
    check_dim("output_dim", given["output_dim"])
    input_dim = given["input_dim"]
    if input_dim is not None:
        _INPUT_DIM.check("input_dim", input_dim)
    return given["output_dim"], input_dim


def one_of(embeddings_initializer: Any, initializer: Any) -> Any:
    """Returns the initializer, which is given under one of two names."""
    if embeddings_initializer is None:
        return initializer
    if initializer is None:
        return embeddings_initializer
    raise TypeError(
        "`embeddings_initializer` and `initializer` are the same. Leave one "
        f"out. Received: {embeddings_initializer!r}, {initializer!r}"
    )


def with_options(
    optimizer: optimizers_lib.Optimizer, options: dict[str, float]
) -> optimizers_lib.Optimizer:
    """Returns the optimizer with options that the layer adds.

    Raises:
        ValueError: If the optimizer lacks an option that the layer adds, or has
            the option set already.
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
    """Removes arguments that have no effect here.

    Raises:
        ValueError: If an argument asks for something that a table cannot do.
    """
    if arguments.pop("input_length", None) is not None:
        warnings.warn(
            "`input_length` says nothing, as for keras.layers.Embedding. Leave "
            "it out.",
            stacklevel=4,
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


def _scaled(initializer: Any, input_dim: int | None, output_dim: int) -> Any:
    """Returns the initializer for a rule that depends on the matrix's shape.

    The rules that depend on it are `keras.initializers.VarianceScaling` and its
    kinds, such as "he_normal". Other initializers are returned as they are.
    """
    rule = initializer
    # For other names no Keras object is made: Keras would draw a seed for the
    # object, and later layers would get other seeds.
    if (
        rule in ("glorot_uniform", "GlorotUniform")
        or (isinstance(rule, str) and not initializers_lib._is_known(rule))
        # An initializer that Keras has serialised.
        or (isinstance(rule, Mapping) and "module" in rule)
    ):
        with contextlib.suppress(ValueError, TypeError):
            rule = keras.initializers.get(rule)
    if not isinstance(rule, keras.initializers.VarianceScaling):
        return initializer
    if input_dim is None:
        if type(rule).__name__ == "GlorotUniform":
            return initializer  # Tables apply this rule to one id.
        raise ValueError(
            "`embeddings_initializer` depends on the number of ids. Give it as "
            "`input_dim`, as for keras.layers.Embedding; it bounds "
            f"nothing. Received: embeddings_initializer={initializer!r}"
        )
    fan = {
        "fan_in": input_dim,
        "fan_out": output_dim,
        "fan_avg": (input_dim + output_dim) / 2,
    }[rule.mode]
    variance = rule.scale / fan
    if rule.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return initializers_lib.RandomUniform(-limit, limit)
    if rule.distribution == "untruncated_normal":
        return initializers_lib.RandomNormal(0.0, math.sqrt(variance))
    return initializers_lib.TruncatedNormal(
        0.0, math.sqrt(variance) / _TRUNCATED_STDDEV
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
    # Keras adds l2 * |w|^2 to the loss. The option `l2` is the factor of w in
    # the gradient, which is twice as large.
    return {"l2": 2.0 * l2} if l2 else {}


def _bounds_of(constraint: Any) -> dict[str, float]:
    if constraint is None:
        return {}
    kind = type(constraint).__name__
    if kind == "NonNeg":
        return {"min_weight": 0.0}
    if kind == "UnitNorm":
        bounds = {"min_norm": 1.0, "max_norm": 1.0}
    elif kind == "MaxNorm":
        bounds = {"max_norm": float(constraint.max_value)}
    elif kind == "MinMaxNorm" and constraint.rate == 1.0:
        bounds = {
            "min_norm": float(constraint.min_value),
            "max_norm": float(constraint.max_value),
        }
    else:
        raise ValueError(
            "`embeddings_constraint` must be None or one of "
            "keras.constraints: NonNeg, UnitNorm, MaxNorm, MinMaxNorm with "
            f"rate 1. A table keeps no other. Received: {constraint!r}"
        )
    if constraint.axis not in (1, -1):
        raise ValueError(
            "`embeddings_constraint` is for the norm of each row: pass "
            f"keras.constraints.{kind}(axis=1). The norm of a column is one "
            f"over all ids. Received: axis={constraint.axis!r}"
        )
    return bounds
