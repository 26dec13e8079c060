"""Size and AUC of a trained model by the format of its exported rows.

    python benchmarks/row_format_auc.py

Trains the DeepFM of examples/deepfm_movielens.py on its data, saves it in each
format, and predicts the held-out ratings with each saved model. Prints the
bytes of the row files, the AUC, and the largest difference of a score.
"""

import os
import pathlib
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfswitch as tsw

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import deepfm_movielens as example
from figures import area_under_curve, report

_SEEDS = flags.DEFINE_list("seeds", ["1", "2", "3"], "One training for each.")

ROW_FORMATS = ("float32", "float16", "int8")


def main(_: list[str]) -> None:
    train, labels, held_out, held_out_labels = example.read_movielens(
        flags.FLAGS.data, None
    )
    for seed in map(int, _SEEDS.value):
        keras.utils.set_random_seed(seed)
        example.SEED = seed
        model = example.dynamic_model()
        model.fit(
            train, labels, batch_size=256, epochs=flags.FLAGS.epochs, verbose=0
        )
        scores = model.predict(held_out, batch_size=4096, verbose=0)[:, 0]
        auc = area_under_curve(held_out_labels, scores)
        report("formats | trained | AUC", "AUC", [auc])
        print(f"seed {seed}, trained: AUC {auc:.6f}")
        with tempfile.TemporaryDirectory() as folder:
            for row_format in ROW_FORMATS:
                path = f"{folder}/{row_format}"
                tsw.saved_model.save(model, path, row_format=row_format)
                size = sum(
                    file.stat().st_size
                    for file in pathlib.Path(path).rglob("*.safetensors")
                )
                serve = tf.saved_model.load(path).signatures["serving_default"]
                served = next(
                    iter(
                        serve(
                            **{
                                name: tf.constant(ids)
                                for name, ids in held_out.items()
                            }
                        ).values()
                    )
                ).numpy()[:, 0]
                auc = area_under_curve(held_out_labels, served)
                difference = np.max(np.abs(served - scores))
                row = f"formats | {row_format}"
                report(f"{row} | row files", "B", [size])
                report(f"{row} | AUC", "AUC", [auc])
                report(f"{row} | largest difference", "", [difference])
                print(
                    f"seed {seed}, {row_format}: {size} bytes, AUC {auc:.6f}, "
                    f"largest difference {difference:.2e}"
                )


if __name__ == "__main__":
    app.run(main)
