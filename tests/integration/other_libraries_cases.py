"""Models of other libraries, where only the layer is another one.

other_libraries_test.py runs this file for the Keras that each library is for.
"""

import csv
import gzip
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.programs import ROOT
from tfswitch.keras._backend import IS_LEGACY, keras

RATINGS = ROOT / "examples" / "data" / "ml_latest_small" / "ratings.csv.gz"
DIM = 8

# other_libraries_test.py runs each of both kinds.
only_keras3 = pytest.mark.skipif(IS_LEGACY, reason="of Keras 3")
only_legacy_keras = pytest.mark.skipif(not IS_LEGACY, reason="of tf_keras")


def read_ratings(count=4000):
    """Numbers of users and movies from 0, and ratings."""
    with gzip.open(RATINGS, "rt") as file:
        lines = list(itertools.islice(csv.DictReader(file), count))
    users, movies = (
        np.unique([line[name] for line in lines], return_inverse=True)[1]
        for name in ("userId", "movieId")
    )
    return users, movies, np.array([float(x["rating"]) for x in lines], "f")


def embedding(kind, name, ids, dim=DIM, *, rows=None, dense=False, **kwargs):
    """A layer for `ids`, with the same first rows whatever its kind."""
    size = int(np.max(ids)) + 1
    if rows is None:
        rows = np.random.default_rng(size).normal(scale=0.1, size=(size, dim))
    layer = {
        "keras": keras.layers.Embedding,
        "ours": tsw.keras.DynamicEmbedding,
    }[kind]
    if dense and kind == "ours":
        kwargs["update"] = "dense"
    initializer = keras.initializers.Constant(rows.astype("f"))
    return layer(
        size, dim, embeddings_initializer=initializer, name=name, **kwargs
    )


def dense(units, **kwargs):
    seeded = keras.initializers.GlorotUniform(seed=units)
    return keras.layers.Dense(units, kernel_initializer=seeded, **kwargs)


def losses_of(model, x, y, batch_size=100):
    """The losses of three epochs in the order of the data."""
    return model.fit(
        x, y, batch_size=batch_size, epochs=3, shuffle=False, verbose=0
    ).history["loss"]


def check_alike(train):
    """The losses of each epoch are the same, and become less."""
    expected, ours = train("keras"), train("ours")
    np.testing.assert_allclose(ours, expected, rtol=1e-3)
    assert ours[-1] < ours[0]


@only_legacy_keras
@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_tensorflow_recommenders(task):
    import tensorflow_recommenders as tfrs

    users, movies, ratings = read_ratings()
    data = {"user": users, "movie": movies, "rating": ratings}

    class Retrieval(tfrs.Model):
        def __init__(self, kind):
            super().__init__()
            self.user = embedding(kind, "user", users)
            self.movie = embedding(kind, "movie", movies)
            self.task = tfrs.tasks.Retrieval()

        def compute_loss(self, features, training=False):
            return self.task(
                self.user(features["user"]), self.movie(features["movie"])
            )

    class Ranking(Retrieval):
        def __init__(self, kind):
            super().__init__(kind)
            self.score = keras.Sequential(
                [dense(16, activation="relu"), dense(1)]
            )
            self.task = tfrs.tasks.Ranking(loss=keras.losses.MeanSquaredError())

        def call(self, features):
            parts = [
                self.user(features["user"]),
                self.movie(features["movie"]),
            ]
            return self.score(tf.concat(parts, axis=1))

        def compute_loss(self, features, training=False):
            return self.task(
                labels=features["rating"], predictions=self(features)
            )

    def train(kind):
        keras.utils.set_random_seed(1)
        model = {"retrieval": Retrieval, "ranking": Ranking}[task](kind)
        model.compile(keras.optimizers.Adagrad(0.1))
        batches = tf.data.Dataset.from_tensor_slices(data).batch(500)
        return model.fit(batches, epochs=3, verbose=0).history["loss"]

    check_alike(train)


