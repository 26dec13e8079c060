"""Workers that are killed at any moment and started again change no result."""

import random
import subprocess
import time
from pathlib import Path

import pytest

import tfswitch as tsw
from tests.faults.training import (
    BSP,
    IDS,
    bsp_rows,
    count_table,
    new_seed,
    start_bsp,
)
from tests.programs import PythonProgram
from tests.support import examples, running_servers

# Long runs take more kills.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

PROGRAM = Path(__file__).with_name("worker_program.py")


@pytest.mark.slow
def test_bsp_ends_with_the_bits_of_a_run_without_kills(tmp_path: Path) -> None:
    rng = random.Random(new_seed())
    num_kills = examples(3, 50)
    num_steps = 25 * num_kills
    with running_servers(2) as address:
        for call in start_bsp(address, num_steps):
            call.result(200.0)
        whole = bsp_rows(address)

    with running_servers(2) as address:

        def start(worker: int) -> PythonProgram:
            return PythonProgram(
                *(PROGRAM, address, worker, num_steps, tmp_path / "save"),
                stdout=subprocess.PIPE,
            )

        workers = [start(0), start(1)]
        for number in range(num_kills):
            # The first one repeats steps; see the program.
            victim = 1 - number % 2
            worker = workers[victim]
            # Also now and then while it joins.
            if number == 0 or rng.random() < 0.8:
                assert worker.stdout.readline() == "joined\n"
                if victim == 1:
                    assert worker.stdout.readline() == "behind\n"
            # The first one before there is another note.
            if number > 0:
                time.sleep(rng.uniform(0.0, 0.1))
            worker.kill()
            assert worker.wait(10.0) < 0, "it had ended before"
            workers[victim] = start(victim)
        for worker in workers:
            assert worker.stdout.read().endswith("done\n")
            assert worker.wait(10.0) == 0

        assert bsp_rows(address) == whole
        # The last save of the chief is whole, for all that it left half done.
        with tsw.Cluster(address) as cluster:
            cluster.restore(tmp_path / "save")
            rows = count_table(cluster, BSP).lookup(IDS).numpy()
            assert set(rows[:, 0]) == {num_steps}
