"""One worker of sync_replicas_test.py: a TensorFlow 1 training script.

Who it is and where the servers are it knows from TF_CONFIG alone. Its argument
is a JSON object:

    batches: Of each worker, lists of ids. Id i owns element i of a variable;
        the loss is minus the mean over the batch and SGD's rate is 1, so
        element i ends as the weight of sample i.
    num_ids: How many there are.
    out: Folder of the chief's checkpoint.
    pause: Before which step to print "paused" and wait for a line; by worker.
    announces: Whether to print "joined" before the first step.
    optimizer: Arguments of `tsw.train.SyncReplicasOptimizer`.

It prints "done" at the end.
"""

import json
import sys

import tensorflow as tf

import tfswitch as tsw

v1 = tf.compat.v1


def main(job):
    v1.disable_eager_execution()
    ids = v1.placeholder(tf.int64, [None])
    weights = v1.get_variable(
        "weights", [job["num_ids"]], initializer=v1.zeros_initializer()
    )
    loss = -tf.reduce_mean(tf.gather(weights, ids))
    optimizer = tsw.train.SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(1.0),
        len(job["batches"]),
        batch_weight=tf.size(ids),
        **job["optimizer"],
    )
    train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    worker = optimizer.task_index
    hook = optimizer.make_session_run_hook(worker == 0)
    with tsw.train.MonitoredTrainingSession(
        is_chief=worker == 0, checkpoint_dir=job["out"], hooks=[hook]
    ) as session:
        if job["announces"]:
            print("joined", flush=True)
        for step, batch in enumerate(job["batches"][worker]):
            if step == job["pause"].get(str(worker)):
                print("paused", flush=True)
                sys.stdin.readline()
            session.run(train_op, {ids: batch})
        if worker != 0:
            hook.finish_epoch()
            values = session.run(weights)
            print(json.dumps([float(v) for v in values]), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
