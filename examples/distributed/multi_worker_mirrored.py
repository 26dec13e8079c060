"""Dense variables by all-reduce, embeddings on tfswitch servers.

    tfswitch launch --servers=2 --workers=2 multi_worker_mirrored.py

`tf.distribute.MultiWorkerMirroredStrategy` keeps a copy of the dense variables
in every worker and sums gradients over the network. The embeddings, which would
not fit in a worker, are on the "ps" of TF_CONFIG. Keras 3 cannot `fit` under
this strategy, so the program has its own training loop.

All-reduce needs every worker in every step, but their data ends at different
times. So a worker without data continues with empty batches
(`tsw.train.uneven_batches`), and each batch sends its number of samples in the
same all-reduce (`tsw.train.weighted_all_reduce`). If the sum is 0, all data has
been used. Every sample counts once, with the same weight as the others of its
step.
"""

import json
import os
from collections.abc import Sequence

import keras
import movielens
import tensorflow as tf
from absl import app, flags

import tfswitch as tsw

_CONSISTENCY = flags.DEFINE_enum(
    "consistency",
    "bsp",
    ["asp", "bsp"],
    "Whether gradients of embeddings are applied as they come or, as those of "
    "the dense variables, together after each step.",
)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "How often to see all ratings.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "Ratings per step and worker."
)
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many ratings."
)


def make_strategy() -> tf.distribute.Strategy:
    """Makes the strategy of the workers in TF_CONFIG, without its ps.

    TensorFlow would take the first ps for its own coordinator, and wait for it.
    """
    config = json.loads(os.environ["TF_CONFIG"])
    workers = {
        job: addresses
        for job, addresses in config["cluster"].items()
        if job in ("chief", "worker")
    }
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(workers),
        task_type=config["task"]["type"],
        task_id=int(config["task"]["index"]),
        rpc_layer="grpc",
    )
    return tf.distribute.MultiWorkerMirroredStrategy(resolver)


class Trainer:
    """Makes a step of all workers. Call this in the strategy's scope."""

    def __init__(self, model: keras.Model) -> None:
        self._strategy = tf.distribute.get_strategy()
        self._model = model
        self._optimizer = keras.optimizers.Adam(movielens.LEARNING_RATE)
        self._optimizer.build(model.trainable_variables)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 2], tf.int64),
            tf.TensorSpec([None, 1], tf.float32),
        ]
    )
    def step(
        self, ids: tf.Tensor, labels: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean loss and the number of samples of all workers."""
        gradients, loss, samples = self._strategy.run(
            self._gradients, args=(ids, labels)
        )
        # Not even a step with zero gradients after the end, because Adam would
        # move.
        if samples > 0.0:
            # This is outside of `run`, where the optimizer would sum again.
            self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss, samples

    def _gradients(
        self, ids: tf.Tensor, labels: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        samples = tf.cast(tf.shape(ids)[0], tf.float32)
        with tf.GradientTape() as tape:
            losses = keras.losses.binary_crossentropy(
                labels, self._model(ids, training=True)
            )
            # The gradient is divided by all samples, as the servers need that
            # of the mean.
            loss = tf.math.divide_no_nan(tf.reduce_sum(losses), samples)
        gradients = tape.gradient(loss, self._model.trainable_variables)
        (*gradients, loss), samples = tsw.train.weighted_all_reduce(
            [*gradients, loss], samples
        )
        return gradients, loss, samples


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    tf.get_logger().setLevel("WARNING")
    strategy = make_strategy()  # Must be TensorFlow's first use.
    worker = tsw.train.Worker(consistency=_CONSISTENCY.value)
    keras.utils.set_random_seed(movielens.SEED)
    train, valid = movielens.read(_MAX_RATINGS.value)
    mine = movielens.my_share(train, worker)
    with strategy.scope():
        model = movielens.build_model(worker.consistency)
        trainer = Trainer(model)

    movielens.train_together(
        worker,
        trainer.step,
        mine,
        epochs=_EPOCHS.value,
        batch_size=_BATCH_SIZE.value,
    )
    worker.leave()

    # All workers have the same model; the chief prints how good it is.
    if worker.is_chief:
        movielens.report_auc(valid, model(valid.ids).numpy())


if __name__ == "__main__":
    app.run(main)
