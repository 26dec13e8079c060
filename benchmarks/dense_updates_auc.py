"""Measures the AUC of a model with `DynamicEmbedding` in place of `Embedding`.

    python benchmarks/dense_updates_auc.py

Trains LR, FM, DeepFM and DCN on Frappe, and two towers on MovieLens, with each
kind of layer:

*   "keras": `keras.layers.Embedding`;
*   "summed": `keras.layers.Embedding`, and the optimizer first sums the
    gradients of an id, as tables do. Adam of Keras 3 adds up the squares of the
    single gradients;
*   "default": `DynamicEmbedding` with default settings;
*   "sparse": the same with `update="sparse"`.

With one seed all kinds of layers have the same first rows and the same other
weights, see the same batches, and drop the same units. Each AUC is measured on
the test samples after the last epoch, and is the mean of all seeds. The losses
of each epoch are compared with those of "summed": the largest difference of all
seeds, divided by the mean difference of two seeds of "summed".
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import frappe
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import area_under_curve, report

import tfswitch as tsw

EPOCHS = {"lr": 10, "fm": 10, "deepfm": 5, "dcn": 5, "towers": 3}
_MODELS = flags.DEFINE_list("models", [*EPOCHS], "Which.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each.", lower_bound=2)

KINDS = ("keras", "summed", "default", "sparse")
DIM = 10
RATINGS = (
    pathlib.Path(__file__)
    .parents[1]
    .joinpath("examples/data/ml_latest_small/ratings.csv.gz")
)


class Data(NamedTuple):
    """Samples; those for the test come first."""

    ids: np.ndarray  # (samples, fields), from 0.
    labels: np.ndarray
    num_ids: int
    num_test: int


class SummingAdam(keras.optimizers.Adam):
    """Sums the gradients of an id before it squares them."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([*map(tf.convert_to_tensor, grads)], trainable_variables)


def embedding(kind: str, dim: int, ids: int, seed: int) -> keras.layers.Layer:
    """Returns a layer; the kinds differ in nothing else."""
    update = "sparse" if kind == "sparse" else "auto"
    layer = tsw.keras.DynamicEmbedding(dim, seed=seed, update=update)
    if kind in ("default", "sparse"):
        return layer
    rows = layer.table.lookup_or_create(np.arange(ids)).numpy()
    return keras.layers.Embedding(ids, dim, weights=rows)


def hidden(x: Any) -> Any:
    for units in (128, 64):
        x = keras.layers.Dense(units)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
        x = keras.layers.Dropout(0.2)(x)
    return x


class Cross(keras.layers.Layer):
    """x0 (w x) + b + x (Wang et al., ADKDD 2017)."""

    def build(self, first_shape: Any, x_shape: Any) -> None:
        dim = first_shape[-1]
        self.w = self.add_weight(shape=(dim, 1))
        self.b = self.add_weight(shape=(dim,), initializer="zeros")

    def call(self, first: Any, x: Any) -> Any:
        return first * keras.ops.matmul(x, self.w) + self.b + x


def make_model(name: str, kind: str, num_ids: int, seed: int) -> keras.Model:
    """Maps ids `(batch, fields)` to a probability."""
    fields = 2 if name == "towers" else frappe.FIELDS
    ids = keras.Input((fields,), dtype="int64")
    linear = embedding(kind, 1, num_ids, seed)(ids)
    vectors = embedding(kind, DIM, num_ids, seed)(ids)
    keras.utils.set_random_seed(seed)  # An Embedding has drawn numbers.
    flat = keras.layers.Flatten()(vectors)
    logits = []
    if name in ("lr", "fm", "deepfm"):
        logits.append(keras.ops.sum(linear, axis=1))
    if name in ("fm", "deepfm"):
        sums = keras.ops.square(keras.ops.sum(vectors, axis=1))
        squares = keras.ops.sum(keras.ops.square(vectors), axis=1)
        pairs = keras.ops.sum(sums - squares, axis=1, keepdims=True) / 2.0
        logits.append(pairs)
    if name == "deepfm":
        logits.append(keras.layers.Dense(1)(hidden(flat)))
    if name == "dcn":
        crossed = flat
        for _ in range(3):
            crossed = Cross()(flat, crossed)
        both = keras.layers.Concatenate()([crossed, hidden(flat)])
        logits.append(keras.layers.Dense(1)(both))
    if name == "towers":
        user, movie = (
            keras.layers.Dense(DIM)(
                keras.layers.Dense(64, "relu")(vectors[:, field])
            )
            for field in range(fields)
        )
        logits.append(keras.layers.Dot(1)([user, movie]))
    total = logits[0] if len(logits) == 1 else keras.layers.add(logits)
    return keras.Model(ids, keras.activations.sigmoid(total))


