"""Sampled softmax and NCE on tables, beside TensorFlow's on variables."""

import doctest
import os

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfswitch as tsw
from tfswitch.nn import sampled_losses, samplers

if os.environ.get("TF_USE_LEGACY_KERAS"):
    import tf_keras as keras
else:
    import keras

DIM = 3
NUM_CLASSES = 30
NUM_SAMPLED = 6
RATE = 0.5

LOSSES = [
    (tsw.nn.sampled_softmax_loss, tf.nn.sampled_softmax_loss),
    (tsw.nn.nce_loss, tf.nn.nce_loss),
]

# The ids of classes 0, 1, 2, ... in the table.
IDS = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, NUM_CLASSES)


def run_eagerly(function):
    return function


@pytest.fixture(params=[run_eagerly, tf.function], ids=["eager", "function"])
def mode(request):
    return request.param


@pytest.fixture(params=LOSSES, ids=["softmax", "nce"])
def loss_pair(request):
    return request.param


class Case:
    """The same values in tables and in variables, and a batch."""

    def __init__(self, num_true=1, has_biases=True):
        rng = np.random.default_rng(num_true)
        self.weights = tf.Variable(
            rng.normal(size=(NUM_CLASSES, DIM)), dtype="float32"
        )
        self.biases = tf.Variable(rng.normal(size=NUM_CLASSES), dtype="float32")
        if not has_biases:
            self.biases.assign(tf.zeros([NUM_CLASSES]))
        # Repeated labels, within an example too.
        self.classes = rng.integers(0, 8, (5, num_true))
        self.labels = IDS[self.classes]
        self.inputs = tf.Variable(rng.normal(size=(5, DIM)), dtype="float32")
        self.table = self._table("weights", self.weights.numpy())
        self.bias_table = (
            self._table("biases", self.biases.numpy()[:, np.newaxis])
            if has_biases
            else None
        )
        sampler = tsw.nn.LogUniformSampler(NUM_CLASSES)
        self.sampled = sampler.sample(self.classes, NUM_SAMPLED, seed=3)
        self.sampled_ids = self.sampled._replace(
            sampled_candidates=IDS[self.sampled.sampled_candidates]
        )

    @staticmethod
    def _table(name, values):
        table = tsw.EmbeddingTable(
            name, values.shape[1], optimizer=tsw.optimizers.SGD(RATE)
        )
        table.assign(IDS, values)
        return table

    def step_of_tables(self, loss, mode, optimizer=None, **arguments):
        tables = [self.table]
        if self.bias_table is not None:
            tables.append(self.bias_table)
        weights = [table.weight for table in tables]

        @mode
        def step():
            with tf.GradientTape() as tape:
                losses = loss(
                    weights=self.table,
                    biases=self.bias_table,
                    labels=self.labels,
                    inputs=self.inputs,
                    num_sampled=NUM_SAMPLED,
                    sampled_values=self.sampled_ids,
                    **arguments,
                )
                mean = tf.reduce_mean(losses)
            gradient, *of_rows = tape.gradient(mean, [self.inputs, *weights])
            if not arguments.get("training", True):
                assert of_rows == [None] * len(tables)
            elif optimizer is not None:
                optimizer.apply_gradients(zip(of_rows, weights, strict=True))
            else:
                for table, slices in zip(tables, of_rows, strict=True):
                    table.apply_gradients(slices)
            return losses, gradient

        return step()

    def step_of_variables(self, loss, **arguments):
        with tf.GradientTape() as tape:
            losses = loss(
                weights=self.weights,
                biases=self.biases,
                labels=self.classes,
                inputs=self.inputs,
                num_sampled=NUM_SAMPLED,
                num_classes=NUM_CLASSES,
                num_true=self.classes.shape[1],
                sampled_values=tuple(self.sampled),
                **arguments,
            )
            mean = tf.reduce_mean(losses)
        gradients = tape.gradient(
            mean, [self.inputs, self.weights, self.biases]
        )
        for variable, gradient in zip(
            (self.weights, self.biases), gradients[1:], strict=True
        ):
            dense = tf.convert_to_tensor(gradient)
            variable.assign_sub(RATE * dense)
        return losses, gradients[0]


