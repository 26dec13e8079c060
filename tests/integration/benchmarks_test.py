"""Benchmarks that train, on a little data: that they run and what they print.

What they measure is in docs/benchmarks.md.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COWCLIP_BENCH = ROOT / "benchmarks/cowclip_bench.py"
TIMEOUT_S = 240


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    # Works whether or not the checkout is registered in the environment.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    environment.pop("TF_USE_LEGACY_KERAS", None)
    return subprocess.run(
        [sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
    )


def cowclip_table(*arguments: str) -> list[list[float]]:
    """Returns the numbers of the rows of the table that the program prints."""
    result = run(COWCLIP_BENCH, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    return [
        [float(number) for number in line.split()]
        for line in result.stdout.splitlines()
        if re.match(r" *\d+ ", line)
    ]


def test_cowclip_bench_learns_with_each_rule_from_generated_samples() -> None:
    rows = cowclip_table(
        "--data=generated",
        "--batch_sizes=100,400",
        "--epochs=2",
        "--seeds=1",
    )

    assert [row[:2] for row in rows] == [[100, 70], [400, 17]]
    base, larger = (row[2:6] for row in rows)
    assert min(base) > 0.8
    assert base[1] == base[2] == base[3]  # Without a clip, nothing scales.
    assert min(larger) > 0.5
    assert len(set(larger[1:])) == 3
    assert [len(row) for row in rows] == [14, 14]  # Seconds, CPU seconds.


def test_cowclip_bench_clips_more_the_smaller_r_is() -> None:
    rows = cowclip_table(
        "--data=generated",
        "--batch_sizes=100",
        "--epochs=2",
        "--seeds=1",
        "--rules=cowclip,unclipped",
        "--r=1e-6",
        "--zeta=0",
    )

    (_, _, clipped, unclipped, *_), *_ = rows
    assert clipped < unclipped - 0.01


def test_cowclip_bench_reads_frappe_where_it_is() -> None:
    data = Path(os.environ.get("TFSWITCH_DATA", ROOT.parent / "shared/data"))
    if not (data / "frappe_x1r").is_dir():
        pytest.skip(f"no frappe_x1r in {data}; set TFSWITCH_DATA to its folder")

    rows = cowclip_table(
        f"--data={data}",
        "--batch_sizes=4096",
        "--epochs=1",
        "--seeds=1",
        "--rules=cowclip",
    )

    (batch, steps, auc, *_), *_ = rows
    assert (batch, steps) == (4096, 49)
    assert auc > 0.9


def test_cowclip_bench_says_where_it_expects_the_data(tmp_path: Path) -> None:
    result = run(COWCLIP_BENCH, f"--data={tmp_path}")

    assert result.returncode != 0
    assert f"no {tmp_path}/frappe_x1r/frappe_x1r.npz" in result.stderr


def test_row_type_auc_trains_with_each_row_type() -> None:
    result = run(
        ROOT / "benchmarks/row_type_auc.py",
        "--optimizer=adam",
        "--seeds=1",
        "--epochs=1",
        "--max_ratings=3000",
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    rows = dict(
        re.findall(
            r"^  ([a-z0-9+ ,]+?) +(\d+ 0\.\d+) \(", result.stdout, re.MULTILINE
        )
    )
    strides = {name: int(row.split()[0]) for name, row in rows.items()}
    assert len(strides) == 8
    assert strides["float32"] == 128  # 112 in whole cache lines.
    assert strides["bfloat16 + float32"] == 96
    assert strides["float16 + float16"] == 64
    assert all(float(row.split()[1]) > 0.5 for row in rows.values())
