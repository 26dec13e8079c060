"""Programs of Keras with an `Embedding`, and with a `DynamicEmbedding`.

docs/keras_compatibility.md has a row for each of these tests.
"""

import copy
import functools
import pickle
import sys
import types
import warnings

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import struct_pb2

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch.keras._backend import IS_LEGACY, VERSION, keras

VOCABULARY, DIM, COLUMNS, BATCH = 39, 4, 3, 12

only_keras3 = pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")
# Keras 3.9 has ragged inputs, and its own test of layers does not.
with_ragged_inputs = pytest.mark.skipif(
    not IS_LEGACY and VERSION < (3, 10), reason="of Keras 3.10"
)

pytestmark = pytest.mark.usefixtures("embedded", "fresh_keras")


def first_rows():
    return (
        np.random.default_rng(1)
        .normal(scale=0.3, size=(VOCABULARY, DIM))
        .astype(np.float32)
    )


def make_data(seed=0, *, repeats=False):
    """96 examples. A batch has an id twice only with `repeats`."""
    draw = np.random.default_rng(seed)
    batch = BATCH * COLUMNS
    ids = np.concatenate(
        [draw.choice(VOCABULARY, batch, replace=repeats) for _ in range(8)]
    ).reshape(-1, COLUMNS)
    return ids, (ids.sum(axis=1, keepdims=True) % 2).astype(np.float32)


def dense(**kwargs):
    """A layer that begins alike, whatever was drawn before."""
    seeded = keras.initializers.GlorotUniform(seed=7)
    return keras.layers.Dense(1, kernel_initializer=seeded, **kwargs)


def make_embedding(kind, **kwargs):
    """A layer with the same first rows as the other kind's."""
    layers = {
        "keras": keras.layers.Embedding,
        "ours": tsw.keras.DynamicEmbedding,
    }
    if IS_LEGACY and kind == "keras":
        rows = first_rows()
        kwargs["embeddings_initializer"] = keras.initializers.Constant(rows)
    else:
        kwargs["weights"] = [first_rows()]
    return layers[kind](VOCABULARY, DIM, name="rows", **kwargs)


@keras.saving.register_keras_serializable(package="compatibility")
class Subclassed(keras.Model):
    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.rows = make_embedding(kind)
        self.flat = keras.layers.Flatten()
        self.dense = dense()

    def call(self, ids, training=None):
        return self.dense(self.flat(self.rows(ids, training=training)))

    def get_config(self):
        return {"kind": self.kind, "name": self.name}


def functional(kind, **kwargs):
    ids = keras.Input((COLUMNS,), dtype="int64")
    flat = keras.layers.Flatten()(make_embedding(kind, **kwargs)(ids))
    return keras.Model(ids, dense(dtype="float32")(flat))


def sequential(kind):
    # An Embedding of tf_keras asks for one column after another without.
    first = [keras.Input((COLUMNS,), dtype="int64")] if IS_LEGACY else []
    return keras.Sequential(
        [*first, make_embedding(kind), keras.layers.Flatten(), dense()]
    )


def nested(kind):
    ids = keras.Input((COLUMNS,), dtype="int64")
    return keras.Model(ids, dense()(functional(kind)(ids)))


FORMS = {
    "functional": functional,
    "sequential": sequential,
    "subclassed": Subclassed,
    "nested": nested,
}


def compiled(kind, form=functional, optimizer=None, **kwargs):
    """A model whose weights and rows are those of the other kind's."""
    keras.utils.set_random_seed(5)
    model = form(kind)
    optimizer = optimizer or (lambda: keras.optimizers.Adagrad(0.3))
    model.compile(optimizer(), "mse", **kwargs)
    return model


def predictions(model):
    return np.asarray(model(make_data(seed=9)[0], training=False))


def both(train, *args, **kwargs):
    """Trains a model of each kind; returns both, which must predict alike."""
    models = []
    results = []
    for kind in ("keras", "ours"):
        model = compiled(kind, *args, **kwargs)
        models.append(model)
        results.append(train(model))
    assert_alike(results[1], results[0])
    assert_alike(predictions(models[1]), predictions(models[0]))
    return models


def assert_alike(ours, expected):
    np.testing.assert_allclose(
        np.asarray(ours, np.float64),
        np.asarray(expected, np.float64),
        rtol=2e-4,
        atol=2e-5,
    )


def fit(model, epochs=2, seed=0, repeats=False, **kwargs):
    ids, labels = make_data(seed, repeats=repeats)
    kwargs = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(ids, labels, epochs=epochs, **kwargs).history["loss"]


