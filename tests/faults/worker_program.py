"""One of two bsp workers, which a test kills and starts again.

    worker_program.py ADDRESS WORKER NUM_STEPS FOLDER

Goes on with the step at which its group is. Worker 0, the chief, saves to the
folder after every third step. Prints "joined", and "done" when all have ended.
"""

import sys

import tfswitch as tsw
from tests.faults.training import BSP, train


def main(address: str, number: str, num_steps: str, folder: str) -> None:
    with (
        tsw.Cluster(address, timeout=60.0) as cluster,
        tsw.train.Worker(
            int(number), 2, cluster=cluster, consistency=BSP, lease_secs=600.0
        ) as worker,
    ):
        print("joined", flush=True)

        def save(step: int) -> None:
            if worker.is_chief and step % 3 == 0:
                cluster.save(folder)

        train(worker, int(num_steps), pause=0.01, after_step=save)
        worker.wait_at_barrier("trained")
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
