"""The callback Checkpoint, for the Keras that TF_USE_LEGACY_KERAS chooses."""

import contextlib
import functools
import json
import os
import signal
import threading

import numpy as np
import pytest

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.programs import HANG_SECS, PythonProgram, run_python
from tests.python.worker_threads import Call, join_workers, running_clients
from tests.support import ServerProcess
from tfswitch._which_keras import IS_LEGACY, keras
from tfswitch.keras.callbacks.backup_and_restore import _meets_all
from tfswitch.train.barrier import END_OF_EPOCH

BackupAndRestore = tsw.keras.callbacks.BackupAndRestore

COLUMNS = 3
BATCHES = 4


def make_model(dim=4, dense_units=3, eager=True, update="sparse"):
    ids = keras.Input((COLUMNS,), dtype="int64")
    rows = tsw.keras.DynamicEmbedding(
        dim, name="rows", table="rows", seed=1, update=update
    )(ids)
    pooled = tsw.keras.DynamicEmbedding(
        2,
        name="pooled",
        table="pooled",
        combiner="sum",
        optimizer="adagrad",
        seed=1,
    )(ids)
    hidden = keras.layers.Dense(dense_units, activation="tanh")(
        keras.layers.Flatten()(rows)
    )
    if not IS_LEGACY:  # There its random state is no variable.
        hidden = keras.layers.Dropout(0.3, seed=5)(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    output = keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, pooled]))
    model = keras.Model(ids, output)
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    model.compile(
        keras.optimizers.Adam(rate), "mse", metrics=["mae"], run_eagerly=eager
    )
    return model


def make_small_model(dim=4, dense_units=3):
    keras.utils.set_random_seed(1)
    ids = keras.Input((COLUMNS,), dtype="int64")
    rows = tsw.keras.DynamicEmbedding(dim, name="rows", table="rows")(ids)
    hidden = keras.layers.Dense(dense_units)(keras.layers.Flatten()(rows))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse", run_eagerly=True)
    return model


class Stop(keras.callbacks.Callback):
    """Ends `fit` with an error, as a process that is killed."""

    def __init__(self, epoch, batch):
        super().__init__()
        self._at = (epoch, batch)
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            raise InterruptedError("on purpose")


def fit(model, *callbacks, epochs=2):
    rng = np.random.default_rng(0)
    count = BATCHES * 4
    ids = rng.integers(0, 30, (count, COLUMNS))
    return model.fit(
        ids,
        rng.normal(size=(count, 1)).astype(np.float32),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    ).history


def fit_until(epoch, batch, callback, model):
    with pytest.raises(InterruptedError):
        fit(model, callback, Stop(epoch, batch))
    callback._wait_for_writer()  # As the interpreter does when it ends.


def make_seeded(seed=1, **arguments):
    keras.utils.set_random_seed(seed)
    return make_model(**arguments)


def layers_of(model):
    found = (layer for layer in model.layers if hasattr(layer, "_table"))
    return {layer.name: layer.table for layer in found}


def state_of(model):
    """All that training has led to, as arrays."""
    state = {
        f"variable {i}": np.array(v.numpy())
        for i, v in enumerate([*model.variables, *model.optimizer.variables])
        if "anchor" not in v.name
    }
    for name, table in layers_of(model).items():
        ids, values, slots = table._export_with_slots()
        order = np.argsort(ids)
        state[f"{name} ids"] = ids[order]
        state[f"{name} values"] = values[order]
        state[f"{name} slots"] = slots[order]
        state[f"{name} iterations"] = np.array(table.iterations)
    return state


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


@functools.cache
def undisturbed(eager=True):
    """The state and the history of a `fit` without an interruption."""
    with running_cluster(0):
        model = make_seeded(eager=eager)
        history = fit(model)
        return state_of(model), history


@contextlib.contextmanager
def connections(place):
    """Yields a maker of connections, each as of a restarted process."""
    if place == "process":
        yield lambda: running_cluster(0)
        return
    with ServerProcess() as server:
        yield lambda: tsw.connect(f"grpc://{server.address}")


