"""Changes that a program makes to gradients before it applies them reach rows.

Each program runs with `keras.layers.Embedding` and with `DynamicEmbedding`. The
gradient of the `Embedding` is summed by id when it is applied, as a table does
it; Keras 3 squares the parts of a repeated id one by one.
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfswitch as tsw
from tests.conftest import running_cluster
from tfswitch.keras._backend import IS_LEGACY, keras

VOCABULARY, DIM = 11, 3
IDS = tf.constant([[3, 5, 3], [7, 3, 10], [0, 1, 5], [7, 7, 2]], tf.int64)
OTHER_IDS = tf.constant([[1, 5, 4], [4, 3, 9], [0, 6, 5], [8, 8, 2]], tf.int64)
TARGETS = tf.constant([[0.5], [-1.0], [0.25], [2.0]])

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
}


class Program:
    """A model of one of the layers, and the loop around it."""

    def __init__(self, is_ours, optimizer="sgd"):
        keras.utils.set_random_seed(1)
        self.is_ours = is_ours
        rows = np.random.default_rng(0).normal(size=(VOCABULARY, DIM))
        if is_ours:
            table = tsw.EmbeddingTable(
                "rows",
                DIM,
                optimizer=tsw.optimizers.from_keras(OPTIMIZERS[optimizer]()),
            )
            table.assign(np.arange(VOCABULARY), rows.astype(np.float32))
            make = tsw.keras.DynamicEmbedding
            self.one, self.two = (make(DIM, table=table) for _ in range(2))
        else:
            self.one = self.two = keras.layers.Embedding(VOCABULARY, DIM)
        for layer in (self.one, self.two):
            layer.build((None, 3))
        if not is_ours:
            self.one.set_weights([rows.astype(np.float32)])
        # It begins alike, whatever was drawn before.
        seeded = keras.initializers.GlorotUniform(seed=7)
        self.dense = keras.layers.Dense(1, kernel_initializer=seeded)
        self.dense.build((None, 3 * DIM))
        self.optimizer = OPTIMIZERS[optimizer]()
        self.optimizer.build(self.variables)

    @property
    def variables(self):
        both = [*self.one.trainable_variables, *self.two.trainable_variables]
        distinct = {id(v): v for v in [*both, *self.dense.trainable_variables]}
        return list(distinct.values())

    def output(self, ids, layer=None):
        rows = (layer or self.one)(ids)
        return self.dense(tf.reshape(rows, [-1, 3 * DIM]))

    def loss(self, ids=IDS, layer=None):
        return tf.reduce_mean((self.output(ids, layer) - TARGETS) ** 2)

    def gradients(self, make_loss=None):
        with tf.GradientTape() as tape:
            loss = (make_loss or self.loss)()
        return tape.gradient(loss, self.variables)

    def apply(self, gradients, variables=None, optimizer=None):
        variables = self.variables if variables is None else variables
        pairs = [
            (self._summed(gradient), variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        if pairs:
            (optimizer or self.optimizer).apply_gradients(pairs)

    def _summed(self, gradient):
        if self.is_ours or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.convert_to_tensor(gradient)

    def state(self):
        if self.is_ours:
            rows = self.one.table.lookup(np.arange(VOCABULARY)).numpy()
        else:
            rows = self.one.get_weights()[0]
        return [rows, *self.dense.get_weights()]


def changed(gradient, function):
    """A gradient whose numbers went through a function, or None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def added(one, other):
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0),
            tf.concat([one.indices, other.indices], 0),
            one.dense_shape,
        )
    return one + other


