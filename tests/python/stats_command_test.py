"""`tfswitch stats` and `tfswitch top`."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import environment
from tests.support import ServerProcess, make_table
from tfswitch.cli import stats_command

COMMAND = "import tfswitch_command; tfswitch_command.main()"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


def values(text: str) -> stats_command._Values:
    """Parses lines of a name, a shard, further labels and a value."""
    found = {}
    for line in text.strip().splitlines():
        name, shard, *more, value = line.split()
        labels = {"shard": shard, **dict(m.split("=") for m in more)}
        found[name, tuple(sorted(labels.items()))] = float(value)
    return found


def heat(table: str, num_keys: float, shares: dict[int, float]):
    hot_keys = [{"key": str(k), "share": s} for k, s in shares.items()]
    return {"table": table, "sampled_keys": num_keys, "hot_keys": hot_keys}


PULLED = "tfswitch_table_pulled_keys_total"
STEPS = "tfswitch_worker_steps_total"
UPTIME = "tfswitch_uptime_seconds"
ROWS = "tfswitch_table_rows"


def test_rates_add_up_shards_and_a_restarted_one_counts_from_its_start():
    before = values(f"""
        {UPTIME} 0 500
        {UPTIME} 1 500
        {ROWS} 0 table=t 5
        {PULLED} 0 table=t 9000
        {PULLED} 1 table=t 100
        {STEPS} 1 group=g worker=0 30
    """)
    now = values(f"""
        {UPTIME} 0 1
        {UPTIME} 1 502
        {ROWS} 0 table=t 5
        {ROWS} 1 table=t 6
        {PULLED} 0 table=t 20
        {PULLED} 1 table=t 140
        {STEPS} 1 group=g worker=0 50
        {STEPS} 1 group=g worker=1 9000
    """)
    heats = [heat("t", 30, {7: 0.5}), heat("t", 10, {8: 1}), heat("u", 5, {})]
    report = stats_command._report(
        stats_command._Look(10.0, before, []),
        stats_command._Look(12.0, now, heats),
    )
    (table,) = report["tables"]
    assert (table["table"], table["rows"]) == ("t", 11)
    assert table["pulled/s"] == (20 + 40) / 2
    assert report["workers"] == [
        {"group": "g", "worker": "0", "steps": 50, "steps/s": 10.0},
        {"group": "g", "worker": "1", "steps": 9000, "steps/s": 0.0},
    ]
    shares = {hot["id"]: hot["share"] for hot in report["hot_ids"]}
    assert shares == {7: 15 / 40, 8: 10 / 40}


@pytest.mark.parametrize(
    ("buckets", "p50", "p99"),
    [
        ({0.001: 50, 0.002: 99, float("inf"): 100}, 1.0, 2.0),
        ({0.001: 0, 60.0: 1, float("inf"): 2}, 60_000.0, None),
    ],
)
def test_percentiles_are_bounds_of_buckets(buckets, p50, p99):
    assert stats_command._percentile(buckets, 0.5) == p50
    assert stats_command._percentile(buckets, 0.99) == p99


def test_stats_as_json_has_servers_calls_and_tables(server, capsys):
    tsw.connect(f"grpc://{server.address}")
    table = make_table("movie")
    table.push(np.arange(7), np.ones((7, 2), np.float32))
    for _ in range(3000):
        table.lookup([3])
    words = ("--cluster", server.address, "--seconds", "0.2", "--json")
    assert stats_command.stats(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [s["server"] for s in report["servers"]] == [0]
    assert [c["call"] for c in report["calls"]] == ["GetMetrics"]
    assert [(t["table"], t["rows"]) for t in report["tables"]] == [("movie", 7)]
    assert report["hot_ids"] == [{"table": "movie", "id": 3, "share": 1.0}]
    del table


@pytest.mark.parametrize("ends", ["q", "closed"])
def test_top_shows_tables_until_q_or_until_its_terminal_is_closed(server, ends):
    tsw.connect(f"grpc://{server.address}")
    table = make_table("shown_by_top")
    table.push([1], np.ones((1, 2), np.float32))
    master, terminal = pty.openpty()
    top = subprocess.Popen(
        [
            *(sys.executable, "-c", COMMAND, "top"),
            *("--cluster", server.address, "--seconds", "0.2"),
        ],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        env=environment(TERM="xterm", COLUMNS="120", LINES="40"),
        text=True,
    )
    os.close(terminal)
    shown = b""
    while b"shown_by_top" not in shown:
        shown += os.read(master, 4096)
    if ends == "q":
        os.write(master, b"mq")
        while True:  # So that it can write its last screen.
            try:
                if not os.read(master, 4096):
                    break
            except OSError:  # It has ended.
                break
    os.close(master)
    _, error = top.communicate(timeout=60)
    assert "Traceback" not in error
    if ends == "q":
        assert top.returncode == 0
    del table
