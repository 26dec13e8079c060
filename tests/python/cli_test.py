"""The command line, as far as it needs no server."""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from absl import app
from absl.testing import flagsaver

import tfswitch as tsw
from tests.programs import ROOT, environment, run_python
from tfswitch.cli import main as cli
from tfswitch.cli import programs


def test_version_is_that_of_the_package_and_needs_no_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise AssertionError")

    result = subprocess.run(
        [sys.executable, "-m", "tfswitch", "version"],
        stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        text=True,
    )

    assert result.stdout == f"tfswitch {tsw.__version__}\n"


def test_a_command_ends_quietly_if_its_reader_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tfswitch", "--help"]

    result = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment()
    )

    os.close(writer)
    assert result.returncode == 128 + signal.SIGPIPE
    assert b"BrokenPipeError" not in result.stderr


def test_a_bad_flag_is_named_with_the_range():
    result = run_python(
        "-m", "tfswitch", "serve", "--num_shards=0", check=False
    )

    assert result.returncode == 2
    assert result.stderr.startswith("tfswitch: flag --num_shards=0: 0 is not")
    assert "`tfswitch serve --help`" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: tfswitch"),
        (["fly"], "no command 'fly'. Commands: serve, launch"),
        (["launch"], "expected `tfswitch launch PROGRAM`"),
        (["info"], "expected `tfswitch info ADDRESS`"),
        (["serve", "twice"], "Received: 'serve twice'"),
    ],
)
def test_bad_commands_are_named(arguments, message):
    with pytest.raises(app.UsageError, match=message):
        cli._run(["tfswitch", *arguments])


@pytest.fixture
def executed(monkeypatch):
    """The arguments of the server program that would have run."""
    executed = []
    monkeypatch.setattr(programs, "execute_server", executed.extend)
    return executed


@pytest.fixture
def flags():
    """Parses flags as the program does, for one test."""
    with flagsaver.flagsaver():
        yield lambda *arguments: cli.flags.FLAGS(["tfswitch", *arguments])


def test_serve_hands_its_flags_to_the_server_program(executed, flags):
    flags(
        "--address=unix:/s",
        "--shard_index=1",
        "--num_shards=2",
        "--limit=max_buffer_bytes=0",
        "--data_dir=/d",
        "--push_log",
        "--push_log_sync=always",
    )

    cli._run(["tfswitch", "serve"])

    assert executed == [
        "--address=unix:/s",
        "--shard_index=1",
        "--num_shards=2",
        "--num_threads=0",
        f"--max_message_bytes={1 << 30}",
        "--checkpoint_root=",
        "--data_dir=/d",
        "--push_log_sync=always",
        "--push_log",
        "--max_buffer_bytes=0",
    ]


def test_a_limit_without_a_value_is_named(executed, flags):
    flags("--limit=max_buffer_bytes")

    with pytest.raises(app.UsageError, match="--limit=max_buffer_bytes"):
        cli._run(["tfswitch", "serve"])
    assert executed == []


def test_a_duration_without_a_unit_is_named(executed, flags):
    flags("--checkpoint_every=10")

    with pytest.raises(app.UsageError, match="a unit, such as 10s or 10m"):
        cli._run(["tfswitch", "serve"])


def test_a_shard_that_is_none_of_the_cluster_is_named(executed, flags):
    flags("--shard_index=2", "--num_shards=2")

    with pytest.raises(app.UsageError, match="--shard_index=2 --num_shards=2"):
        cli._run(["tfswitch", "serve"])
    assert executed == []


def test_a_missing_server_program_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "_FOLDER", tmp_path)

    with pytest.raises(FileNotFoundError, match=r"-server.*pip install"):
        programs.execute_server([])


@pytest.mark.parametrize(
    ("where", "name", "found", "message"),
    [
        (importlib.util, "find_spec", None, "pip install 'tensorflow=="),
        (importlib.metadata, "version", "2.17.1", r"this is 2\.17\.1"),
    ],
    ids=["none", "another minor version"],
)
def test_serving_names_the_tensorflow_that_it_needs(
    where, name, found, message, monkeypatch
):
    monkeypatch.setattr(where, name, lambda _: found)

    with pytest.raises(ImportError, match=message):
        programs.execute_serving([])
