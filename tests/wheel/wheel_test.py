"""A wheel in new environments, with the system's libraries hidden.

TFSWITCH_WHEEL is its path; `scripts/wheel` prints it. By default one
environment borrows the TensorFlow of this one. In long runs each pair of
TensorFlow and Python that the wheel is for gets an environment of its own, with
packages from the index that pip uses.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.programs import ROOT
from tests.support import SERVER

PROGRAM = Path(__file__).with_name("installed_program.py")
# The libraries of the core and the servers. The wheel must contain them, and
# the loader must use these.
LIBRARIES = (
    "absl_",
    "address_sorting",
    "cares",
    "deflate",
    "gpr",
    "grpc",
    "protobuf",
    "re2",
    "upb",
)
# In a namespace of mounts of its own, so that nobody else sees it.
HIDE = f"""
set -e
for file in /usr/lib/*/lib{{{",".join(LIBRARIES)}}}*.so*; do
  [[ ! -e $file ]] || mount --bind /dev/null "$file"
done
exec "$@"
"""
# PyPI has no TensorFlow of these minor versions for newer Pythons.
NEWEST_PYTHON = {"2.18": "3.12", "2.19": "3.12"}


def hidden(*command: object) -> list[str]:
    """Returns a command that finds none of the system's LIBRARIES."""
    unshare = ["unshare", "--mount"]
    if os.geteuid() != 0:
        unshare.append("--map-root-user")
    return [*unshare, "bash", "-c", HIDE, "hide", *map(str, command)]


def run(*command: object, cwd: Path | None = None) -> str:
    variables = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "TFSWITCH_"))
    }
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-10_000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    path = os.environ.get("TFSWITCH_WHEEL")
    if not path:
        pytest.skip("TFSWITCH_WHEEL is not set; scripts/test sets it")
    return Path(path)


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def pairs() -> Iterator[tuple[str, str]]:
    """Yields the minor versions of TensorFlow and Python of a wheel."""
    path = os.environ.get("TFSWITCH_WHEEL")
    if not path:
        return
    with zipfile.ZipFile(path) as archive:
        names = "\n".join(archive.namelist())
    for major, minor in sorted(re.findall(r"ops_tf(\d)(\d+)\.so", names)):
        tensorflow = f"{major}.{minor}"
        newest = NEWEST_PYTHON.get(tensorflow, "3.13")
        for first, second in sorted(re.findall(r"cpython-(\d)(\d+)", names)):
            python = f"{first}.{second}"
            if key(python) <= key(newest):
                yield tensorflow, python


def other_tfswitch(folder: Path) -> Path:
    """Returns a wheel as the Python index has it: of a Terraform tool."""
    path = folder / "tfswitch-1.1.1-py3-none-any.whl"
    info = "tfswitch-1.1.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {
            "tfswitch/__init__.py": "",
            "tfswitch/cli.py": "def main():\n    print('Terraform')\n",
            f"{info}/METADATA": (
                "Metadata-Version: 2.1\nName: tfswitch\nVersion: 1.1.1\n"
            ),
            f"{info}/WHEEL": (
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            ),
            f"{info}/entry_points.txt": (
                "[console_scripts]\ntfswitch = tfswitch.cli:main\n"
            ),
            f"{info}/RECORD": "",
        }.items():
            archive.writestr(name, text)
    return path


def train_and_serve(python: Path, folder: Path) -> str:
    """Runs the program, and one in C++ on its model; returns the last line."""
    output = run(
        *hidden(python, PROGRAM, ROOT / "examples"),
        cwd=folder,
    )

    prefix = run(python.with_name("tfswitch"), "cmake-dir").strip()
    run(
        *("cmake", "-G", "Ninja", "-S", ROOT / "examples" / "serving_cc"),
        *("-B", folder / "cc", f"-DPython_EXECUTABLE={python}"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed",
        "-DCMAKE_CXX_STANDARD_LIBRARIES=-lresolv",
    )
    run("ninja", "-C", folder / "cc")
    predict = folder / "cc" / "predict_file"
    # TensorFlow, of which it calls nothing, and nothing else of that.
    needed = run("readelf", "-d", predict)
    assert "[libtensorflow_cc.so.2]" in needed
    assert "[libtensorflow_framework.so.2]" in needed
    assert "libresolv" not in needed
    table = run(
        *hidden(predict, "--model=models", "--input=in.csv"), cwd=folder
    )
    np.testing.assert_allclose(
        np.loadtxt(table.splitlines()[1:]),
        np.loadtxt(folder / "scores.txt"),
        rtol=1e-5,
    )
    return output.splitlines()[-1]


def test_hidden_libraries_are_those_that_a_checkout_needs() -> None:
    result = subprocess.run(
        hidden(SERVER, "--version"), capture_output=True, text=True
    )

    assert result.returncode != 0
    assert "file too short" in result.stderr


def test_new_environment_has_a_server_then_trains_and_serves(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    # The same command first finds the other package of the name.
    run(*pip, "install", "--no-deps", other_tfswitch(tmp_path))
    run(*pip, "install", "--no-deps", wheel)
    for command in (
        (environment / "bin" / "tfswitch", "version"),
        (python, "-I", "-c", "import tfswitch"),
    ):
        mixed = subprocess.run(command, capture_output=True, text=True)
        assert "files of two packages are mixed in" in mixed.stderr
        assert "pip uninstall tfswitch tfswitch-ps" in mixed.stderr
    run(*pip, "uninstall", "--yes", "tfswitch", "tfswitch-ps")
    run(*pip, "install", "--no-deps", wheel)
    server = environment / "bin" / "tfswitch-server"
    assert run(*hidden(server, "--version")).startswith("tfswitch-server ")
    package = subprocess.run(
        [python, "-I", "-c", "import tfswitch"], capture_output=True, text=True
    )
    assert "works with TensorFlow" in package.stderr
    assert "and there is none. Install one of these" in package.stderr

    (packages,) = environment.glob("lib/python*/site-packages")
    # Behind its own packages: TensorFlow, and no file that says where else
    # packages are, such as a checkout of tfswitch.
    others = Path(tf.__file__).parents[1]
    (packages / "others.pth").write_text(f"{others}\n")

    versions = train_and_serve(python, tmp_path)

    assert versions.startswith(f"TensorFlow {tf.__version__}, ")


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tensorflow", "minor"), list(pairs()))
def test_every_pair_trains_and_serves(
    tensorflow: str, minor: str, wheel: Path, tmp_path: Path
) -> None:
    name = f"python{minor}"
    found = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/{name}"))
    interpreter = found[-1] if found else shutil.which(name)
    assert interpreter, f"there is no {name}; scripts/wheel has used one"
    environment = tmp_path / "environment"
    run(interpreter, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(
        *(*pip, "install", f"{wheel}[tensorflow-cpu]"),
        f"tensorflow-cpu=={tensorflow}.*",
    )
    # It requires `tensorflow`, and is of protocol buffers alone.
    api = f"tensorflow-serving-api=={tensorflow}.*"
    run(*pip, "install", "--no-deps", api)

    versions = train_and_serve(python, tmp_path)

    shutil.rmtree(environment)
    print(versions)
    assert versions.startswith(f"TensorFlow {tensorflow}.")
    assert f"Python {minor}." in versions
