"""Tables under tf.distribute.ParameterServerStrategy."""

from tests.programs import run_pytest


def test_workers_of_a_parameter_server_strategy_use_tables() -> None:
    run_pytest("tests/integration/remote_workers_cases.py")
