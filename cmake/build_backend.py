"""The build backend: that of setuptools, after a look for TensorFlow.

The ops work with the minor version of TensorFlow that they are built against.
A build requirement would bring the newest one, so FindTensorFlow.cmake takes
that of the environment that pip installs into. If there is none, this says
what to do before pip downloads or builds anything.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403

_SETTING = "TFSWITCH_TENSORFLOW"


def _requirement() -> str:
    """Returns that of the extra in pyproject.toml, which has the range."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    found = re.search(r'^tensorflow = \["(.*)"\]$', text, re.M)
    assert found is not None
    return found[1]


def get_requires_for_build_wheel(
    config_settings: dict | None = None,
) -> list[str]:
    """Returns what the build needs besides pyproject.toml's requirements.

    That is nothing, or a TensorFlow of the minor version that the environment
    variable TFSWITCH_TENSORFLOW names.

    Raises:
        SystemExit: If that variable is no minor version, or if it is not set
            and the environment has no TensorFlow. It ends the build with one
            message and no traceback.
    """
    minor = os.environ.get(_SETTING)
    if minor:
        if not re.fullmatch(r"\d+\.\d+", minor):
            sys.exit(
                f"{_SETTING} is '{minor}'. Set it to a minor version of "
                "TensorFlow, such as 2.20, or do not set it."
            )
        # Has the headers and the interface of `tensorflow`, and is smaller.
        return [f"tensorflow-cpu=={minor}.*"]
    # FindTensorFlow.cmake says why -E.
    look = """
import importlib.util
import sys

sys.exit(importlib.util.find_spec("tensorflow") is None)
"""
    if subprocess.run([sys.executable, "-E", "-c", look]).returncode != 0:
        sys.exit(
            "tfswitch is built for the TensorFlow that it will run with, and "
            f"there is none in {sys.prefix}. If that is your environment, "
            "install TensorFlow first:\n"
            f"  pip install '{_requirement()}'    (or tensorflow-cpu)\n"
            "If it is one that uv or `python -m build` made for the build, "
            "let them build in yours:\n"
            "  uv pip install 'setuptools>=77' 'pybind11>=2.13'\n"
            "  uv pip install --no-build-isolation .\n"
            f"Or set {_SETTING}=2.20, or another minor version, to build for "
            "that one."
        )
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
