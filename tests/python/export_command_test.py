"""`tfswitch export`, with servers."""

import json
import signal
import subprocess
import sys

import pytest
from absl import app, flags
from absl.testing import flagsaver

import tfswitch as tsw
from tests.support import environment, running_servers
from tfswitch import export
from tfswitch.cli import export_command
from tfswitch.cli import main as cli

COMMAND = (sys.executable, "-m", "tfswitch", "export")


@pytest.fixture(scope="module")
def servers():
    """The address of two servers with tables."""
    with (
        running_servers(2) as address,
        tsw.connect(address) as cluster,
    ):
        table = tsw.EmbeddingTable("t", 2, cluster=cluster)
        table.push([1, 2], [[1.0, 1.0]] * 2)
        other = tsw.EmbeddingTable("other", 2, cluster=cluster)
        other.push([1], [[1.0, 1.0]])
        yield address


@pytest.fixture
def parse():
    """Parses flags as the program does, for one test."""
    with flagsaver.flagsaver():
        yield lambda *arguments: flags.FLAGS(["tfswitch", *arguments])


def run_once(*arguments):
    return subprocess.run(
        [*COMMAND, "--once", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
    )


def test_once_writes_what_is_due(servers, tmp_path):
    flag_values = [f"--cluster={servers}", f"--path={tmp_path}"]

    base = run_once(*flag_values, "--tables=t", "--row_format=int8")
    delta = run_once(*flag_values)

    assert base.returncode == delta.returncode == 0, base.stderr + delta.stderr
    assert base.stdout == "base 1: 2 rows, 0 removed\n"
    assert delta.stdout == "nothing has changed since export 1\n"
    manifest = tmp_path / "base-00000001" / "manifest.json"
    tables = json.loads(manifest.read_text())["content"]["tables"]
    assert {name: t["row_format"] for name, t in tables.items()} == {
        "t": "int8"
    }


def test_a_failure_once_is_told_in_the_exit_code(servers, tmp_path):
    result = run_once(
        f"--cluster={servers}", f"--path={tmp_path}", "--tables=away"
    )

    assert result.returncode == 1
    assert "tfswitch export: failed: no table 'away'" in result.stderr


@pytest.mark.parametrize(
    ("number", "every", "exports"),
    [
        (signal.SIGTERM, "1h", ["base 1: 3 rows"]),
        (
            signal.SIGINT,
            "0.01s",
            ["base 1: 3 rows", *["nothing has changed since export 1"] * 2],
        ),
    ],
)
def test_it_exports_until_a_signal_comes(
    servers, tmp_path, number, every, exports
):
    with subprocess.Popen(
        [
            *COMMAND,
            f"--cluster={servers}",
            f"--path={tmp_path}",
            f"--every={every}",
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in exports:
            assert process.stdout.readline().startswith(line)
        process.send_signal(number)

        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("1.5m", 90.0), ("24h", 86400.0), ("2d", 172800.0)],
)
def test_durations_have_units(parse, text, seconds):
    parse(f"--every={text}")

    assert export_command._EVERY.value == seconds


@pytest.mark.parametrize("text", ["30", "s", "0s", "-1s", "1 h", "1w"])
def test_bad_durations_are_named(parse, text):
    with pytest.raises(flags.IllegalFlagValueError, match=r"--every=.*30s, 5m"):
        parse(f"--every={text}")


def test_flags_reach_the_schedule(parse, monkeypatch):
    made = {}
    monkeypatch.setattr(
        export,
        "Schedule",
        lambda path, **options: made.update(options, path=path),
    )
    parse(
        "--cluster=grpc://127.0.0.1:1",
        "--path=exports",
        "--base_every=24h",
        "--tables=a,b",
        "--base_threshold=2",
        "--delta_keep_days=3",
        "--keep_bases=4",
    )

    export_command._schedule()

    assert made.pop("cluster").args == ("grpc://127.0.0.1:1",)
    assert made == {
        "path": "exports",
        "base_every_seconds": 86400.0,
        "tables": ["a", "b"],
        "row_format": None,
        "rule": export.ScoreRule(base_threshold=2.0, delta_keep_days=3.0),
        "keep_bases": 4,
        "tell": export_command._tell,
    }


def test_servers_may_come_from_tf_config(parse, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"ps": ["a:1", "b:2"]}})
    )
    made = {}
    monkeypatch.setattr(
        export, "Schedule", lambda path, **options: made.update(options)
    )
    parse("--path=exports")

    export_command._schedule()

    assert made["cluster"].args == ("grpc://a:1,b:2",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path=p"], "--cluster must be given"),
        (["--path=p", "--cluster=local://"], "--cluster=local://"),
        (["--cluster=grpc://a:1"], "--path must be given"),
        (
            [
                "--path=p",
                "--cluster=grpc://a:1",
                "--all_rows",
                "--base_threshold=1",
            ],
            "--all_rows does not go with --base_threshold",
        ),
    ],
)
def test_missing_flags_are_named(parse, arguments, message):
    parse(*arguments)

    with pytest.raises(app.UsageError, match=message):
        cli._run(["tfswitch", "export"])