@only_keras3
@pytest.mark.parametrize("interaction", ["FeatureCross", "DotInteraction"])
def test_ranking_of_keras_rs(interaction):
    import keras_rs

    users, movies, ratings = read_ratings()
    data = {"user": users[:, None], "movie": movies[:, None]}

    def train(kind):
        keras.utils.set_random_seed(1)
        inputs = {
            name: keras.Input((1,), dtype="int64", name=name) for name in data
        }
        vectors = [
            keras.layers.Flatten()(
                embedding(kind, f"{name}_rows", data[name])(x)
            )
            for name, x in inputs.items()
        ]
        if interaction == "FeatureCross":
            both = keras.layers.Concatenate()(vectors)
            seeded = keras.initializers.GlorotUniform(seed=3)
            crossed = keras_rs.layers.FeatureCross(kernel_initializer=seeded)(
                both, both
            )
        else:
            dots = keras_rs.layers.DotInteraction()(vectors)
            crossed = keras.layers.Concatenate()([*vectors, dots])
        output = dense(1)(dense(16, activation="relu")(crossed))
        model = keras.Model(inputs, output)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return losses_of(model, data, ratings)

    check_alike(train)


@only_keras3
def test_retrieval_of_keras_rs():
    import keras_rs

    users, movies, _ = read_ratings()

    class Retrieval(keras.Model):
        def __init__(self, kind):
            super().__init__()
            self.user = embedding(kind, "user", users)
            self.movie = embedding(kind, "movie", movies)
            self.retrieval = keras_rs.layers.BruteForceRetrieval(
                k=5, return_scores=False
            )

        def call(self, ids):
            return self.user(ids)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            scores = keras.ops.matmul(
                y_pred, keras.ops.transpose(self.movie(y))
            )
            # Softmax, with the batch's other movies as negatives.
            return keras.losses.CategoricalCrossentropy(from_logits=True)(
                keras.ops.eye(keras.ops.shape(scores)[0]), scores
            )

    best = {}

    def train(kind):
        keras.utils.set_random_seed(1)
        model = Retrieval(kind)
        model.compile(keras.optimizers.SGD(5.0))
        losses = losses_of(model, users, movies)
        candidates = model.movie(np.arange(movies.max() + 1))
        model.retrieval.update_candidates(candidates)
        best[kind] = np.asarray(model.retrieval(model.user(users[:1])))
        return losses

    check_alike(train)
    np.testing.assert_array_equal(best["ours"], best["keras"])


# --- Recommenders as those among the examples of keras.io -------------------

# With L2 the gradient of Keras's variable is dense, in which an id that a batch
# has twice is summed, as in a table.
OF_ALL_ROWS = {
    "embeddings_regularizer": keras.regularizers.L2(1e-6),
    "dense": True,
}


@only_keras3
def test_ratings_by_vectors_and_biases():
    """A subclassed model that takes the columns of one input apart."""
    users, movies, ratings = read_ratings()

    class Ratings(keras.Model):
        def __init__(self, kind):
            super().__init__()
            self.users = embedding(kind, "users", users, **OF_ALL_ROWS)
            self.movies = embedding(kind, "movies", movies, **OF_ALL_ROWS)
            self.user_biases = embedding(kind, "u", users, 1, **OF_ALL_ROWS)
            self.movie_biases = embedding(kind, "m", movies, 1, **OF_ALL_ROWS)

        def call(self, pairs):
            user, movie = pairs[:, 0], pairs[:, 1]
            dots = keras.ops.sum(
                self.users(user) * self.movies(movie), axis=1, keepdims=True
            )
            biases = self.user_biases(user) + self.movie_biases(movie)
            return keras.activations.sigmoid(dots + biases)

    def train(kind):
        model = Ratings(kind)
        model.compile(keras.optimizers.Adam(0.002), "binary_crossentropy")
        return losses_of(
            model,
            np.stack([users, movies], axis=1),
            ratings / 5.0,
            batch_size=64,
        )

    check_alike(train)


