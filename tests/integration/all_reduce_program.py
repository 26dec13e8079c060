"""One worker of all_reduce_test.py: says how much each of its samples counted.

Sample i owns element i of a variable (and, in another run, row i of an
embedding, whose gradients are IndexedSlices); the loss is the mean over the
batch and SGD's rate is 1, so element i ends as minus the weight of sample i.
Worker 0 has batches of 4, 4, 4 samples, worker 1 of 4 and 1, worker 2 none.
"""

import json

import numpy as np
import tensorflow as tf

import tfswitch as tsw

BATCHES = [
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    [[12, 13, 14, 15], [16]],
    [],
]
NUM_SAMPLES = 17


def train(strategy, mine, is_sparse):
    with strategy.scope():
        weights = tf.Variable(tf.zeros([NUM_SAMPLES, 1]))

    def gradients(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(weights, ids))
        gradient = tape.gradient(loss, weights)
        assert isinstance(gradient, tf.IndexedSlices)
        if not is_sparse:
            gradient = tf.convert_to_tensor(gradient)
        return tsw.train.weighted_all_reduce([gradient], tf.shape(ids)[0])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        (average,), total = strategy.run(gradients, args=(ids,))
        return tf.convert_to_tensor(average), total

    batches = [np.array(ids, np.int64) for ids in mine]
    result = np.zeros((NUM_SAMPLES, 1))
    for ids in tsw.train.uneven_batches(
        batches, like=tf.TensorSpec([None], tf.int64)
    ):
        average, total = step(ids)
        if total == 0.0:
            break
        result -= average.numpy()
    return result.reshape(-1).tolist()


def main():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    mine = BATCHES[resolver.task_id]
    weights = {
        "dense": train(strategy, mine, is_sparse=False),
        "sparse": train(strategy, mine, is_sparse=True),
    }
    print(json.dumps(weights))


if __name__ == "__main__":
    main()