def assert_alike(program, optimizer="sgd"):
    states = []
    for is_ours in (False, True):
        subject = Program(is_ours, optimizer)
        before = subject.state()
        program(subject)
        states.append(subject.state())
    for ours, expected in zip(states[1], states[0], strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    return max(
        np.abs(a - b).max() for a, b in zip(states[1], before, strict=True)
    )


def clip(p):
    for _ in range(3):
        p.apply(tf.clip_by_global_norm(p.gradients(), 0.1)[0])


def drop(p):
    for step in range(4):
        gradients = p.gradients()
        if step % 2:
            p.apply(gradients)


def accumulate(p):
    total = p.gradients()
    for ids in (OTHER_IDS, IDS):
        more = p.gradients(lambda ids=ids: p.loss(ids))
        total = [added(*pair) for pair in zip(total, more, strict=True)]
    p.apply([changed(g, lambda x: x / 3.0) for g in total])


def call_twice(p):
    p.apply(p.gradients(lambda: p.loss(IDS) + p.loss(OTHER_IDS)))


def two_layers_of_one_table(p):
    p.apply(p.gradients(lambda: p.loss(IDS) + p.loss(OTHER_IDS, p.two)))


def penalty(p):
    def loss():
        with tf.GradientTape() as inner:
            rows = p.one(IDS)
            inner.watch(rows)
            output = p.dense(tf.reshape(rows, [-1, 3 * DIM]))
        slope = inner.gradient(output, rows)
        return tf.reduce_mean((output - TARGETS) ** 2) + tf.reduce_sum(
            tf.reduce_sum(rows * slope, -1) ** 2
        )

    p.apply(p.gradients(loss))


def persistent_tape(p):
    with tf.GradientTape(persistent=True) as tape:
        loss = p.loss()
    for _ in range(2):
        p.apply(tape.gradient(loss, p.variables))


def a_function(p):
    @tf.function
    def step(ids):
        p.apply(tf.clip_by_global_norm(p.gradients(lambda: p.loss(ids)), 1)[0])

    step(IDS)
    step(OTHER_IDS)


def a_branch(p):
    @tf.function
    def step(which):
        def loss():
            return tf.cond(
                which, lambda: p.loss(IDS), lambda: p.loss(OTHER_IDS)
            )

        p.apply(p.gradients(loss))

    step(tf.constant(True))
    step(tf.constant(False))


def a_subset(p):
    rows, dense = p.one.trainable_variables, p.dense.trainable_variables
    for variables in (dense, rows):
        with tf.GradientTape() as tape:
            loss = p.loss()
        p.apply(tape.gradient(loss, variables), variables)


def two_optimizers(p):
    second = keras.optimizers.SGD(0.05, clipnorm=0.5)
    rows, dense = p.one.trainable_variables, p.dense.trainable_variables
    for _ in range(2):
        with tf.GradientTape(persistent=True) as tape:
            loss = p.loss()
        p.apply(tape.gradient(loss, rows), rows)
        p.apply(tape.gradient(loss, dense), dense, second)


def stop_gradient(p):
    def loss():
        return tf.reduce_mean(tf.stop_gradient(p.output(OTHER_IDS))) + p.loss()

    p.apply(p.gradients(loss))


def custom_gradient(p):
    @tf.custom_gradient
    def reversed_(x):
        return tf.identity(x), lambda upstream: -2.0 * upstream

    p.apply(
        p.gradients(
            lambda: tf.reduce_mean((reversed_(p.output(IDS)) - TARGETS) ** 2)
        )
    )


PROGRAMS = [
    clip,
    drop,
    accumulate,
    call_twice,
    two_layers_of_one_table,
    penalty,
    persistent_tape,
    a_function,
    a_branch,
    a_subset,
    two_optimizers,
    stop_gradient,
    custom_gradient,
]


WHERE = pytest.mark.parametrize("where", [0, 2], ids=["embedded", "two"])


@pytest.mark.parametrize(
    ("program", "where"),
    [
        *((program, 0) for program in PROGRAMS),
        # Pushes are the same for servers, but are sent in another way.
        *(
            (program, 2)
            for program in (clip, accumulate, two_layers_of_one_table)
        ),
    ],
    ids=lambda value: {0: "embedded", 2: "two"}.get(value) or value.__name__,
)
def test_rows_learn_as_those_of_an_embedding(program, where):
    with running_cluster(where):
        moved = assert_alike(program, "adagrad")

    assert moved > 1e-4


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "ids": st.lists(
                st.integers(0, VOCABULARY - 1), min_size=12, max_size=12
            ),
            "calls": st.sampled_from(["one", "twice", "both"]),
            "change": st.sampled_from(
                ["none", "scale", "clip", "clip_all", "hold", "drop", "read"]
            ),
            "freezes": st.booleans(),
        }
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.hypothesis
@settings(max_examples=15, deadline=None)
@given(steps=STEPS, optimizer=st.sampled_from(sorted(OPTIMIZERS)))
def test_random_loops_give_the_rows_of_an_embedding(steps, optimizer):
    def program(p):
        held = None
        for step in steps:
            p.one.trainable = p.two.trainable = not step["freezes"]
            ids = tf.reshape(tf.constant(step["ids"], tf.int64), [4, 3])

            def loss(step=step, ids=ids):
                second = p.two if step["calls"] == "both" else p.one
                more = 0.0
                if step["calls"] != "one":
                    more = p.loss(OTHER_IDS, second)
                return p.loss(ids) + more

            gradients = p.gradients(loss)
            change = step["change"]
            if change in ("drop", "read"):
                continue
            if change == "scale":
                gradients = [changed(g, lambda x: x * 0.25) for g in gradients]
            elif change == "clip":
                gradients = [
                    changed(g, lambda x: tf.clip_by_value(x, -0.1, 0.1))
                    for g in gradients
                ]
            elif change == "clip_all":
                gradients = tf.clip_by_global_norm(gradients, 0.2)[0]
            if change == "hold" and not step["freezes"] and held is None:
                held = gradients
                continue
            if held is not None and not step["freezes"]:
                gradients = list(map(added, held, gradients))
                held = None
            p.apply(gradients)

    with running_cluster(0):
        assert_alike(program, optimizer)


