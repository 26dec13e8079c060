"""Builds the C++ parts of tfswitch with CMake; all else is pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Puts core, ops, pybind11 module and server program into the package.

    In place (`pip install -e .`, `setup.py build_ext --inplace`) the build is
    incremental in `build/`, and the built files are installed in `tfswitch/` of
    the checkout. Otherwise the build folder is temporary, and the files are
    installed in the wheel.

    CMAKE_ARGS in the environment is passed on to CMake.
    """

    def run(self) -> None:
        build = ROOT / "build" if self.inplace else Path(self.build_temp)
        prefix = ROOT if self.inplace else Path(self.build_lib).resolve()
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build}",
            "-GNinja",
            "--log-level=NOTICE",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        if not (build / "CMakeCache.txt").exists():
            configure.append("-DTFSWITCH_BUILD_TESTS=OFF")
            if shutil.which("ccache"):
                configure += [
                    f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache"
                    for language in ("C", "CXX")
                ]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        self.spawn(configure)
        self.spawn(
            ["cmake", "--build", str(build), "--target", "tfswitch_package"]
        )
        # Removes files of an earlier build, for another TensorFlow or Python.
        patterns = ["libtfswitch_ops*.so"]
        if not self.inplace:
            patterns.append("_native.*.so")
        for pattern in patterns:
            for path in prefix.glob(f"tfswitch/{pattern}"):
                path.unlink()
        install = ["cmake", "--install", str(build), "--prefix", str(prefix)]
        install += ["--component", "tfswitch_package"]
        if not self.inplace:
            install.append("--strip")
        # This command lists each file, so its output is shown only if it fails.
        result = subprocess.run(install, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"{shlex.join(install)}\n{result.stdout}{result.stderr}")


setup(
    ext_modules=[Extension("tfswitch._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
