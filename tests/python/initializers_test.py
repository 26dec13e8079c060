"""Initializers: arguments, conversion from Keras, and the values of rows."""

import math

import keras
import numpy as np
import pytest

import tfswitch as tsw
from tfswitch import initializers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zeros", initializers.Zeros()),
        ("ones", initializers.Ones()),
        ("constant", initializers.Constant(0.0)),
        ("uniform", initializers.RandomUniform(-0.05, 0.05)),
        ("random_uniform", initializers.RandomUniform()),
        ("normal", initializers.RandomNormal(0.0, 0.05)),
        ("RandomNormal", initializers.RandomNormal()),
        ("truncated_normal", initializers.TruncatedNormal(0.0, 0.05)),
        ("glorot_uniform", initializers.GlorotUniform()),
    ],
)
def test_names_are_those_of_keras(name, expected):
    assert initializers.get(name) == expected
    # Keras has the short ones as deprecated names only.
    if name not in ("constant",):
        assert (
            type(keras.initializers.get(name)).__name__
            == type(expected).__name__
        )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (keras.initializers.Zeros(), initializers.Zeros()),
        (keras.initializers.Ones(), initializers.Ones()),
        (keras.initializers.Constant(2.0), initializers.Constant(2.0)),
        (
            keras.initializers.RandomUniform(-1.0, 2.0, seed=3),
            initializers.RandomUniform(-1.0, 2.0),
        ),
        (
            keras.initializers.RandomNormal(1.0, 2.0),
            initializers.RandomNormal(1.0, 2.0),
        ),
        (
            keras.initializers.TruncatedNormal(1.0, 2.0),
            initializers.TruncatedNormal(1.0, 2.0),
        ),
        (keras.initializers.GlorotUniform(), initializers.GlorotUniform()),
    ],
)
def test_keras_objects_are_converted(theirs, ours):
    assert initializers.get(theirs) == ours
    assert initializers.get(keras.saving.serialize_keras_object(theirs)) == ours


@pytest.mark.parametrize(
    "initializer",
    [
        initializers.Zeros(),
        initializers.Constant(3.0),
        initializers.RandomUniform(-2.0, 1.0),
        initializers.TruncatedNormal(0.5, 0.25),
        initializers.GlorotUniform(),
    ],
)
def test_config_round_trip_keeps_every_argument(initializer):
    assert initializers.get(initializer.to_config()) == initializer
    config = initializer.get_config()
    assert type(initializer).from_config(config) == initializer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: initializers.Constant(math.nan), "Received: value=nan"),
        (lambda: initializers.Constant("1"), "Received: value='1'"),
        (
            lambda: initializers.RandomUniform(1.0, 0.0),
            "Received: minval=1.0, maxval=0.0",
        ),
        (lambda: initializers.RandomNormal(0.0, -1.0), "stddev=-1.0"),
        (lambda: initializers.get("orthogonal"), "Received: 'orthogonal'"),
        (
            lambda: initializers.get(keras.initializers.Orthogonal()),
            "glorot_uniform",
        ),
        (lambda: initializers.get(3), "`initializer` must be.*Received: 3"),
        (
            lambda: tsw.keras.DynamicEmbedding(2, embeddings_initializer="no"),
            "`embeddings_initializer` must be",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("initializer", "mean", "stddev"),
    [
        (initializers.RandomUniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12)),
        (initializers.RandomNormal(1.0, 2.0), 1.0, 2.0),
        # A normal cut at two deviations has 0.8796 of the deviation.
        (initializers.TruncatedNormal(1.0, 2.0), 1.0, 2 * 0.8796),
        (initializers.GlorotUniform(), 0.0, math.sqrt(6 / 17) / math.sqrt(3)),
    ],
)
def test_values_are_distributed_as_named(embedded, initializer, mean, stddev):
    """That a distribution is the right one is for the tests of C++."""
    table = tsw.EmbeddingTable("t", 16, initializer=initializer)

    values = table.lookup_or_create(np.arange(10_000)).numpy()

    # 160,000 values: five standard errors of mean and deviation.
    assert abs(values.mean() - mean) < 5 * stddev / 400
    assert abs(values.std() - stddev) < 5 * stddev / 400