@pytest.mark.parametrize(
    ("place", "every", "stops_at", "eager", "epochs_again"),
    [
        ("process", "epoch", (1, 1), True, 1),
        ("process", 3, (0, 2), True, 2),
        ("server", 2, (1, 2), False, 1),
    ],
)
def test_a_fit_that_was_interrupted_goes_on_as_if_it_were_not(
    place, every, stops_at, eager, epochs_again, tmp_path
):
    expected, history = undisturbed(eager)
    with connections(place) as connect:
        with connect():
            first = BackupAndRestore(tmp_path, every)
            fit_until(*stops_at, first, make_seeded(eager=eager))
        with connect():
            model = make_seeded(seed=2, eager=eager)
            again = fit(model, BackupAndRestore(tmp_path, every))
            assert_equal(state_of(model), expected)
    if not IS_LEGACY:  # It makes its metrics in its first step.
        assert len(again["mae"]) == epochs_again
        assert again["mae"] == history["mae"][-epochs_again:]


def test_rows_of_dense_updates_go_on_but_for_rounding(tmp_path):
    """A save writes rows as they are after the steps that they have missed."""
    states = []
    for stops in (False, True):
        with running_cluster(0):
            if stops:
                first = BackupAndRestore(tmp_path, 3)
                fit_until(0, 2, first, make_seeded(update="auto"))
        with running_cluster(0):
            model = make_seeded(update="auto")
            fit(model, *[BackupAndRestore(tmp_path, 3)] * stops)
            assert layers_of(model)["rows"].update == "dense"
            states.append(state_of(model))

    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_allclose(
            states[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_a_fit_that_is_interrupted_where_it_leaves_out_batches_goes_on(
    embedded, tmp_path
):
    """Also in the process that it was interrupted in."""
    checkpoint = BackupAndRestore(tmp_path, 3)
    model = make_seeded()
    for stops_at in [(0, 3), (0, 1)]:
        with pytest.raises(InterruptedError):
            fit(model, checkpoint, Stop(*stops_at))

    fit(model, checkpoint)

    assert_equal(state_of(model), undisturbed()[0])


PROGRAM = """
import os, signal, sys
import tfswitch as tsw
from tests.python import checkpoint_test
from tfswitch.keras.callbacks import _backup_folder as files

address, path, moment = sys.argv[1:]
published, written = files.published, []

def kill_at(path):
    written.append(path.name)
    if written[-1].startswith(moment) and "3" in written[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return published(path)

files.published = kill_at
with tsw.connect(address):
    checkpoint_test.fit(
        checkpoint_test.make_seeded(),
        tsw.keras.callbacks.BackupAndRestore(path, every=2),
    )
"""


@pytest.mark.parametrize(
    ("place", "moment"), [("process", "checkpoint"), ("server", "dense")]
)
def test_a_kill_between_the_writes_leaves_the_checkpoint_before(
    place, moment, tmp_path
):
    """Tables and variables are never of two steps."""
    with connections(place) as connect:
        with connect() as cluster:
            address = cluster.address
        killed = run_python(
            *("-c", PROGRAM, address, tmp_path, moment), check=False
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
        check_the_one_before(tmp_path, address)
        with connect():
            model = make_seeded(seed=2)
            fit(model, BackupAndRestore(tmp_path, every=2))
            assert_equal(state_of(model), undisturbed()[0])


def check_the_one_before(tmp_path, address):
    tables = tmp_path / ("server_tables" if "grpc" in address else "tables")
    manifest = json.loads((tables / "manifest.json").read_text())
    of_tables = int(manifest["save"])
    newest = max(tmp_path.glob("checkpoint-*.json"))
    named = json.loads(newest.read_text())["tables"]

    # The tables were saved, and nothing else of the third checkpoint.
    assert newest.name == "checkpoint-000002.json"
    assert [place["save"] for place in named.values()] == [of_tables - 1]


def test_many_kills_between_the_writes_lose_no_checkpoint(
    embedded, monkeypatch, tmp_path
):
    model = make_small_model()
    fit_until(0, 3, BackupAndRestore(tmp_path, 2, keep=1), model)
    newest = max(tmp_path.glob("checkpoint-*.json")).read_text()

    def fails(*_):
        raise OSError("the disk is full")

    for _ in range(3):
        checkpoint = BackupAndRestore(tmp_path, 2, keep=1)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint._folder, "publish", fails)
            with pytest.raises(OSError, match="the disk is full"):
                fit(model, checkpoint)

    assert [p.read_text() for p in tmp_path.glob("checkpoint-*.json")] == [
        newest
    ]
    fit(model, BackupAndRestore(tmp_path, 2, keep=1))


def test_the_last_checkpoints_stay(embedded, tmp_path):
    fit(make_small_model(), BackupAndRestore(tmp_path, 2, keep=3))

    numbers = [p.name for p in sorted(tmp_path.glob("checkpoint-*"))]
    named = [
        json.loads((tmp_path / name).read_text())["tables"]["process"]["save"]
        for name in numbers
    ]
    # After 6 and 8 batches, and at the end of the last epoch.
    assert numbers == [f"checkpoint-00000{i}.json" for i in (3, 4, 5)]
    assert len(list(tmp_path.glob("dense-*"))) == 3
    saves = {
        int(json.loads(p.read_text())["save"])
        for p in (tmp_path / "tables").glob("manifest*.json")
    }
    # The one before goes with the next save.
    assert set(named) <= saves and len(saves) <= 4


def test_variables_are_written_while_training_goes_on(
    embedded, monkeypatch, tmp_path
):
    """And are those of the moment, though the thread comes later."""
    checkpoint = BackupAndRestore(tmp_path, 100, keep=1)
    publish, may_write = checkpoint._folder.publish, threading.Event()
    seen = []

    def wait_and_publish(*arguments):
        assert may_write.wait(60)
        publish(*arguments)

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                checkpoint._save(0, 1)
                seen.append(state_of(self.model))
            if batch == 3:
                assert not list(tmp_path.glob("checkpoint-*"))
                may_write.set()
                raise InterruptedError

    monkeypatch.setattr(checkpoint._folder, "publish", wait_and_publish)
    with pytest.raises(InterruptedError):
        fit(make_model(), checkpoint, Steps())
    checkpoint._wait_for_writer()

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            assert_equal(state_of(self.model), seen[0])

    fit(make_model(), BackupAndRestore(tmp_path), Look(), epochs=1)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(embedded, tmp_path):
    fit_until(1, 3, BackupAndRestore(tmp_path, 2), make_seeded())
    newest = max(tmp_path.glob("dense-*"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)

    model = make_seeded(seed=2)
    fit(model, BackupAndRestore(tmp_path, 2))

    assert_equal(state_of(model), undisturbed()[0])


def test_damaged_checkpoints_are_an_error_and_no_beginning(embedded, tmp_path):
    model = make_small_model()
    fit(model, BackupAndRestore(tmp_path), epochs=1)
    for path in tmp_path.glob("dense-*"):
        path.write_bytes(b"no zip")

    with pytest.raises(OSError, match=r"no checkpoint in .* can be read: .*1"):
        fit(model, BackupAndRestore(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({"dim": 8}, "'rows' of dim 4 .*'rows' of dim 8"),
        ({"dense_units": 4}, r"shape \(12, 3\), and here .* \(12, 4\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    arguments, difference, tmp_path
):
    with running_cluster(0):
        fit(make_small_model(), BackupAndRestore(tmp_path), epochs=1)

    with running_cluster(0):
        model = make_small_model(**arguments)
        with pytest.raises(
            ValueError, match=rf"is of another model than .*({difference})"
        ):
            fit(model, BackupAndRestore(tmp_path))
        assert layers_of(model)["rows"].size() == 0


def test_a_batch_that_executions_do_not_come_to_is_refused(embedded, tmp_path):
    model = make_small_model()
    fit_until(0, 3, BackupAndRestore(tmp_path, 4), model)
    model.compile(model.optimizer, "mse", steps_per_execution=3)

    with pytest.raises(ValueError, match=r"batch 4 .*steps_per_execution=3"):
        fit(model, BackupAndRestore(tmp_path))


def test_a_checkpoint_is_of_the_last_batch_of_an_execution(embedded, tmp_path):
    model = make_small_model()
    model.compile("sgd", "mse", steps_per_execution=2)

    fit(model, BackupAndRestore(tmp_path, 2, keep=3), epochs=1)

    manifest = json.loads((tmp_path / "checkpoint-000001.json").read_text())
    assert (manifest["epoch"], manifest["batch"]) == (0, 2)


def test_a_fit_that_has_ended_is_not_repeated(embedded, tmp_path):
    checkpoint = BackupAndRestore(tmp_path)
    model = make_small_model()
    fit(model, checkpoint, epochs=1)
    before = state_of(model)

    fit(model, BackupAndRestore(tmp_path), epochs=1)
    assert_equal(state_of(model), before)
    more = fit(model, checkpoint, epochs=2)  # This one has seen it end.
    further = fit(model, BackupAndRestore(tmp_path), epochs=3)

    assert (len(more["loss"]), len(further["loss"])) == (2, 1)


def test_checkpoints_go_at_the_end_if_asked(embedded, tmp_path):
    model = make_small_model()

    for _ in range(2):
        again = fit(
            model, BackupAndRestore(tmp_path, delete_checkpoint=True), epochs=1
        )
        assert len(again["loss"]) == 1

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [{"every": 0}, {"every": "step"}, {"keep": 0}, {"path": ""}],
    ids=str,
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BackupAndRestore(**{"path": "checkpoints", **arguments})


@pytest.mark.parametrize("has_ended_epoch", [False, True])
def test_a_worker_that_comes_back_alone_joins_the_others(has_ended_epoch):
    """To restore would take from them what they have trained."""
    with running_clients(0) as client:
        former, peer = join_workers(client, 2, consistency="asp")
        meeting = Call(_meets_all, peer)
        assert _meets_all(former) and meeting.result()
        done = threading.Event()

        def train():
            if has_ended_epoch:
                peer.wait_at_barrier(END_OF_EPOCH)
            while not done.wait(0.01):
                peer.end_step()

        others = Call(train)
        worker = tsw.train.Worker(0, 2, consistency="asp", cluster=client(2))
        assert not _meets_all(worker)
        done.set()
        others.result()

        # It holds up nobody, and those that begin together restore.
        worker.end_step()
        meeting = Call(_meets_all, peer)
        assert _meets_all(worker) and meeting.result()


WORKER = """
import os, signal, sys
import numpy as np
import tfswitch as tsw
from tests.python import checkpoint_test
from tfswitch._which_keras import keras

address, path, number, stops_at, result = sys.argv[1:]
number = int(number)

class Kill(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == int(stops_at):
            os.kill(os.getpid(), signal.SIGKILL)

with tsw.connect(address, timeout_secs=60):
    worker = tsw.train.Worker(number, 2, consistency="bsp")
    model = checkpoint_test.make_worker_model(worker)
    ids = np.arange(32).reshape(16, 2)[number::2] % 7
    model.fit(
        ids, ids.sum(axis=1, keepdims=True) / 7.0, batch_size=2, epochs=2,
        shuffle=False, verbose=0,
        callbacks=[tsw.keras.callbacks.BackupAndRestore(path, every=3), Kill()],
    )
    if number == 0:
        np.savez(result, **checkpoint_test.state_of(model))
"""


def make_worker_model(worker):
    keras.utils.set_random_seed(1)
    ids = keras.Input((2,), dtype="int64")
    rows = tsw.keras.DynamicEmbedding(
        3, name="rows", seed=1, consistency="bsp"
    )(ids)
    model = keras.Model(
        ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    )
    model.compile(
        tsw.keras.ParameterServerOptimizer(
            "adam", consistency="bsp", worker=worker
        ),
        "mse",
        run_eagerly=True,
    )
    return model


def run_workers(address, path, result, stops_at):
    """Runs both to their ends; returns their exit codes."""
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(
                PythonProgram(
                    *("-c", WORKER, address, path, number, stops_at, result)
                )
            )
            for number in range(2)
        ]
        return [program.wait(HANG_SECS) for program in programs]


@pytest.mark.faults
@pytest.mark.skipif(
    not os.environ.get("TFSWITCH_LONG_TESTS"),
    reason="six processes; scripts/test --full runs it",
)
def test_workers_that_all_died_go_on_together(tmp_path):
    """The servers have gone on for two steps since the checkpoint."""
    states = []
    for name, deaths in [("quiet", []), ("killed", [5])]:
        with ServerProcess() as server:
            address = f"grpc://{server.address}"
            for stops_at in [*deaths, 0]:
                codes = run_workers(
                    *(address, tmp_path / name, tmp_path / f"{name}.npz"),
                    stops_at,
                )
                assert codes == [-signal.SIGKILL if stops_at else 0] * 2
        with np.load(tmp_path / f"{name}.npz") as state:
            states.append(dict(state))

    assert_equal(states[1], states[0])
    assert len(states[0]["rows ids"]) == 7
