"""Exported models: what they serve, how it changes, and what they refuse."""

import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.programs import HANG_SECS, ROOT, run_python
from tfswitch import cluster as cluster_lib
from tfswitch._which_keras import IS_LEGACY, keras


def make_model():
    """A model with one id, several, and numbers."""
    user = keras.Input((), dtype="int64", name="user")
    items = keras.Input((3,), dtype="int32", name="items")
    numbers = keras.Input((2,), name="numbers")
    x = keras.layers.Concatenate()(
        [
            # Deltas have the rows of a push, and no idle rows that move.
            tsw.keras.DynamicEmbedding(4, name="users", update="sparse")(user),
            tsw.keras.DynamicEmbedding(3, name="items_seen", combiner="mean")(
                items
            ),
            numbers,
        ]
    )
    x = keras.layers.Dense(8, "relu")(x)
    score = keras.layers.Dense(1, "sigmoid", name="score")(x)
    model = keras.Model([user, items, numbers], score)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    return model


def make_data(num_samples=64, seed=0):
    random = np.random.default_rng(seed)
    return {
        "user": random.integers(-5, 40, num_samples),
        "items": random.integers(0, 60, (num_samples, 3)).astype(np.int32),
        "numbers": random.normal(size=(num_samples, 2)).astype(np.float32),
    }, random.integers(0, 2, num_samples)


def train(model, seed=0):
    inputs, labels = make_data(seed=seed)
    model.fit(list(inputs.values()), labels, batch_size=16, verbose=0)


def predict(model, inputs):
    values = list(inputs.values())
    return model.predict(values, batch_size=len(values[0]), verbose=0)


def serve(loaded, inputs):
    signature = loaded.signatures["serving_default"]
    return signature(**{n: tf.constant(v) for n, v in inputs.items()})[
        "score"
    ].numpy()


@pytest.fixture(scope="module", params=[0, 2], ids=["embedded", "two_servers"])
def trained(request):
    """A cluster and a model of its tables, which all tests train on."""
    with running_cluster(request.param) as cluster:
        model = make_model()
        train(model)
        yield cluster, model


# For tests of what is the same wherever the rows come from.
embedded_only = pytest.mark.parametrize(
    "trained", [0], ids=["embedded"], indirect=True
)


@pytest.fixture
def model(trained, monkeypatch):
    cluster, model = trained
    monkeypatch.setattr(cluster_lib, "_default", cluster)
    return model


def assert_same(scores, expected):
    """The same bits; with tf_keras, which compiles other graphs, nearly."""
    if IS_LEGACY:
        np.testing.assert_allclose(scores, expected, rtol=1e-6)
    else:
        np.testing.assert_array_equal(scores, expected)


# Also ids that were never trained.
INPUTS, _ = make_data(num_samples=128, seed=7)


def test_a_loaded_model_gives_the_bits_of_predict(model, tmp_path):
    path = tmp_path / "1"
    tsw.saved_model.save(model, path)

    loaded = tf.saved_model.load(path)

    expected = predict(model, INPUTS)
    assert_same(serve(loaded, INPUTS), expected)
    assert_same(
        loaded.serve([tf.constant(v) for v in INPUTS.values()]).numpy(),
        expected,
    )
    keras.backend.clear_session()
    assert_same(serve(loaded, INPUTS), expected)


@pytest.mark.parametrize("trained", [2], ids=["two_servers"], indirect=True)
def test_a_model_that_is_moved_is_served_without_its_trainer(model, tmp_path):
    tsw.saved_model.save(model, tmp_path / "1")
    path = (tmp_path / "1").rename(tmp_path / "elsewhere")
    np.savez(tmp_path / "inputs.npz", **INPUTS)
    program = """
import sys
import numpy as np, tensorflow as tf, tfswitch
loaded = tf.saved_model.load(sys.argv[1])
inputs = {n: tf.constant(v) for n, v in np.load(sys.argv[2]).items()}
np.save(sys.argv[3], loaded.signatures["serving_default"](**inputs)["score"])
assert not tfswitch.connect().tables()
"""
    run_python(
        *("-c", program, path),
        *(tmp_path / "inputs.npz", tmp_path / "scores.npy"),
    )
    assert_same(np.load(tmp_path / "scores.npy"), predict(model, INPUTS))


