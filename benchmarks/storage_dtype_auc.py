"""Measures the effect of 16-bit rows: AUC of DeepFM with each type of row.

Trains the DeepFM of examples/deepfm_movielens.py on MovieLens latest-small with
each type of row, and prints the validation AUC and the bytes of a row. With one
seed all types start from the same values, except for rounding, and see the
ratings in the same order. Types take turns. Figures are medians over
the seeds, and the median of the difference to float32 with the same seed.

    python benchmarks/storage_dtype_auc.py --optimizer=adam --seeds=5
    python benchmarks/storage_dtype_auc.py --wire

`--epochs`, `--batch_size`, `--data` and `--max_ratings` are those of the
example.
"""

import os
import pathlib
import statistics
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import app, flags

import tfswitch as tsw

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import deepfm_movielens as example
from figures import report

_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "adagrad", ["adagrad", "adam"], "Of the embeddings."
)
_WIRE = flags.DEFINE_bool(
    "wire", False, "Vary `wire_dtype` of rows on a server, not their type."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each.", lower_bound=1)

OPTIMIZERS = {
    "adagrad": tsw.optimizers.Adagrad(example.LEARNING_RATE),
    "adam": tsw.optimizers.Adam(0.003),
}
ROW_TYPES = {
    "float32": tsw.StorageDtype(),
    "bfloat16 + float32": tsw.StorageDtype("bfloat16"),
    "bfloat16 + float32, nearest": tsw.StorageDtype(
        "bfloat16", rounding="nearest"
    ),
    "float16 + float32": tsw.StorageDtype("float16"),
    "bfloat16 + bfloat16": tsw.StorageDtype("bfloat16", slots="bfloat16"),
    "bfloat16 + bfloat16, nearest": tsw.StorageDtype(
        "bfloat16", slots="bfloat16", rounding="nearest"
    ),
    "float16 + bfloat16": tsw.StorageDtype("float16", slots="bfloat16"),
    "float16 + float16": tsw.StorageDtype("float16", slots="float16"),
}
WIRE_TYPES = ("float32", "bfloat16", "float16")


def train(data: tuple, name: str, seed: int) -> tuple[float, int]:
    """Returns the AUC of the last epoch, and the bytes of a row."""
    if not _WIRE.value:
        return train_with(data, seed, storage_dtype=ROW_TYPES[name])
    with tsw.Server() as server:
        cluster = tsw.Cluster(f"grpc://{server.address}")
        return train_with(data, seed, wire_dtype=name, cluster=cluster)


def train_with(data: tuple, seed: int, **settings: Any) -> tuple[float, int]:
    """Trains layers with these settings; see `train`."""
    train_x, train_y, valid_x, valid_y = data
    keras.utils.set_random_seed(seed)
    layers = []

    def embed(name: str, ids: keras.KerasTensor) -> keras.KerasTensor:
        layers.append(
            tsw.keras.DynamicEmbedding(
                1 + example.DIM,
                name=f"{name}_embedding",
                optimizer=OPTIMIZERS[_OPTIMIZER.value],
                combiner="mean",
                mask_zero=True,
                seed=seed,
                **settings,
            )
        )
        return layers[-1](ids)

    model = example.deepfm(embed)
    history = model.fit(
        train_x,
        train_y,
        batch_size=flags.FLAGS.batch_size,
        epochs=flags.FLAGS.epochs,
        validation_data=(valid_x, valid_y),
        verbose=0,
    )
    auc = history.history["val_auc"][-1]
    return auc, layers[0].table.stats()["row_stride_bytes"]


def main(argv: list[str]) -> None:
    """Trains all and prints the table."""
    del argv
    data = example.read_movielens(flags.FLAGS.data, flags.FLAGS.max_ratings)
    names = WIRE_TYPES if _WIRE.value else tuple(ROW_TYPES)
    aucs: dict[str, list[float]] = {name: [] for name in names}
    stride = {}
    for seed in range(1, 1 + _SEEDS.value):
        for name in names:
            auc, stride[name] = train(data, name, seed)
            aucs[name].append(auc)
            print(f"seed {seed}, {name}: AUC {auc:.4f}", flush=True)
    print(f"\n{_OPTIMIZER.value}, embeddings + slots: bytes of a row, AUC")
    for name, values in aucs.items():
        difference = np.subtract(values, aucs["float32"])
        cell = f"auc | {name} | {_OPTIMIZER.value}"
        report(cell, "AUC", values)
        report(f"{cell} - float32", "AUC", difference)
        print(
            f"  {name:28} {stride[name]:4} {statistics.median(values):.4f} "
            f"({statistics.median(difference):+.4f}, "
            f"{difference.min():+.4f} to {difference.max():+.4f})"
        )


if __name__ == "__main__":
    app.run(main)
