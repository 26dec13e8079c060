"""One worker of workers_test.py: trains with plain `fit`, as users do.

Who it is and where the servers are it knows from TF_CONFIG alone. Its argument
is a JSON object:

    data: .npz file with `ids_B` and `targets_B` of each batch B.
    out: Folder for what came out, one .npz per run.
    consistency: As `tsw.train.Consistency.get_config` returns it.
    runs: [[name, optimizer], ...]; each has tables and a group of its own.
    pause: Before which batch to print "paused" and wait for a line.
    worker: Arguments of `tsw.train.Worker`.

It prints "done" at the end.
"""

import json
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tfswitch as tsw
from tfswitch.keras._backend import keras

DIM, IDS_PER_SAMPLE, NUM_IDS = 3, 2, 7

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.02),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.05),
}


def make_model(name, make_optimizer, rows, **layer):
    """A model of a few variables; `rows` names the table of its embeddings."""
    keras.utils.set_random_seed(12)
    layer = tsw.keras.DynamicEmbedding(
        DIM,
        table=rows,
        optimizer=OPTIMIZERS[name]()
        if name != "adamw"
        else tsw.optimizers.AdamW(0.02, weight_decay=0.05),
        seed=0,
        **layer,
    )
    model = keras.Sequential(
        [
            keras.Input((IDS_PER_SAMPLE,), dtype="int64"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(make_optimizer(OPTIMIZERS[name]()), "mse")
    return model, layer


def make_dataset(batches):
    """Batches of any sizes, one after the other."""
    return tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=(
            tf.TensorSpec([None, IDS_PER_SAMPLE], tf.int64),
            tf.TensorSpec([None, 1], tf.float32),
        ),
    )


def dense_variables(model):
    """The model's variables without the one that stands for rows."""
    return [v for v in model.trainable_variables if v.shape[0] != 0]


def result_of(model, layer):
    """Dense variables, then the rows of all ids."""
    dense = [v.numpy() for v in dense_variables(model)]
    return [*dense, layer.table.lookup(np.arange(NUM_IDS)).numpy()]


class BeforeBatch(keras.callbacks.Callback):
    """Calls a function with the number of each batch before its step."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def on_train_batch_begin(self, batch, logs=None):
        self._function(batch)


def main(job):
    arrays = np.load(job["data"])
    batches = [
        (arrays[f"ids_{b}"], arrays[f"targets_{b}"])
        for b in range(len(arrays.files) // 2)
    ]
    consistency = tsw.train.Consistency(**job["consistency"])

    def before_batch(number):
        if number == job.get("pause"):
            print("paused", flush=True)
            sys.stdin.readline()

    for run, name in job["runs"]:
        worker = tsw.train.Worker(
            consistency=consistency, group=run, **job.get("worker", {})
        )
        model, layer = make_model(
            name,
            lambda optimizer, run=run, worker=worker: (
                tsw.keras.ParameterServerOptimizer(
                    optimizer,
                    consistency=consistency,
                    table=f"dense of {run}",
                    worker=worker,
                )
            ),
            f"rows of {run}",
            consistency=consistency,
        )
        history = model.fit(
            make_dataset(batches),
            callbacks=[BeforeBatch(before_batch)],
            verbose=0,
        )
        np.savez(
            pathlib.Path(job["out"]) / f"{run}-{worker.worker_id}.npz",
            *result_of(model, layer),
            loss=history.history.get("loss", [0.0])[0],
            stats=json.dumps(worker.stats()),
        )
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
