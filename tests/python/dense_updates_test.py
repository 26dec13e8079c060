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


# Name, the optimizer of the Keras model, the table's, the L2 of Keras.
CASES = {
    "sgd": (
        lambda rate: keras.optimizers.SGD(rate),
        lambda: tsw.optimizers.SGD(),
        0.0,
    ),
    "momentum": (
        lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
        lambda: tsw.optimizers.SGD(momentum=0.9),
        0.0,
    ),
    "nesterov": (
        lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        lambda: tsw.optimizers.SGD(momentum=0.9, nesterov=True),
        0.0,
    ),
    "adagrad": (
        lambda rate: keras.optimizers.Adagrad(rate),
        lambda: tsw.optimizers.Adagrad(),
        0.0,
    ),
    "adam": (
        lambda rate: keras.optimizers.Adam(rate),
        lambda: tsw.optimizers.Adam(),
        0.0,
    ),
    "rmsprop": (
        lambda rate: keras.optimizers.RMSprop(rate),
        lambda: tsw.optimizers.RMSprop(),
        0.0,
    ),
    "adadelta": (
        lambda rate: keras.optimizers.Adadelta(rate),
        lambda: tsw.optimizers.Adadelta(),
        0.0,
    ),
    "amsgrad": (
        lambda rate: keras.optimizers.Adam(rate, amsgrad=True),
        lambda: tsw.optimizers.AMSGrad(),
        0.0,
    ),
    "adamw": (
        lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1),
        lambda: tsw.optimizers.AdamW(weight_decay=0.1),
        0.0,
    ),
    # Keras's L2(x) is x w^2, with the gradient 2 x w.
    "adam with l2": (
        lambda rate: keras.optimizers.Adam(rate),
        lambda: tsw.optimizers.Adam(l2=0.02),
        0.01,
    ),
    "sgd with l2": (
        lambda rate: keras.optimizers.SGD(rate),
        lambda: tsw.optimizers.SGD(l2=0.02),
        0.01,
    ),
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
    make_keras, make_own, l2 = CASES[name]
    rng = np.random.default_rng(1)
    schedule = make_rates()
    table = tsw.EmbeddingTable(
        f"dense {name}", DIM, optimizer=make_own(), update="dense"
    )
    ids = np.arange(NUM_IDS)
    reference = KerasRows(
        table.lookup_or_create(ids).numpy(), make_keras(schedule), l2
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


def test_rows_are_those_of_a_variable_after_a_reshard(make_cluster, tmp_path):
    rate = 0.05
    adam = tsw.optimizers.Adam(rate, l2=0.02)
    cluster = make_cluster(2)
    table = tsw.EmbeddingTable("moved", DIM, optimizer=adam, update="dense")
    ids = np.arange(NUM_IDS)
    whole = tsw.EmbeddingTable("whole", DIM, seed=table.seed)
    gradients = np.random.default_rng(3).normal(size=(10, 1, DIM))
    gradients = gradients.astype(np.float32)
    reference = KerasRows(
        whole.lookup_or_create(ids).numpy(), keras.optimizers.Adam(rate), 0.01
    )
    table.lookup_or_create(ids)
    for step in range(5):
        table.push([step], gradients[step])
        reference.step([step], gradients[step])
    cluster.save(str(tmp_path))

    cluster = make_cluster(3)
    table = tsw.EmbeddingTable("moved", DIM, optimizer=adam, update="dense")
    cluster.restore(str(tmp_path), tables=["moved"])
    for step in range(5, 10):
        table.push([step], gradients[step])
        reference.step([step], gradients[step])

    assert table.stats()["num_steps"] == 10
    np.testing.assert_allclose(
        table.lookup_or_create(ids).numpy(),
        reference.variable.numpy(),
        rtol=2e-5,
        atol=2e-6,
    )


def test_a_new_id_begins_undecayed(cluster):
    table = tsw.EmbeddingTable(
        "late",
        1,
        initializer="ones",
        optimizer=tsw.optimizers.AdamW(0.1, weight_decay=0.5),
        update="dense",
    )
    for _ in range(10):
        table.push([1], [[1.0]])

    assert table.lookup_or_create([7]).numpy() == 1.0

    table.push([1], [[1.0]])
    np.testing.assert_allclose(table.lookup([7]).numpy(), [[0.95]], rtol=1e-6)


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


def test_a_layer_learns_as_the_embedding_of_keras(embedded):
    ids = np.random.default_rng(2).integers(0, NUM_IDS, (96, 1))
    labels = (ids % 3 == 0).astype(np.float32)

    def train(layer):
        inputs = keras.Input((1,), dtype="int64")
        rows = keras.layers.Flatten()(layer(inputs))
        outputs = keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")(
            rows
        )
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
        model.fit(ids, labels, batch_size=8, shuffle=False, verbose=0)
        return layer

    own = tsw.keras.DynamicEmbedding(
        DIM, optimizer=tsw.optimizers.Adam(0.02, l2=0.002), update="dense"
    )
    assert own.get_config()["update"] == "dense"
    first = own.table.lookup_or_create(np.arange(NUM_IDS)).numpy()
    keras_layer = keras.layers.Embedding(
        NUM_IDS,
        DIM,
        embeddings_initializer=keras.initializers.Constant(first),
        # With it the gradient is dense, so that repeated ids are summed.
        embeddings_regularizer=keras.regularizers.L2(0.001),
    )

    train(own)
    train(keras_layer)

    np.testing.assert_allclose(
        own.table.lookup(np.arange(NUM_IDS)).numpy(),
        np.asarray(keras_layer.embeddings),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_sparse_checkpoint_is_refused_by_a_dense_table(cluster, tmp_path):
    adam = tsw.optimizers.Adam()
    table = tsw.EmbeddingTable("kind", DIM, optimizer=adam)
    table.push([1], np.ones((1, DIM)))
    cluster.save(str(tmp_path))
    cluster.drop("kind")
    tsw.EmbeddingTable("kind", DIM, optimizer=adam, update="dense")

    with pytest.raises(RuntimeError, match="adam with dense updates"):
        cluster.restore(str(tmp_path))
