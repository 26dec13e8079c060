"""The workers' programs of ray_test.py."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfswitch as tsw
from tests.integration.work_queue_program import make_counts

NUM_SAMPLES = 40  # In each item of a queue.
STEPS = 30  # Steps of worker 0 in an epoch; others have fewer.


def wait_for(path: Path) -> None:
    """Waits until a file is there."""
    give_up = time.monotonic() + 120.0
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.01)


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
                        whole = mark.with_suffix(".new")
                        whole.write_text(str(os.getpid()))
                        whole.rename(mark)
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


def make_model(worker: Any, learning_rate: float = 0.01) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            tsw.keras.DynamicEmbedding(
                4, name="ids", consistency=worker.consistency, seed=1
            ),
            keras.layers.Flatten(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        tsw.keras.ParameterServerOptimizer(
            tsw.optimizers.Adam(learning_rate),
            consistency=worker.consistency,
            worker=worker,
        ),
        "binary_crossentropy",
    )
    return model


def make_data(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of `(samples, 3)`, and labels."""
    ids = np.random.default_rng(seed).integers(0, 500, size=(samples, 3))
    return ids, (ids.sum(axis=1) % 2).astype(np.float32)


def fit(folder: Path) -> dict[str, Any]:
    """Trains a model with plain `fit` on its part of the data, under bsp.

    Returns:
        "samples" of all workers, and bytes: "rows" by id, "dense" weights.
    """
    worker = tsw.train.Worker(consistency="bsp")
    model = make_model(worker)
    samples = 8 * (STEPS - 3 * worker.worker_id) - worker.worker_id
    ids, labels = make_data(samples, seed=worker.worker_id)
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
    """Worker 1 fails; the others would wait without end."""
    worker = tsw.train.Worker(consistency="bsp")
    if worker.worker_id == 1:
        raise ZeroDivisionError(f"worker {worker.worker_id}")
    threading.Event().wait()


def train_loop(config: dict[str, Any]) -> None:
    """The loop of a trainer of Ray Train, with its data and checkpoints."""
    import ray.train

    with tsw.connect(config["servers"]):
        worker = tsw.train.Worker(consistency="bsp")
        model = make_model(worker)
        shard = ray.train.get_dataset_shard("train")

        def batches() -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
            for batch in shard.iter_tf_batches(batch_size=8):
                yield batch["ids"], batch["label"]

        for epoch in range(2):
            model.fit(
                tf.data.Dataset.from_generator(
                    batches,
                    output_signature=(
                        tf.TensorSpec([None, 3], tf.int64),
                        tf.TensorSpec([None], tf.float32),
                    ),
                ),
                initial_epoch=epoch,
                epochs=epoch + 1,
                callbacks=[tsw.keras.SyncEpochs()],
                verbose=0,
            )
            checkpoint = None
            if worker.is_chief:
                checkpoint = tsw.ray.save_checkpoint("run", model)
            worker.wait_at_barrier("saved")
            ray.train.report(
                {
                    "samples": worker.stats()["workers"]["samples"],
                    "dense": float(np.sum(model.layers[-1].get_weights()[0])),
                },
                checkpoint=checkpoint,
            )


def trial(config: dict[str, Any]) -> dict[str, float]:
    """A trial of Ray Tune, which trains with its own servers."""
    from ray import tune

    with (
        tsw.ray.start_servers(
            1,
            name=f"trial-{tune.get_context().get_trial_id()}",
            host="127.0.0.1",
            resources_per_server={"head": 1},
        ) as servers,
        tsw.connect(servers.address) as cluster,
    ):
        worker = tsw.train.Worker(0, 1, consistency="bsp")
        model = make_model(worker, config["learning_rate"])
        history = model.fit(
            *make_data(160, seed=0), batch_size=16, epochs=3, verbose=0
        )
        return {
            "loss": history.history["loss"][-1],
            "tables": float(len(cluster.tables())),
        }
