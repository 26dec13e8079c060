"""Which TensorFlow a build is for, without building.

The environments are real ones, with an empty TensorFlow. The isolation does
what pip's does: it hides the environment from the interpreter by a
`sitecustomize` in a folder on PYTHONPATH, which has the build requirements.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import _distutils_hack
import pytest
import setuptools

from tests.programs import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


class Target:
    """An environment that a package is installed into, and its isolation."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "environment"
        venv.create(self.prefix, symlinks=True)
        self.python = self.prefix / "bin" / "python"
        (self.packages,) = self.prefix.glob("lib/python*/site-packages")
        self.isolation = folder / "isolation"
        self.isolation.mkdir()
        for package in (setuptools, _distutils_hack):
            path = Path(package.__path__[0])
            (self.isolation / path.name).symlink_to(path)
        (self.isolation / "sitecustomize.py").write_text(
            f"import sys\nsys.path.remove({str(self.packages)!r})\n"
        )

    def run(
        self, *command: object, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.isolation)}
        environment.pop("TFSWITCH_TENSORFLOW", None)
        return subprocess.run(
            [str(argument) for argument in command],
            env={**environment, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    def ask_backend(self, **variables: str) -> subprocess.CompletedProcess[str]:
        program = """
            import sys
            sys.path.insert(0, "cmake")
            import build_backend
            print(build_backend.get_requires_for_build_wheel())
            print(build_backend.get_requires_for_build_editable())
        """
        return self.run(
            self.python, "-c", textwrap.dedent(program), **variables
        )

    def ask_cmake(self) -> subprocess.CompletedProcess[str]:
        project = self.prefix.with_name("project")
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.22)\n"
            "project(look LANGUAGES NONE)\n"
            f"include({ROOT}/cmake/FindTensorFlow.cmake)\n"
        )
        return self.run(
            *("cmake", "-S", project, "-B", project / "build"),
            f"-DPython_EXECUTABLE={self.python}",
        )


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path)


def add_tensorflow(packages: Path, version: str) -> None:
    folder = packages / "tensorflow"
    folder.mkdir()
    (folder / "libtensorflow_framework.so.2").touch()
    (folder / "__init__.py").write_text(
        f"from tensorflow import sysconfig\n__version__ = {version!r}\n"
    )
    (folder / "sysconfig.py").write_text(
        "def get_include(): return '/include'\n"
        "def get_lib(): return '/lib'\n"
        "def get_compile_flags(): return []\n"
        "def get_link_flags(): return []\n"
    )


def test_no_package_is_required_that_may_stand_beside_the_other() -> None:
    required = [
        *PROJECT["build-system"]["requires"],
        *PROJECT["project"]["dependencies"],
    ]

    assert not [name for name in required if name.startswith("tensorflow")]


def test_backend_sees_the_tensorflow_that_isolation_hides(
    target: Target,
) -> None:
    add_tensorflow(target.packages, "2.20.1")

    result = target.ask_backend()

    assert result.stdout == "[]\n[]\n", result.stderr


def test_backend_without_tensorflow_ends_with_the_commands(
    target: Target,
) -> None:
    result = target.ask_backend()

    assert result.returncode == 1
    assert f"there is none in {target.prefix}." in result.stderr
    assert f"pip install '{EXTRAS['tensorflow'][0]}'" in result.stderr
    assert "uv pip install --no-build-isolation ." in result.stderr
    for requirement in PROJECT["build-system"]["requires"]:
        assert f"'{requirement}'" in result.stderr
    assert "Traceback" not in result.stderr


def test_backend_requires_the_tensorflow_of_the_variable(
    target: Target,
) -> None:
    result = target.ask_backend(TFSWITCH_TENSORFLOW="2.19")

    assert result.stdout == 2 * "['tensorflow-cpu==2.19.*']\n", result.stderr


def test_editable_install_is_a_path_that_type_checkers_follow(
    tmp_path: Path,
) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "tfswitch"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "tfswitch_command.py", tmp_path)
    # Without setup.py, which builds C++.
    program = "import setuptools.build_meta as b; b.build_editable('wheel')"

    subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )

    (wheel,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if "dist-info" not in n)
        assert path.endswith(".pth")
        assert archive.read(path).decode().strip() == str(tmp_path)


@pytest.mark.parametrize("value", ["2", "2.20.0", "==2.20", "newest"])
def test_backend_refuses_a_variable_that_is_no_minor_version(
    value: str, target: Target
) -> None:
    result = target.ask_backend(TFSWITCH_TENSORFLOW=value)

    assert result.returncode == 1
    assert result.stderr.startswith(f"TFSWITCH_TENSORFLOW is '{value}'. ")


def test_cmake_takes_the_tensorflow_that_isolation_hides(
    target: Target,
) -> None:
    add_tensorflow(target.packages, "2.20.1")

    result = target.ask_cmake()

    assert "-- TensorFlow 2.20.1 in /lib" in result.stdout, result.stderr


def test_cmake_prefers_a_tensorflow_that_the_build_required(
    target: Target,
) -> None:
    add_tensorflow(target.packages, "2.20.1")
    add_tensorflow(target.isolation, "2.18.0")

    result = target.ask_cmake()

    assert "-- TensorFlow 2.18.0 in /lib" in result.stdout, result.stderr


def test_cmake_without_tensorflow_says_which_to_install(target: Target) -> None:
    result = target.ask_cmake()

    assert result.returncode != 0
    wanted = f"has no TensorFlow. Install {EXTRAS['tensorflow'][0]} or"
    assert wanted in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("version", ["2.17.1", "2.22.0"])
def test_cmake_refuses_a_tensorflow_outside_the_supported_range(
    version: str, target: Target
) -> None:
    add_tensorflow(target.packages, version)

    result = target.ask_cmake()

    assert result.returncode != 0
    assert re.search(
        rf"{re.escape(EXTRAS['tensorflow'][0])},\s+and\s+{target.python}\s+has\s+"
        rf"{version}\.",
        result.stderr,
    )
