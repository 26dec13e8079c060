"""Dense variables by Horovod's all-reduce, embeddings on tfswitch servers.

    tfswitch launch --servers=2 horovodrun -np 2 python horovod_workers.py

This program does the same as `multi_worker_mirrored.py`, whose text explains
data that ends at different times; here Horovod computes the sums. Horovod's own
solution, `hvd.join()`, divides by the number of all workers, even of those
without data, and refuses the all-gathers that sparse gradients need.

Horovod tells each process its number. The "ps" of TF_CONFIG, which horovodrun
passes on to its processes, are tfswitch servers. The tests run this program
only if Horovod is installed: its last release, 0.28.1, does not compile against
TensorFlow 2.21, whose wheel no longer has headers that it includes
(`tensorflow/compiler/xla/client/xla_builder.h`).
"""

import sys
from collections.abc import Sequence

import keras
import movielens
import tensorflow as tf
from absl import app, flags

import tfswitch as tsw

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    sys.exit(
        f"this example needs Horovod ({error}). Install it with\n"
        "  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 pip install "
        "--no-build-isolation 'horovod[tensorflow]'"
    )

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


class Trainer:
    """A step of all workers."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._optimizer = keras.optimizers.Adam(movielens.LEARNING_RATE)
        self._optimizer.build(model.trainable_variables)
        hvd.broadcast_variables(
            [variable.value for variable in model.trainable_variables],
            root_rank=0,
        )

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
        samples = tf.cast(tf.shape(ids)[0], tf.float32)
        with tf.GradientTape() as tape:
            losses = keras.losses.binary_crossentropy(
                labels, self._model(ids, training=True)
            )
            # Divides by the number of samples, because the servers need the
            # gradient of the mean loss.
            loss = tf.math.divide_no_nan(tf.reduce_sum(losses), samples)
        gradients = tape.gradient(loss, self._model.trainable_variables)
        (*gradients, loss), samples = tsw.train.weighted_all_reduce(
            [*gradients, loss], samples, backend="horovod"
        )
        # No step is taken after the end of the data, because Adam moves
        # variables even if all gradients are zero.
        if samples > 0.0:
            self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss, samples


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    hvd.init()
    worker = tsw.train.Worker(
        hvd.rank(), hvd.size(), consistency=_CONSISTENCY.value
    )
    keras.utils.set_random_seed(movielens.SEED)
    train, valid = movielens.read(_MAX_RATINGS.value)
    mine = movielens.my_share(train, worker)
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