@pytest.mark.parametrize(
    ("loss_pair", "num_servers", "mode", "num_true", "by_keras", "removes"),
    [
        (LOSSES[0], 0, run_eagerly, 3, True, True),
        (LOSSES[0], 2, tf.function, 3, False, False),
        (LOSSES[1], 0, tf.function, 1, True, False),
        (LOSSES[1], 2, run_eagerly, 3, False, True),
    ],
    ids=["softmax", "softmax_on_servers", "nce", "nce_on_servers"],
)
def test_loss_gradients_and_rows_are_those_of_tensorflow(
    make_cluster, loss_pair, num_servers, mode, num_true, by_keras, removes
):
    make_cluster(num_servers)
    ours, theirs = loss_pair
    case = Case(num_true)
    # Rows of a table learn by its own rule.
    optimizer = keras.optimizers.Adam(0.1) if by_keras else None

    losses, gradient = case.step_of_tables(
        ours, mode, optimizer, remove_accidental_hits=removes
    )
    expected, expected_gradient = case.step_of_variables(
        theirs, remove_accidental_hits=removes
    )

    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(
        gradient, expected_gradient, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        case.table.lookup(IDS), case.weights, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        case.bias_table.lookup(IDS)[:, 0], case.biases, rtol=1e-5, atol=1e-6
    )


def test_defaults_are_those_of_tensorflow_and_biases_zeros(embedded, loss_pair):
    ours, theirs = loss_pair
    case = Case(has_biases=False)

    losses, _ = case.step_of_tables(ours, tf.function)
    expected, _ = case.step_of_variables(theirs)

    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(
        case.table.lookup(IDS), case.weights, rtol=1e-5, atol=1e-6
    )


def test_rows_are_made_and_pushed_for_labels_and_samples_only(embedded, mode):
    table = tsw.EmbeddingTable(
        "weights", DIM, initializer="ones", optimizer=tsw.optimizers.SGD(1.0)
    )
    labels = IDS[[1, 2, 1]]
    sampled = tsw.nn.SampledValues(
        IDS[[2, 5]], tf.fill([3, 1], 0.5), tf.fill([2], 0.5)
    )

    @mode
    def step():
        with tf.GradientTape() as tape:
            loss = tsw.nn.sampled_softmax_loss(
                table,
                None,
                labels,
                tf.ones([3, DIM]),
                2,
                sampled_values=sampled,
            )
        return table.apply_gradients(tape.gradient(loss, table.weight))

    assert step() == 3

    ids, rows = table.export_rows()
    assert sorted(ids) == sorted(IDS[[1, 2, 5]])
    assert np.all(rows != 1.0)


def test_without_training_nothing_is_made_or_pushed(embedded, loss_pair):
    case = Case()
    case.table.remove(IDS[:4])
    before = case.table.lookup(IDS).numpy()

    losses, _ = case.step_of_tables(loss_pair[0], tf.function, training=False)

    case.weights.assign(before)
    expected, _ = case.step_of_variables(loss_pair[1])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_array_equal(case.table.lookup(IDS), before)
    assert case.table.size() == NUM_CLASSES - 4


def test_labels_may_be_a_vector_and_strings(embedded):
    names = np.array([f"item {i}" for i in range(10)])
    sampler = tsw.nn.UnigramSampler((names, np.arange(1, 11)))
    table = tsw.EmbeddingTable("weights", DIM)

    loss = tsw.nn.nce_loss(
        table, None, names[:4], tf.ones([4, DIM]), 3, sampler
    )

    assert loss.shape == [4]
    assert set(table.export_rows()[0]) <= set(tsw.ids.hash_strings(names))


def test_a_plain_graph_trains(embedded):
    case = Case()
    batch = case.inputs.numpy()
    rows = case.table.lookup(case.labels).numpy()
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            inputs = tf.compat.v1.placeholder(tf.float32, [None, DIM])
            losses = tsw.nn.sampled_softmax_loss(
                case.table,
                None,
                case.labels,
                inputs,
                NUM_SAMPLED,
                tsw.nn.LogUniformSampler(NUM_CLASSES, ids=IDS),
            )
            (gradient,) = tf.gradients(losses, case.table.weight)
            pushed = case.table.apply_gradients(gradient)
            session.run([losses, pushed], {inputs: batch})
        before, rows = rows, case.table.lookup(case.labels).numpy()
        assert np.all(before != rows)


