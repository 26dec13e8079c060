"""Runs two_devices_cases.py, for both Keras, in processes of their own."""

import pytest

from tests.programs import run_pytest


@pytest.mark.slow
@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras3", "tf_keras"])
def test_the_layer_under_mirrored_strategy(legacy):
    run_pytest(
        "tests/integration/two_devices_cases.py", TF_USE_LEGACY_KERAS=legacy
    )
