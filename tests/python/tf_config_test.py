"""TF_CONFIG: what it says of servers, workers and `tfswitch serve`."""

import json
import sys

import pytest
from absl import app

import tfswitch as tsw
from tfswitch._connection import _tf_config
from tfswitch.cli import main as cli
from tfswitch.cli import programs

JOB = {
    "ps": ["ps0:7077", "ps1:7078"],
    "chief": ["c:1"],
    "worker": ["w0:1", "w1:1"],
    "evaluator": ["e:1"],
}

MALFORMED = [
    "{",
    "[]",
    '"text"',
    '{"cluster": 3}',
    '{"cluster": {"ps": 7077}}',
    '{"cluster": {"ps": [7077]}}',
    '{"cluster": {"ps": {"host": "a:1"}}}',
]

BAD_TASKS = [
    {"type": "worker"},
    {"index": 0},
    {"type": "worker", "index": "first"},
    {"type": "worker", "index": None},
    ["worker", 0],
    "worker",
]


@pytest.fixture
def tf_config(monkeypatch):
    """Sets the variable: `tf_config(cluster, (type, index))`."""

    def set_variable(cluster=None, task=None):
        config = {}
        if cluster is not None:
            config["cluster"] = cluster
        if task is not None:
            config["task"] = {"type": task[0], "index": task[1]}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    return set_variable


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_without_it_nothing_is_known(monkeypatch, text):
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)

    assert _tf_config.task() is None
    assert _tf_config.worker_id() is None
    assert _tf_config.num_workers() == 0
    assert _tf_config.ps_addresses() == []


def test_ps_entries_are_the_servers_in_shard_order(tf_config, monkeypatch):
    tf_config(JOB)

    assert _tf_config.ps_addresses() == ["ps0:7077", "ps1:7078"]
    assert _tf_config.cluster_address() == "grpc://ps0:7077,ps1:7078"
    monkeypatch.setenv("TFSWITCH_TLS_CA", "ca.pem")
    assert _tf_config.cluster_address() == "grpcs://ps0:7077,ps1:7078"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (("chief", 0), 0),
        (("worker", 0), 1),
        (("worker", 1), 2),
        (("worker", "1"), 2),  # As text.
        (("ps", 0), None),
        (("evaluator", 0), None),
    ],
)
def test_the_chief_is_worker_0(tf_config, task, expected):
    tf_config(JOB, task)

    assert _tf_config.worker_id() == expected
    assert _tf_config.num_workers() == 3
    assert _tf_config.task() == (task[0], int(task[1]))


@pytest.mark.parametrize(
    ("cluster", "index"),
    [
        ({"master": ["m:1"], "worker": ["w:1"]}, 0),
        ({"chief": "c:1", "worker": ["w:1"]}, 0),
        ({"worker": ["w0:1", "w1:1"]}, 1),
    ],
    ids=["master_of_older_launchers", "chief_without_a_list", "no_chief"],
)
def test_chiefs_are_told_in_several_ways(tf_config, cluster, index):
    tf_config(cluster, ("worker", index))

    assert _tf_config.worker_id() == 1
    assert _tf_config.num_workers() == 2


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_malformed_is_named(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)

    with pytest.raises(ValueError, match="TF_CONFIG must hold") as error:
        _tf_config.ps_addresses()

    assert f"TF_CONFIG={text!r}" in str(error.value)


@pytest.mark.parametrize("task", BAD_TASKS, ids=json.dumps)
def test_a_task_that_is_none_is_named(monkeypatch, task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": JOB, "task": task}))

    with pytest.raises(ValueError, match="TF_CONFIG must hold"):
        _tf_config.task()


# --- Workers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "arguments", "expected"),
    [
        (("worker", 1), (), (2, 3, False)),
        (("chief", 0), (), (0, 3, True)),
        (("worker", 1), (0, 7), (0, 7, True)),  # Arguments come before it.
    ],
)
def test_a_worker_takes_its_place_from_it(tf_config, task, arguments, expected):
    tf_config({**JOB, "ps": []}, task)

    with (
        tsw.connect("local://tf_config_worker"),
        tsw.train.Worker(*arguments) as worker,
    ):
        found = (worker.worker_id, worker.num_workers, worker.is_chief)
    assert found == expected


def test_without_it_a_worker_is_the_only_one(embedded):
    worker = tsw.train.Worker()

    assert (worker.worker_id, worker.num_workers) == (0, 1)


# --- tfswitch serve ---------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """Runs `tfswitch serve` with flags; returns those of the program."""
    executed = []
    monkeypatch.setattr(programs, "execute_server", executed.extend)

    def serve(*flags):
        executed.clear()
        cli.run(["serve", *flags])
        return set(executed)

    return serve


@pytest.mark.parametrize(
    ("task", "flags", "expected"),
    [
        (("ps", 0), (), ("0.0.0.0:7077", 0, 2)),
        (("ps", 1), (), ("0.0.0.0:7078", 1, 2)),
        # Flags come before it.
        (("ps", 1), ("--address=unix:/s",), ("unix:/s", 1, 2)),
        (
            ("ps", 1),
            ("--shard_index=0", "--num_shards=5"),
            ("0.0.0.0:7078", 0, 5),
        ),
        # Any other is the only server.
        (("worker", 0), (), None),
        (("chief", 0), (), None),
        (None, (), None),
    ],
)
def test_serve_takes_its_place_from_a_ps_task(
    tf_config, served, task, flags, expected
):
    tf_config(JOB, task)

    assert served(*flags) == (flags_of(*expected) if expected else set())


def test_serve_stays_on_the_loopback_where_the_job_is_there(tf_config, served):
    tf_config({"ps": ["localhost:7077", "127.0.0.1:7078"]}, ("ps", 1))

    assert served() == flags_of("127.0.0.1:7078", 1, 2)


def flags_of(address, shard_index, num_shards):
    return {
        f"--address={address}",
        f"--shard_index={shard_index}",
        f"--num_shards={num_shards}",
    }


def test_serve_of_a_ps_number_that_there_is_not_is_refused(tf_config, served):
    tf_config(JOB, ("ps", 2))

    with pytest.raises(app.UsageError, match=r"2 ps addresses.*ps number 2"):
        served()


def test_serve_says_in_one_line_what_is_malformed(monkeypatch, served, capsys):
    monkeypatch.setattr(sys, "argv", ["tfswitch", "serve"])
    monkeypatch.setenv("TF_CONFIG", "{")

    with pytest.raises(SystemExit, match="2"):
        cli.main()

    written = capsys.readouterr().err
    assert written.startswith("tfswitch: the environment variable TF_CONFIG")
    assert written.count("\n") == 1
