"""Hands figures of the Python benchmarks to run.py, as Report() of C++ does."""

import os
from collections.abc import Iterable


def report(
    name: str, unit: str, values: Iterable[float], to_reach: str = ""
) -> None:
    """Adds a figure to the file that the environment names, if it does.

    Args:
        name: "table | row | column" of its place on a page.
        unit: Such as "ms"; empty for ratios and counts.
        values: One for each round.
        to_reach: A bar, such as "at most 2".
    """
    if path := os.environ.get("TFSWITCH_FIGURES"):
        with open(path, "a", encoding="utf-8") as file:
            print(name, unit, to_reach, *values, sep="\t", file=file)
