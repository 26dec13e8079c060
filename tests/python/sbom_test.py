"""The bill of materials of this installation, and the script that writes it."""

import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from tests.programs import ROOT, run_python
from tests.support import PACKAGE

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

BILL = PACKAGE / "sbom.cdx.json"
SCRIPT = ROOT / "cmake" / "sbom.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Which library the headers of an #include are of.
HEADERS = {
    r"absl/.*": "abseil",
    r"google/protobuf/.*": "protobuf",
    r"event2/.*": "libevent",
    r"grpc(pp)?/.*": "grpc",
    r"libdeflate\.h": "libdeflate",
    r"nlohmann/.*": "nlohmann_json",
    r"openssl/.*": "openssl",
    r"prometheus/.*": "prometheus-cpp",
    r"pybind11/.*": "pybind11",
    r"Python\.h": "python",
    r"(farmhash|tensorflow|unsupported)/.*": "tensorflow",
    r"xxhash\.h": "xxhash",
}
SYSTEM_HEADER = re.compile(
    r"[a-z0-9_]+"  # C++ headers, such as <vector>.
    r"|(arpa|linux|net|netinet|sanitizer|sys)/\w+\.h"
    r"|(cpuid|cxxabi|dlfcn|errno|fcntl|immintrin|malloc|netdb|poll|pthread|sched"
    r"|semaphore|signal|stddef|stdint|stdlib|time|unistd)\.h"
)
SYSTEM_LIBRARY = re.compile(
    r"(linux-vdso|ld-linux-.*|lib(c|dl|gcc_s|m|pthread|rt|stdc\+\+))\.so\.\d"
)


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return json.loads(BILL.read_text())


@pytest.fixture(scope="module")
def components(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {component["name"]: component for component in bill["components"]}


def needed_libraries() -> set[str]:
    """The libraries that the loader looks for, direct and indirect."""
    files = [*PACKAGE.glob("*.so"), *PACKAGE.glob("bin/*")]
    assert len(files) >= 6
    listed = "".join(
        subprocess.check_output(["ldd", path], text=True) for path in files
    )
    names = re.findall(r"^\s*(?:/\S*/)?(\S+\.so\S*) ", listed, re.M)
    own = {file.name for file in files}
    return {n for n in names if n not in own and not SYSTEM_LIBRARY.match(n)}


def test_file_is_valid_and_tells_no_time(bill: dict[str, Any]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)

    assert validator.validate_str(BILL.read_text()) is None
    assert bill["metadata"]["component"]["version"] == PROJECT["version"]
    assert "timestamp" not in bill["metadata"]
    assert "serialNumber" not in bill


def test_every_shared_library_is_of_a_component(
    components: dict[str, dict[str, Any]],
) -> None:
    listed = {
        place["location"]
        for component in components.values()
        for place in component.get("evidence", {}).get("occurrences", [])
    }

    assert listed and listed == needed_libraries()


def test_every_component_has_version_licence_and_package_url(
    components: dict[str, dict[str, Any]],
) -> None:
    for component in components.values():
        purl = PackageURL.from_string(component["purl"])
        assert purl.to_string() == component["purl"]
        assert purl.version == component["version"]
        assert component["licenses"]


def test_everything_that_is_referred_to_is_there(bill: dict[str, Any]) -> None:
    names = {component["bom-ref"] for component in bill["components"]}

    reached = set()
    for dependency in bill["dependencies"]:
        assert dependency["ref"] in names | {PROJECT["name"]}
        reached |= set(dependency["dependsOn"])

    assert reached == names


def test_python_requirements_have_the_versions_of_the_environment(
    components: dict[str, dict[str, Any]],
) -> None:
    requirements = {"": PROJECT["dependencies"]}
    requirements |= PROJECT["optional-dependencies"]
    for extra in ("dev", "tensorflow", "tensorflow-cpu"):
        del requirements[extra]

    for requirement in itertools.chain(*requirements.values()):
        name = re.split(r"[\[<>=]", requirement)[0]
        version = importlib.metadata.version(name)
        assert components[name]["version"] == version
    assert components["tensorflow"]["version"] == tf.__version__


def test_every_header_is_of_a_component(
    components: dict[str, dict[str, Any]],
) -> None:
    included = {
        header
        for path in (ROOT / "cc").rglob("*")
        if path.suffix in (".cc", ".h", ".inc")
        for header in re.findall(
            r'^ *# *include [<"]([^>"]+)', path.read_text(), re.M
        )
    }

    for header in sorted(included):
        message = re.sub(r"(\.grpc)?\.pb\.h$", ".proto", header)
        if (
            SYSTEM_HEADER.fullmatch(header)
            or (ROOT / header).exists()
            or (ROOT / f"{header}.in").exists()
            or (ROOT / "cc/predictor/include" / header).exists()
            or (ROOT / "protos" / message).exists()
        ):
            continue
        names = [HEADERS[key] for key in HEADERS if re.fullmatch(key, header)]
        assert names, f"{header}: enter its library in HEADERS and sbom.py"
        assert names[0] in components


def write_bill(
    package: Path, *libraries: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "1.2.3", *libraries, package],
        capture_output=True,
        text=True,
    )


def test_library_without_a_licence_ends_the_installation(
    tmp_path: Path,
) -> None:
    result = write_bill(tmp_path, "grpc=1.51=", "strange=7=")

    assert result.returncode == 1
    assert "Enter the licence of strange in _LICENCES" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_unknown_shared_library_ends_the_installation(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    shared = ["c++", "-shared", "-x", "c++", "/dev/null", "-x", "none", "-o"]
    subprocess.run([*shared, tmp_path / "libstrange.so"], check=True)
    needs = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lstrange"]
    subprocess.run([*shared, package / "own.so", *needs], check=True)

    result = write_bill(package)

    assert result.returncode == 1
    assert f"{package}/own.so needs libstrange.so" in result.stderr
    assert [path.name for path in package.iterdir()] == ["own.so"]


def test_library_of_no_system_package_has_the_version_of_the_build(
    tmp_path: Path,
) -> None:
    header = tmp_path / "include" / "xxhash.h"

    result = write_bill(tmp_path, f"xxhash=0.8.1={header}")

    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "sbom.cdx.json").read_text())
    (component,) = (c for c in written["components"] if c["name"] == "xxhash")
    assert component["version"] == "0.8.1"
    assert component["purl"] == "pkg:generic/xxhash@0.8.1"


def test_package_for_several_tensorflows_has_the_version_of_none(
    tmp_path: Path,
) -> None:
    result = write_bill(tmp_path, "tensorflow=2.20.0,2.21.0=")

    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "sbom.cdx.json").read_text())
    (component,) = (
        c for c in written["components"] if c["name"] == "tensorflow"
    )
    assert component["purl"] == "pkg:pypi/tensorflow"
    assert component["properties"][0]["value"] == "2.20.0,2.21.0"


def test_command_line_tells_where_the_file_is() -> None:
    result = run_python("-m", "tfswitch", "version", "--sbom")

    assert result.stdout == f"{BILL}\n"
