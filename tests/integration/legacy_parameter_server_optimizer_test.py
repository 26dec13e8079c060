"""Runs the tests of the optimizer with tf_keras, in another process."""

import pytest

from tests import support


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_optimizer_with_tf_keras():
    pytest.importorskip("tf_keras")
    # Where the servers are makes no difference between the two Keras.
    support.run_pytest(
        "tests/python/parameter_server_optimizer_test.py",
        "-k",
        "not two_servers",
        TF_USE_LEGACY_KERAS="1",
    )
