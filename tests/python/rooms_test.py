"""The Python rooms of docs/architecture.md, by what their modules import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PACKAGE

# From the lowest to the highest; "" has the modules of the package itself, and
# FOLDERS of them.
ROOMS = [
    "ops",
    "remote",
    "",
    "io",
    "nn",
    "train",
    "data",
    "keras",
    "metrics",
    "saved_model",
    "cli",
    "ray",
]


FOLDERS = ["", "_connection", "_settings", "optimizers"]


def imported(file: Path) -> Iterator[str]:
    """Yields the full names of what a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    part = module.split(".")[1]
    if part in ("_loader", "_installation", "_types"):  # The ops need them.
        return "ops"
    return part if part in ROOMS else ""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_no_room_above_it(room: str) -> None:
    folders = FOLDERS if room == "" else [room]
    files = [
        file
        for folder in folders
        for file in (PACKAGE / folder).glob("*.py" if room == "" else "**/*.py")
        # The doors of the package, and a former name, may import all rooms.
        if file.relative_to(PACKAGE).as_posix()
        not in ("__init__.py", "__main__.py")
    ]
    assert files

    upward = [
        f"{file} imports {module}"
        for file in files
        for module in imported(file)
        if module.startswith("tfswitch.")
        and ROOMS.index(room_of(module)) > ROOMS.index(room)
    ]

    assert upward == []
