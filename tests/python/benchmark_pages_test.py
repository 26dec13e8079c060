"""The pages of the benchmarks are those that their figures make."""

import json
from pathlib import Path

import pytest

from benchmarks import pages


@pytest.mark.parametrize("path", pages.render(), ids=lambda path: path.name)
def test_page_is_made_from_committed_figures(path: Path) -> None:
    assert path.read_text("utf-8") == pages.render()[path], (
        "run: python benchmarks/run.py --page"
    )


def test_each_file_of_figures_is_on_a_page() -> None:
    texts = "".join(path.read_text("utf-8") for path in pages.render())
    for path in (pages.FOLDER / "figures").glob("*.json"):
        assert json.loads(path.read_text("utf-8"))["suite"] == path.stem
        assert f"<!-- figures: {path.stem} " in texts