def steps(model, epochs=2, seed=0, repeats=False):
    """The steps of `fit`, in a third of its time."""
    ids, labels = make_data(seed, repeats=repeats)
    losses = [
        model.train_on_batch(ids[i : i + BATCH], labels[i : i + BATCH])
        for _ in range(epochs)
        for i in range(0, 96, BATCH)
    ]
    return [float(np.asarray(loss).ravel()[0]) for loss in losses]


def in_a_loop(model, function=lambda step: step):
    ids, labels = make_data()

    def step(ids, labels):
        with tf.GradientTape() as tape:
            output = model(ids, training=True)
            loss = tf.reduce_mean((output - labels) ** 2) + sum(model.losses)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    step = function(step)
    return [
        float(step(tf.constant(ids[i : i + BATCH]), labels[i : i + BATCH]))
        for i in range(0, 96, BATCH)
    ]


# --- Ways to train ----------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_fit_of_each_form_of_model(form):
    both(fit, FORMS[form])


@pytest.mark.parametrize(
    "train",
    [steps, in_a_loop, lambda m: in_a_loop(m, tf.function)],
    ids=["train_on_batch", "eager_loop", "traced_loop"],
)
def test_other_ways_to_train(train):
    both(train)


@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"steps_per_execution": 3}], ids=str
)
def test_options_of_compile(options):
    both(fit, **options)


def test_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_float16")
    models = [compiled(kind) for kind in ("keras", "ours")]
    losses = [steps(model) for model in models]

    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)
    np.testing.assert_allclose(*map(predictions, models), atol=0.02)


def test_a_distribution_strategy():
    for_each = []
    for kind in ("keras", "ours"):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = compiled(kind)
        for_each.append((fit(model), predictions(model)))
    assert_alike(for_each[1][0], for_each[0][0])
    assert_alike(for_each[1][1], for_each[0][1])


def test_training_on_servers():
    with running_cluster(2):
        both(fit, Subclassed)


# --- The optimizer of the model ---------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)
    ),
    "clipnorm": lambda: keras.optimizers.SGD(0.3, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.3, clipvalue=0.005),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.3, global_clipnorm=0.05),
}
if not IS_LEGACY:
    OPTIMIZERS |= {
        "accumulation": lambda: keras.optimizers.SGD(
            0.3, gradient_accumulation_steps=3
        ),
        "clipped_accumulation": lambda: keras.optimizers.SGD(
            0.3, gradient_accumulation_steps=2, global_clipnorm=0.05
        ),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_learn_as_the_compiled_optimizer_does(name):
    where = 2 * (list(OPTIMIZERS).index(name) % 2)
    # Keras 3 adds up the squares of an id that a batch has twice; tables, as
    # tf_keras, square its sum.
    repeats = name != "adagrad"
    with running_cluster(where):
        both(lambda m: steps(m, repeats=repeats), functional, OPTIMIZERS[name])


@only_keras3
def test_a_loss_scale_factor_does_not_change_the_step():
    """Keras 3 itself fails here, as it cannot divide the sparse gradient."""
    plain, scaled = (
        compiled(
            "ours",
            optimizer=lambda factor=factor: keras.optimizers.SGD(
                0.1, loss_scale_factor=factor
            ),
        )
        for factor in (None, 8.0)
    )

    assert_alike(steps(scaled), steps(plain))
    assert_alike(predictions(scaled), predictions(plain))


def fit_all_ids(model, epochs=1):
    ids = np.arange(VOCABULARY).reshape(-1, COLUMNS)
    labels = (ids.sum(axis=1, keepdims=True) % 2).astype(np.float32)
    history = model.fit(ids, labels, epochs=epochs, batch_size=64, verbose=0)
    return history.history["loss"]


def test_lion_steps_alike_when_each_batch_has_all_ids():
    both(
        lambda model: fit_all_ids(model, epochs=3),
        functional,
        lambda: keras.optimizers.Lion(0.01),
    )


def test_rows_of_ftrl_stay_where_their_gradients_have_brought_them():
    both(
        lambda model: fit_all_ids(model) + steps(model),
        functional,
        lambda: keras.optimizers.Ftrl(0.3, l1_regularization_strength=0.01),
    )


@pytest.mark.parametrize(
    ("make", "message", "remedy"),
    [
        (
            lambda: keras.optimizers.SGD(use_ema=True),
            "use_ema",
            "with an optimizer of their own",
        ),
        (
            lambda: keras.optimizers.Nadam(),
            "Keras SGD, Adagrad, Adam",
            "an `optimizer` of its own",
        ),
    ],
)
def test_what_rows_cannot_follow_is_refused_by_name(make, message, remedy):
    model = compiled("ours", optimizer=make)

    with pytest.raises(ValueError, match=message) as refusal:
        steps(model)

    assert remedy in str(refusal.value)


MOVE_OTHER_ROWS = {
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "momentum_with_decay": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, weight_decay=0.1
    ),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
}


