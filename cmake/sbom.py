"""Writes the software bill of materials of a package, in CycloneDX's JSON.

    sbom.py VERSION NAME=VERSION[,VERSION...]=FILE... PACKAGE

`cmake --install` runs this when the other files lie in the folder PACKAGE. It
follows these files as the loader does, and adds the libraries that the build
has found, NAME=VERSION=FILE: those that are headers alone have no other trace.
The same build gives the same file, without a time or a random number.
"""

import ast
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

# A dependency that is not here ends the installation.
_LICENCES = {
    "abseil": "Apache-2.0",
    "absl-py": "Apache-2.0",
    "address_sorting": "BSD-3-Clause",  # It comes with gRPC, as upb does.
    "c-ares": "MIT",
    "fsspec": "BSD-3-Clause",
    "grpc": "Apache-2.0",
    "libdeflate": "MIT",
    "libevent": "BSD-3-Clause",
    "nlohmann_json": "MIT",
    "numpy": "BSD-3-Clause",
    "openssl": "Apache-2.0",
    "opentelemetry-sdk": "Apache-2.0",
    "prometheus-client": "Apache-2.0",
    "prometheus-cpp": "MIT",
    "protobuf": "BSD-3-Clause",
    "pyarrow": "Apache-2.0",
    "pybind11": "BSD-3-Clause",
    "python": "Python-2.0",
    "ray": "Apache-2.0",
    "re2": "BSD-3-Clause",
    "rich": "MIT",
    "s3fs": "BSD-3-Clause",
    "tensorflow": "Apache-2.0",
    "tf_keras": "Apache-2.0",
    "tfswitch-ps": "Apache-2.0",
    "upb": "BSD-3-Clause",
    "xxhash": "BSD-2-Clause",
    "zlib": "Zlib",
}
# The names of shared libraries, up to ".so"; "" is the compiler's and libc's,
# and one that stands in the package.
_LIBRARIES = {
    r"ld-linux.*|lib(c|dl|gcc_s|m|pthread|rt|stdc\+\+)": "",
    r"libabsl_.*": "abseil",
    r"libaddress_sorting": "address_sorting",
    r"libcares": "c-ares",
    r"libdeflate": "libdeflate",
    r"libevent_(core|extra|openssl)-.*": "libevent",
    r"libgpr|libgrpc.*": "grpc",
    r"libprometheus-cpp-core": "prometheus-cpp",
    r"libprotobuf": "protobuf",
    r"libre2": "re2",
    r"libssl|libcrypto": "openssl",
    r"libtfswitch_predictor": "",
    r"libtensorflow_(cc|framework)": "tensorflow",
    r"libupb": "upb",
    r"libz": "zlib",
}
_ROOT = Path(__file__).parents[1]


def _output(*command: str | Path) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _library_of(soname: str, user: str) -> str:
    stem = soname.partition(".so")[0]
    for pattern, name in _LIBRARIES.items():
        if re.fullmatch(pattern, stem):
            return name
    sys.exit(
        f"{user} needs {soname}, which cmake/sbom.py does not know. Enter its "
        "library in _LIBRARIES and _LICENCES there."
    )


def _follow(
    package: Path,
) -> tuple[dict[str, set[str]], dict[str, dict[str, str]]]:
    """Returns which libraries each one needs, and the files of each.

    The files are paths by soname. The path is empty if the loader finds none:
    TensorFlow's libraries are found by the process that loads the ops.
    """
    needs: dict[str, set[str]] = defaultdict(set)
    files: dict[str, dict[str, str]] = defaultdict(dict)
    paths: dict[str, str] = {}
    queue = [
        ("tfswitch-ps", str(path))
        for path in [*package.glob("*.so"), *package.glob("bin/*")]
    ]
    for _, path in queue:
        paths |= re.findall(r"^\s*(\S+) => (/\S+)", _output("ldd", path), re.M)
    while queue:
        user, path = queue.pop()
        sections = _output("readelf", "--dynamic", "--wide", path)
        for soname in re.findall(r"\(NEEDED\).*\[(.*)\]", sections):
            name = _library_of(soname, path)
            if not name:
                continue
            if name != user:
                needs[user].add(name)
            if soname not in files[name]:
                files[name][soname] = paths.get(soname, "")
                # TensorFlow's wheel brings what its libraries need.
                if name != "tensorflow" and soname in paths:
                    queue.append((name, paths[soname]))
    return needs, files