def test_deltas_reach_a_model_that_is_loaded(model, tmp_path):
    path = tmp_path / "1"
    tsw.saved_model.save(model, path)
    loaded = tf.saved_model.load(path)
    table = model.get_layer("users").table
    before = serve(loaded, INPUTS)
    table.push(INPUTS["user"], np.ones((len(INPUTS["user"]), 4), np.float32))
    np.testing.assert_array_equal(serve(loaded, INPUTS), before)

    report = tsw.export.delta(path)

    assert report.published and report.number == 2
    assert report.num_rows == len(set(INPUTS["user"]))
    assert tsw.saved_model.state(path).number == 1
    assert tsw.saved_model.refresh(path).number == 2
    assert_same(serve(loaded, INPUTS), predict(model, INPUTS))
    assert not np.array_equal(serve(loaded, INPUTS), before)
    assert not tsw.export.delta(path).published

    state = tsw.saved_model.roll_back(path, 1)
    assert state.held and state.number == 1
    np.testing.assert_array_equal(serve(loaded, INPUTS), before)
    state = tsw.saved_model.resume(path)
    assert not state.held and state.number == 2

    table.remove(INPUTS["user"])
    assert tsw.export.delta(path).num_removed == len(set(INPUTS["user"]))
    assert tsw.export.base(path, keep=1).number == 4
    assert tsw.saved_model.refresh(path).base_number == 4
    assert_same(serve(loaded, INPUTS), predict(model, INPUTS))


@embedded_only
def test_a_delta_of_the_next_day_needs_only_the_saved_model(model, tmp_path):
    path = tmp_path / "models" / "1"
    tsw.saved_model.save(model, path)
    model.save(tmp_path / "model.keras")
    # No changes are known there, as in another process.
    with tsw.connect("local://next_day"):
        with pytest.raises(KeyError, match="no table"):
            tsw.export.delta(path)
        model = keras.models.load_model(tmp_path / "model.keras")
        assert not tsw.export.delta(path).published
        train(model, seed=1)
        if IS_LEGACY:
            assert tsw.export.delta(path).num_rows > 0
            return

        with pytest.warns(RuntimeWarning, match="'dense.*/bias', .* 1 more"):
            report = tsw.export.delta(path)

        assert (report.kind, report.number) == ("delta", 2)
        assert 0 < report.num_rows < 100
        train(model, seed=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # It has been said.
            assert tsw.export.delta(path).number == 3
        with pytest.raises(
            ValueError, match=r"model: 1\. .* write '.*models/1'"
        ):
            tsw.export.delta(tmp_path / "models")


@embedded_only
def test_what_cannot_be_served_is_told_and_changes_nothing(model, tmp_path):
    path = tmp_path / "1"
    tsw.saved_model.save(model, path)
    loaded = tf.saved_model.load(path)
    model.get_layer("users").table.assign([1], np.ones((1, 4), np.float32))
    tsw.export.delta(path)
    (rows,) = path.glob("assets.extra/tfswitch/delta-00000002/users.*")
    damaged = bytearray(rows.read_bytes())
    damaged[4200] ^= 1
    rows.write_bytes(damaged)
    before = serve(loaded, INPUTS)

    with pytest.raises(OSError, match="is damaged") as raised:
        tsw.saved_model.refresh(path)

    assert str(rows) in str(raised.value)
    state = tsw.saved_model.state(path)
    assert state.number == 1 and state.refused == 1
    assert "is damaged" in state.error
    np.testing.assert_array_equal(serve(loaded, INPUTS), before)


@embedded_only
@pytest.mark.parametrize("row_format", ["float16", "int8"])
def test_smaller_formats_are_near(model, tmp_path, row_format):
    tsw.saved_model.save(model, tmp_path / "1", row_format=row_format)
    scores = serve(tf.saved_model.load(tmp_path / "1"), INPUTS)
    expected = predict(model, INPUTS)
    assert not np.array_equal(scores, expected)
    np.testing.assert_allclose(scores, expected, atol=2e-3)


def make_hash_table():
    return tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant([1, 2], tf.int64), tf.constant([2, 1], tf.int64)
        ),
        default_value=-1,
    )