@pytest.mark.parametrize(
    ("loss_pair", "dtype"),
    [(LOSSES[0], tf.bfloat16), (LOSSES[1], tf.float16)],
)
def test_short_inputs_give_a_float32_loss(embedded, loss_pair, dtype):
    case = Case()
    case.inputs = tf.Variable(tf.cast(case.inputs, dtype))

    losses, gradient = case.step_of_tables(loss_pair[0], run_eagerly)

    case.inputs = tf.Variable(tf.cast(case.inputs, tf.float32))
    expected, _ = case.step_of_variables(loss_pair[1])
    assert losses.dtype == tf.float32 and gradient.dtype == dtype
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_the_rows_of_a_layer_learn_though_nothing_before_does(embedded, mode):
    layer = tsw.keras.DynamicEmbedding(DIM, optimizer=tsw.optimizers.SGD(1.0))
    layer.build()
    sampler = tsw.nn.LogUniformSampler(10)

    @mode
    def step():
        with tf.GradientTape() as tape:
            loss = tsw.nn.nce_loss(
                layer, None, [1], tf.ones([1, DIM]), 3, sampler
            )
        gradient = tape.gradient(loss, layer.trainable_variables)
        return layer.apply_gradients(gradient)

    layer(tf.range(10), training=True)
    before = layer.table.lookup([1]).numpy()
    step()

    assert np.all(layer.table.lookup([1]) != before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "items"}, "`weights` must be an EmbeddingTable"),
        ({"biases": 3}, "`biases` must be an EmbeddingTable"),
        (
            {"inputs": tf.ones([2, 4])},
            "`weights` must have dim 4.*'w' of dim 3",
        ),
        ({"inputs": tf.ones([2, 3, 1])}, r"`inputs` must .*\(2, 3, 1\)"),
        ({"inputs": tf.ones([2, 3], tf.int32)}, "`inputs` must .*int32"),
        ({"labels": [[[1]]]}, r"`labels` must .*\(1, 1, 1\)"),
        ({"labels": [1.5, 2.5]}, "ids must be integers"),
        ({"labels": [1, 50]}, r"not in the vocabulary of 10 .*\[50\]"),
        ({"labels": [1, -1]}, r"not in the vocabulary of 10 .*\[-1\]"),
        ({"num_sampled": 0}, "`num_sampled` must be a positive"),
        ({"num_sampled": 11}, "at most the size of the vocabulary, 10"),
        ({"sampler": None}, "either `sampler`.* or `sampled_values`"),
        (
            {
                "sampler": None,
                "sampled_values": ([1, 2], tf.ones([2, 1]), tf.ones([2])),
            },
            "num_sampled=3, and sampled ids of shape",
        ),
    ],
)
def test_loss_refuses_what_does_not_fit(embedded, arguments, message):
    table = tsw.EmbeddingTable("w", DIM)
    defaults = {
        "weights": table,
        "biases": None,
        "labels": [1, 2],
        "inputs": tf.ones([2, DIM]),
        "num_sampled": 3,
        "sampler": tsw.nn.LogUniformSampler(10),
    }

    with pytest.raises(ValueError, match=f"(?s){message}"):
        tsw.nn.sampled_softmax_loss(**{**defaults, **arguments})


def test_tables_and_layers_of_another_dim_are_refused(embedded):
    table = tsw.EmbeddingTable("w", DIM)
    layer = tsw.keras.DynamicEmbedding(DIM + 1)
    sampler = tsw.nn.LogUniformSampler(10)
    inputs = tf.ones([1, DIM])

    with pytest.raises(ValueError, match="`biases` must have dim 1"):
        tsw.nn.nce_loss(table, table, [1], inputs, 3, sampler)
    with pytest.raises(ValueError, match=r"`weights` must map .* \(n, 3\)"):
        tsw.nn.nce_loss(layer, None, [1], inputs, 3, sampler)


# --- Samplers -----------------------------------------------------------------

COUNTS = np.arange(1, NUM_CLASSES + 1)


def make_samplers(ids):
    return [
        tsw.nn.LogUniformSampler(NUM_CLASSES, ids=ids),
        tsw.nn.UnigramSampler(COUNTS if ids is None else (ids, COUNTS), 0.5),
    ]


