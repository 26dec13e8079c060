"""Runs the tests of the optimizer with tf_keras, in other processes."""

import pytest

from tests.programs import run_pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_optimizer_with_tf_keras():
    pytest.importorskip("tf_keras")
    # Where the servers are makes no difference between the two Keras.
    for name in ("parameter_server_optimizer", "sync_epochs"):
        run_pytest(
            f"tests/python/{name}_test.py",
            "-k",
            "not two_servers",
            TF_USE_LEGACY_KERAS="1",
        )
