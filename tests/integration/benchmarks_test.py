"""Benchmarks that train, on a little data: that they run and what they print.

What they measure is in docs/benchmarks/.
"""

import re
from pathlib import Path

from tests.programs import ROOT, run_python

COWCLIP_BENCH = ROOT / "benchmarks/cowclip_bench.py"


def cowclip_table(*arguments: str) -> list[list[float]]:
    """Returns the numbers of the rows of the table that the program prints."""
    result = run_python(COWCLIP_BENCH, "--seeds=1", *arguments)
    return [
        [float(number) for number in line.split()]
        for line in result.stdout.splitlines()
        if re.match(r" *\d+ ", line)
    ]


def test_cowclip_bench_learns_from_generated_samples_as_each_rule_says() -> (
    None
):
    rows = cowclip_table(
        "--data=generated",
        "--batch_sizes=100,400",
        "--epochs=2",
        "--r=1e-6",
        "--zeta=0",
    )

    assert [row[:2] for row in rows] == [[100, 70], [400, 17]]
    (clipped, *base), larger = (row[2:6] for row in rows)
    assert base[0] == base[1] == base[2]  # Without a clip, nothing scales.
    assert base[0] > 0.8
    assert 0.5 < clipped < base[0] - 0.01  # So small an r clips a lot.
    assert min(larger) > 0.5
    assert len(set(larger[1:])) == 3
    assert [len(row) for row in rows] == [14, 14]  # Seconds, CPU seconds.


def test_cowclip_bench_says_where_it_expects_the_data(tmp_path: Path) -> None:
    result = run_python(COWCLIP_BENCH, f"--data={tmp_path}", check=False)

    assert result.returncode != 0
    assert f"no {tmp_path}/frappe_x1r/frappe_x1r.npz" in result.stderr
