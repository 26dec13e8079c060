"""Benchmarks that train, on a little data: that they run and what they print.

What they measure is in docs/benchmarks/.
"""

import os
import re
from pathlib import Path

import pytest

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


def test_cowclip_bench_reads_frappe_where_it_is() -> None:
    data = Path(os.environ.get("TFSWITCH_DATA", ROOT.parent / "shared/data"))
    if not (data / "frappe_x1r").is_dir():
        pytest.skip(f"no frappe_x1r in {data}; set TFSWITCH_DATA to its folder")

    rows = cowclip_table(
        f"--data={data}",
        "--batch_sizes=4096",
        "--epochs=1",
        "--rules=cowclip",
    )

    (batch, steps, auc, *_), *_ = rows
    assert (batch, steps) == (4096, 49)
    assert auc > 0.9


def test_cowclip_bench_says_where_it_expects_the_data(tmp_path: Path) -> None:
    result = run_python(COWCLIP_BENCH, f"--data={tmp_path}", check=False)

    assert result.returncode != 0
    assert f"no {tmp_path}/frappe_x1r/frappe_x1r.npz" in result.stderr


def test_storage_dtype_auc_trains_with_rows_of_each_size() -> None:
    program = """
import sys
from absl import app
sys.path.insert(0, "benchmarks")
import storage_dtype_auc as bench
# Of the eight, which take as much time.
names = ("float32", "bfloat16 + float32", "float16 + float16")
bench.ROW_TYPES = {name: bench.ROW_TYPES[name] for name in names}
app.run(bench.main)
"""
    result = run_python(
        "-c",
        program,
        "--optimizer=adam",
        "--seeds=1",
        "--epochs=1",
        "--max_ratings=1000",
    )
    rows = re.findall(
        r"^  ([a-z0-9+ ]+?) +(\d+) (0\.\d+) \(", result.stdout, re.MULTILINE
    )
    assert {name: int(stride) for name, stride, _ in rows} == {
        "float32": 128,  # 112 in whole cache lines.
        "bfloat16 + float32": 96,
        "float16 + float16": 64,
    }
    assert all(float(auc) > 0.5 for _, _, auc in rows)
