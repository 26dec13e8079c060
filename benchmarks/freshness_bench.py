"""Seconds from a push to the moment a serving process answers with it.

    python benchmarks/freshness_bench.py --export_every=5 --watch_every=1

This process trains a table of a million rows: it pushes without pause, and
exports a delta every few seconds. Another process has loaded the SavedModel and
watches its folder. One row counts the pushes. A push is visible in the other
process from the first answer in which this row counts it. The program prints
the median and the worst time of all pushes, and how long a delta took.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import report

import tfswitch as tsw

_EXPORT_EVERY = flags.DEFINE_float("export_every", 5.0, "Seconds.")
_WATCH_EVERY = flags.DEFINE_float("watch_every", 1.0, "Seconds.")
_SECONDS = flags.DEFINE_float("seconds", 60.0, "Of training.")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "Of the table.")
_SERVE = flags.DEFINE_string("serve", None, "The other process: a SavedModel.")

COUNTER = -1  # The id whose row counts pushes.
DIM = 16
BATCH = 2048


def serve(path: str) -> None:
    """Prints `[count, time]` whenever the served count changes."""
    model = tf.saved_model.load(path)
    answer = model.signatures["serving_default"]
    tsw.saved_model.watch(path, _WATCH_EVERY.value)
    ids = tf.constant([[COUNTER]], tf.int64)
    last = -1
    print(json.dumps("ready"), flush=True)
    while True:
        rows = next(iter(answer(ids).values())).numpy()
        count = round(float(rows.ravel()[0]))
        if count != last:
            print(json.dumps([count, time.time()]), flush=True)
            last = count
        time.sleep(0.005)


def train(path: str, table: tsw.EmbeddingTable) -> tuple[list, list, list]:
    """Returns the times of the pushes, and the seconds and rows of deltas."""
    pushed: list[float] = []
    took: list[float] = []
    num_rows: list[int] = []
    over = threading.Event()

    def export() -> None:
        while not over.wait(_EXPORT_EVERY.value):
            begin = time.time()
            report = tsw.export.delta(path)
            took.append(time.time() - begin)
            num_rows.append(report.num_rows)

    exporter = threading.Thread(target=export)
    exporter.start()
    random = np.random.default_rng(1)
    gradients = tf.fill([BATCH, DIM], 0.01)
    end = time.time() + _SECONDS.value
    while time.time() < end:
        ids = random.integers(0, _ROWS.value, BATCH)
        table.push(ids, gradients)
        table.assign([COUNTER], np.full((1, DIM), len(pushed), np.float32))
        pushed.append(time.time())
        time.sleep(0.01)
    # The last pushes become visible too.
    time.sleep(2 * (_EXPORT_EVERY.value + _WATCH_EVERY.value))
    over.set()
    exporter.join()
    return pushed, took, num_rows


def main(_: list[str]) -> None:
    if _SERVE.value is not None:
        serve(_SERVE.value)
        return
    ids = keras.Input((1,), dtype="int64", name="ids")
    layer = tsw.keras.DynamicEmbedding(DIM, name="rows")
    model = keras.Model(ids, layer(ids))
    every = np.arange(_ROWS.value)
    layer.table.assign(every, np.zeros((len(every), DIM), np.float32))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        tsw.saved_model.save(model, path)
        with subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], f"--serve={path}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(__file__).parents[1],
            env=os.environ | {"PYTHONPATH": "."},
        ) as server:
            assert server.stdout is not None
            assert json.loads(server.stdout.readline()) == "ready"
            pushed, took, num_rows = train(path, layer.table)
            server.terminate()
            seen = [json.loads(line) for line in server.stdout]
    waits = []
    for count, when in enumerate(pushed):
        visible = [moment for other, moment in seen if other >= count]
        if visible:
            waits.append(visible[0] - when)
    report(
        "freshness | from a push to an answer with it | measured",
        "s",
        waits,
        "10 s; 60 s by configuration",
    )
    report("freshness | exporting a delta | measured", "s", took)
    report("freshness | rows of a delta | measured", "", num_rows)
    print(
        f"{len(pushed)} pushes of {BATCH} rows, {len(took)} deltas of "
        f"{statistics.median(num_rows):.0f} rows, each in "
        f"{statistics.median(took):.2f} s (worst {max(took):.2f})"
    )
    print(
        f"from push to served: median {statistics.median(waits):.2f} s, "
        f"worst {max(waits):.2f} s; {len(pushed) - len(waits)} never seen"
    )


if __name__ == "__main__":
    app.run(main)