class Scorer:
    """No `tf.Module`: nobody knows what it has."""

    def __init__(self, table):
        self.table = table
        self.weight = tf.Variable([1.0, 10.0])
        self.parts = {"names": [make_hash_table()]}

    def __call__(self, ids):
        rows = self.table.lookup(self.parts["names"][0].lookup(ids))
        return {"score": tf.linalg.matvec(rows, self.weight)}


class TrackableScorer(Scorer, tf.__internal__.tracking.AutoTrackable):
    pass


class Swapped(keras.layers.Layer):
    """Exchanges ids by a lookup table that is in a list."""

    def __init__(self):
        super().__init__()
        self.names = [make_hash_table()]

    def call(self, ids):
        return self.names[0].lookup(ids)


def keras_scorer(table):
    ids = keras.Input((), dtype="int64", name="ids")
    rows = tsw.keras.DynamicEmbedding(2, name="of_keras")(Swapped()(ids))
    score = keras.layers.Dense(1, name="score")(rows)
    return keras.Model(ids, {"score": score})


def lambda_of_keras(table):
    model = keras_scorer(table)
    return lambda ids: {"score": model(ids)["score"]}


def module_of_a_loaded_model(table):
    class Weigher(tf.Module):
        def __init__(self):
            self.weight = tf.Variable([1.0, 10.0])
            self.names = make_hash_table()

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.int64, name="ids"),
                tf.TensorSpec([None, 2], name="rows"),
            ]
        )
        def weigh(self, ids, rows):
            by_name = tf.cast(self.names.lookup(ids), tf.float32)
            return tf.linalg.matvec(rows, self.weight) * by_name

    class OfLoaded(tf.Module):
        def __init__(self, folder):
            tf.saved_model.save(Weigher(), folder)
            self.loaded = tf.saved_model.load(folder)

        def __call__(self, ids):
            return {"score": self.loaded.weigh(ids, table.lookup(ids))}

    with tempfile.TemporaryDirectory() as folder:
        return OfLoaded(folder)


@pytest.mark.parametrize(
    "make",
    [
        Scorer,
        TrackableScorer,
        keras_scorer,
        lambda_of_keras,
        module_of_a_loaded_model,
    ],
)
def test_what_the_graph_reads_is_saved_whoever_has_it(tmp_path, make):
    ids = np.array([1, 2, 3])
    with tsw.connect(f"local://{tmp_path}"):
        table = tsw.EmbeddingTable("t", 2)
        table.assign([1, 2], [[1.0, 2.0], [3.0, 4.0]])
        scorer = make(table)
        expected = scorer(tf.constant(ids, tf.int64))["score"].numpy()
        tsw.saved_model.save(
            scorer,
            tmp_path / "1",
            inputs={"ids": tf.TensorSpec([None], tf.int64)},
        )
    loaded = tf.saved_model.load(tmp_path / "1")
    assert_same(serve(loaded, {"ids": ids}), expected)


def test_a_step_reads_one_state_of_the_rows(tmp_path):
    with tsw.connect(f"local://{tmp_path}"):
        table = tsw.EmbeddingTable("t", 1, optimizer=tsw.optimizers.SGD(1.0))
        ids = np.arange(2000)

        def set_all(value):
            table.assign(ids, np.full((2000, 1), value, np.float32))

        def twice(ids):
            return {
                "score": tf.concat(
                    [table.lookup(ids), table.lookup(ids[::-1])], axis=1
                )
            }

        set_all(0.0)
        path = tmp_path / "1"
        tsw.saved_model.save(
            twice, path, inputs={"ids": tf.TensorSpec([None], tf.int64)}
        )
        loaded = tf.saved_model.load(path)
        tsw.saved_model.watch(path, 0.001)

        def present():
            """The one value that a run of the graph has read everywhere."""
            (value,) = np.unique(serve(loaded, {"ids": ids}))
            return value

        # Runs go on while the rows are exchanged under them.
        for value in range(1, 8):
            set_all(float(value))
            tsw.export.delta(path)
            while (seen := present()) != value:
                assert seen == value - 1
        tsw.saved_model.watch(path, 0)


