"""Rows and gradients that travel as 16-bit numbers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.support import make_table, running_servers
from tfswitch import _table_summary
from tfswitch.keras import DynamicEmbedding, ParameterServerOptimizer

IDS = np.arange(-300, 300)
HALVES = ["float16", "bfloat16"]


def rounded(values: Any, dtype: str) -> np.ndarray:
    return tf.cast(tf.cast(values, dtype), tf.float32).numpy()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_servers", [0, 2])
def test_lookups_are_rounded_and_everything_else_is_exact(
    num_servers: int, dtype: str
) -> None:
    with (
        running_servers(num_servers) as address,
        tsw.connect(address) as cluster,
    ):
        full = make_table("t", 3, initializer="uniform", seed=1)
        half = make_table(
            "t", 3, initializer="uniform", seed=1, wire_dtype=dtype
        )
        rows = full.lookup_or_create(IDS).numpy()
        expected = rounded(rows, dtype) if num_servers else rows
        for read in (half.lookup, half.lookup_or_create):
            np.testing.assert_array_equal(read(IDS).numpy(), expected)
        unknown = half.lookup_or_create(IDS + 1000).numpy()
        np.testing.assert_allclose(unknown, full.lookup(IDS + 1000), rtol=4e-3)

        values = np.float32(rows * np.pi)
        half.assign(IDS, values)
        np.testing.assert_array_equal(full.lookup(IDS), values)
        ids, exported, _ = half._export_with_slots()
        np.testing.assert_array_equal(full.lookup(ids), exported)
        # Other processes see nothing of this one's choice.
        assert cluster.table("t").wire_dtype == "float32"
        assert half.wire_dtype == dtype
        summary = _table_summary.describe(half, sample=10)
        assert (dtype in summary) == (num_servers > 0)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_exact_on_average_and_the_same_in_each_run(
    dtype: str,
) -> None:
    steps = []
    gradient = 1 + 2**-12
    for _ in range(2):
        with (
            running_servers(2) as address,
            tsw.connect(address),
        ):
            table = make_table("t", 4, wire_dtype=dtype)
            for _ in range(2):
                table.push(IDS, np.full((600, 4), gradient))
            steps.append(-make_table("t", 4).lookup(IDS).numpy())
    np.testing.assert_array_equal(*steps)
    assert len(np.unique(steps[0])) > 1
    np.testing.assert_allclose(steps[0].mean(), 2 * gradient, atol=4e-4)


def test_a_layer_keeps_its_wire_dtype(tmp_path: Any) -> None:
    with running_servers(1) as address, tsw.connect(address) as cluster:
        ids = keras.Input((2,), dtype="int64")
        layer = DynamicEmbedding(4, name="rows", wire_dtype=tf.bfloat16)
        model = keras.Model(ids, keras.layers.Flatten()(layer(ids)))
        model.compile("adagrad", "mse")
        model.fit(IDS.reshape(-1, 2), np.ones((300, 8)), verbose=0)
        rows = cluster.table("rows").lookup(IDS).numpy()
        assert np.abs(rows - rounded(rows, "bfloat16")).max() > 0
        np.testing.assert_array_equal(
            layer(IDS).numpy(), rounded(rows, "bfloat16")
        )
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded.get_layer("rows").get_config()["wire_dtype"] == "bfloat16"
        assert loaded.get_layer("rows").table.wire_dtype == "bfloat16"


def test_variables_on_servers_stay_float32(make_cluster: Any) -> None:
    cluster = make_cluster(2)
    table = tsw.DenseTable(
        "mlp", {"w": (40, 3)}, optimizer="sgd", wire_dtype="bfloat16"
    )
    first = np.linspace(1, 2, 120, dtype=np.float32).reshape(40, 3)
    table.initialize([first])
    np.testing.assert_array_equal(table.pull()[0], rounded(first, "bfloat16"))
    table.push([np.full((40, 3), 0.5)], learning_rate=0.5)
    exact = tsw.DenseTable("mlp", {"w": (40, 3)}, optimizer="sgd")
    np.testing.assert_array_equal(exact.pull()[0], first - 0.25)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = ParameterServerOptimizer("sgd", wire_dtype="bfloat16")
    model.compile(optimizer, "mse")
    x = np.random.default_rng(1).normal(size=(64, 3))
    model.fit(x, np.ones((64, 2)), batch_size=8, verbose=0)
    # A step reads rounded values; after an epoch they are exact.
    exact = cluster.table("dense_variables").pull()
    for ours, variable in zip(exact, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(variable, ours)
        assert np.abs(ours - rounded(ours, "bfloat16")).max() > 0
    model.train_on_batch(x, np.ones((64, 2)))
    for variable in model.trainable_variables:
        value = variable.numpy()
        np.testing.assert_array_equal(value, rounded(value, "bfloat16"))
    again = ParameterServerOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


def test_features_of_one_table_need_one_wire_dtype(make_cluster: Any) -> None:
    make_cluster(1)
    layer = tsw.keras.DynamicEmbeddings(
        {
            "a": {"output_dim": 2, "table": "t"},
            "b": {"output_dim": 2, "table": "t", "wire_dtype": "bfloat16"},
        }
    )
    with pytest.raises(ValueError, match="different `wire_dtype`"):
        layer({"a": IDS, "b": IDS})


@pytest.mark.parametrize("value", ["float64", 16, None])
def test_an_unknown_type_is_named(value: Any) -> None:
    for make in (
        lambda: make_table(wire_dtype=value),
        lambda: DynamicEmbedding(2, wire_dtype=value),
        lambda: ParameterServerOptimizer("sgd", wire_dtype=value),
    ):
        with pytest.raises(ValueError, match=r"`wire_dtype` must be \"float32"):
            make()
