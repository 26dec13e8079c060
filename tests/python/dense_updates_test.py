"""Tables with `update="dense"` against `keras.layers.Embedding`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw

NUM_IDS = 20
DIM = 4
STEPS = 40


def make_rates() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.ExponentialDecay(0.05, 7, 0.9)


# By name: the optimizer of the Keras model, its arguments, the table's.
CASES = {
    "sgd": ("SGD", {}, tsw.optimizers.SGD()),
    "momentum": (
        *("SGD", {"momentum": 0.9}),
        tsw.optimizers.SGD(momentum=0.9),
    ),
    "nesterov": (
        *("SGD", {"momentum": 0.9, "nesterov": True}),
        tsw.optimizers.SGD(momentum=0.9, nesterov=True),
    ),
    "adagrad": ("Adagrad", {}, tsw.optimizers.Adagrad()),
    "adam": ("Adam", {}, tsw.optimizers.Adam()),
    "rmsprop": ("RMSprop", {}, tsw.optimizers.RMSprop()),
    "adadelta": ("Adadelta", {}, tsw.optimizers.Adadelta()),
    "amsgrad": ("Adam", {"amsgrad": True}, tsw.optimizers.AMSGrad()),
    "adamw": (
        *("AdamW", {"weight_decay": 0.1}),
        tsw.optimizers.AdamW(weight_decay=0.1),
    ),
    "adam with l2": ("Adam", {}, tsw.optimizers.Adam(l2=0.02)),
    "sgd with l2": ("SGD", {}, tsw.optimizers.SGD(l2=0.02)),
}


class KerasRows:
    """A Keras embedding that learns the gradients it is given."""

    def __init__(self, rows, optimizer, l2):
        self.variable = keras.Variable(rows)
        self.optimizer = optimizer
        self.l2 = l2

    def step(self, ids, gradients):
        with tf.GradientTape() as tape:
            rows = tf.gather(self.variable.value, ids)
            loss = tf.reduce_sum(rows * gradients)
            if self.l2:
                loss += self.l2 * tf.reduce_sum(self.variable.value**2)
        gradient = tape.gradient(loss, self.variable.value)
        self.optimizer.apply([tf.convert_to_tensor(gradient)], [self.variable])


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_a_keras_variable(make_cluster, name, tmp_path):
    cluster = make_cluster(2 * (list(CASES).index(name) % 2))
    theirs, arguments, own = CASES[name]
    rng = np.random.default_rng(1)
    schedule = make_rates()
    table = tsw.EmbeddingTable(
        f"dense {name}", DIM, optimizer=own, update="dense"
    )
    ids = np.arange(NUM_IDS)
    reference = KerasRows(
        table.lookup_or_create(ids).numpy(),
        getattr(keras.optimizers, theirs)(schedule, **arguments),
        own.l2 / 2,  # Keras's L2(x) is x w^2, with the gradient 2 x w.
    )

    for step in range(STEPS):
        if step == STEPS // 2:
            cluster.save(str(tmp_path))
            table.push([0], np.ones((1, DIM)), learning_rate=1.0)
            cluster.restore(str(tmp_path))
        batch = rng.choice(NUM_IDS, 3, replace=False)
        gradients = rng.normal(size=(3, DIM)).astype(np.float32)
        reference.step(batch, gradients)
        table.push(batch, gradients, learning_rate=float(schedule(float(step))))
        some = rng.choice(NUM_IDS, 2, replace=False)
        np.testing.assert_allclose(
            table.lookup(some).numpy(),
            reference.variable.numpy()[some],
            rtol=2e-5,
            atol=2e-6,
        )

    assert table.stats()["num_steps"] == STEPS
    np.testing.assert_allclose(
        table.lookup(ids).numpy(),
        reference.variable.numpy(),
        rtol=2e-5,
        atol=2e-6,
    )


def test_a_push_without_ids_is_a_step(cluster):
    table = tsw.EmbeddingTable(
        "idle",
        1,
        initializer="ones",
        optimizer=tsw.optimizers.SGD(0.1, momentum=0.5),
        update="dense",
    )
    table.push([7], [[1.0]])

    table.push([], np.zeros((0, 1), np.float32))

    assert table.stats()["num_steps"] == 2
    np.testing.assert_allclose(table.lookup([7]).numpy(), [[0.85]])


def test_an_unknown_way_of_updating_is_refused(embedded):
    with pytest.raises(ValueError, match="update='lazy'"):
        tsw.EmbeddingTable("lazy", DIM, update="lazy")


def test_rules_without_dense_updates_are_refused(embedded):
    with pytest.raises(ValueError, match=r"ftrl.*amsgrad"):
        tsw.EmbeddingTable(
            "dense ftrl", DIM, optimizer=tsw.optimizers.Ftrl(), update="dense"
        )


def test_a_table_has_one_way_of_updating(embedded):
    table = tsw.EmbeddingTable("one way", DIM, update="dense")
    assert table.update == "dense"
    with pytest.raises(ValueError, match="is_dense"):
        tsw.EmbeddingTable("one way", DIM)


def test_a_sparse_checkpoint_is_refused_by_a_dense_table(cluster, tmp_path):
    adam = tsw.optimizers.Adam()
    table = tsw.EmbeddingTable("kind", DIM, optimizer=adam)
    table.push([1], np.ones((1, DIM)))
    cluster.save(str(tmp_path))
    cluster.drop("kind")
    tsw.EmbeddingTable("kind", DIM, optimizer=adam, update="dense")

    with pytest.raises(RuntimeError, match="adam with dense updates"):
        cluster.restore(str(tmp_path))