def read_sequences(length=4):
    """The movies that each user has rated one after another, as numbers."""
    users, movies, ratings = read_ratings()
    starts = [
        i
        for i in range(0, len(users) - length, 2)
        if users[i] == users[i + length - 1]
    ]
    windows = [slice(i, i + length) for i in starts]
    return (
        np.stack([movies[w] for w in windows]),
        np.stack([ratings[w] for w in windows]),
    )


@only_keras3
def test_a_transformer_over_what_a_user_has_seen():
    """Strings, vectors that are frozen, positions that are no input."""
    movies, ratings = read_sequences()
    vocabulary = [str(i) for i in range(movies.max() + 1)]
    genres = np.random.default_rng(0).integers(0, 2, (len(vocabulary), 5))
    data = {
        "seen": tf.constant(movies[:, :-1].astype(str)),
        "ratings": tf.constant(ratings[:, :-1]),
        "target": tf.constant(movies[:, -1:].astype(str)),
    }

    def train(kind):
        keras.utils.set_random_seed(1)
        inputs = {
            "seen": keras.Input((3,), dtype="string"),
            "ratings": keras.Input((3,)),
            "target": keras.Input((1,), dtype="string"),
        }
        to_index = keras.layers.StringLookup(
            vocabulary=vocabulary, mask_token=None, num_oov_indices=0
        )
        rows = embedding(kind, "movie", movies)
        genre_vectors = embedding(
            kind, "genres", movies, 5, rows=genres, trainable=False
        )
        processed = dense(DIM, activation="relu")

        def encode(ids):
            number = to_index(ids)
            return processed(
                keras.layers.concatenate([rows(number), genre_vectors(number)])
            )

        positions = embedding(kind, "position", [2])(tf.range(3))
        seen = keras.layers.Multiply()(
            [
                encode(inputs["seen"]) + positions,
                keras.ops.expand_dims(inputs["ratings"], -1),
            ]
        )
        sequence = keras.layers.concatenate(
            [seen, encode(inputs["target"])], axis=1
        )
        attention = keras.layers.MultiHeadAttention(
            num_heads=2,
            key_dim=DIM,
            kernel_initializer=keras.initializers.GlorotUniform(seed=5),
        )
        both = keras.layers.Add()([sequence, attention(sequence, sequence)])
        both = keras.layers.LayerNormalization()(both)
        output = dense(1)(keras.layers.Flatten()(both))
        model = keras.Model(inputs, output)
        model.compile(keras.optimizers.Adagrad(0.01), "mse")
        return losses_of(model, data, ratings[:, -1])

    check_alike(train)


@only_keras3
def test_retrieval_with_a_recurrent_query_tower():
    """Towers that `build` builds; one is called in the loss only."""
    movies, _ = read_sequences()

    class Sequential(keras.Model):
        def __init__(self, kind):
            super().__init__()
            self.query = keras.Sequential(
                [
                    embedding(kind, "seen", movies, mask_zero=True, dense=True),
                    keras.layers.GRU(
                        DIM,
                        kernel_initializer=keras.initializers.GlorotUniform(3),
                        recurrent_initializer=keras.initializers.Orthogonal(
                            seed=4
                        ),
                    ),
                ]
            )
            self.candidate = embedding(kind, "candidate", movies, dense=True)

        def build(self, input_shape):
            self.query.build(input_shape)
            self.candidate.build(input_shape)
            super().build(input_shape)

        def call(self, seen):
            return self.query(seen)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            scores = keras.ops.matmul(
                y_pred, keras.ops.transpose(self.candidate(y))
            )
            return keras.losses.CategoricalCrossentropy(from_logits=True)(
                keras.ops.eye(keras.ops.shape(scores)[0]), scores
            )

    def train(kind):
        keras.utils.set_random_seed(1)
        model = Sequential(kind)
        model.compile(keras.optimizers.SGD(0.2, momentum=0.9))
        return losses_of(model, movies[:, :-1], movies[:, -1])

    check_alike(train)
