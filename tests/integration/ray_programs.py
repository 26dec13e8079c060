"""What the workers of ray_test.py do."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfswitch as tsw

NUM_SAMPLES = 40  # Of each item of a queue.
STEPS = 30  # Of worker 0 in an epoch; others have fewer.


def wait_for(path: Path) -> None:
    """Waits until a file is there."""
    give_up = time.monotonic() + 120.0
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.01)


def make_counts(cluster: Any = None) -> tsw.EmbeddingTable:
    """A table that counts how often each sample has been trained."""
    return tsw.EmbeddingTable(
        "counts",
        1,
        initializer="zeros",
        optimizer=tsw.optimizers.SGD(1.0),
        seed=0,
        consistency=tsw.train.Consistency.bsp(reduction="sum"),
        cluster=cluster,
    )


def count_samples(items: Sequence[str], folder: Path, pause: bool) -> int:
    """Trains what a work queue hands out, 2 epochs; returns its samples.

    Each worker says that it trains by a file with its number, which has its
    process. With `pause` it goes on when there is a file "go".
    """
    table = make_counts()
    own = 0
    with tsw.train.Worker(
        consistency=table.consistency, lease_secs=3.0
    ) as worker:
        queue = tsw.data.WorkQueue(items, epochs=2, worker=worker)
        for epoch in queue.epochs():
            for item in epoch:
                while item.offset < NUM_SAMPLES and not item.is_lost:
                    begin = item.offset
                    count = min(4, NUM_SAMPLES - begin)
                    first = NUM_SAMPLES * item.index + begin
                    item.advance(count)
                    table.push(
                        np.arange(first, first + count), np.ones((count, 1))
                    )
                    if pause:
                        mark = folder / str(worker.worker_id)
                        mark.write_text(str(os.getpid()))
                        wait_for(folder / "go")
                    worker.end_step(weight=count)
                    own += count
                    time.sleep(0.02)
    return own


class Mark(keras.callbacks.Callback):
    """Says in mid-epoch that it trains, and waits for what happens then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == STEPS // 3:
            (self._folder / "marked").touch()
            wait_for(self._folder / "go")


def fit(folder: Path) -> dict[str, Any]:
    """Trains a model with plain `fit` on its part of the data, under bsp.

    Returns:
        "samples" of all workers, and bytes: "rows" by id, "dense" weights.
    """
    bsp = tsw.train.Consistency.bsp()
    worker = tsw.train.Worker(consistency=bsp)
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(worker.worker_id)
    samples = 8 * (STEPS - 3 * worker.worker_id) - worker.worker_id
    ids = random.integers(0, 500, size=(samples, 3))
    labels = (ids.sum(axis=1) % 2).astype(np.float32)
    model = keras.Sequential(
        [
            tsw.keras.DynamicEmbedding(4, name="ids", consistency=bsp, seed=1),
            keras.layers.Flatten(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        tsw.keras.ParameterServerOptimizer(
            "adam", consistency=bsp, worker=worker
        ),
        "binary_crossentropy",
    )
    callbacks: list[Any] = [tsw.keras.SyncEpochs()]
    if worker.is_chief:
        callbacks.append(Mark(folder))
    model.fit(
        ids,
        labels,
        batch_size=8,
        epochs=2,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    )
    keys, values = model.layers[0].table.export_rows()
    return {
        "samples": worker.stats()["workers"]["samples"],
        "rows": {
            int(k): v.tobytes() for k, v in zip(keys, values, strict=True)
        },
        "dense": [weight.tobytes() for weight in model.get_weights()],
    }


def fail_or_wait() -> None:
    """Worker 1 fails; the others would wait for ever."""
    worker = tsw.train.Worker(consistency="bsp")
    if worker.worker_id == 1:
        raise ZeroDivisionError(f"worker {worker.worker_id}")
    threading.Event().wait()
