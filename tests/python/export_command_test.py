"""`tfswitch export`, with servers."""

import contextlib
import json
import signal
import socket
import subprocess

import pytest
from absl import app

import tfswitch as tsw
from tests.programs import HANG_SECS, PythonProgram, run_python
from tests.support import running_servers
from tfswitch import export
from tfswitch.cli import export_command
from tfswitch.cli import main as cli

COMMAND = ("-m", "tfswitch", "export")


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


def parse(*words):
    return export_command._parser().parse_args(words)


def test_once_writes_what_is_due(servers, tmp_path):
    flag_values = ["--once", f"--cluster={servers}", f"--path={tmp_path}"]

    base = run_python(*COMMAND, *flag_values, "--tables=t", "--row_format=int8")
    delta = run_python(*COMMAND, *flag_values, "--tables=t")

    assert base.stdout == "base 1: 2 rows, 0 removed\n"
    assert delta.stdout == "nothing has changed since export 1\n"
    manifest = tmp_path / "base-00000001" / "manifest.json"
    tables = json.loads(manifest.read_text())["content"]["tables"]
    assert {name: t["row_format"] for name, t in tables.items()} == {
        "t": "int8"
    }


def test_what_does_not_get_better_is_not_tried_again(servers, tmp_path):
    model = tmp_path / "model"
    (model / "assets").mkdir(parents=True)
    (model / export._MODEL_FILE).write_text('{"version": 2, "tables": {}}')
    flag_values = {"--cluster": servers, "--path": tmp_path}

    for others, message in [
        ({"--tables": "away"}, "failed: no table 'away'"),
        ({"--path": model}, "looks rows up on servers, and has no exports"),
    ]:
        flags_given = (flag_values | others).items()
        result = run_python(
            *COMMAND,
            "--once",
            *(f"{k}={v}" for k, v in flags_given),
            check=False,
        )

        assert result.returncode == 1
        assert "tfswitch export: failed: " in result.stderr
        assert message in result.stderr


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
    with PythonProgram(
        *COMMAND,
        *(f"--cluster={servers}", f"--path={tmp_path}", f"--every={every}"),
        stdout=subprocess.PIPE,
    ) as process:
        for line in exports:
            assert process.stdout.readline().startswith(line)
        process.send_signal(number)

        assert process.wait(HANG_SECS) == 0


@pytest.mark.parametrize(
    ("first", "second", "once"),
    [
        (signal.SIGTERM, signal.SIGTERM, False),
        (signal.SIGINT, signal.SIGINT, True),
        (signal.SIGINT, signal.SIGTERM, False),
    ],
)
def test_a_second_signal_ends_it_while_a_server_is_silent(
    tmp_path, first, second, once
):
    # No port, to which others may connect as well.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    with (
        listener,
        PythonProgram(
            *COMMAND,
            f"--cluster=grpc+unix://{tmp_path}/s",
            f"--path={tmp_path}",
            *(["--once"] if once else []),
        ) as process,
    ):
        listener.settimeout(HANG_SECS)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(first)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            assert process.returncode is None
            # One that comes before the first was handled is lost.
            while process.returncode is None:
                process.send_signal(second)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)

            # Had the call ended, or its 30 s, it would have been another.
            assert process.returncode == 128 + second


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("1.5m", 90.0), ("24h", 86400.0), ("2d", 172800.0)],
)
def test_durations_have_units(text, seconds):
    assert parse("--path=p", f"--every={text}").every == seconds


@pytest.mark.parametrize(
    "text", ["30", "s", "0s", "-1s", "1 h", "1w", "999999999d"]
)
def test_bad_durations_are_named(text):
    with pytest.raises(app.UsageError, match=r"--every: .*30s, 5m"):
        parse("--path=p", f"--every={text}")


def test_flags_reach_the_schedule(monkeypatch):
    made = {}
    monkeypatch.setattr(
        export,
        "Schedule",
        lambda path, **options: made.update(options, path=path),
    )
    options = parse(
        "--cluster=grpc://127.0.0.1:1",
        "--path=exports",
        "--base_every=24h",
        "--tables=a,b",
        "--base_threshold=2",
        "--delta_keep_days=3",
        "--keep_bases=4",
    )

    export_command._schedule(options, print)

    assert made.pop("cluster").args == ("grpc://127.0.0.1:1",)
    assert made == {
        "path": "exports",
        "base_every_secs": 86400.0,
        "tables": ["a", "b"],
        "row_format": None,
        "rule": export.ScoreRule(base_threshold=2.0, delta_keep_days=3.0),
        "keep_bases": 4,
        "log_fn": print,
    }


def test_servers_may_come_from_tf_config(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"ps": ["a:1", "b:2"]}})
    )
    made = {}
    monkeypatch.setattr(
        export, "Schedule", lambda path, **options: made.update(options)
    )
    export_command._schedule(parse("--path=exports"), print)

    assert made["cluster"].args == ("grpc://a:1,b:2",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path=p"], "--cluster must be given"),
        (["--path=p", "--cluster=local://"], "Received: 'local://'"),
        (["--path=p", "--cluster=grpc://a"], "missing in 'a'"),
        (["--path=p", "--cluster=grpc://a:1,b:x"], "'x' is no port in 'b:x'"),
        (["--path=p", "--cluster=grpc://a:70000"], "no port in 'a:70000'"),
        (["--cluster=grpc://a:1"], "required: --path"),
        (
            [
                "--path=p",
                "--cluster=grpc://a:1",
                "--all_rows",
                "--base_threshold=1",
            ],
            "--all_rows does not go with --base_threshold",
        ),
        (
            ["--path=p", "--cluster=grpc://a:1", "--tables="],
            "`tables` must have names",
        ),
        (
            ["--path=p", "--cluster=grpc://a:1", "--tables=a,,b"],
            "`tables` must have names",
        ),
        (
            ["--path=p", "--cluster=grpc://a:1", "--base_threshold=nan"],
            "a finite number from 0 on. Received: 'nan'",
        ),
    ],
)
def test_missing_flags_are_named(arguments, message):
    with pytest.raises(app.UsageError, match=message):
        cli.run(["export", *arguments])
