"""The TensorFlow and Python versions that this installation supports.

Nothing here imports TensorFlow.
"""

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent.resolve()
_AGAIN = (
    "Install tfswitch-ps again with pip, or build it with `./scripts/setup`."
)


def build_info() -> dict[str, Any]:
    """Returns how this installation of tfswitch was built.

    ```python
    >>> tsw.build_info()
    {'version': '0.1.0', 'tensorflow': ['2.20', '2.21'], 'python': ['3.11'],
     'libraries': {'abseil': '20220623.1-1', 'grpc': '1.51.1-3', ...}}
    ```

    Returns:
        A dict with `version`; `tensorflow`, the minor versions for which there
        are ops; `python`, the versions for which there are modules; and
        `libraries`, the versions of the C++ libraries, by their names in the
        software bill of materials (`tfswitch version --sbom`).

    Raises:
        ImportError: If a file of the installation is missing.
    """
    path = _FOLDER / "sbom.cdx.json"
    try:
        bill = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ImportError(
            f"tfswitch cannot read {path}: {error}. {_AGAIN}"
        ) from error
    return {
        "version": bill["metadata"]["component"]["version"],
        "tensorflow": _versions("libtfswitch_ops_tf*.so"),
        "python": _versions("_native.cpython-*.so"),
        "libraries": {
            component["name"]: component["version"]
            for component in bill["components"]
            if "scope" not in component and "version" in component
        },
    }


def op_library(version: str) -> Path:
    """Returns the path of the op library for a version of TensorFlow.

    TensorFlow keeps its binary interface within a minor version only; a library
    for another minor version may load and then crash.

    Raises:
        ImportError: If there is no library for the minor version. The message
            names the versions for which there is one.
    """
    minor = ".".join(version.split(".")[:2])
    path = _FOLDER / f"libtfswitch_ops_tf{minor.replace('.', '')}.so"
    if not path.is_file():
        raise ImportError(
            f"this tfswitch works with TensorFlow {_built_for()}, and this is "
            f"{version}. Install {_command()}, or build tfswitch for "
            f"TensorFlow {minor}: see docs/building.md."
        )
    return path


def missing_tensorflow() -> str:
    """Returns the error text for an environment without TensorFlow."""
    return (
        f"tfswitch works with TensorFlow {_built_for()}, and there is none. "
        f"Install {_command()}."
    )


def check_processor() -> None:
    """Checks that importing TensorFlow does not end in an illegal instruction.

    Does nothing with glibc before 2.33, which has no function for this.

    Raises:
        ImportError: If the processor has no AVX. If TensorFlow is already
            imported, it was built without AVX, and there is no error.
    """
    if "tensorflow" in sys.modules:
        return
    try:
        features = ctypes.CDLL(None).__x86_get_cpuid_feature_leaf
    except AttributeError:
        return
    features.restype = ctypes.POINTER(ctypes.c_uint32)
    # The array has the registers EAX to EDX of CPUID's leaf 1. The next four
    # numbers have only those bits of the registers that programs can use.
    if not features(0)[4 + 2] & 1 << 28:
        raise ImportError(
            "this processor has no AVX, and TensorFlow's releases end with "
            "'Illegal instruction' there. Use another processor. With a "
            "TensorFlow that was built without AVX, import it before tfswitch."
        )


def check_files() -> None:
    """Checks that no other package has written into tfswitch's folder.

    The package `tfswitch` of the Python index, a Terraform tool, has the same
    folder and the same command. pip overwrites files without a message, and
    removes the files of both packages when it uninstalls one.

    Raises:
        ImportError: If the other package is installed beside `tfswitch-ps`, or
            was installed before it.
    """
    # This package is `tfswitch-ps`, whose metadata are in
    # tfswitch_ps-*.dist-info.
    for path in _FOLDER.parent.glob("tfswitch-*.dist-info"):
        problem = f"{path} is of another package of that name"
        break
    else:
        path = _FOLDER / "__init__.py"
        if path.is_file() and path.stat().st_size:
            return
        problem = f"another package has overwritten or removed {path}"
    raise ImportError(
        f"files of two packages are mixed in {_FOLDER}: {problem}. Run `pip "
        "uninstall tfswitch tfswitch-ps`, then install tfswitch-ps again "
        "(docs/wheels.md)."
    )


def check_module() -> None:
    """Checks that there is a native module for this Python.

    Raises:
        ImportError: If there is no such module. The message names the Python
            versions for which there is one.
    """
    version = "{}.{}".format(*sys.version_info)
    versions = _versions("_native.cpython-*.so")
    if not versions:
        raise ImportError(f"tfswitch has no module in {_FOLDER}. {_AGAIN}")
    if version not in versions:
        raise ImportError(
            f"this tfswitch works with Python {_listed(versions)}, and this is "
            f"{version}. {_AGAIN}"
        )


def _versions(pattern: str) -> list[str]:
    """Returns the versions in names of files, such as "2.21" for tf221."""
    found = []
    for path in _FOLDER.glob(pattern):
        match = re.search(r"(?:_tf|-)(\d)(\d+)", path.name)
        if match is not None:
            found.append((int(match[1]), int(match[2])))
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _listed(versions: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(versions[:-1]), versions[-1]]))


def _built_for() -> str:
    versions = _versions("libtfswitch_ops_tf*.so")
    if not versions:
        raise ImportError(f"tfswitch has no op library in {_FOLDER}. {_AGAIN}")
    return _listed(versions)


def _command() -> str:
    newest = _versions("libtfswitch_ops_tf*.so")[-1]
    return (
        f"one of these (`pip install 'tensorflow=={newest}.*'`, or "
        "`tensorflow-cpu`)"
    )
