"""AUC on Frappe with `keras.layers.Embedding`, and with tables in its place.

    python benchmarks/dense_updates_auc.py

Trains LR, FM, DeepFM and DCN with Keras's layer ("keras"), and with only the
layer changed ("sparse", the default, and "dense", which is `update="dense"`).
The protocol is that of BARS (Zhu et al., SIGIR 2022): dimension 10, batches of
4,096, Adam at 1e-3, rows that start with a deviation of 1e-4, L2 of all rows,
a rate of a tenth after each epoch whose validation AUC is no better, an end
after two. The gradient's norm is clipped variable by variable. All three have
one seed; their first rows are drawn from one distribution.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses
from collections.abc import Sequence
from typing import Any

import frappe
import keras
import numpy as np
from absl import app, flags
from figures import report

import tfswitch as tsw

_MODELS = flags.DEFINE_list("models", ["lr", "fm", "deepfm", "dcn"], "Which.")
_KINDS = flags.DEFINE_list(
    "kinds", ["keras", "sparse", "dense"], "With which layers."
)
_SEED = flags.DEFINE_integer("seed", 1, "Of all draws.")
_EPOCHS = flags.DEFINE_integer("epochs", 100, "At most.", lower_bound=1)

DIM = 10
# The factor of w in the gradient; Keras's L2 has half of it.
L2 = {"lr": 1e-5, "fm": 5e-6, "deepfm": 0.05, "dcn": 0.05}


def embedding(kind: str, dim: int, ids: int, l2: float) -> keras.layers.Layer:
    """Returns a layer; the kinds differ in nothing else."""
    layer, options = keras.layers.Embedding, {}
    if kind != "keras":
        layer, options = tsw.keras.DynamicEmbedding, {"update": kind}
    return layer(
        ids,
        dim,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=1e-4),
        embeddings_regularizer=keras.regularizers.L2(l2 / 2),
        **options,
    )


def hidden(x: Any) -> Any:
    for _ in range(3):
        x = keras.layers.Dense(400)(x)
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


def make_model(name: str, kind: str, num_ids: int) -> keras.Model:
    """Maps ids `(batch, fields)` to a probability."""
    ids = keras.Input((frappe.FIELDS,), dtype="int64")
    logits = []
    if name != "dcn":
        linear = embedding(kind, 1, num_ids, L2[name])(ids)
        logits.append(keras.ops.sum(linear, axis=1))
    if name != "lr":
        vectors = embedding(kind, DIM, num_ids, L2[name])(ids)
        flat = keras.layers.Flatten()(vectors)
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
    total = logits[0] if len(logits) == 1 else keras.layers.add(logits)
    return keras.Model(ids, keras.activations.sigmoid(total))


class ValidAuc(keras.callbacks.Callback):
    """Gives the callbacks behind it the exact AUC of a split."""

    def __init__(self, split: frappe.Split) -> None:
        super().__init__()
        self.split = split

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["val_auc"] = auc(self.model, self.split)


def auc(model: keras.Model, split: frappe.Split) -> float:
    scores = model.predict(split[0], batch_size=8192, verbose=0)
    return frappe.area_under_curve(split[1], scores.ravel())


def train(data: frappe.Data, name: str, kind: str) -> float:
    """Returns the AUC of the test split after the best epoch."""
    keras.utils.set_random_seed(_SEED.value)
    num_ids = 1 + max(int(ids.max()) for ids, _ in dataclasses.astuple(data))
    model = make_model(name, kind, num_ids)
    model.compile(
        keras.optimizers.Adam(1e-3, clipnorm=10.0), "binary_crossentropy"
    )
    best = {"monitor": "val_auc", "mode": "max"}
    model.fit(
        *data.train,
        batch_size=4096,
        epochs=_EPOCHS.value,
        verbose=0,
        callbacks=[
            ValidAuc(data.valid),
            keras.callbacks.ReduceLROnPlateau(
                **best, factor=0.1, patience=1, min_delta=1e-6
            ),
            keras.callbacks.EarlyStopping(
                **best, patience=2, min_delta=1e-6, restore_best_weights=True
            ),
        ],
    )
    return auc(model, data.test)


def renumbered(data: frappe.Data) -> frappe.Data:
    """Numbers ids from 0, as `Embedding` needs."""
    splits = dataclasses.astuple(data)
    _, ids = np.unique(
        np.concatenate([ids for ids, _ in splits]), return_inverse=True
    )
    ends = np.cumsum([len(labels) for _, labels in splits])
    parts = np.split(ids.reshape(-1, frappe.FIELDS), ends[:-1])
    return frappe.Data(
        *(
            (part, labels)
            for part, (_, labels) in zip(parts, splits, strict=True)
        )
    )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    data = renumbered(frappe.read())
    print(f"{'':8}" + "".join(f"{kind:>10}" for kind in _KINDS.value))
    for name in _MODELS.value:
        print(f"{name:8}", end="", flush=True)
        for kind in _KINDS.value:
            found = train(data, name, kind)
            report(f"auc | {name} | {kind}", "AUC", [found])
            print(f"{found:10.5f}", end="", flush=True)
        print()


if __name__ == "__main__":
    app.run(main)