@pytest.mark.parametrize("name", MOVE_OTHER_ROWS)
def test_all_rows_move_as_those_of_a_variable(name):
    both(steps, functional, MOVE_OTHER_ROWS[name])


@pytest.mark.parametrize(
    ("make", "arguments", "reason"),
    [
        (lambda: keras.optimizers.SGD(0.1), {}, None),
        (lambda: keras.optimizers.Adagrad(0.1), {}, None),
        (lambda: keras.optimizers.Ftrl(0.1), {}, None),
        (lambda: keras.optimizers.AdamW(0.1), {"update": "sparse"}, None),
        (lambda: keras.optimizers.Lion(0.1), {}, "dense updates of Lion"),
        (
            lambda: keras.optimizers.Ftrl(
                keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)
            ),
            {},
            "dense updates of Ftrl",
        ),
        (
            lambda: keras.optimizers.Adam(0.1),
            {"embeddings_regularizer": keras.regularizers.L2(0.1)},
            "with L2",
        ),
    ],
)
def test_other_rows_stay_where_they_would_or_where_it_is_said(
    make, arguments, reason
):
    model = compiled(
        "ours", lambda kind: functional(kind, **arguments), optimizer=make
    )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model)

    said = [str(w.message) for w in caught if "its batch alone" in str(w)]
    assert len(said) == (reason is not None)
    assert all("'rows'" in text and str(reason) in text for text in said)
    assert model.get_layer("rows").table.update == "sparse"


@pytest.mark.parametrize("where", [0, 2], ids=["embedded", "two_servers"])
def test_dense_updates_stay_dense_whoever_decides_the_optimizer(where):
    with running_cluster(where):
        first = functional("ours", update="dense")
        if where == 0:
            predictions(first)  # Makes the table, with Adam.
        first.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        steps(first)
        second = functional("ours", update="dense")
        predictions(second)  # On servers it finds the table.

        for model in (first, second):
            table = model.get_layer("rows").table
            (info,) = table._cluster._list(table.name)
            assert info["config"]["optimizer"]["is_dense"]
        if where:
            np.testing.assert_array_equal(
                second.get_layer("rows").table.lookup([1]),
                first.get_layer("rows").table.lookup([1]),
            )


# Uses of rows that a program may make before it trains them.
FIRST_USES = {
    "predict": lambda model: model.predict(make_data()[0], verbose=0),
    "predict of another model": lambda model: predictions(functional("ours")),
    "size": lambda model: model.get_layer("rows").table.size(),
    "rule": lambda model: model.get_layer("rows").table.optimizer,
    "weights": lambda model: model.set_weights(model.get_weights()),
    "assign": lambda model: model.get_layer("rows").table.assign(
        np.arange(VOCABULARY), first_rows()
    ),
    "erase": lambda model: model.get_layer("rows").table.remove([VOCABULARY]),
}


@functools.cache
def first_losses_of_keras():
    return steps(compiled("keras"))


@pytest.mark.parametrize(
    ("use", "where"),
    [*((use, 2) for use in FIRST_USES), ("predict", 0), ("assign", 0)],
)
def test_the_optimizer_is_open_until_the_first_step(use, where):
    expected = first_losses_of_keras()
    keras.utils.set_random_seed(5)
    with running_cluster(where):
        model = functional("ours")
        FIRST_USES[use](model)
        model.compile(keras.optimizers.Adagrad(0.3), "mse")

        losses = steps(model)

        assert_alike(losses, expected)
        assert isinstance(
            model.get_layer("rows").table.optimizer, tsw.optimizers.Adagrad
        )


def test_a_push_by_hand_chooses_the_optimizer_for_all_processes():
    with running_cluster(2):
        first, second = (
            tsw.keras.DynamicEmbedding(DIM, name="rows").table for _ in range(2)
        )
        first.push([1], np.ones((1, DIM)))
        model = compiled("ours")

        with pytest.raises(ValueError, match="'rows' is on servers, where"):
            steps(model)

        second.push([1], np.ones((1, DIM)))
        assert second.iterations == 1


@pytest.mark.parametrize("where", [0, 2])
def test_a_dropped_table_without_an_optimizer_is_not_made_again(where):
    with running_cluster(where) as cluster:
        table = tsw.keras.DynamicEmbedding(DIM, name="rows").table
        table.drop()

        assert isinstance(table.optimizer, tsw.optimizers.Adam)
        with pytest.raises(KeyError, match="no table 'rows'"):
            table.push([1], np.ones((1, DIM)))

        assert not cluster.tables()


