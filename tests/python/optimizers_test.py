"""Optimizers: names, conversion from Keras, and a model that Keras trains."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tfswitch import optimizers
from tfswitch.optimizers import _conversion


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        (None, optimizers.Adam()),
        ("sgd", optimizers.SGD(0.01)),
        ("SGD", optimizers.SGD(0.01)),
        ("momentum", optimizers.SGD(0.01, momentum=0.9)),
        ("adagrad", optimizers.Adagrad(0.001, 0.1, 1e-7)),
        ("adam", optimizers.Adam(0.001, 0.9, 0.999, 1e-7)),
    ],
)
def test_names_have_the_defaults_of_keras(identifier, expected):
    found = optimizers.get(identifier)

    assert found.get_config() == expected.get_config()


def test_a_keras_schedule_stays_a_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)

    found = optimizers.get(keras.optimizers.SGD(schedule))

    assert found.learning_rate is schedule


@pytest.mark.parametrize("of", ["optimizers", "optimizers.legacy"])
def test_a_tf_keras_schedule_decides_each_push(embedded, of):
    tf_keras = pytest.importorskip("tf_keras")
    module = tf_keras.optimizers
    schedule = module.schedules.PiecewiseConstantDecay([0], [1.0, 0.25])
    module = module.legacy if of.endswith("legacy") else module
    table = tsw.EmbeddingTable(
        "t", 1, initializer="zeros", optimizer=module.SGD(schedule)
    )

    for _ in range(2):
        table.push([1], [[1.0]])

    np.testing.assert_array_equal(table.lookup([1]), [[-1.25]])


def test_a_schedule_that_cannot_be_described_is_named():
    class Schedule:
        def __call__(self, step):
            return 0.1

    with pytest.raises(
        ValueError, match=r"tfswitch\.optimizers\.SGD.*learning_rate=.*Schedule"
    ):
        optimizers.get(keras.optimizers.SGD(Schedule()))


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
@pytest.mark.parametrize("excluded", ["var_names", "var_list"])
def test_variables_excluded_from_weight_decay_are_refused(library, excluded):
    module = pytest.importorskip(library)
    optimizer = module.optimizers.AdamW(0.1)
    what = {"var_names": ["bias"], "var_list": [tf.Variable(0.0)]}[excluded]
    if (library, excluded) == ("keras", "var_list"):
        what = [keras.Variable(0.0)]
    optimizer.exclude_from_weight_decay(**{excluded: what})

    with pytest.raises(ValueError, match="`exclude_from_weight_decay`"):
        optimizers.get(optimizer)


def test_settings_of_a_later_keras_that_are_off_do_not_matter():
    class SGD(keras.optimizers.SGD):
        def get_config(self):
            return {**super().get_config(), "warp": self.warp}

    optimizer = SGD(0.5)
    optimizer.warp = None
    assert optimizers.from_keras(optimizer) == optimizers.SGD(0.5)
    shared = _conversion.KerasRate(optimizer)
    assert optimizers.get(optimizer) == optimizers.SGD(shared)

    optimizer.warp = 9
    with pytest.raises(ValueError, match=r"SGD has no setting `warp`.*=9"):
        optimizers.get(optimizer)


@pytest.mark.parametrize(
    ("class_name", "key", "value"),
    [("Adam", "bata_1", 0.5), ("SGD", "amsgrad", True), ("SGD", "l3", None)],
)
def test_an_unknown_setting_of_a_config_is_named(class_name, key, value):
    config = {"class_name": class_name, "config": {key: value}}

    with pytest.raises(
        ValueError, match=f"{class_name} has no setting `{key}`"
    ):
        optimizers.get(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimizers.get("nadam"), "Received: 'nadam'"),
        (lambda: optimizers.get(keras.optimizers.Nadam()), "optimizer"),
        (
            lambda: optimizers.get(keras.optimizers.Adam(global_clipnorm=1.0)),
            "global_clipnorm=1.0",
        ),
        (
            lambda: optimizers.get(keras.optimizers.Adam(use_ema=True)),
            "use_ema=True",
        ),
    ],
)
def test_what_is_no_optimizer_of_a_table_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_optimizers_are_immutable():
    with pytest.raises(AttributeError):
        optimizers.SGD().momentum = 0.5


def test_a_weight_decay_of_zero_comes_back_as_zero():
    zero = optimizers.AdamW(0.1, 0.0)
    assert optimizers.get(zero.to_config()) == zero
    from_keras = optimizers.get(keras.optimizers.AdamW(0.1, weight_decay=0.0))
    assert from_keras.weight_decay == 0.0
