"""Measures requests to a served DeepFM, with lookups and without them.

    python benchmarks/serving_request_bench.py --program PATH/time_requests

Makes the DeepFM of examples/deepfm_movielens.py with 26 fields on one table of
10M rows, and saves it. It also saves the same graph with the embeddings as its
input. `time_requests` (time_requests.cc) sends requests to both models in
turns, in one C++ process. The program prints milliseconds, and the time of the
model with tables as a multiple of the other one's.
"""

import os
import pathlib
import re
import subprocess
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import app, flags
from figures import report

import tfswitch as tsw

_PROGRAM = flags.DEFINE_string(
    "program", None, "time_requests, built.", required=True
)
_ROWS = flags.DEFINE_integer("rows", 10_000_000, "Of the table.")
_REQUESTS = flags.DEFINE_integer("requests", 3000, "Of each model, per round.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of the program.")
_HIDDEN = flags.DEFINE_list(
    "hidden", ["64", "32"], "Units of the layers; the DeepFM paper has 400 x 3."
)
_THREADS = flags.DEFINE_list("threads", ["1", "2"], "Of TensorFlow, in turns.")
_ROW_FORMATS = flags.DEFINE_list("row_formats", ["float32"], "Of the rows.")

FIELDS = 26
DIM = 8  # Floats of a vector; each row has one more, its linear weight.


def deepfm(rows: keras.KerasTensor) -> keras.KerasTensor:
    """The graph behind the embeddings `(batch, FIELDS, 1 + DIM)`."""
    linear, vectors = rows[:, :, 0], rows[:, :, 1:]
    pairs = (
        keras.ops.square(keras.ops.sum(vectors, axis=1))
        - keras.ops.sum(keras.ops.square(vectors), axis=1)
    ) / 2.0
    deep = keras.layers.Flatten()(vectors)
    for units in map(int, _HIDDEN.value):
        deep = keras.layers.Dense(units, "relu")(deep)
    parts = [
        keras.ops.sum(linear, axis=1, keepdims=True),
        keras.ops.sum(pairs, axis=1, keepdims=True),
        keras.layers.Dense(1)(deep),
    ]
    return keras.layers.Activation("sigmoid")(keras.layers.add(parts))


def save_fed(path: str) -> None:
    """Saves the graph with its embeddings as the input."""
    rows = keras.Input((FIELDS, 1 + DIM), name="rows")
    model = keras.Model(rows, deepfm(rows))
    model.export(path, verbose=False)


def save_served(folder: str, row_formats: list[str]) -> list[str]:
    """Saves the model with its table, once in each format."""
    ids = keras.Input((FIELDS,), dtype="int64", name="ids")
    layer = tsw.keras.DynamicEmbedding(1 + DIM, name="rows")
    model = keras.Model(ids, deepfm(layer(ids)))
    random = np.random.default_rng(1)
    step = 500_000
    for begin in range(0, _ROWS.value, step):
        some = np.arange(begin, min(begin + step, _ROWS.value))
        layer.table.assign(
            some,
            random.normal(0, 0.1, (len(some), 1 + DIM)).astype(np.float32),
        )
    paths = []
    for row_format in row_formats:
        path = f"{folder}/{row_format}"
        tsw.saved_model.save(model, path, row_format=row_format)
        paths.append(path)
    return paths


def report_times(output: str, threads: str) -> None:
    """Reports what `time_requests` has printed of each model."""
    row = f"layers of {', '.join(_HIDDEN.value)}; threads: {threads}"
    for model, *numbers in re.findall(
        r"/(\w+): median (\S+) ms \((\S+)\), p99 (\S+) ms \((\S+)\)", output
    ):
        median, ratio, p99, p99_ratio = map(float, numbers)
        report(f"requests | {row} | {model}: median", "ms", [median])
        report(f"requests | {row} | {model}: p99", "ms", [p99])
        if model != "fed":
            name = f"requests | {row} | {model} / fed"
            report(f"{name}: median", "", [ratio])
            report(f"{name}: p99", "", [p99_ratio], "at most 1.2")


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fed = f"{folder}/fed"
        save_fed(fed)
        models = [fed, *save_served(folder, _ROW_FORMATS.value)]
        for path in models:
            size = sum(
                file.stat().st_size
                for file in pathlib.Path(path).rglob("*")
                if file.is_file()
            )
            print(f"{path}: {size / 2**20:.0f} MiB")
        for _ in range(_ROUNDS.value):
            for threads in _THREADS.value:
                print(f"threads: {threads}", flush=True)
                output = subprocess.run(
                    [
                        _PROGRAM.value,
                        f"--models={','.join(models)}",
                        f"--num_ids={_ROWS.value}",
                        f"--requests={_REQUESTS.value}",
                        f"--threads={threads}",
                    ],
                    check=True,
                    env={"TF_CPP_MIN_LOG_LEVEL": "2"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                ).stdout
                print(output, end="", flush=True)
                report_times(output, threads)


if __name__ == "__main__":
    app.run(main)
