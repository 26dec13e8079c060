"""Dense variables on TensorFlow's parameter servers, embeddings on tfswitch's.

    tfswitch launch --servers=2 --workers=2 --tf_ps=1 \
        Every task of TF_CONFIG runs this program. The chief has the training
        loop of `tf.distribute.ParameterServerStrategy`: it schedules steps, and
        the workers run them, each as fast as it can and without waiting for
        others. Dense variables are on the "ps", which are TensorFlow's own
        here. So tfswitch needs the addresses of its servers in another way:
        by --tfswitch_servers, or an environment variable.
A step runs on a worker, so the worker looks up and pushes rows. It needs the
ops for that, so every task imports tfswitch.
the ops for that, hence the import of tfswitch in every task.
"""

import os
from collections.abc import Sequence

import keras
import movielens
import tensorflow as tf
from absl import app, flags, logging

import tfswitch as tsw

_TFSWITCH_SERVERS = flags.DEFINE_string(
    "tfswitch_servers",
    os.environ.get("TFSWITCH_SERVERS"),
    "host:port,host:port of the tfswitch servers, in shard order; by default "
    "what the environment variable TFSWITCH_SERVERS says.",
)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "How often to see all ratings.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Ratings per step.")
_MAX_RATINGS = flags.DEFINE_integer(
    "max_ratings", None, "Take only so many ratings."
)


def serve(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Runs the steps that others schedule, until the process is ended."""
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    )
    server.join()


def train(strategy: tf.distribute.Strategy) -> None:
    """Schedules all steps, and prints how good the model is."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    ratings, valid = movielens.read(_MAX_RATINGS.value)
    with strategy.scope():
        model = movielens.build_model()
        # Not Adam, which counts steps: Keras reads the counter and writes it
        # back, so with several workers some steps would not be counted.
        optimizer = keras.optimizers.Adagrad(5 * movielens.LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def make_dataset() -> tf.data.Dataset:
        # This runs on each worker, which reads the data itself, in its own
        # order.
        rows = tf.data.Dataset.from_tensor_slices(tuple(ratings))
        rows = rows.shuffle(len(ratings.ids)).repeat()
        return rows.batch(_BATCH_SIZE.value, drop_remainder=True).prefetch(2)

    def gradient_step(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = keras.losses.binary_crossentropy(
                labels, model(ids, training=True)
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(iterator: tf.distribute.DistributedIterator) -> tf.Tensor:
        return strategy.run(gradient_step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
    steps = len(ratings.ids) // _BATCH_SIZE.value
    for epoch in range(_EPOCHS.value):
        losses = [
            coordinator.schedule(step, args=(iterator,)) for _ in range(steps)
        ]
        coordinator.join()
        mean = sum(float(loss.fetch()) for loss in losses) / steps
        print(f"epoch {epoch + 1}: loss {mean:.4f}, {steps} steps")
    table = model.get_layer("user").table
    print(f"{table.iterations} steps of the rows of users")
    movielens.report_auc(valid, model(valid.ids).numpy())


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("WARNING")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
        return
    if not _TFSWITCH_SERVERS.value:
        raise app.UsageError("--tfswitch_servers is needed")
    with tsw.connect(f"grpc://{_TFSWITCH_SERVERS.value}") as cluster:
        train(tf.distribute.ParameterServerStrategy(resolver))
        for name, stats in cluster.stats().items():
            print(f"table {name!r}: {stats['num_rows']} rows")


if __name__ == "__main__":
    app.run(main)