def test_a_model_saved_anew_at_a_path_is_another_one(tmp_path):
    with tsw.connect(f"local://{tmp_path}"):
        table = tsw.EmbeddingTable("t", 1)
        path = tmp_path / "1"
        ids = {"ids": np.array([1])}

        def save(value):
            table.assign([1], [[value]])
            tsw.saved_model.save(
                lambda ids: {"score": table.lookup(ids) + value},
                path,
                inputs={"ids": tf.TensorSpec([None], tf.int64)},
            )

        save(1.0)
        first = tf.saved_model.load(path)
        assert serve(first, ids) == 2.0
        shutil.rmtree(path)
        save(10.0)
        second = tf.saved_model.load(path)
        assert serve(second, ids) == 20.0
        assert serve(first, ids) == 2.0

        # Who steers by the path means the model that is there now.
        table.assign([1], [[100.0]])
        tsw.export.delta(path)
        assert tsw.saved_model.refresh(path).number == 2
        assert serve(second, ids) == 110.0
        assert serve(first, ids) == 2.0


@pytest.mark.parametrize(
    ("num_servers", "mode"), [(0, "embedded"), (2, "remote")]
)
def test_a_models_own_functions_serve_and_train_as_before(
    make_cluster, tmp_path, num_servers, mode
):
    make_cluster(num_servers)
    table = tsw.EmbeddingTable("t", 2)

    class Scorer(tf.Module):
        def __init__(self):
            self.weight = tf.Variable([1.0, 10.0])
            self.names = [make_hash_table()]

        @tf.function
        def score(self, ids):
            if tf.size(ids) > 2:  # Only autograph makes this work.
                return tf.linalg.matvec(table.lookup(ids), self.weight)
            return tf.reduce_sum(table.lookup(ids) * self.weight, axis=1)

        @tf.function
        def __call__(self, ids):
            return {"score": self.score(self.names[0].lookup(ids))}

    scorer = Scorer()
    inputs = {"ids": tf.TensorSpec([None], tf.int64)}
    ids = tf.constant([2, 1, 2], tf.int64)
    # Saved before it was called, and after; called in between and at the end.
    for version in range(1, 4):
        path = tmp_path / str(version)
        tsw.saved_model.save(scorer, path, inputs=inputs, mode=mode)
        table.assign([1, 2], [[1.0 * version, 2.0], [3.0, 4.0]])
        expected = [20.0 + version, 43.0, 20.0 + version]
        np.testing.assert_array_equal(scorer(ids)["score"], expected)
        if mode == "embedded":
            tsw.export.delta(path)
        served = serve(tf.saved_model.load(path), {"ids": ids})
        np.testing.assert_array_equal(served, expected)


@embedded_only
def test_exports_of_a_model_have_its_tables(model, tmp_path):
    path = tmp_path / "1"
    tsw.saved_model.save(model, path)
    users = model.get_layer("users").table
    items = model.get_layer("items_seen").table
    with pytest.raises(ValueError, match=f"looks up '{items.name}' as well"):
        tsw.export.base(path, tables=[users])
    assert tsw.export.base(path, tables=[users, items.name]).number == 2
    # Elsewhere any will do.
    assert tsw.export.base(tmp_path / "rows", tables=[users]).number == 1


@embedded_only
def test_cpp_serves_the_same_bits(model, tmp_path):
    build = os.environ.get("TFSWITCH_BUILD_DIR")
    program = Path(build or ROOT / "build") / "tests/cc/ops/serve_saved_model"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    table = model.get_layer("users").table
    tsw.saved_model.save(
        lambda ids: {"embeddings": table.lookup(ids)},
        tmp_path / "1",
        inputs={"ids": tf.TensorSpec([None], tf.int64)},
    )
    ids = [-5, 0, 7, 10**12]
    served = subprocess.run(
        [
            program,
            tsw.ops.library_path(),
            tmp_path / "1",
            *map(str, ids),
        ],
        check=True,
        timeout=HANG_SECS,
        capture_output=True,
        text=True,
    )
    np.testing.assert_array_equal(
        np.array(served.stdout.split(), np.float32).reshape(4, 4),
        table.lookup(ids).numpy(),
    )


