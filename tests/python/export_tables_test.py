"""ExportTables, for the Keras that TF_USE_LEGACY_KERAS chooses."""

import queue

import numpy as np
import pytest

import tfswitch as tsw
from tests.support import running_servers
from tfswitch._which_keras import keras

DEADLINE_SECS = 60.0


@pytest.fixture
def model():
    """A model of one table, "user", on two servers."""
    with running_servers(2) as address, tsw.connect(address):
        ids = keras.Input((), dtype="int64")
        vectors = tsw.keras.DynamicEmbedding(4, name="user")(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(vectors))
        model.compile("sgd", "mse")
        yield model


@pytest.fixture
def told():
    """Collects results of exports; `told.put` is their `log_fn`."""
    return queue.SimpleQueue()


def fit(model, *callbacks, ids=range(40), epochs=1, fail_at=None):
    ids = np.array(ids, np.int64)

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == fail_at:
                raise InterruptedError("on purpose")

    model.fit(
        ids,
        np.ones(len(ids)),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, Fail()],
    )


def drain(told):
    results = []
    while not told.empty():
        results.append(told.get())
    return results


def test_tables_are_exported_between_batches(model, tmp_path, told):
    callback = tsw.keras.ExportTables(
        tmp_path, every_batches=4, log_fn=told.put
    )

    fit(model, callback, epochs=2)

    # After batches 4, 8, 12, 16 and 20 of twice 10, and at the end.
    reports = drain(told)
    assert [r.kind for r in reports] == ["base", *["delta"] * 5]
    assert [r.num_rows for r in reports] == [16, 16, 16, 16, 16, 0]
    assert not reports[-1].published


def test_batches_of_one_execution_end_together(model, tmp_path, told):
    model.compile("sgd", "mse", steps_per_execution=5)
    callback = tsw.keras.ExportTables(
        tmp_path, every_batches=4, log_fn=told.put
    )

    fit(model, callback)

    assert [r.num_rows for r in drain(told)] == [20, 20, 0]


def test_a_thread_exports_while_fit_trains(model, tmp_path, told):
    # An export before the optimizer is known is followed by another base.
    fit(model)
    callback = tsw.keras.ExportTables(
        tmp_path, every_secs=0.01, log_fn=told.put
    )
    kinds = []

    class WaitForExports(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch < 2:
                while True:
                    result = told.get(timeout=DEADLINE_SECS)
                    if getattr(result, "published", False):
                        break
                kinds.append(result.kind)

    fit(model, callback, WaitForExports())

    assert kinds == ["base", "delta"]
    assert drain(told)[-1].number >= 2
    names = [f.name for f in tmp_path.iterdir() if f.name[0] != "."]
    assert min(names) == "base-00000001"
    assert callback._schedule._thread is None


def test_what_is_exported_is_what_was_trained(model, tmp_path, told):
    (tmp_path / "former").mkdir()
    fit(model)
    tsw.saved_model.save(model, tmp_path / "model")
    callback = tsw.keras.ExportTables(
        tmp_path / "model", every_batches=100, log_fn=told.put
    )

    fit(model, callback, ids=range(20, 60))

    (report,) = drain(told)
    assert (report.kind, report.num_rows) == ("delta", 40)


def test_a_failed_export_does_not_end_training(model, tmp_path, told):
    path = tmp_path / "file"
    path.write_text("in the way")
    callback = tsw.keras.ExportTables(path, every_batches=5, log_fn=told.put)

    fit(model, callback)

    assert len(drain(told)) == 3


def test_a_fit_that_fails_can_be_repeated(model, tmp_path, told):
    callback = tsw.keras.ExportTables(
        tmp_path, every_secs=1000.0, log_fn=told.put
    )
    with pytest.raises(InterruptedError):
        fit(model, callback, fail_at=2)

    fit(model, callback)

    (report,) = drain(told)
    assert (report.kind, report.num_rows) == ("base", 40)


def test_a_thread_of_a_fit_that_failed_can_be_stopped(model, tmp_path, told):
    callback = tsw.keras.ExportTables(
        tmp_path, every_secs=0.01, log_fn=told.put
    )
    with pytest.raises(InterruptedError):
        fit(model, callback, fail_at=2)

    callback.stop()
    callback.stop()

    assert callback._schedule._thread is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of `every_secs` and `every_batches`"),
        (
            {"every_secs": 1, "every_batches": 1},
            "one of `every_secs` and `every_batches`",
        ),
        ({"every_secs": 0}, "`every_secs` must be"),
        ({"every_batches": 0}, "`every_batches` must be"),
        ({"every_batches": 1.5}, "`every_batches` must be"),
        ({"every_batches": 1, "row_format": "int4"}, "`row_format`"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.keras.ExportTables(tmp_path, **arguments)
