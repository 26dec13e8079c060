"""weighted_all_reduce under MultiWorkerMirroredStrategy, in three processes."""

import contextlib
import json
import subprocess

import numpy as np
import pytest

from tests.programs import HANG_SECS, PythonProgram, environment
from tests.support import free_ports


@pytest.fixture(scope="module")
def printed():
    """The output of each of three workers, as a dict of weights."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(3):
            config = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
            program = PythonProgram(
                "tests/integration/all_reduce_program.py",
                stdout=subprocess.PIPE,
                env=environment(TF_CONFIG=json.dumps(config)),
            )
            workers.append(stack.enter_context(program))
        for worker in workers:
            assert worker.wait(HANG_SECS) == 0
        return [json.load(worker.stdout) for worker in workers]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_every_sample_counts_once_and_as_much_as_the_others_of_its_step(
    printed, kind
):
    step_of = [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1]
    samples = np.bincount(step_of)
    expected = [-1.0 / samples[step] for step in step_of]
    for weights in printed:
        np.testing.assert_allclose(weights[kind], expected, atol=1e-6)