@pytest.mark.parametrize("unique", [True, False])
@pytest.mark.parametrize("kind", [0, 1], ids=["log_uniform", "unigram"])
def test_sampler_draws_and_counts_as_tensorflow(kind, unique):
    classes = np.array([[3, 4], [4, 29]])
    sampler = make_samplers(IDS)[kind]

    ours = tf.function(
        lambda: sampler.sample(IDS[classes], 8, unique=unique, seed=5)
    )()
    options = {
        "true_classes": tf.constant(classes),
        "num_true": 2,
        "num_sampled": 8,
        "unique": unique,
        "range_max": NUM_CLASSES,
        "seed": 5,
    }
    if kind == 0:
        theirs = tf.random.log_uniform_candidate_sampler(**options)
    else:
        theirs = tf.random.fixed_unigram_candidate_sampler(
            **options, distortion=0.5, unigrams=COUNTS.astype(float).tolist()
        )

    assert set(ours.sampled_candidates.numpy()) <= set(IDS)
    if not unique:
        # With repetition expected counts do not depend on the draw.
        np.testing.assert_array_equal(ours[1], theirs[1])
        probability = (
            np.log((np.arange(NUM_CLASSES) + 2) / (np.arange(NUM_CLASSES) + 1))
            / np.log(NUM_CLASSES + 1)
            if kind == 0
            else np.sqrt(COUNTS) / np.sqrt(COUNTS).sum()
        )
        np.testing.assert_allclose(ours[1], 8 * probability[classes], rtol=1e-5)
        place = {x: i for i, x in enumerate(IDS)}
        drawn = [place[x] for x in ours.sampled_candidates.numpy()]
        np.testing.assert_allclose(ours[2], 8 * probability[drawn], rtol=1e-5)
    else:
        assert len(set(ours.sampled_candidates.numpy())) == 8


def tensorflow_draw(seed):
    return tf.random.fixed_unigram_candidate_sampler(
        [[0]],
        num_true=1,
        num_sampled=8,
        unique=True,
        range_max=NUM_CLASSES,
        distortion=0.5,
        unigrams=COUNTS.astype(float).tolist(),
        seed=seed,
    )[0]


def two_draws(draw, mode, global_seed):
    """Draws twice after `set_seed`, by a function traced after it."""
    tf.random.set_seed(global_seed)
    draw = mode(draw)
    return [draw().numpy().tolist() for _ in range(2)]


@pytest.fixture
def _global_seed_of_the_test():
    yield
    tf.random.set_seed(None)


@pytest.mark.usefixtures("_global_seed_of_the_test")
@pytest.mark.parametrize(("kind", "seed"), [(0, 5), (1, None)])
def test_draws_follow_the_global_seed(mode, kind, seed):
    sampler = make_samplers(None)[kind]

    def draw():
        return sampler.sample([[0]], 8, seed=seed).sampled_candidates

    first = two_draws(draw, mode, 1)
    other = two_draws(draw, mode, 2)
    again = two_draws(draw, mode, 1)

    assert first[0] != first[1]
    assert other != first
    assert again == first


@pytest.mark.usefixtures("_global_seed_of_the_test")
@pytest.mark.parametrize("global_seed", [1, 2])
def test_unigram_draws_are_tensorflows_for_the_same_seeds(mode, global_seed):
    sampler = make_samplers(None)[1]
    sampler.sample([[0]], 8, seed=5)  # Before the global seed is known.

    ours = two_draws(
        lambda: sampler.sample([[0]], 8, seed=5).sampled_candidates,
        mode,
        global_seed,
    )

    assert ours == two_draws(lambda: tensorflow_draw(5), mode, global_seed)


@pytest.mark.usefixtures("_global_seed_of_the_test")
def test_samplers_in_one_function_draw_by_themselves():
    one, other = make_samplers(None)[1], make_samplers(None)[1]
    tf.random.set_seed(1)

    @tf.function
    def draw():
        return [
            each.sample([[0]], 8).sampled_candidates for each in (one, other)
        ]

    a, b = draw()
    assert a.numpy().tolist() != b.numpy().tolist()


@pytest.mark.parametrize("kind", [0, 1], ids=["log_uniform", "unigram"])
def test_sampler_without_ids_takes_classes_for_ids(kind):
    sampler = make_samplers(None)[kind]

    drawn = sampler.sample([[0]], NUM_CLASSES)

    np.testing.assert_array_equal(
        np.sort(drawn.sampled_candidates), np.arange(NUM_CLASSES)
    )
    np.testing.assert_array_equal(sampler.ids, np.arange(NUM_CLASSES))