@pytest.fixture
def embedded():
    with running_cluster(0):
        yield


@WHERE
def test_reading_gradients_moves_no_row(where):
    with running_cluster(where):
        p = Program(is_ours=True)
        before = p.state()

        with tf.GradientTape(persistent=True) as tape:
            output = p.output(IDS)[:, 0]
        for _ in range(3):
            tape.gradient(output, p.variables)
        tape.jacobian(output, p.dense.trainable_variables[0])
        with pytest.raises(TypeError, match=r"leave its weight out of `tape.j"):
            tape.jacobian(output, p.one.trainable_variables[0])

        np.testing.assert_array_equal(p.state()[0], before[0])


@pytest.mark.usefixtures("embedded")
def test_an_optimizer_that_comes_back_after_another_is_refused():
    keras.utils.set_random_seed(1)
    layer = tsw.keras.DynamicEmbedding(DIM, name="shared")
    models = []
    for _ in range(2):
        model = keras.Sequential([layer, keras.layers.Flatten()])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        models.append(model)
    targets = np.zeros((4, 3 * DIM), np.float32)
    for model in models:
        model.train_on_batch(IDS, targets)

    # Its step is traced already.
    with pytest.raises(tf.errors.FailedPreconditionError, match="'shared'"):
        models[0].train_on_batch(IDS, targets)
    with pytest.raises(ValueError, match="'shared' learns by another"):
        models[0].fit(IDS, targets, verbose=0)
    models[1].train_on_batch(IDS, targets)


@pytest.mark.usefixtures("embedded")
def test_optimizers_without_state_may_take_turns():
    layer = tsw.keras.DynamicEmbedding(1, embeddings_initializer="zeros")
    rates = [1.0, 0.25, 1.0]
    optimizers = {rate: keras.optimizers.SGD(rate) for rate in rates}
    layer.build()
    for rate in rates:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([4])))
        weights = layer.trainable_variables
        optimizers[rate].apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )

    assert float(layer.table.lookup([4])[0, 0]) == -2.25


@pytest.mark.usefixtures("embedded")
@pytest.mark.skipif(IS_LEGACY, reason="a setting of Keras 3")
def test_shows_and_clicks_of_accumulated_gradients_count_each_once():
    layer = tsw.keras.DynamicEmbedding(
        1, statistics=tsw.statistics.ShowClick(), name="ad"
    )
    layer.build()
    optimizer = keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2, global_clipnorm=1e-3
    )
    for clicks in ([1.0, 0.0, 0.0], [0.0, 1.0, 1.0]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                layer(
                    tf.constant([8, 9, 8]),
                    shows=tf.constant([4.0, 2.0, 1.0]),
                    clicks=tf.constant(clicks),
                )
            )
        weights = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    usage = layer.table.usage([8, 9])
    np.testing.assert_array_equal(usage["show"], [10.0, 4.0])
    np.testing.assert_array_equal(usage["click"], [2.0, 1.0])