def test_an_optimizer_that_another_process_chose_is_found():
    with running_cluster(2):
        present = tsw.keras.DynamicEmbedding(DIM, name="rows").table
        steps(compiled("ours"))

        chosen = present.optimizer

        assert isinstance(chosen, tsw.optimizers.Adagrad)
        assert present.export_rows()[0].size


def test_compiling_again_on_servers_is_refused():
    with running_cluster(2):
        model = compiled("ours")
        steps(model)
        model.compile("sgd", "mse")

        with pytest.raises(ValueError, match="'rows' is on servers, where"):
            steps(model)


def test_rows_that_are_excluded_do_not_decay():
    def train(model):
        model.optimizer.exclude_from_weight_decay(
            var_list=model.get_layer("rows").trainable_variables
        )
        return steps(model)

    both(train, functional, lambda: keras.optimizers.SGD(0.1, weight_decay=0.1))


def test_compiling_again_goes_on_with_the_new_optimizer():
    def train(model):
        first = steps(model)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return first + steps(model)

    _, ours = both(train)
    assert isinstance(
        ours.get_layer("rows").table.optimizer, tsw.optimizers.SGD
    )


@pytest.mark.parametrize("restores", [False, True])
def test_a_new_optimizer_has_no_state_but_that_of_a_checkpoint(
    restores, tmp_path
):
    def momentum():
        return keras.optimizers.SGD(0.05, momentum=0.9)

    def train(model):
        first = steps(model)
        checkpoint = tf.train.Checkpoint(model=model, opt=model.optimizer)
        path = checkpoint.save(str(tmp_path / "checkpoint"))
        steps(model, seed=4)
        model.compile(momentum(), "mse")
        if restores:
            model.optimizer.build(model.trainable_variables)
            checkpoint = tf.train.Checkpoint(model=model, opt=model.optimizer)
            checkpoint.restore(path)
        return first + steps(model, seed=5)

    both(train, functional, momentum)


def test_predicting_before_compiling_does_not_decide_the_optimizer():
    model = functional("ours")
    predictions(model)
    model.compile("sgd", "mse")
    steps(model)

    assert isinstance(
        model.get_layer("rows").table.optimizer, tsw.optimizers.SGD
    )


def test_without_a_compiled_model_rows_learn_by_adam():
    layer = tsw.keras.DynamicEmbedding(DIM)
    layer(tf.constant([1]), training=True)

    assert layer.table.optimizer == tsw.optimizers.Adam()


def test_a_shared_optimizer_object_shares_its_rate():
    optimizer = keras.optimizers.SGD(0.5)
    layer = tsw.keras.DynamicEmbedding(DIM, optimizer=optimizer)
    layer.build((None,))
    optimizer.learning_rate = 0.25

    assert layer.table.learning_rate == 0.25


def test_models_whose_train_step_calls_their_parts_are_followed():
    class Tower(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = keras.Sequential(
                [make_embedding("ours"), keras.layers.Flatten()]
            )

        def train_step(self, data):
            ids, labels = data
            with tf.GradientTape() as tape:
                output = self.tower(ids, training=True)
                loss = tf.reduce_mean((output - labels) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    model = Tower()
    model.compile(keras.optimizers.Adagrad(0.125))
    ids, labels = make_data()
    model.fit(ids, labels, verbose=0)

    table = model.tower.layers[0].table
    assert isinstance(table.optimizer, tsw.optimizers.Adagrad)
    assert table.learning_rate == 0.125


# --- Callbacks --------------------------------------------------------------

CALLBACKS = {
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(
        lambda epoch: [0.3, 0.0, 0.1][epoch]
    ),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(
        monitor="loss", patience=0, min_delta=10.0, factor=0.1
    ),
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping(
        monitor="val_loss", patience=2, restore_best_weights=True
    ),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("LearningRateScheduler", 2),
        ("ReduceLROnPlateau", 0),
        ("EarlyStopping", 2),
    ],
)
def test_callbacks_act_on_rows(name, where):
    def train(model):
        validation = make_data(seed=2)
        return fit(
            model,
            epochs=3,
            callbacks=[CALLBACKS[name]()],
            validation_data=validation,
        )

    with running_cluster(where):
        both(train, functional, lambda: keras.optimizers.SGD(0.9))


def test_labels_that_are_nan_end_training_by_its_callback():
    def train(model):
        ids, labels = make_data()
        labels[40] = np.nan
        history = model.fit(
            ids,
            labels,
            batch_size=BATCH,
            shuffle=False,
            epochs=5,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )
        return len(history.epoch)

    epochs = [train(compiled(kind)) for kind in ("keras", "ours")]

    assert epochs == [1, 1]


def _through_a_file(model, path):
    model.save(path)
    return keras.models.load_model(path)


@pytest.mark.parametrize(
    "copied",
    [
        _through_a_file,
        lambda model, path: pickle.loads(pickle.dumps(model)),
        lambda model, path: copy.deepcopy(model),
    ],
    ids=["file", "pickle", "deepcopy"],
)
def test_ids_that_are_new_to_a_copied_model_begin_with_its_step(
    copied, tmp_path
):
    path = str(tmp_path / "model.keras")

    def train(model):
        labels = make_data()[1][:24]
        few = np.tile(np.arange(COLUMNS), (len(labels), 1))
        model.fit(few, labels, batch_size=1, shuffle=False, verbose=0)
        again = copied(model, path)
        return steps(again), predictions(again), predictions(model)

    expected, ours = (
        train(compiled(kind, optimizer=lambda: keras.optimizers.Adam(0.05)))
        for kind in ("keras", "ours")
    )

    for one, other in zip(ours, expected, strict=True):
        assert_alike(one, other)


def test_the_best_weights_are_restored():
    model = compiled("ours", optimizer=lambda: keras.optimizers.SGD(0.1))
    seen = []
    fit(
        model,
        epochs=4,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(predictions(model))
            ),
            # The first epoch is the best: what is less is worse.
            keras.callbacks.EarlyStopping(
                monitor="loss",
                mode="max",
                patience=2,
                restore_best_weights=True,
            ),
        ],
    )

    np.testing.assert_allclose(predictions(model), seen[0], rtol=1e-5)
    assert np.abs(seen[-1] - seen[0]).max() > 1e-3


