"""The Python rooms of docs/architecture.md: their imports and public names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tfswitch as tsw
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
    "keras",
    "data",
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


def public_modules(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for name in module.__all__:
        if isinstance(part := getattr(module, name), ModuleType):
            yield from public_modules(part)


def defined(module: ModuleType) -> Iterator[str]:
    """Yields the public names that a module's file defines."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            yield from (each.id for each in targets)


def test_a_public_module_lists_all_that_is_public_in_it() -> None:
    modules = [*public_modules(tsw), pytest.importorskip("tfswitch.ray")]

    unlisted = [
        f"{module.__name__}.{name}"
        for module in modules
        for name in defined(module)
        if not name.startswith("_") and name not in module.__all__
    ]

    assert unlisted == []
    assert [
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if not hasattr(module, name)
    ] == []


TIME = re.compile(r"(timeout|interval|period|deadline|delay|seconds|_s)$", re.I)
VARIABLE = re.compile(r"\bTFSWITCH_[A-Z_]+\b")


def test_parameters_and_variables_in_seconds_say_so() -> None:
    others = []
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        arguments = [
            node.arg
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.arg)
        ]
        for name in [*arguments, *VARIABLE.findall(text)]:
            if TIME.search(name):
                others.append(f"{file.relative_to(PACKAGE)}: {name}")

    assert others == [], "name these ..._secs"
