"""Runs the tests of the Keras layers with tf_keras, in another process."""

import pytest

from tests.programs import run_pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_layer_with_tf_keras():
    pytest.importorskip("tf_keras")
    run_pytest(
        "tests/python/dynamic_embedding_test.py", TF_USE_LEGACY_KERAS="1"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_layer_of_many_features_with_tf_keras():
    pytest.importorskip("tf_keras")
    run_pytest(
        "tests/python/dynamic_embeddings_test.py", TF_USE_LEGACY_KERAS="1"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_layers_of_sampled_losses_with_tf_keras():
    pytest.importorskip("tf_keras")
    run_pytest(
        "tests/python/sampled_losses_test.py",
        "-k=layer or model or score",
        TF_USE_LEGACY_KERAS="1",
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_warm_starts_with_tf_keras():
    pytest.importorskip("tf_keras")
    run_pytest("tests/python/warm_start_test.py", TF_USE_LEGACY_KERAS="1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_exports_while_training_with_tf_keras():
    pytest.importorskip("tf_keras")
    run_pytest("tests/python/export_tables_test.py", TF_USE_LEGACY_KERAS="1")
