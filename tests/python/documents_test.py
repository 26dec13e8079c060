"""The pages name nothing that is not there: links, names, arguments, flags."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfswitch as tsw
from tests.programs import ROOT

# A changelog also has names of before.
PAGES = [
    path
    for folder in (".", "docs", "docs/benchmarks", "examples", "examples/*")
    for path in sorted(ROOT.glob(f"{folder}/*.md"))
    if path.name != "CHANGELOG.md"
]
# Flags of other programs, which the pages also call.
FLAGS_OF_OTHERS = {"detach", "network", "prefix", "python_venv", "src_dir"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Returns those that GitHub gives the headings of a page."""
    found = set()
    for line in re.findall(r"^#+ (.*)$", without_blocks(text_of(page)), re.M):
        heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line).lower()
        found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


@functools.cache
def words() -> tuple[set[str], set[str]]:
    """Returns all words of the code, and those that can be names of flags."""
    folders = ("cc", "cmake", "deploy", "examples", "scripts", "tfswitch")
    kinds = (
        "",
        ".cc",
        ".cmake",
        ".h",
        ".py",
        ".sbatch",
        ".sh",
        ".txt",
        ".yaml",
    )
    code = text_of(ROOT / "CMakeLists.txt") + "\n".join(
        text_of(path)
        for folder in (*folders, "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds and path.is_file() and path.parent.name != "bin"
    )
    flags = re.findall(r"--([a-z]\w*)|\"([a-z]\w*)\"", code)
    return set(re.findall(r"\w+", code)), {a or b for a, b in flags}


def resolve(name: str) -> Any:
    """Returns what a dotted name that begins with `tsw` stands for."""
    found: Any = tsw
    for part in name.split(".")[1:]:
        if inspect.ismodule(found) and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        elif not hasattr(found, part) and part in fields(found):
            return None  # Objects have it, of a type that is not known here.
        else:
            found = getattr(found, part)
    return found


def fields(cls: Any) -> set[str]:
    """Returns the attributes that objects of a class get from `__init__`."""
    if not inspect.isclass(cls):
        return set()
    lines = inspect.getsource(cls)
    return {*re.findall(r"self\.(\w+)\b.* = ", lines), *cls.__annotations__}


def code_of(text: str) -> Iterator[str]:
    yield from re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    yield from re.findall(r"`([^`]+)`", without_blocks(text))


def problems_of_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(page))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith("http"):
            continue
        if not target.exists():
            yield f"there is no {path}"
        elif anchor and anchor not in anchors(target):
            yield f"{target.name} has no heading #{anchor}"


def problems_of_names(page: Path) -> Iterator[str]:
    text = text_of(page)
    names = set(re.findall(r"\btsw(?:\.[A-Za-z]\w*)+", text))
    rooms = "admission|eviction|initializers|optimizers|statistics"
    names |= {
        f"tsw.{name}"
        for name in re.findall(rf"(?<![\w.])((?:{rooms})\.[A-Z]\w*)", text)
    }
    for name in sorted(names):
        if name.startswith("tsw.ray"):
            continue
        try:
            resolve(name)
        except (AttributeError, ImportError) as error:
            yield f"{name}: {error}"


def problems_of_arguments(page: Path) -> Iterator[str]:
    for code in code_of(text_of(page)):
        try:
            tree = ast.parse(code.lstrip())
        except SyntaxError:
            continue
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            # Ray takes seconds to import.
            if not re.fullmatch(r"tsw\.(?!ray\.)[\w.]+", name):
                continue
            parameters = inspect.signature(resolve(name)).parameters.values()
            if any(p.kind == p.VAR_KEYWORD for p in parameters):
                continue
            known = {p.name for p in parameters}
            for keyword in call.keywords:
                if keyword.arg is not None and keyword.arg not in known:
                    yield f"{name} has no argument {keyword.arg}"


def problems_of_flags(page: Path) -> Iterator[str]:
    # With a hyphen they are those of other programs.
    found = re.findall(
        r"(?<![\w-])--(?:no)?([a-z]\w*)(?![\w.-])", text_of(page)
    )
    for name in sorted(set(found) - words()[1] - FLAGS_OF_OTHERS):
        yield f"there is no flag --{name}"


def problems_of_settings(page: Path) -> Iterator[str]:
    found = set(re.findall(r"\bTFSWITCH_\w+", text_of(page)))
    for name in sorted(found - words()[0]):
        yield f"nothing reads {name}"


@pytest.mark.parametrize(
    "problems_of",
    [
        problems_of_links,
        problems_of_names,
        problems_of_arguments,
        problems_of_flags,
        problems_of_settings,
    ],
)
def test_pages_name_only_what_there_is(
    problems_of: Callable[[Path], Iterator[str]],
) -> None:
    assert [
        f"{page.relative_to(ROOT)}: {problem}"
        for page in PAGES
        for problem in problems_of(page)
    ] == []