def test_checkpoints_of_the_best_epoch(tmp_path):
    path = str(tmp_path / "best.weights.h5")

    def train(model):
        losses = fit(
            model,
            epochs=3,
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    path,
                    monitor="loss",
                    save_best_only=True,
                    save_weights_only=True,
                )
            ],
        )
        model.load_weights(path)
        return losses

    both(train)


@only_keras3
def test_backup_and_restore(tmp_path):
    def fail(epoch, logs):
        if epoch == 1:
            raise ZeroDivisionError

    def train(model):
        backup = str(tmp_path / model.get_layer("rows").__class__.__name__)
        with pytest.raises(ZeroDivisionError):
            fit(
                model,
                epochs=3,
                callbacks=[
                    keras.callbacks.BackupAndRestore(backup),
                    keras.callbacks.LambdaCallback(on_epoch_begin=fail),
                ],
            )
        return fit(
            model,
            epochs=3,
            callbacks=[keras.callbacks.BackupAndRestore(backup)],
        )

    both(train)


# --- Weights ----------------------------------------------------------------


def test_set_weights_brings_rows_of_another_model_and_time():
    model = compiled("ours")
    steps(model)
    before, weights = predictions(model), model.get_weights()
    size = model.get_layer("rows").table.size()
    steps(model, seed=4)
    model.get_layer("rows").table.assign([10**12], [[1.0] * DIM])
    assert np.abs(predictions(model) - before).max() > 1e-3

    model.set_weights(copy.deepcopy(weights))
    clone = keras.models.clone_model(model)
    clone.set_weights(pickle.loads(pickle.dumps(weights)))

    np.testing.assert_array_equal(predictions(model), before)
    np.testing.assert_array_equal(predictions(clone), before)
    assert model.get_layer("rows").table.size() == size


def test_too_many_rows_on_servers_are_not_copied(monkeypatch):
    monkeypatch.setattr("tfswitch.keras._weights._MAX_BYTES_FROM_SERVERS", 100)
    with running_cluster(2):
        model = compiled("ours")
        steps(model)

        with pytest.raises(ValueError, match=r"Cluster\.save"):
            model.get_weights()


def test_weights_without_rows_are_refused():
    model = compiled("ours")
    steps(model)
    doubled = [2 * each for each in model.get_weights()]

    with pytest.raises(ValueError, match=r"'rows'.*carries no rows"):
        model.set_weights(doubled)


def test_set_weights_keeps_the_state_of_rows():
    def train(model):
        steps(model)
        weights = model.get_weights()
        steps(model, seed=4)
        model.set_weights(weights)
        return steps(model)

    both(train)


# --- Files ------------------------------------------------------------------


@pytest.mark.parametrize("form", ["functional", "subclassed", "nested"])
def test_a_saved_model_comes_back_and_goes_on(form, tmp_path):
    def train(model):
        steps(model)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(
            predictions(loaded), predictions(model), rtol=1e-5, atol=1e-6
        )
        if IS_LEGACY and form == "subclassed":
            return []  # It loses the state of the optimizer.
        return steps(loaded)

    both(train, FORMS[form])