class TestBadInput:
    @pytest.fixture
    def save(self, embedded, tmp_path):
        """Saves a table's lookup to `path`, with other arguments."""
        table = tsw.EmbeddingTable("t", 2)
        table.assign([1], [[1.0, 2.0]])

        def save(**kwargs):
            arguments = {
                "model": lambda ids: {"score": table.lookup(ids)},
                "path": tmp_path / "1",
                "inputs": {"ids": tf.TensorSpec([None], tf.int64)},
                **kwargs,
            }
            tsw.saved_model.save(**arguments)
            return tmp_path / "1"

        return save

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"mode": "cloud"}, "mode='cloud'"),
            ({"row_format": "int4"}, "float32, float16, int8.*int4"),
            ({"model": 3}, "model=3"),
            ({"inputs": None}, "Pass `inputs`"),
            ({"inputs": {"ids": 3}}, "tf.TensorSpec by name"),
            ({"model": lambda ids: {"score": ids}}, "no lookup at all"),
        ],
    )
    def test_arguments_are_named(self, save, tmp_path, arguments, message):
        with pytest.raises(ValueError, match=message):
            save(**arguments)
        assert not [p for p in tmp_path.iterdir() if p.is_dir()]

    def test_a_folder_that_is_there_is_not_overwritten(self, save):
        save()
        with pytest.raises(FileExistsError, match="folder of its own"):
            save()

    def test_a_link_to_nothing_is_not_replaced(self, save, tmp_path):
        (tmp_path / "1").symlink_to(tmp_path / "nowhere")
        with pytest.raises(FileExistsError, match="folder of its own"):
            save()
        assert os.listdir(tmp_path) == ["1"]

    def test_a_resource_that_nothing_has_is_named(self, save, tmp_path):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[], shared_name="of_nobody"
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=1.0)
        table = tsw.EmbeddingTable("u", 2)

        def score(ids):
            weight = tf.raw_ops.ReadVariableOp(
                resource=handle, dtype=tf.float32
            )
            return {"score": table.lookup(ids) * weight}

        with pytest.raises(
            ValueError, match=r"of_nobody.*Keep it in a tf\.Mod"
        ):
            save(model=score)
        assert os.listdir(tmp_path) == []

    def test_operations_of_training_are_refused(self, save):
        table = tsw.EmbeddingTable("u", 2)

        with pytest.raises(ValueError, match="makes no rows"):
            save(model=lambda ids: {"score": table.lookup_or_create(ids)})

        traced = tf.function(table.lookup)
        traced(tf.constant([1], tf.int64))
        spec = tf.TensorSpec([None], tf.int64)
        concrete = traced.get_concrete_function(spec)
        with pytest.raises(
            ValueError, match=r"Tfswitch>LookupMany.*traced before"
        ):
            save(model=lambda ids: {"score": concrete(ids)})

    def test_a_model_that_is_not_loaded_has_no_state(self, save):
        path = save()
        with pytest.raises(KeyError, match="not open in this process"):
            tsw.saved_model.state(path)
        with pytest.raises(KeyError, match="find model file"):
            tsw.saved_model.state(path.parent / "2")
        loaded = tf.saved_model.load(path)
        with pytest.raises(KeyError, match="no export 9"):
            tsw.saved_model.roll_back(path, 9)
        with pytest.raises(ValueError, match="number=0"):
            tsw.saved_model.roll_back(path, 0)
        with pytest.raises(ValueError, match="interval_secs=-1"):
            tsw.saved_model.watch(path, -1)
        with pytest.raises(ValueError, match="interval_secs=True"):
            tsw.saved_model.watch(path, True)
        del loaded

    def test_the_environment_is_checked(self, save, monkeypatch):
        path = save()
        monkeypatch.setenv("TFSWITCH_SERVING_WATCH_SECS", "often")
        with pytest.raises(Exception, match=r"WATCH_SECS.*'often'"):
            tf.saved_model.load(path)
        monkeypatch.setenv("TFSWITCH_SERVING_WATCH_SECS", "0.5")
        monkeypatch.setenv("TFSWITCH_SERVING_VERIFY_FIRST", "1")
        tf.saved_model.load(path)

    @pytest.mark.skipif(IS_LEGACY, reason="sparse inputs as Keras 3 has them")
    def test_sparse_inputs_are_refused(self, save):
        ids = keras.Input((5,), dtype="int64", sparse=True, name="ids")
        layer = tsw.keras.DynamicEmbedding(2, combiner="sum")
        with pytest.raises(ValueError, match="'ids' is sparse or ragged"):
            save(model=keras.Model(ids, layer(ids)), inputs=None)
