"""A CTR model from strings and numbers: tf.data, callbacks, save, load, export.

    python examples/ctr_pipeline.py                    # DynamicEmbedding
    python examples/ctr_pipeline.py --layer=keras      # keras.layers.Embedding

The model predicts whether a user rates a movie with 4 or more.
docs/ctr_pipeline.md shows where the programs for the two layers differ: at the
uses of `--layer`.
"""

import csv
import gzip
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfswitch as tsw

_LAYER = flags.DEFINE_enum(
    "layer",
    "dynamic",
    ["dynamic", "keras"],
    "tfswitch.keras.DynamicEmbedding or keras.layers.Embedding.",
)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "At most so many epochs.")
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many lines of the ratings."
)
_DATA = flags.DEFINE_string(
    "data",
    str(pathlib.Path(__file__).parent / "data" / "ml_latest_small"),
    "Folder with ratings.csv.gz and movies.csv.gz.",
)

DIM = 8
STRINGS = ("user", "movie", "genre")


def read(name: str) -> list[dict[str, str]]:
    """Returns the lines of one of MovieLens's files."""
    path = pathlib.Path(_DATA.value) / f"{name}.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def make_data() -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns batches to train and to validate with: dicts, and labels.

    The newest tenth of the ratings is for validation.
    """
    genres = {m["movieId"]: m["genres"].split("|")[0] for m in read("movies")}
    ratings = sorted(read("ratings"), key=lambda line: int(line["timestamp"]))
    ratings = ratings[: _MAX_RATINGS.value]
    hours = np.array([int(r["timestamp"]) // 3600 % 24 for r in ratings])
    features = {
        "user": np.array([f"user {r['userId']}" for r in ratings]),
        "movie": np.array([f"movie {r['movieId']}" for r in ratings]),
        "genre": np.array([genres[r["movieId"]] for r in ratings]),
        "hour": (hours / 24.0).astype(np.float32),
    }
    labels = np.array([float(r["rating"]) >= 4.0 for r in ratings], np.float32)
    features = {name: values[:, None] for name, values in features.items()}
    cut = len(ratings) * 9 // 10
    newest = ({k: v[cut:] for k, v in features.items()}, labels[cut:])
    older = ({k: v[:cut] for k, v in features.items()}, labels[:cut])
    train = tf.data.Dataset.from_tensor_slices(older).shuffle(100_000, seed=1)
    validation = tf.data.Dataset.from_tensor_slices(newest)
    return train.batch(256), validation.batch(1024)


def embed(name: str, strings: Any, data: tf.data.Dataset) -> Any:
    """Returns one vector for each string of a feature."""
    if _LAYER.value == "keras":
        lookup = keras.layers.StringLookup(name=f"{name}_lookup")
        lookup.adapt(data.map(lambda features, label: features[name]))
        return keras.layers.Embedding(
            lookup.vocabulary_size(), DIM, name=f"{name}_rows"
        )(lookup(strings))
    return tsw.keras.DynamicEmbedding(DIM, name=f"{name}_rows")(strings)


def make_model(data: tf.data.Dataset) -> keras.Model:
    """Returns a compiled model of dicts of strings and one number."""
    inputs = {
        name: keras.Input((1,), dtype="string", name=name) for name in STRINGS
    }
    inputs["hour"] = keras.Input((1,), name="hour")
    vectors = [
        keras.layers.Flatten()(embed(name, inputs[name], data))
        for name in STRINGS
    ]
    hidden = keras.layers.Concatenate()([*vectors, inputs["hour"]])
    hidden = keras.layers.Dense(32, activation="relu")(hidden)
    click = keras.layers.Dense(1, activation="sigmoid")(hidden)
    model = keras.Model(inputs, click)
    model.compile(
        keras.optimizers.Adam(0.002),
        "binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model


def main(argv: list[str]) -> None:
    del argv
    keras.utils.set_random_seed(1)
    train, validation = make_data()
    model = make_model(train)
    model.fit(
        train,
        validation_data=validation,
        epochs=_EPOCHS.value,
        verbose=2,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(
                "val_auc", mode="max", patience=0, factor=0.3
            ),
            keras.callbacks.EarlyStopping(
                "val_auc", mode="max", patience=2, restore_best_weights=True
            ),
        ],
    )
    auc = model.evaluate(validation, verbose=0, return_dict=True)["auc"]
    print(f"validation AUC of the best epoch: {auc:.4f}")

    folder = pathlib.Path(tempfile.mkdtemp())
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    expected = model.predict(validation, verbose=0)
    same = np.allclose(loaded.predict(validation, verbose=0), expected)
    print(f"predictions of the loaded model are the same: {same}")

    if _LAYER.value == "keras":
        model.export(str(folder / "exported"), verbose=False)
    else:
        tsw.saved_model.save(model, str(folder / "exported"))
    served = tf.saved_model.load(str(folder / "exported"))
    features, _ = next(iter(validation))
    exported = served.signatures["serving_default"](**features)
    (scores,) = exported.values()
    same = np.allclose(scores, expected[: len(scores)], atol=1e-6)
    print(f"predictions of the exported model are the same: {same}")


if __name__ == "__main__":
    app.run(main)