def test_a_checkpoint_of_tensorflow_has_the_rows(tmp_path):
    model = compiled("ours")
    steps(model)
    before = predictions(model)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    steps(model, seed=4)

    tf.train.Checkpoint(model=model).restore(path)

    np.testing.assert_array_equal(predictions(model), before)


def test_rows_on_servers_are_not_lost_in_silence(tmp_path):
    path = tmp_path / "model.keras"
    with running_cluster(2):
        model = compiled("ours")
        steps(model)
        with pytest.warns(UserWarning, match="do not go into the file"):
            model.save(path)

    with pytest.raises((RuntimeError, ValueError), match="load_without_rows"):
        keras.models.load_model(path)
    with tsw.keras.load_without_rows():
        keras.models.load_model(path)


def test_loading_does_not_replace_the_rows_of_a_live_model(tmp_path):
    ids = keras.Input((COLUMNS,), dtype="int64")
    layer = tsw.keras.DynamicEmbedding(DIM, table="shared", name="rows")
    output = dense()(keras.layers.Flatten()(layer(ids)))
    model = keras.Model(ids, output)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    steps(model)
    model.save(tmp_path / "model.keras")
    then = predictions(model)
    steps(model, seed=4)
    now = predictions(model)

    with pytest.raises(ValueError, match="'shared' was there before"):
        keras.models.load_model(tmp_path / "model.keras")

    np.testing.assert_array_equal(predictions(model), now)
    with tsw.connect("local://beside"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(predictions(loaded), then, rtol=1e-5)


def test_exports_of_keras_say_what_to_use(tmp_path):
    model = compiled("ours")
    steps(model)

    with pytest.raises(ValueError, match=r"tfswitch\.saved_model\.save"):
        model.export(str(tmp_path / "exported"))
    with pytest.raises(ValueError, match=r"tfswitch\.saved_model\.save"):
        tf.saved_model.save(model, str(tmp_path / "saved"))


def test_converters_say_what_to_use():
    model = compiled("ours")
    steps(model)
    # As tf2onnx does, which is no requirement.
    tf2onnx = types.ModuleType("tf2onnx.convert")
    trace = "def trace(model, spec): return model.get_concrete_function(spec)"
    exec(trace, tf2onnx.__dict__)

    spec = tf.TensorSpec([None, COLUMNS], tf.int64)
    with pytest.raises(ValueError, match=r"tfswitch\.saved_model\.save"):
        tf2onnx.trace(tf.function(model), spec)
    lite = tf.lite.TFLiteConverter.from_keras_model(model)
    with (
        pytest.warns(UserWarning, match=r"tfswitch\.saved_model\.save"),
        # It drops the layer's error, and with Keras 3 raises its own. The type
        # depends on the version.
        pytest.raises((ValueError, TypeError, AttributeError)),
    ):
        lite.convert()


def test_tensorboard_says_that_its_projector_has_no_rows(tmp_path, monkeypatch):
    # In place of a package that is no requirement: any message will do.
    plugins = types.ModuleType("tensorboard.plugins")
    plugins.projector = types.SimpleNamespace(ProjectorConfig=struct_pb2.Struct)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("t"))
    monkeypatch.setitem(sys.modules, "tensorboard.plugins", plugins)
    callback = keras.callbacks.TensorBoard(tmp_path, embeddings_freq=1)

    with pytest.warns(
        UserWarning, match="not those of layer 'rows'.*write_projector"
    ):
        callback.set_model(compiled("ours"))


@pytest.mark.parametrize("kind", ["keras", "ours"])
def test_a_layer_and_an_input_of_one_name_are_refused(kind):
    ids = keras.Input((COLUMNS,), dtype="int64", name="rows")

    with pytest.raises(ValueError, match='"rows" is used 2 times'):
        keras.Model(ids, make_embedding(kind)(ids))


def test_a_table_may_have_the_name_of_an_input():
    ids = keras.Input((COLUMNS,), dtype="int64", name="user")
    layer = tsw.keras.DynamicEmbedding(DIM, table="user")

    keras.Model(ids, layer(ids, training=True))

    assert layer.table.name == "user"


# --- Masks and ids ---------------------------------------------------------


def test_later_layers_get_the_mask_of_embedding():
    ids = np.array([[1, 0, 2]])
    masks = [
        np.asarray(make_embedding(kind, mask_zero=True).compute_mask(ids))
        for kind in ("keras", "ours")
    ]

    np.testing.assert_array_equal(masks[1], masks[0])