def _debian(path: str) -> tuple[str, str] | None:
    """Returns version and URL of the source package that a file comes from.

    Security advisories name source packages, and only their versions tell
    which faults Debian has mended in an old release of a library.
    """
    path = os.path.realpath(path)
    try:
        found = subprocess.run(
            # Packages made before Debian 12 have /lib in place of /usr/lib.
            ["dpkg-query", "--search", path, path.removeprefix("/usr")],
            capture_output=True,
            text=True,
        ).stdout
    except FileNotFoundError:
        return None  # The system is not a Debian.
    if not found:
        return None
    # The last line has the owners: "one, another: path".
    owner = re.split("[,:] ", found.splitlines()[-1])[0]
    columns = "${source:Package} ${source:Version}"
    name, version = _output("dpkg-query", "-W", "-f", columns, owner).split()
    system = platform.freedesktop_os_release()
    return version, (
        f"pkg:deb/{system['ID']}/{quote(name)}@{quote(version, safe=':')}"
        f"?arch=source&distro={system['ID']}-{system.get('VERSION_ID', 'sid')}"
    )


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _purl(kind: str, name: str, version: str) -> str:
    return f"pkg:{kind}/{name}" + (f"@{quote(version)}" if version else "")


def _component(
    name: str, version: str, purl: str, **rest: Any
) -> dict[str, Any]:
    if name not in _LICENCES:
        sys.exit(f"Enter the licence of {name} in _LICENCES of cmake/sbom.py.")
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        **({"version": version} if version else {}),
        "licenses": [{"license": {"id": _LICENCES[name]}}],
        "purl": purl,
        **rest,
    }


def _library(
    name: str, version: str, file: str, sonames: dict[str, str]
) -> dict[str, Any]:
    """Returns the component of a C++ library."""
    if "," in version:  # The environment has one of them.
        versions = {"name": "tfswitch:versions", "value": version}
        purl = _purl("pypi" if name == "tensorflow" else "generic", name, "")
        return _component(name, "", purl, properties=[versions])
    if name == "tensorflow" and _installed("tensorflow-cpu") == version:
        purl = _purl("pypi", "tensorflow-cpu", version)
    elif name in ("pybind11", "tensorflow"):
        purl = _purl("pypi", name, version)
    else:
        generic = version, _purl("generic", name, version)
        version, purl = _debian(next(iter(sonames.values()), file)) or generic
    places = [{"location": soname} for soname in sorted(sonames)]
    rest = {"evidence": {"occurrences": places}} if places else {}
    return _component(name, version, purl, **rest)


def _python_packages() -> list[dict[str, Any]]:
    """Returns the components of what pyproject.toml requires at run time."""
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    components = []
    for key in ("dependencies", "keras2", "parquet", "ray", "remote", "traces"):
        # Python 3.10 cannot read TOML, whose lists of strings are Python's.
        found = re.search(rf"^{key} = (\[.*?\])$", text, re.M | re.S)
        assert found is not None, key
        scope = "required" if key == "dependencies" else "optional"
        for requirement in ast.literal_eval(found[1]):
            name = re.split(r"[^\w.-]", requirement)[0]
            version = _installed(name)
            purl = _purl("pypi", name.lower().replace("_", "-"), version)
            written = {"name": "tfswitch:requirement", "value": requirement}
            components.append(
                _component(
                    name, version, purl, scope=scope, properties=[written]
                )
            )
    return components


def main() -> None:
    version, *arguments, package = sys.argv[1:]
    found = {
        name: (version, file)
        for name, version, file in (text.split("=", 2) for text in arguments)
    }
    needs, files = _follow(Path(package))
    components = [
        _library(name, *found.get(name, ("", "")), files.get(name, {}))
        for name in {*found, *files}
    ]
    components += _python_packages()
    components.sort(key=lambda component: component["name"])
    needs["tfswitch-ps"] |= {c["name"] for c in components} - set(files)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": _component(
                "tfswitch-ps", version, _purl("pypi", "tfswitch-ps", version)
            ),
        },
        "components": components,
        "dependencies": [
            {"ref": user, "dependsOn": sorted(needs[user])}
            for user in sorted(needs)
        ],
    }
    text = json.dumps(bill, indent=2) + "\n"
    Path(package, "sbom.cdx.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
