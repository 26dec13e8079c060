"""The command line, as far as it needs no server."""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from absl import app

import tfswitch as tsw
from tests.programs import ROOT, environment
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: tfswitch"),
        (["fly"], "no command 'fly'. Commands: serve, launch"),
        (["launch"], "required: program.*`tfswitch launch --help`"),
        (["launch", "--workers=0", "a.py"], "from 1 on. Received: '0'"),
        (["info", "a:1", "--tim=3"], "unrecognized arguments: --tim=3"),
    ],
)
def test_bad_commands_are_named(arguments, message):
    with pytest.raises(app.UsageError, match=message):
        cli.run(arguments)


@pytest.fixture
def executed(monkeypatch):
    """The arguments of the server program that would have run."""
    executed = []
    monkeypatch.setattr(programs, "execute_server", executed.extend)
    return executed


def test_serve_hands_its_flags_to_the_server_program_unread(executed):
    words = ["--address", "unix:/s", "--push_log", "--no_such_flag=1", "twice"]

    cli.run(["serve", *words])

    assert executed == words


@pytest.mark.parametrize(
    ("words", "kind"), [([], "cut"), (["--dry_run"], "dry_run")]
)
def test_repair_hands_on_its_way_and_other_flags(executed, words, kind):
    cli.run(["repair", *words, "/d", "--max_tables=3"])

    assert executed == ["--data_dir=/d", f"--repair={kind}", "--max_tables=3"]


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