@hypothesis.given(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_vocabulary_finds_each_id_and_no_other(ids):
    listed = list(ids)
    vocabulary = samplers._Vocabulary(
        np.array(listed, np.int64), len(listed), "test"
    )
    absent = [x for x in (0, -(2**63), 2**63 - 1) if x not in ids]

    classes, is_known = vocabulary.to_classes(
        tf.constant(listed + absent, tf.int64)
    )

    np.testing.assert_array_equal(
        is_known, [True] * len(listed) + [False] * len(absent)
    )
    np.testing.assert_array_equal(
        classes[: len(listed)], np.arange(len(listed))
    )
    np.testing.assert_array_equal(
        vocabulary.to_ids(tf.range(len(listed))), listed
    )


def test_sampler_refuses_unknown_labels_in_a_graph():
    sampler = tsw.nn.LogUniformSampler(3, ids=[5, 6, 7])

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"(?s)vocabulary.*\[8\]"
    ):
        tf.function(lambda x: sampler.sample(x, 2))(tf.constant([[5], [8]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tsw.nn.LogUniformSampler(0), "`range_max` must be a positive"),
        (lambda: tsw.nn.LogUniformSampler(2, ids=[1]), r"shape \(2,\)"),
        (lambda: tsw.nn.LogUniformSampler(2, ids=[7, 7]), "Received 7 twice"),
        (lambda: tsw.nn.LogUniformSampler(1, ids=[0.5]), "must be integers"),
        (lambda: tsw.nn.UnigramSampler([]), "`counts` must be"),
        (lambda: tsw.nn.UnigramSampler([1, 0]), "leave it out"),
        (lambda: tsw.nn.UnigramSampler([1.0, np.nan]), "`counts` must be"),
        (lambda: tsw.nn.UnigramSampler(([1, 2], [1])), r"shape \(1,\)"),
        (lambda: tsw.nn.UnigramSampler([1], np.inf), "`distortion` must be"),
    ],
)
def test_sampler_refuses_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sampler_refuses_labels_without_an_axis():
    with pytest.raises(ValueError, match=r"\(batch_size, num_true\)"):
        tsw.nn.LogUniformSampler(3).sample([1, 2], 1)


@pytest.mark.parametrize(
    ("kind", "ids"), [(0, None), (1, IDS)], ids=["classes", "ids"]
)
def test_sampler_config_round_trip(kind, ids):
    sampler = make_samplers(ids)[kind]

    again = samplers.from_config(samplers.to_config(sampler))

    assert type(again) is type(sampler)
    assert again.get_config() == sampler.get_config()
    np.testing.assert_array_equal(again.ids, sampler.ids)


def test_config_of_another_sampler_is_refused():
    with pytest.raises(ValueError, match="class_name='Other'"):
        samplers.from_config({"class_name": "Other", "config": {}})


# --- Layers -------------------------------------------------------------------


def make_model(layer_class, sampler, dtype="float32", **arguments):
    """Learns which item follows which; returns model, users and loss."""
    optimizer = tsw.optimizers.Adam(0.05)
    last = keras.Input((), dtype="int64")
    label = keras.Input((), dtype="int64")
    seen = tsw.keras.DynamicEmbedding(
        8, name="seen", optimizer=optimizer, dtype=dtype
    )(last)
    user = keras.layers.Dense(8, dtype=dtype)(seen)
    loss = layer_class(
        tsw.keras.DynamicEmbedding(
            8, name="next", optimizer=optimizer, dtype=dtype
        ),
        sampler,
        5,
        biases=tsw.keras.DynamicEmbedding(
            1, name="popularity", optimizer=optimizer, dtype=dtype
        ),
        seed=1,
        name="loss",
        dtype=dtype,
        **arguments,
    )
    model = keras.Model([last, label], loss(user, label))
    model.compile(keras.optimizers.Adam(0.05))
    return model, keras.Model(last, user), loss


@pytest.fixture
def chain():
    """Items that follow each other in a circle."""
    keras.utils.set_random_seed(1)
    last = np.random.default_rng(1).integers(0, NUM_CLASSES, 2000)
    return IDS[last], IDS[(last + 1) % NUM_CLASSES]


