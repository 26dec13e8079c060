"""TensorFlow's SyncReplicasOptimizer fails where both engines of ours do not.

The guard of all tests of synchronous training: what they look for is there to
be found. That ours trains each sample once in these cases, the tests of
sync_replicas_optimizer_test.py prove without TensorFlow's.
"""

import re

import pytest

from tests.programs import ROOT, run_python

# It tests TensorFlow, whose workers hang until their limit.
pytestmark = pytest.mark.acceptance

PROGRAM = ROOT / "benchmarks" / "sync_replicas_bench.py"

# Stock workers that hang are ended after so long.
LIMIT_SECS = 25

ENDS_WELL = r"exit 0, exit 0"


@pytest.mark.parametrize(
    ("case", "stock", "ours"),
    [
        (
            "other_ends_first",
            r"hangs, exit 0 \| 8 of 40 \| 0 0\.25",
            rf"{ENDS_WELL} \| 0 of 40 \| 0\.125 0\.25",
        ),
        (
            "repeated_ids",
            r".* \| 0 of 4 \| 0\.25 0\.5",
            rf"{ENDS_WELL} \| 0 of 4 \| 0\.125 0\.25 0\.375",
        ),
    ],
)
def test_stock_workers_fail_where_ours_do_not(case, stock, ours):
    printed = run_python(
        PROGRAM, f"--cases={case}", f"--limit={LIMIT_SECS}"
    ).stdout

    assert re.search(rf"\| {case} \| stock \| {stock} \|", printed), printed
    for engine in ("ps", "servers"):
        assert re.search(rf"\| {case} \| {engine} \| {ours} \|", printed), (
            printed
        )
