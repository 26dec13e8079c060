"""`tfswitch size`: its predictions, against what servers then take."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import environment
from tests.support import ServerProcess

ROWS = 200_000


def size(
    *arguments: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs the command as it is installed, which does not import TensorFlow."""
    code = "import tfswitch_command; tfswitch_command.main()"
    return subprocess.run(
        [sys.executable, "-c", code, "size", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=check,
    )


def predict(*arguments: str) -> dict:
    return json.loads(size(*arguments, "--json").stdout)


def resident_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server._process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.parametrize(
    ("flags", "dim", "settings"),
    [
        (["--dim=16"], 16, {"optimizer": "adam"}),
        (
            [
                "--dim=6",
                "--optimizer=adagrad",
                "--storage_dtype=bfloat16,bfloat16",
                "--statistics=show_click",
            ],
            6,
            {
                "optimizer": "adagrad",
                "storage_dtype": tsw.StorageDtype("bfloat16", "bfloat16"),
                "statistics": tsw.statistics.ShowClick(),
            },
        ),
    ],
    ids=["adam", "16 bits and statistics"],
)
def test_prediction_is_what_a_server_takes(flags, dim, settings, tmp_path):
    predicted = predict(f"--rows={ROWS}", *flags)
    memory = predicted["memory_bytes"]
    server_flags = (
        f"--data_dir={tmp_path}",
        "--push_log",
        *predicted["server_flags"],
    )

    with ServerProcess(flags=server_flags) as server:
        before = resident_bytes(server)
        with tsw.connect(f"grpc://{server.address}") as cluster:
            table = tsw.EmbeddingTable("t", dim, **settings)
            for ids in np.array_split(np.arange(ROWS), 10):
                table.push(ids, np.ones((ids.size, dim)))
            stats = cluster.stats()["t"]
        growth = resident_bytes(server) - before
        server.signal(signal.SIGTERM)
        assert server.wait() == 0

    table_bytes = memory["rows"] + memory["index"] + memory["reserved"]
    assert stats.memory_bytes == pytest.approx(table_bytes, rel=0.15)
    assert predicted["row_stride_bytes"] == stats["row_stride_bytes"]
    assert memory["rows"] < growth
    assert growth < table_bytes + memory["stamps"] + memory["process"]
    saved = sum(
        file.stat().st_size for file in tmp_path.glob("state/t/*.safetensors")
    )
    assert predicted["disk_bytes"]["saves"] == pytest.approx(5 * saved, rel=0.1)


def test_rows_beyond_the_sample_cost_as_much_each():
    small, large = (
        predict(f"--rows={rows}", "--dim=64")["memory_bytes"]
        for rows in ("2M", "2000M")
    )

    assert large["rows"] == 1000 * small["rows"]
    assert large["index"] == pytest.approx(1000 * small["index"], rel=0.1)
    assert large["reserved"] == pytest.approx(small["reserved"], rel=0.5)


def test_server_with_most_rows_is_what_counts():
    # One of the three has 342 of 1024 virtual shards.
    plan = predict("--rows=1024k", "--dim=4", "--servers=3")

    assert plan["rows_per_server"] == 342_000


def test_text_has_the_sums_and_the_requests():
    text = size("--rows=20k", "--dim=4", "--servers=2").stdout

    assert text.startswith("20,000 rows of 4 floats, adam, on 2 server(s)")
    plan = predict("--rows=20k", "--dim=4", "--servers=2")["kubernetes"]
    assert f"memory: {plan['memory']}" in text
    assert f"storage: {plan['storage']}" in text
    assert "--max_buffer_bytes=536870912\n" in text
    assert "--max_bloom_bytes=1\n" in text


def test_memory_for_bloom_filters_is_in_the_request_and_bounded():
    plan = predict("--rows=20k", "--dim=4", "--max_bloom_bytes=20Gi")

    # Besides, buffers take 1 GiB.
    assert plan["kubernetes"]["memory"] == "22Gi"
    assert f"--max_bloom_bytes={20 << 30}" in plan["server_flags"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--dim=4"], "the following arguments are required: --rows"),
        (["--rows=1X", "--dim=4"], "argument --rows: expected a number from 1"),
        (["--rows=0", "--dim=4"], "argument --rows: expected a number from 1"),
        (
            ["--rows=1M", "--dim=4", "--max_buffer_bytes=1k"],
            "argument --max_buffer_bytes: expected a number from 2097152 on",
        ),
        (["--rows=1M", "--dim=4097"], "--dim=4097: table 'size': dim: exp"),
        (
            ["--rows=1M", "--dim=4", "--optimizer=best"],
            "argument --optimizer: invalid choice: 'best' (choose from",
        ),
        (
            ["--rows=1M", "--dim=4", "--storage_dtype=int8"],
            '--storage_dtype: `embeddings` must be one of "float32"',
        ),
        (
            ["--rows=1M", "--dim=4", "--storage_dtype=float32,int8,int8"],
            "--storage_dtype: expected one type, or two",
        ),
    ],
)
def test_bad_values_are_named(arguments, error):
    result = size(*arguments, check=False)

    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"tfswitch: {error}")


def test_help_lists_flags_with_a_choice():
    result = size("--help")

    assert "--optimizer {sgd," in result.stdout
    assert "--statistics {usage,show_click}" in result.stdout
