"""Runs tests of what Keras calls again with tf_keras, in other processes.

That is what a layer, a callback or an optimizer does in a model: training,
saving, configs, masks and mixed precision. Left out are tests of what only
tfswitch does, such as its messages, and of where tables are.
"""

import pytest

from tests.programs import run_pytest

pytestmark = pytest.mark.submission

OUR_OWN = "servers or refused or named"
TESTS = {
    "apply_gradients": "embedded or random or reading or turns",
    "checkpoint": "process-epoch or process-3",
    "dynamic_embedding": (
        "not (gradients_equal or freed or learning_rate or subclassed)"
    ),
    "dynamic_embeddings": "not gone",
    "export_tables": "not thread",
    "global_metrics": "logs",
    "keras_compatibility": (
        "forms or each_form or other_ways or compiled_optimizer or Early"
        " or set_weights or saved_model or tensorflow or exports"
    ),
    "metrics": "fit or add_up",
    "parameter_server_optimizer": (
        "fit_equals or rows_equals or custom_loop or eager or execution"
        " or schedule or saved or config or layers_see or alone or sends"
    ),
    "sampled_losses": "(layer or model or score) and not (soft or weigh)",
    "sync_epochs": "not counts_for_nothing",
    "table_metrics": "not frequency",
    "warm_start": "not any_ids",
}


# Several files in one process: each would begin with seconds of imports.
GROUPS = [
    ["keras_compatibility", "export_tables"],
    ["parameter_server_optimizer", "checkpoint", "apply_gradients"],
    ["dynamic_embedding", "dynamic_embeddings", "warm_start", "sync_epochs"],
    ["sampled_losses", "metrics", "global_metrics", "table_metrics"],
]


def test_each_file_is_in_a_group():
    assert {name for names in GROUPS for name in names} == TESTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_with_tf_keras(names):
    chosen = " or ".join(f"({name}_test and ({TESTS[name]}))" for name in names)
    run_pytest(
        f"tests/python/{names[0]}_test.py",
        *(f"tests/python/{name}_test.py" for name in names[1:]),
        *("-k", f"({chosen}) and not ({OUR_OWN})"),
        TF_USE_LEGACY_KERAS="1",
    )
