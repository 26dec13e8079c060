"""Runs two_devices_cases.py, for both Keras, in processes of their own."""

import pytest

from tests.programs import run_pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("legacy", "tests"),
    # Each Keras scales and sums the gradients of replicas in its own way.
    [("0", ""), ("1", "not schedule and not evaluate")],
    ids=["keras3", "tf_keras"],
)
def test_the_layer_under_mirrored_strategy(legacy, tests):
    run_pytest(
        "tests/integration/two_devices_cases.py",
        "-k",
        tests,
        TF_USE_LEGACY_KERAS=legacy,
    )
