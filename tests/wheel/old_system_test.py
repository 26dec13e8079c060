"""A wheel on a system that is too old for it: pip says that there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_pip_finds_no_wheel_for_an_older_glibc(tmp_path: Path) -> None:
    wheel = os.environ.get("TFSWITCH_WHEEL")
    if not wheel:
        pytest.skip("TFSWITCH_WHEEL is not set; scripts/test sets it")
    found = re.search(r"manylinux_2_(\d+)_x86_64", wheel)
    assert found is not None
    minor = int(found[1])

    def download(glibc_minor: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--no-index"),
                *("--no-deps", "--only-binary=:all:"),
                *(
                    f"--platform=manylinux_2_{glibc_minor}_x86_64",
                    "tfswitch-ps",
                ),
                *(f"--find-links={Path(wheel).parent}", f"--dest={tmp_path}"),
            ],
            capture_output=True,
            text=True,
        )

    assert download(minor).returncode == 0
    older = download(minor - 1)
    assert older.returncode == 1
    assert "No matching distribution found for tfswitch-ps" in older.stderr
