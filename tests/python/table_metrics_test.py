"""TableMetrics, for the Keras that TF_USE_LEGACY_KERAS chooses."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.summary.summary_iterator import summary_iterator

import tfswitch as tsw
from tests.support import running_servers
from tfswitch._which_keras import keras
from tfswitch.keras import _step_meters
from tfswitch.keras.callbacks import TableMetrics

IDS = np.array([[1, 1], [2, 3], [4, 5], [4, 5]], np.int64)
TARGETS = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)


@pytest.fixture(params=[0, 2], ids=["local", "servers"])
def cluster(request):
    with running_servers(request.param) as address:
        with tsw.connect(address) as cluster:
            yield cluster


def make_model(optimizer=None, **options):
    ids = keras.Input((2,), dtype="int64")
    vectors = tsw.keras.DynamicEmbedding(2, name="user")(ids)
    model = keras.Model(
        ids,
        keras.layers.Dense(1, name="head")(keras.layers.Flatten()(vectors)),
    )
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **options)
    return model


def fit(model, *callbacks, epochs=1, targets=TARGETS):
    model.fit(
        IDS,
        targets,
        batch_size=1,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def points(log_dir):
    """Returns the points of each tag as a dict from steps to values."""
    found = collections.defaultdict(dict)
    for file in sorted((log_dir / "tables").iterdir()):
        for event in summary_iterator(str(file)):
            for value in event.summary.value:
                assert event.step not in found[value.tag]
                number = tf.make_ndarray(value.tensor).item()
                found[value.tag][event.step] = number
    return dict(found)


def test_an_epoch_is_a_point_of_each_series(cluster, tmp_path):
    model = make_model()

    fit(model, TableMetrics(tmp_path), epochs=2)

    found = points(tmp_path)
    assert found["user/epoch_rows"] == {0: 5, 1: 5}
    assert found["user/epoch_new_rows"] == {0: 5 / 4, 1: 0}
    assert all(value > 0 for value in found["user/epoch_push_ms"].values())
    assert set(found) == {
        "user/epoch_rows",
        "user/epoch_new_rows",
        "user/epoch_hit_rate",
        "user/epoch_gradient_norm",
        "user/epoch_push_ms",
    }
    # At first only the repeated 4 and 5 have rows.
    assert found["user/epoch_hit_rate"] == {0: 2 / 8, 1: 1}


def test_rows_of_former_steps_are_not_new(cluster, tmp_path):
    model = make_model()
    fit(model)

    fit(model, TableMetrics(tmp_path))

    assert points(tmp_path)["user/epoch_new_rows"] == {0: 0}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_norm_is_that_of_the_sums_of_repeated_ids(
    cluster, tmp_path, run_eagerly
):
    model = make_model(
        keras.optimizers.SGD(0.0, clipvalue=0.03), run_eagerly=run_eagerly
    )
    model(IDS)
    model.layers[1].table.assign([1, 2], [[0.1, 0.2], [0.3, 0.4]])
    expected = []
    for ids, target in zip(IDS, TARGETS, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                (model(ids[None], training=True) - target) ** 2
            )
        gradient = tape.gradient(loss, model.layers[1].trainable_weights[0])
        by_id = collections.defaultdict(float)
        clipped = np.clip(gradient.values.numpy(), -0.03, 0.03)
        for key, value in zip(gradient.indices.numpy(), clipped, strict=True):
            by_id[key] = by_id[key] + value.astype(np.float64)
        expected.append(np.linalg.norm(list(by_id.values())))

    fit(model, TableMetrics(tmp_path, update_freq="batch"))

    norms = points(tmp_path)["user/batch_gradient_norm"]
    assert list(norms) == [1, 2, 3, 4]
    np.testing.assert_allclose(list(norms.values()), expected, rtol=1e-6)
    np.testing.assert_allclose(
        points(tmp_path)["user/epoch_gradient_norm"][0],
        np.mean(expected),
        rtol=1e-6,
    )


def test_points_come_after_so_many_batches(cluster, tmp_path):
    model = make_model()

    fit(model, TableMetrics(tmp_path, update_freq=3), epochs=2)

    found = points(tmp_path)
    assert found["user/batch_rows"] == {3: 5, 6: 5}
    assert found["user/batch_new_rows"] == pytest.approx({3: 5 / 3, 6: 0})
    assert list(found["user/epoch_rows"]) == [0, 1]


def test_batches_of_one_execution_have_one_point(cluster, tmp_path):
    model = make_model(steps_per_execution=2)

    fit(model, TableMetrics(tmp_path, update_freq="batch"))

    found = points(tmp_path)
    assert list(found["user/batch_rows"]) == [2, 4]
    assert found["user/epoch_new_rows"] == {0: 5 / 4}


def test_only_a_fit_with_the_callback_measures(cluster, tmp_path, monkeypatch):
    traced = []
    norm = _step_meters._norm
    monkeypatch.setattr(
        _step_meters, "_norm", lambda *a: traced.append(1) or norm(*a)
    )
    model = make_model()
    fit(model)
    assert not traced

    for log_dir in (tmp_path / "a", tmp_path / "b"):
        traced.clear()
        fit(model, TableMetrics(log_dir))
        assert traced
        assert not _step_meters._active
        traced.clear()
        fit(model)
        assert not traced
    assert points(tmp_path / "b")["user/epoch_rows"] == {0: 5}


def test_a_fit_that_fails_does_not_end_the_measurements_of_the_next(
    cluster, tmp_path
):
    model = make_model()

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise InterruptedError("on purpose")

    callback = TableMetrics(tmp_path)
    with pytest.raises(InterruptedError):
        fit(model, callback, Fail())

    fit(model, callback)

    assert list(points(tmp_path)["user/epoch_gradient_norm"]) == [0]
    assert not _step_meters._active


def test_a_skipped_push_is_no_step(cluster, tmp_path):
    model = make_model()
    targets = TARGETS.copy()
    targets[3] = np.nan

    fit(model, TableMetrics(tmp_path, update_freq="batch"), targets=targets)

    found = points(tmp_path)
    assert list(found["user/batch_rows"]) == [1, 2, 3, 4]
    assert list(found["user/batch_gradient_norm"]) == [1, 2, 3]
    assert np.isfinite(found["user/epoch_gradient_norm"][0])


def test_a_worker_has_the_staleness_of_its_group(tmp_path):
    with running_servers(1) as address, tsw.connect(address):
        optimizer = tsw.keras.ParameterServerOptimizer(
            tsw.optimizers.SGD(0.1),
            worker=tsw.train.Worker(0, 1, consistency="asp"),
        )
        model = make_model(optimizer)

        fit(model, TableMetrics(tmp_path))

        found = points(tmp_path)
        assert found["user/epoch_staleness"] == {0: 0}
        assert found["user/epoch_new_rows"] == {0: 5 / 4}


def test_tensorboard_reads_the_points_beside_its_own(cluster, tmp_path):
    # TensorFlow 2.21 does not install TensorBoard.
    from tensorboard.backend.event_processing import event_accumulator as events

    board = keras.callbacks.TensorBoard(tmp_path, update_freq=3)

    fit(make_model(), board, TableMetrics(tmp_path, update_freq="batch"))

    read = events.EventAccumulator(str(tmp_path / "tables"))
    read.Reload()
    assert read.SummaryMetadata("user/batch_rows").plugin_data.plugin_name == (
        "scalars"
    )
    rows = [
        (event.step, tf.make_ndarray(event.tensor_proto).item())
        for event in read.Tensors("user/batch_rows")
    ]
    assert rows == [(1, 1), (2, 3), (3, 5), (4, 5)]


@pytest.mark.parametrize("freq", ["step", 0, -1, 1.5, None, True])
def test_another_frequency_is_refused(freq, tmp_path):
    with pytest.raises(ValueError, match="update_freq"):
        TableMetrics(tmp_path, update_freq=freq)