def share_of_right_successors(loss, users):
    best = np.argmax(loss.score(users(IDS), IDS), axis=1)
    return np.mean(best == (np.arange(NUM_CLASSES) + 1) % NUM_CLASSES)


@pytest.mark.parametrize(
    ("layer_class", "dtype", "num_servers"),
    [
        (tsw.keras.SampledSoftmax, "float32", 2),
        (tsw.keras.NCE, "mixed_float16", 0),
    ],
    ids=["softmax_on_servers", "nce_float16"],
)
def test_layer_learns_in_fit(
    make_cluster, chain, layer_class, dtype, num_servers
):
    make_cluster(num_servers)
    sampler = tsw.nn.UnigramSampler((IDS, np.ones(NUM_CLASSES)))
    model, users, loss = make_model(layer_class, sampler, dtype)

    history = model.fit(list(chain), epochs=8, batch_size=50, verbose=0)

    assert share_of_right_successors(loss, users) > 0.9
    losses = history.history["loss"]
    assert losses[-1] < losses[0] / 2
    assert model.evaluate(list(chain), verbose=0) < losses[0] / 2


def test_layer_makes_no_rows_in_evaluation(embedded, chain):
    model, _, loss = make_model(
        tsw.keras.NCE, tsw.nn.LogUniformSampler(NUM_CLASSES, IDS)
    )

    value = model.evaluate(list(chain), verbose=0)
    predictions = model.predict([x[:7] for x in chain], verbose=0)

    assert np.isfinite(value)
    assert predictions.shape == (7,)
    assert loss.embedding.table.size() == 0


def test_model_is_saved_and_loaded_with_its_rows(embedded, chain, tmp_path):
    model, users, loss = make_model(
        tsw.keras.SampledSoftmax,
        tsw.nn.UnigramSampler((IDS, COUNTS)),
        remove_accidental_hits=False,
    )
    model.fit(list(chain), epochs=1, batch_size=50, verbose=0)
    assert [tuple(weight.shape) for weight in loss.weights] == [(0, 8), (0, 1)]
    model.save(tmp_path / "model.keras")

    loaded = keras.models.load_model(tmp_path / "model.keras")

    again = loaded.get_layer("loss")
    assert again.get_config()["sampler"] == loss.get_config()["sampler"]
    assert not again.remove_accidental_hits
    np.testing.assert_array_equal(
        again.score(users(IDS), IDS), loss.score(users(IDS), IDS)
    )
    loaded.train_on_batch([x[:50] for x in chain])


@pytest.fixture
def weighed(embedded):
    """A layer, and the losses of four examples that it draws by seed 1."""
    layer = tsw.keras.SampledSoftmax(
        tsw.keras.DynamicEmbedding(DIM, embeddings_initializer="normal"),
        tsw.nn.LogUniformSampler(NUM_CLASSES),
        NUM_SAMPLED,
        seed=1,
        name="loss",
    )
    inputs, labels = tf.ones([4, DIM]), tf.constant([1, 2, 3, 4])
    layer(inputs, labels, training=True)  # Makes the rows.

    def losses(**arguments):
        tf.random.set_seed(1)
        return layer(inputs, labels, **arguments)

    yield layer, losses
    tf.random.set_seed(None)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_layer_weighs_examples_and_divides_by_their_number(weighed, shape):
    layer, losses = weighed
    weights = np.array([0.0, 0.5, 3.0, 2.0])
    plain = losses().numpy()

    given = losses(sample_weight=weights.reshape(shape))

    np.testing.assert_allclose(given, plain * weights, rtol=1e-6)
    np.testing.assert_allclose(
        layer.losses[-1], np.sum(plain * weights) / 4, rtol=1e-6
    )


def test_layer_refuses_weights_that_are_not_one_for_each_example(weighed):
    _, losses = weighed

    for weights in (np.ones(1), np.ones(3), np.ones((4, 2)), np.float32(1)):
        with pytest.raises(ValueError, match="'loss': `sample_weight` must"):
            losses(sample_weight=weights)
    unknown = tf.TensorSpec([None], tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="sample_weight"):
        tf.function(
            lambda weights: losses(sample_weight=weights),
            input_signature=[unknown],
            autograph=False,
        )(tf.ones([1]))


