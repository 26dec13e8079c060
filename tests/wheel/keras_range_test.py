"""The tests of what Keras calls, on a wheel, at both ends of the versions.

TFSWITCH_WHEEL is its path; `scripts/wheel` prints it. Packages come from the
index that pip uses.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.legacy_keras_test import OUR_OWN, TESTS
from tests.programs import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(7200)]

# Each TensorFlow, with the oldest Keras that it allows and the newest.
ENDS = [
    ("2.18", "keras==3.5.0"),
    ("2.18", "keras"),
    ("2.19", "keras==3.5.0"),
    ("2.19", "keras"),
    ("2.20", "keras==3.10.0"),
    ("2.20", "keras"),
    ("2.21", "keras==3.12.0"),
    ("2.21", "keras"),
]
OTHER_TESTS = ("optimizers", "saved_model", "tracked_table")


def run(*command: object, cwd: Path, **variables: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**inherited, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-20_000:]
    return result.stdout


@pytest.mark.parametrize(("tensorflow", "keras"), ENDS)
def test_keras_trains_and_saves(
    tensorflow: str, keras: str, tmp_path: Path
) -> None:
    wheel = os.environ.get("TFSWITCH_WHEEL")
    if not wheel:
        pytest.skip("TFSWITCH_WHEEL is not set; scripts/test sets it")
    # Without the package of the checkout, which Python would find first.
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "install")
    run(
        *(*pip, wheel, f"tensorflow-cpu=={tensorflow}.*", keras),
        *("hypothesis", "pytest", "pytest-timeout"),
        cwd=tmp_path,
    )
    # It requires `tensorflow`.
    run(*pip, "--no-deps", f"tf_keras=={tensorflow}.*", cwd=tmp_path)

    pytest_of = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    files = (f"tests/python/{name}_test.py" for name in (*TESTS, *OTHER_TESTS))
    print(run(*pytest_of, *files, cwd=tmp_path).splitlines()[-1])
    for name, chosen in TESTS.items():
        output = run(
            *(*pytest_of, f"tests/python/{name}_test.py"),
            *("-k", f"({chosen}) and not ({OUR_OWN})"),
            cwd=tmp_path,
            TF_USE_LEGACY_KERAS="1",
        )
        print(f"tf_keras: {name}: {output.splitlines()[-1]}")

    shutil.rmtree(tmp_path / "environment")
