"""One of two bsp workers, which a test kills and starts again.

    worker_program.py ADDRESS WORKER NUM_STEPS FOLDER

Worker 0, the chief, goes on with the step at which its group is, and saves to
the folder after every third step. Worker 1 goes on from a note of its own, of
every third step, and repeats those since then. Prints "joined", and "done" when
all have ended; worker 1 also "behind" when it has ended two steps since a note.
"""

import sys
from pathlib import Path

import tfswitch as tsw
from tests.faults.training import BSP, train


def main(address: str, number: str, num_steps: str, folder: str) -> None:
    note = Path(folder + ".note")
    first_step = None
    if int(number) == 1:
        first_step = int(note.read_text()) if note.exists() else 0
    with (
        tsw.Cluster(address, timeout_secs=60.0) as cluster,
        tsw.train.Worker(
            int(number),
            2,
            cluster=cluster,
            consistency=BSP,
            lease_secs=600.0,
            first_step=first_step,
        ) as worker,
    ):
        print("joined", flush=True)

        def save(step: int) -> None:
            if worker.is_chief:
                if step % 3 == 0:
                    cluster.save(folder)
                return
            if step % 3 == 2:
                print("behind", flush=True)
            if step % 3 != 0:
                return
            assert worker.stats()["num_steps"] == step
            new = note.with_suffix(".new")
            new.write_text(str(step))
            new.replace(note)

        train(
            worker,
            int(num_steps),
            first_step=first_step,
            pause=0.01,
            after_step=save,
        )
        worker.wait_at_barrier("trained")
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
