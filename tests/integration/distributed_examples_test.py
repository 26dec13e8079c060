"""The examples of examples/distributed, each in processes of its own."""

import re
import subprocess
import sys

import pytest

from tests.programs import HANG_SECS, ROOT, environment

EXAMPLES = ROOT / "examples" / "distributed"

# 3,200 ratings to train with, 800 held out. Two workers have 2,133 and 1,067 of
# them: 17 and 9 batches.
DATA = ("--max_ratings=4000", "--batch_size=128", "--epochs=2")

pytestmark = pytest.mark.slow


COMMAND = "import tfswitch_command; tfswitch_command.main()"


def launch(*words: str) -> list[str]:
    """Runs `tfswitch launch`; returns the lines that the program printed."""
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, "launch", "--timeout=200s", *words],
        cwd=EXAMPLES,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECS,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout.splitlines()


def matches(pattern: str, lines: list[str]) -> list[re.Match[str]]:
    return [m for line in lines if (m := re.fullmatch(pattern, line))]


def check_auc(lines: list[str], task: str) -> None:
    (found,) = matches(
        rf"\[{task}\] AUC on 800 ratings that were held out: (0\.\d+)", lines
    )
    assert float(found[1]) > 0.55


def test_keras_workers_end_epochs_together() -> None:
    lines = launch(
        "--workers=2",
        "--servers=2",
        "keras_workers.py",
        "--consistency=bsp",
        *DATA,
    )

    # An epoch has 17 batches for one and 9 for the other; then they go on
    # together, at the clock of the first.
    for worker in (0, 1):
        assert matches(rf"\[worker {worker}\] clock 34; waits .*", lines)
    losses = [
        matches(rf"\[worker {worker}\] .* val_loss: (\S+)", lines)
        for worker in (0, 1)
    ]
    # All have seen the same, complete model.
    assert len(losses[0]) == len(losses[1]) == 2
    assert [m[1] for m in losses[0]] == [m[1] for m in losses[1]]
    (group,) = matches(
        r"\[worker 0\] (\d+) steps of all workers in (\d+) rounds", lines
    )
    assert int(group[1]) == 52
    # Synchronous steps of both workers are one.
    assert int(group[2]) == 34
    check_auc(lines, "worker 0")


def test_multi_worker_mirrored_counts_each_sample_once() -> None:
    lines = launch("--workers=2", "multi_worker_mirrored.py", *DATA)

    for epoch in (1, 2):
        found = matches(
            rf"\[worker \d\] epoch {epoch}: loss (0\.\d+), (\d+) samples "
            r"of all workers",
            lines,
        )
        assert len(found) == 2
        assert {int(line[2]) for line in found} == {3200}
        assert len({line[1] for line in found}) == 1
    check_auc(lines, "worker 0")


def test_parameter_server_strategy_takes_each_step_once() -> None:
    lines = launch(
        "--workers=2",
        "--servers=2",
        "--tf_ps=1",
        "parameter_server_strategy.py",
        *DATA,
    )

    assert "[chief 0] 50 steps of the rows of users" in lines
    assert matches(r"\[chief 0\] table 'movie': \d{3,4} rows", lines)
    check_auc(lines, "chief 0")


def test_horovod_workers_count_each_sample_once() -> None:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")

    lines = launch(
        *("horovodrun", "-np", "2", sys.executable, "horovod_workers.py"), *DATA
    )

    counts = re.findall(r"(\d+) samples of all workers", "\n".join(lines))
    assert counts == ["3200"] * 4
    assert "AUC on 800 ratings" in "\n".join(lines)