def test_any_id_gets_a_row_whatever_input_dim_says():
    layer = tsw.keras.DynamicEmbedding(4, DIM)
    layer(tf.constant([-1, 4, 10**12], tf.int64), training=True)

    assert layer.table.size() == 3


# --- Names and seeds --------------------------------------------------------


def test_layers_without_names_do_not_meet_on_servers():
    with running_cluster(2):
        layer = tsw.keras.DynamicEmbedding(DIM)
        with pytest.raises(ValueError, match="Pass `name` or `table`"):
            layer(tf.constant([1]))


def first_row(name, seed=None):
    layer = tsw.keras.DynamicEmbedding(DIM, name=name, seed=seed)
    return layer(tf.constant([5]), training=True).numpy()


def test_first_rows_go_by_name_and_seed_and_repeat():
    keras.utils.set_random_seed(1)
    user, item = first_row("user"), first_row("item")
    again = first_row("user")
    keras.utils.set_random_seed(2)
    other = first_row("user")

    np.testing.assert_array_equal(user, again)
    assert not np.array_equal(user, item)
    assert not np.array_equal(user, other)
    np.testing.assert_array_equal(
        first_row("a", seed=7), first_row("b", seed=7)
    )


# --- Keras's own tests of an Embedding ---------------------------------------


@only_keras3
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"input_dtype": "int32"}),
        (
            {"mask_zero": True},
            {"input_dtype": "int64", "supports_masking": True},
        ),
        pytest.param(
            {},
            {
                "input_ragged": True,
                "expected_output_shape": (2, None, 4),
                "expected_output_ragged": True,
            },
            marks=with_ragged_inputs,
        ),
    ],
    ids=["basics", "mask_zero", "ragged"],
)
def test_the_layer_test_of_keras(arguments, expected):
    """Shapes, dtypes, config, symbolic calls, training, mixed precision."""
    from keras.src.testing import test_case

    class LayerTest(test_case.TestCase):
        def test_layer(self):
            self.run_layer_test(
                tsw.keras.DynamicEmbedding,
                {"input_dim": 5, "output_dim": 4, **arguments},
                **{
                    "input_shape": (2, 3),
                    "input_dtype": "int32",
                    "expected_output_shape": (2, 3, 4),
                    "expected_num_trainable_weights": 1,
                    "expected_num_non_trainable_weights": 0,
                    "expected_num_seed_generators": 0,
                    "expected_num_losses": 0,
                    "supports_masking": False,
                    **expected,
                },
            )

    LayerTest("test_layer").debug()


@only_keras3
def test_parts_of_keras_that_change_a_matrix_are_refused():
    layer = tsw.keras.DynamicEmbedding(10, DIM)
    layer.build()

    with pytest.raises(NotImplementedError, match="quantize"):
        layer.quantize("int8")
    with pytest.raises(AttributeError, match="enable_lora"):
        layer.enable_lora(2)
    with pytest.raises(ValueError, match="sparse ids need a combiner"):
        layer(tf.SparseTensor([[0, 0], [1, 2]], [2, 1], (2, 3)))


# --- Arguments of Embedding -------------------------------------------------


def test_non_negativity_and_l2_are_options_of_the_rows():
    layer = tsw.keras.DynamicEmbedding(
        VOCABULARY,
        DIM,
        embeddings_regularizer=keras.regularizers.L2(0.25),
        embeddings_constraint="non_neg",
        optimizer="sgd",
    )
    assert (layer._spec.optimizer.l2, layer._spec.optimizer.min_weight) == (
        0.5,
        0.0,
    )
    again = type(layer).from_config(layer.get_config())
    assert again._spec.initializer == layer._spec.initializer


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.constraints.NonNeg(),
        lambda: keras.constraints.UnitNorm(axis=1),
        lambda: keras.constraints.MaxNorm(0.4, axis=1),
        lambda: keras.constraints.MinMaxNorm(0.5, 0.6, axis=-1),
    ],
    ids=["NonNeg", "UnitNorm", "MaxNorm", "MinMaxNorm"],
)
def test_constraints_hold_as_those_of_a_variable(make):
    def form(kind):
        dense = {"update": "dense"} if kind == "ours" else {}
        return functional(kind, embeddings_constraint=make(), **dense)

    both(lambda m: steps(m, repeats=True), form, OPTIMIZERS["sgd"])


