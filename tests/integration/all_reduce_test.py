"""weighted_all_reduce under MultiWorkerMirroredStrategy, in three processes."""

import numpy as np
import pytest

from tests.integration.distributed_examples_test import launch, matches
from tests.programs import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lines():
    program = ROOT / "tests" / "integration" / "all_reduce_program.py"
    return launch(program, "--workers=3", "--servers=1")


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_every_sample_counts_once_and_as_much_as_the_others_of_its_step(
    lines, kind
):
    found = matches(rf"\[worker \d\] {kind} (.*)", lines)

    assert len(found) == 3
    step_of = [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1]
    samples = np.bincount(step_of)
    expected = [-1.0 / samples[step] for step in step_of]
    for worker in found:
        np.testing.assert_allclose(
            [float(w) for w in worker[1].split()], expected, atol=1e-6
        )