class Uniform(tsw.nn.Sampler):
    """Draws with an offset, which only its config keeps."""

    def __init__(self, range_max, offset=0):
        super().__init__(range_max)
        self.offset = offset

    def get_config(self):
        return {"range_max": self.range_max, "offset": self.offset}

    def _draw(self, classes, num_sampled, unique, seed):
        drawn = (tf.range(num_sampled, dtype="int64") + self.offset) % (
            self.range_max
        )
        count = num_sampled / self.range_max
        return drawn, tf.fill(tf.shape(classes), count), [count] * num_sampled


@keras.saving.register_keras_serializable(package="tests")
class Registered(Uniform):
    pass


@keras.saving.register_keras_serializable(package="tests")
class UnigramSampler(tsw.nn.UnigramSampler):
    pass


def make_layer_model(sampler):
    last, label = (keras.Input((), dtype="int64") for _ in range(2))
    user = tsw.keras.DynamicEmbedding(2)(last)
    loss = tsw.keras.NCE(
        tsw.keras.DynamicEmbedding(2), sampler, num_sampled=3, name="loss"
    )
    return keras.Model([last, label], loss(user, label))


@pytest.mark.parametrize(
    "sampler",
    [Registered(9, offset=4), UnigramSampler((IDS[:3], [3, 1, 2]), 0.5)],
    ids=["own", "derived"],
)
def test_model_with_a_registered_sampler_is_saved_and_loaded(
    embedded, tmp_path, sampler
):
    make_layer_model(sampler).save(tmp_path / "model.keras")

    loaded = keras.models.load_model(tmp_path / "model.keras")

    again = loaded.get_layer("loss").sampler
    assert type(again) is type(sampler)
    assert again.get_config() == sampler.get_config()
    label = sampler.ids[:1]
    assert loaded([label, label]).shape == (1,)


def test_model_with_an_unknown_sampler_says_how_to_load_it(embedded, tmp_path):
    class Local(Uniform):  # Where tf_keras does not find it by itself.
        pass

    make_layer_model(Local(9)).save(tmp_path / "model.keras")

    with pytest.raises(
        ValueError, match=r"sampler 'Local'.*register_keras_serializable"
    ):
        keras.models.load_model(tmp_path / "model.keras")

    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"Local": Local}
    )
    assert type(loaded.get_layer("loss").sampler) is Local


def test_score_of_an_unknown_id_is_zero(embedded):
    _, _, loss = make_model(
        tsw.keras.SampledSoftmax, tsw.nn.LogUniformSampler(NUM_CLASSES, IDS)
    )
    loss.embedding.table.assign(["known"], np.ones((1, 8)))

    scores = loss.score(tf.ones([2, 8]), ["known", "unknown"])

    np.testing.assert_array_equal(scores, [[8.0, 0.0], [8.0, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embedding": "items"}, "`embedding` must be a DynamicEmbedding"),
        ({"embedding": {"mask_zero": True}}, "no combiner and mask_zero=False"),
        ({"embedding": {"combiner": "sum"}}, "no combiner and mask_zero=False"),
        ({"biases": {}}, "`biases` must have `output_dim` 1"),
        ({"sampler": "unigram"}, "`sampler` must be one of tfswitch.nn"),
        ({"num_sampled": 0}, "`num_sampled` must be a positive"),
    ],
)
def test_layer_refuses_arguments_out_of_range(embedded, arguments, message):
    defaults = {
        "embedding": {},
        "sampler": tsw.nn.LogUniformSampler(3),
        "num_sampled": 2,
    }
    given = {
        name: tsw.keras.DynamicEmbedding(4, **value)
        if isinstance(value, dict)
        else value
        for name, value in {**defaults, **arguments}.items()
    }

    for layer_class in (tsw.keras.SampledSoftmax, tsw.keras.NCE):
        with pytest.raises(ValueError, match=message):
            layer_class(**given)


@pytest.mark.parametrize("module", [sampled_losses, samplers])
def test_examples_of_the_docstrings(embedded, module):
    runner = doctest.DocTestRunner()
    globs = {"tsw": tsw, "tf": tf}
    for test in doctest.DocTestFinder().find(module, globs=globs):
        runner.run(test)

    assert runner.tries > 0
    assert runner.failures == 0