@pytest.mark.parametrize(
    "kind", ["HeNormal", "LecunUniform", "GlorotUniform", "VarianceScaling"]
)
def test_initializers_that_go_by_the_number_of_ids(kind):
    make = getattr(keras.initializers, kind)
    keras_rows = np.asarray(make(seed=1)((9000, DIM)))
    layer = tsw.keras.DynamicEmbedding(
        9000, DIM, embeddings_initializer=make(), trainable=True
    )
    again = type(layer).from_config(layer.get_config())
    rows = layer(tf.range(9000), training=True).numpy()

    np.testing.assert_allclose(rows.std(), keras_rows.std(), rtol=0.02)
    np.testing.assert_allclose(rows.max(), keras_rows.max(), rtol=0.02)
    assert again._spec.initializer == layer._spec.initializer


def test_a_setting_may_have_the_name_that_it_has_for_a_table():
    layer = tsw.keras.DynamicEmbedding(DIM, initializer="ones")

    rows = layer(tf.constant([1]), training=True)
    np.testing.assert_array_equal(rows, np.ones((1, DIM)))
    with pytest.raises(TypeError, match="`embeddings_initializer` and `init"):
        tsw.keras.DynamicEmbedding(
            DIM, initializer="ones", embeddings_initializer="zeros"
        )


def test_a_constant_matrix_gives_the_first_rows():
    layer = tsw.keras.DynamicEmbedding(
        VOCABULARY,
        DIM,
        embeddings_initializer=keras.initializers.Constant(first_rows()),
        trainable=False,
    )
    np.testing.assert_array_equal(layer(tf.range(VOCABULARY)), first_rows())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings_regularizer": "l1"}, "keras.regularizers.L2"),
        ({"embeddings_constraint": "unit_norm"}, r"UnitNorm\(axis=1\)"),
        (
            {"embeddings_constraint": keras.constraints.MinMaxNorm(rate=0.5)},
            "rate 1",
        ),
        ({"sparse": True}, "`sparse`"),
        ({"lora_rank": 2}, "`lora_rank`"),
        ({"weights": [np.zeros((3, DIM + 1))]}, "for each id from 0"),
        ({"input_dim": 0}, "`input_dim`"),
        ({"embeddings_initializer": "he_normal"}, "as `input_dim`"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.keras.DynamicEmbedding(output_dim=DIM, **arguments)


def test_floats_are_taken_as_long_as_they_tell_ids_apart():
    model = keras.Sequential(
        [tsw.keras.DynamicEmbedding(DIM), keras.layers.Flatten()]
    )
    model.compile("sgd", "mse")
    ids, _ = make_data()
    model.fit(ids.astype("int32"), np.zeros((96, 12)), verbose=0)
    layer = tsw.keras.DynamicEmbedding(DIM)

    assert model.layers[0].table.size() == len(np.unique(ids))
    with pytest.raises(tf.errors.InvalidArgumentError, match='dtype="int64"'):
        layer(tf.constant([2.0**24]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="float32"):
        layer(tf.constant([0.5]))


def test_embeddings_is_no_variable_and_says_what_there_is():
    with pytest.raises(AttributeError, match=r"layer\.table\.lookup"):
        _ = tsw.keras.DynamicEmbedding(DIM).embeddings


def test_the_summary_shows_rows_and_its_total_is_that_of_the_weights():
    model = compiled("ours")
    steps(model)
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))

    shown = f"{model.get_layer('rows').count_params():,}"
    assert shown.startswith(f"0 (and {VOCABULARY} rows, ")
    assert "0 (and" in "".join(lines)
    assert model.count_params() == 13


def test_a_loop_that_does_not_say_training_trains_as_well():
    def train(model):
        ids, labels = make_data()
        for i in range(0, 96, BATCH):
            with tf.GradientTape() as tape:
                output = model(ids[i : i + BATCH])
                loss = tf.reduce_mean((output - labels[i : i + BATCH]) ** 2)
            weights = model.trainable_variables
            gradients = tape.gradient(loss, weights)
            model.optimizer.apply_gradients(
                zip(gradients, weights, strict=True)
            )
        return float(loss)

    _, ours = both(train)
    size = ours.get_layer("rows").table.size()
    ours(np.full((1, COLUMNS), 10**6))  # Without a tape it is a prediction.
    assert ours.get_layer("rows").table.size() == size


def test_a_tape_with_training_false_is_warned_of_once_for_a_model():
    for _ in range(2):  # Each model that is called so.
        ids = keras.Input((), dtype="int64")
        outputs = [tsw.keras.DynamicEmbedding(DIM)(ids) for _ in range(3)]
        model = keras.Model(ids, outputs)
        with pytest.warns(UserWarning) as caught:
            for _ in range(2):
                with tf.GradientTape():
                    model(tf.constant([1]), training=False)

        (warning,) = caught
        assert "dynamic_embedding" in str(warning.message)
        assert "`training=True`" in str(warning.message)
