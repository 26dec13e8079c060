"""One worker of sync_replicas_test.py: a TensorFlow 1 training script.

Who it is and where the servers are it knows from TF_CONFIG alone; as "ps" it is
one of TensorFlow's servers. Its argument is a JSON object:

    engine: Where the variables are: "tables" on tfswitch's servers, "variables"
        on TensorFlow's.
    batches: For each worker, lists of ids. Id i owns element i of a variable;
        the loss is minus the mean over the batch and SGD's rate is 1, so
        element i ends as the weight of sample i. A second variable, elsewhere,
        is trained alike.
    num_ids: How many there are.
    out: Folder of the chief's checkpoint.
    pause: Before which steps to print "paused" and wait for a line; by worker.
        Step -1 is before it joins.
    announces: Whether to print "joined" before the first step.
    optimizer: Arguments of `tsw.train.SyncReplicasOptimizer`.

It prints "done" at the end.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys

import tensorflow as tf

import tfswitch as tsw

v1 = tf.compat.v1


def placement(job):
    """Returns where the model is, and arguments of the session."""
    if job["engine"] == "tables":
        return contextlib.nullcontext(), {}
    config = json.loads(os.environ["TF_CONFIG"])
    kind, index = config["task"]["type"], config["task"]["index"]
    filters = v1.ConfigProto(
        device_filters=["/job:ps", f"/job:worker/task:{index}"]
    )
    server = v1.train.Server(
        config["cluster"],
        job_name=kind,
        task_index=index,
        config=filters if kind == "worker" else None,
    )
    if kind == "ps":
        print("serves", flush=True)
        server.join()
    place = v1.train.replica_device_setter(
        ps_tasks=len(config["cluster"]["ps"]),
        worker_device=f"/job:worker/task:{index}",
    )
    return v1.device(place), {"master": server.target, "config": filters}


def pause_before(step, pauses):
    if step in pauses:
        print("paused", flush=True)
        sys.stdin.readline()


def main(job):
    v1.disable_eager_execution()
    scope, session_args = placement(job)
    with scope:
        ids = v1.placeholder(tf.int64, [None])
        weights, mirror = (
            v1.get_variable(
                name, [job["num_ids"]], initializer=v1.zeros_initializer()
            )
            for name in ("weights", "mirror")
        )
        loss = -tf.reduce_mean(tf.gather(weights, ids) + tf.gather(mirror, ids))
        optimizer = tsw.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(1.0),
            len(job["batches"]),
            batch_weight=tf.size(ids),
            **job["optimizer"],
        )
        step = v1.train.get_or_create_global_step()
        train_op = optimizer.minimize(loss, step)
    worker = optimizer.task_index
    hook = optimizer.make_session_run_hook(worker == 0)
    pauses = job["pause"].get(str(worker), [])
    join = hook.after_create_session

    def pause_and_join(session, coord):
        pause_before(-1, pauses)
        join(session, coord)

    hook.after_create_session = pause_and_join
    with tsw.train.MonitoredTrainingSession(
        is_chief=worker == 0,
        checkpoint_dir=job["out"] if worker == 0 else None,
        hooks=[hook],
        **session_args,
    ) as session:
        if job["announces"]:
            print("joined", flush=True)
        for step, batch in enumerate(job["batches"][worker]):
            pause_before(step, pauses)
            session.run(train_op, {ids: batch})
        if worker != 0:
            hook.finish_epoch()
            values = session.run(weights)
            print(json.dumps([float(v) for v in values]), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # Says where a hang is.
    main(json.loads(sys.argv[1]))
