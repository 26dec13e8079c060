"""One worker of work_queue_test.py: trains what a work queue hands out.

Who it is and where the servers are it knows from TF_CONFIG alone. Its argument
is a JSON object:

    items: The queue's items; each has `samples` samples.
    epochs: The queue's number of epochs.
    pause: In which of its steps, after it has pushed, to print "paused" and
        wait for a line.

It prints "done" at the end.
"""

import json
import sys

import numpy as np

import tfswitch as tsw


def make_counts(cluster=None):
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


def main():
    job = json.loads(sys.argv[1])
    table = make_counts()
    num_steps = 0
    with tsw.train.Worker(
        consistency=table.consistency, lease_secs=3.0
    ) as worker:
        queue = tsw.data.WorkQueue(
            job["items"], epochs=job["epochs"], worker=worker, shuffle=True
        )
        for epoch in queue.epochs():
            for item in epoch:
                while item.offset < job["samples"] and not item.is_lost:
                    # Another number of samples for each worker.
                    begin = item.offset
                    count = min(2 + worker.worker_id, job["samples"] - begin)
                    first = job["samples"] * item.index + begin
                    item.advance(count)
                    table.push(
                        np.arange(first, first + count), np.ones((count, 1))
                    )
                    if num_steps == job.get("pause"):
                        print("paused", flush=True)
                        sys.stdin.readline()
                    worker.end_step(weight=count)
                    num_steps += 1
    print("done", flush=True)


if __name__ == "__main__":
    main()
