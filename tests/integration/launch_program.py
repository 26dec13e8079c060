"""The workers' program of launch_test.py, which does not import TensorFlow.

Each trains a bsp table of a few rows, with gradients by which a row's value is
the number of steps that count, those of all workers. Its arguments are the
number of steps and the seconds that each takes. Worker 0 prints the values at
the end.
"""

import json
import sys
import time

import numpy as np

import tfswitch_command

tfswitch_command._put_package()

from tfswitch._connection import _tf_config  # noqa: E402
from tfswitch._connection._control_calls import call  # noqa: E402
from tfswitch._settings._table_spec import TableSpec  # noqa: E402
from tfswitch.cluster import default_cluster  # noqa: E402
from tfswitch.consistency import Consistency  # noqa: E402
from tfswitch.optimizers import SGD  # noqa: E402

IDS = list(range(8))


def main() -> None:
    num_steps, pause = int(sys.argv[1]), float(sys.argv[2])
    consistency = Consistency.bsp(reduction="sum")
    cluster = default_cluster()._native
    worker = _tf_config.worker_id()
    call(
        cluster,
        "JoinGroup",
        group="train",
        worker=worker,
        options={
            "lease_ms": 30_000,
            "num_workers": _tf_config.num_workers(),
            "join_timeout_ms": 60_000,
        },
        consistency=consistency.to_table_config(),
        wait_timeout_secs=60.0,
    )
    spec = TableSpec("zeros", SGD(1.0), seed=0, consistency=consistency)
    table = cluster.open_table(json.dumps(spec.to_table_config("counts", 1)))
    for step in range(num_steps):
        table.push(IDS, np.full((len(IDS), 1), -1, np.float32), 1.0, True)
        cluster.end_step(1.0)
        print("step", step, flush=True)
        time.sleep(pause)
    if worker == 0:
        print("values", table.pull(IDS, False).ravel().astype(int).tolist())
    call(cluster, "LeaveGroup")


if __name__ == "__main__":
    main()