def train(
    data: Data, name: str, kind: str, seed: int
) -> tuple[float, list[float]]:
    """Returns the AUC of the test samples, and the loss of each epoch."""
    model = make_model(name, kind, data.num_ids, seed)
    adam = SummingAdam if kind == "summed" else keras.optimizers.Adam
    model.compile(adam(), "binary_crossentropy")
    test, rest = slice(data.num_test), slice(data.num_test, None)
    keras.utils.set_random_seed(seed)  # It orders the samples.
    history = model.fit(
        data.ids[rest],
        data.labels[rest],
        batch_size=512,
        epochs=EPOCHS[name],
        verbose=0,
    )
    scores = model.predict(data.ids[test], batch_size=8192, verbose=0)
    auc = area_under_curve(data.labels[test], scores.ravel())
    return auc, history.history["loss"]


def read(name: str) -> Data:
    """Reads Frappe, or who rates which movie with 4 or more."""
    if name == "towers":
        lines = np.loadtxt(RATINGS, delimiter=",", skiprows=1)
        lines = np.random.default_rng(1).permutation(lines)
        ids = tsw.ids.pack(np.arange(2), lines[:, :2].astype(np.int64))
        labels = (lines[:, 2] >= 4).astype(np.float32)
        num_test = len(ids) // 5
    else:
        data = frappe.read()
        ids, labels = (
            np.concatenate(pair)
            for pair in zip(data.test, data.train, strict=True)
        )
        num_test = len(data.test[0])
    known = np.unique(ids)
    return Data(np.searchsorted(known, ids), labels, len(known), num_test)


def compare(name: str) -> None:
    """Trains a model with all kinds; hands over and prints the figures."""
    data = read(name)
    auc, losses = {}, {}
    for kind in KINDS:
        found = [
            train(data, name, kind, seed) for seed in range(1, 1 + _SEEDS.value)
        ]
        auc[kind] = np.mean([auc for auc, _ in found])
        losses[kind] = np.array([of_epochs for _, of_epochs in found])
        print(f"{name}, {kind}: AUC {auc[kind]:.5f}, losses", flush=True)
        print(losses[kind].round(5))
        report(f"auc | {name} | {kind}", "AUC", [auc[kind]])
    for other, bar in ("keras", ""), ("summed", "within 0.001"):
        less = auc["default"] - auc[other]
        report(f"auc | {name} | default less {other}", "AUC", [less], bar)
    pairs = itertools.combinations(losses["summed"], 2)
    spread = np.mean([np.abs(a - b) for a, b in pairs], axis=0)
    report(f"losses | {name} | two seeds", "", spread)
    for kind, bar in ("default", "at most 1"), ("keras", ""), ("sparse", ""):
        ratio = np.abs(losses[kind] - losses["summed"]).max(axis=0) / spread
        report(f"losses | {name} | {kind} / two seeds", "", ratio, bar)
        print(f"{name}, {kind}: {ratio.max():.3g} of the spread at most")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    for name in _MODELS.value:
        compare(name)


if __name__ == "__main__":
    app.run(main)
