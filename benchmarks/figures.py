"""Figures of the Python benchmarks: handed to run.py as by Report() of C++."""

import os
from collections.abc import Iterable

import numpy as np


def report(
    name: str, unit: str, values: Iterable[float], to_reach: str = ""
) -> None:
    """Adds a figure to the file that the environment names, if it does.

    Args:
        name: "table | row | column" of its place on a page.
        unit: For example "ms"; empty for ratios and counts.
        values: One for each round.
        to_reach: A bar, such as "at most 2".
    """
    if path := os.environ.get("TFSWITCH_FIGURES"):
        with open(path, "a", encoding="utf-8") as file:
            print(name, unit, to_reach, *values, sep="\t", file=file)


def area_under_curve(labels: np.ndarray, scores: np.ndarray) -> float:
    """Exact, with ties as halves."""
    _, place, counts = np.unique(
        scores, return_inverse=True, return_counts=True
    )
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    positives = labels > 0.5
    n = int(positives.sum())
    below = ranks[positives].sum() - n * (n + 1) / 2.0
    return float(below / (n * (len(labels) - n)))
