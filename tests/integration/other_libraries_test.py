"""Runs other_libraries_cases.py, for both Keras, in processes of their own."""

import pytest

from tests.programs import run_pytest


@pytest.mark.slow
@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras_rs", "tfrs"])
def test_models_of_other_libraries_take_the_layer(legacy):
    run_pytest(
        "tests/integration/other_libraries_cases.py", TF_USE_LEGACY_KERAS=legacy
    )
