"""The commands that ask servers or read files, and their exit codes."""

import json
import os
import pty
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from absl import app

import tfswitch as tsw
from tests.programs import environment
from tests.support import RestartableServers, ServerProcess, running_servers
from tfswitch._connection._control_calls import call
from tfswitch._connection._tf_config import TfConfigError
from tfswitch.cli import info_command
from tfswitch.cli import main as cli

COMMAND = "import tfswitch_command; tfswitch_command.main()"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two servers with a table of Adagrad that counts the use of rows."""
    with running_servers(2) as address, tsw.Cluster(address) as cluster:
        yield cluster


@pytest.fixture
def table(cluster):
    """A table with the rows 1 to 100, of which 90 are small."""
    table = tsw.EmbeddingTable(
        "user",
        2,
        optimizer=tsw.optimizers.Adagrad(0.1),
        statistics=tsw.statistics.Usage(),
        eviction=tsw.eviction.L2Norm(0.5),
        cluster=cluster,
    )
    table.assign(range(1, 11), np.ones((10, 2), np.float32))
    table.assign(range(11, 101), np.full((90, 2), 0.1, np.float32))
    yield table
    if "user" in cluster.tables():
        cluster.drop("user")


@pytest.fixture
def run(cluster, capsys):
    """Calls a command, and returns its code and what it has printed."""

    def run(name, *words):
        capsys.readouterr()
        if name in (
            "get",
            "set",
            "remove",
            "save",
            "restore",
            "shrink",
            "drop",
        ):
            words = (*words, f"--cluster={cluster.address}")
        code = cli.run([name, *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def run_json(run, *words):
    code, out, _ = run(*words, "--json")
    return code, json.loads(out)


# --- Rows -------------------------------------------------------------------


def test_get_prints_rows_with_slots_and_statistics(run, table):
    code, found = run_json(run, "get", "user", 7, -5, 100)

    assert code == 0
    row, missing, last = found["rows"]
    assert (row["id"], row["state"], row["values"]) == (7, "row", [1.0, 1.0])
    np.testing.assert_allclose(row["slots"], [0.1, 0.1])
    assert row["count"] == 0 and row["last_seen_day"] > 0
    assert missing == {"id": -5, "state": "no row"}
    assert last["id"] == 100
    code, out, _ = run("get", "user", 7)
    assert out.splitlines()[:2] == ["7: row", "  values 1 1"]


def test_infinite_floats_are_null_in_json(run, table):
    table.apply_gradients(tf.IndexedSlices([[1e30, 0.0]], [7]))

    (row,) = run_json(run, "get", "user", 7)[1]["rows"]
    assert row["slots"] == [None, pytest.approx(0.1)]
    assert "  slots inf 0.1\n" in run("get", "user", 7)[1]


def test_a_server_refuses_to_read_too_many_rows_at_once(cluster, table):
    with pytest.raises(ValueError, match="at most 4096 keys, got 4097"):
        call(cluster._native, "ReadRows", table="user", keys=["1"] * 4097)


def test_rows_are_set_and_removed(run, table):
    assert run("set", "user", 7, 200, "--values=-1,2.5")[:2] == (
        0,
        "set 2 row(s) of 'user'\n",
    )
    np.testing.assert_array_equal(table.lookup([7, 200]), [[-1.0, 2.5]] * 2)
    assert run_json(run, "remove", "user", 7, 8, 999) == (
        0,
        {"table": "user", "removed": 2},
    )
    assert table.size() == 99


def test_strings_have_the_ids_of_hash_strings(run, table):
    run("set", "user", "apple", "--strings", "--values=3,4")

    _, found = run_json(run, "get", "user", "apple", "--strings")

    (row,) = found["rows"]
    assert row["values"] == [3.0, 4.0] and row["string"] == "apple"
    assert row["id"] == tsw.ids.hash_strings(["apple"]).numpy()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("get", "user", "x"), "each ID must be an integer"),
        (("set", "user", "1", "--values=1"), "must have 2 numbers"),
        (("set", "user", "1", "--values=a,b"), "expected numbers"),
        (("drop", "user"), "drop needs --yes"),
        (("info", "a"), "ADDRESS must be"),
        (("info", "a:1", "--servers=b:1"), "must have ADDRESS among them"),
        (("bench",), "ADDRESS must be given"),
        (("convert", "a.csv", "b.npz"), "suffix must be one of"),
        (("convert", "a.npz", "b"), "--dim must be given"),
        (("stats", "--seconds=inf"), "a finite number from 0.1 on"),
        (("info", "a:1", "--timeout=nan"), "a finite number from 0.001 on"),
    ],
)
def test_wrong_words_are_usage_errors(run, table, words, message, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(app.UsageError, match=message):
        run(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("get", "nothing", "1"), "tfswitch get: no table 'nothing'"),
        (("drop", "nothing", "--yes"), "tfswitch drop: no table 'nothing'"),
        (("shrink", "nothing"), "tfswitch shrink: no table 'nothing'"),
        (("save", "/proc/x"), "tfswitch save: "),
        (("restore", "/nowhere"), "tfswitch restore: no checkpoint"),
        (("inspect", "/nowhere"), "tfswitch inspect: there is nothing at"),
        (("inspect", "/proc"), "tfswitch inspect: '/proc' is none of"),
        (("diff", "/nowhere", "/proc"), "tfswitch diff: there is nothing"),
    ],
)
def test_an_error_is_one_line_with_code_1(run, words, message):
    code, out, error = run(*words)

    assert (code, out) == (1, "")
    assert error.startswith(message) and error.count("\n") == 1, error


def test_errors_name_flags_in_place_of_arguments(run, cluster, tmp_path):
    tsw.EmbeddingTable("plain", 2, cluster=cluster)
    dense = tsw.DenseTable("mlp", {"a": (2,)}, cluster=cluster)
    cluster.save(tmp_path / "ckpt", [dense])

    shrunk = run("shrink", "plain")
    converted = run("convert", tmp_path / "ckpt", tmp_path / "rows.npz")
    for name in ("plain", "mlp"):
        cluster.drop(name)
    assert shrunk[0] == 1 and "rules; make the table with" in shrunk[2]
    assert converted[0] == 1 and "table 'mlp' of" in converted[2]
    assert "name another one by --table" in converted[2]


# --- Tables -----------------------------------------------------------------


def test_tables_are_saved_shrunk_dropped_and_restored(run, table, tmp_path):
    path = tmp_path / "ckpt"

    assert run("save", path)[:2] == (
        0,
        f"saved 100 rows of 1 table(s) as save 1 of '{path}'\n",
    )
    assert run_json(run, "shrink", "user", "--dry_run")[1]["evicted_rows"] == 90
    assert table.size() == 100
    assert run("shrink", "user")[1].startswith("evicted 90 of 100 rows")
    assert run("drop", "user", "--yes")[:2] == (0, "dropped 'user'\n")
    assert run_json(run, "restore", path) == (
        0,
        {"tables": ["user"], "num_rows": 100, "save": 1},
    )
    assert run("restore", path)[1].endswith(f" from save 1 of '{path}'\n")


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("yes", 0)])
def test_drop_asks_on_a_terminal(cluster, table, answer, code):
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())

    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            COMMAND,
            "drop",
            "user",
            f"--cluster={cluster.address}",
        ],
        stdin=theirs,
        capture_output=True,
        text=True,
        env=environment(),
    )

    os.close(ours)
    os.close(theirs)
    assert "Drop table 'user' with 100 rows? [y/N]" in ended.stderr
    assert (ended.returncode, ended.stdout == "") == (code, code == 1)
    assert ("user" in cluster.tables()) == (code == 1)


# --- Files ------------------------------------------------------------------


@pytest.fixture
def saves(table, tmp_path):
    """A folder with two saves; row 1 has changed, 2 is gone, 101 is new."""
    path = tmp_path / "ckpt"
    table.save(path)
    table.assign([1, 101], [[4.0, 5.0], [0.0, 0.0]])
    table.remove([2])
    table.save(path)
    return path


def test_inspect_finds_the_saves_and_their_damage(run, saves):
    code, found = run_json(run, "inspect", saves, "--verify")

    assert (code, found["kind"]) == (0, "checkpoint")
    first, second = found["parts"]
    assert (first["name"], second["name"]) == ("save 1", "save 2")
    assert second["tables"][0]["num_rows"] == 100
    assert second["created_ms"] >= first["created_ms"] > 1.7e12
    manifest = json.loads((saves / "manifest.json").read_text())
    file = saves / manifest["tables"]["user"]["files"][0]["name"]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run("inspect", saves)[0] == 0
    code, out, _ = run("inspect", saves, "--verify")
    assert code == 1
    assert "damaged: save 2: " in out
    assert file.name in out


def test_diff_counts_rows_and_the_norm_of_changes(run, saves, tmp_path):
    code, found = run_json(
        run, "diff", saves / "manifest-000001.json", saves / "manifest.json"
    )

    (table,) = found["tables"]
    assert code == 0
    assert [table[n] for n in ("added", "removed", "changed", "same")] == [
        *(1, 1, 1, 98)
    ]
    assert table["norm"] == pytest.approx(5.0)


def test_exports_are_inspected_and_compared(run, cluster, table, tmp_path):
    rows = tmp_path / "rows"
    tsw.export.base(rows, cluster=cluster)
    table.save(tmp_path / "ckpt")
    table.assign([1], [[4.0, 5.0]])
    table.remove([2])
    tsw.export.delta(rows, cluster=cluster)

    code, found = run_json(run, "inspect", rows, "--verify")
    _, between = run_json(run, "diff", rows / "base-00000001", rows)
    _, equal = run_json(run, "diff", tmp_path / "ckpt", rows / "base-00000001")

    assert (code, found["kind"]) == (0, "exports")
    names = [part["name"] for part in found["parts"]]
    assert names == ["base-00000001", "delta-00000002"]
    assert found["parts"][1]["tables"][0]["num_removed"] == 1
    (changes,) = between["tables"]
    assert [changes[n] for n in ("added", "removed", "changed", "same")] == [
        *(0, 1, 1, 98)
    ]
    assert (equal["tables"][0]["same"], equal["tables"][0]["norm"]) == (100, 0)
    code, found = run_json(run, "inspect", rows / "delta-00000002")
    assert (found["kind"], len(found["parts"])) == ("export", 1)


def test_convert_goes_from_a_checkpoint_to_files_and_back(
    run, saves, tmp_path, embedded
):
    first, second = tmp_path / "rows.npz", tmp_path / "again"

    assert run("convert", saves, first, "--slots")[0] == 0
    assert run(
        *("convert", first, second, "--dim=2", "--table=user"),
        "--optimizer=adagrad",
    )[:2] == (0, f"wrote 100 rows to '{second}'\n")

    (table,) = run_json(run, "diff", saves, second)[1]["tables"]
    assert (table["same"], table["added"], table["removed"]) == (100, 0, 0)
    words = ("convert", first, second, "--dim=2", "--slots")
    assert "Read it without --slots" in run(*words)[2]

    counted = tsw.EmbeddingTable(
        "counted", 2, statistics=tsw.statistics.Usage(), cluster=embedded
    )
    counted.push([5, 5, 6], np.ones((3, 2), np.float32))
    tsw.io.write_numpy(counted, tmp_path / "counted.npz", slots=True)
    words = ("convert", tmp_path / "counted.npz", tmp_path / "third")
    words += ("--dim=2", "--slots", "--optimizer=adam")
    assert run(*words, "--statistics=ShowClick")[0] == 1
    assert run(*words, "--statistics=Usage")[0] == 0
    found = run_json(run, "inspect", tmp_path / "third")[1]
    assert found["parts"][0]["tables"][0]["num_rows"] == 2


# --- info -------------------------------------------------------------------


def test_info_shows_a_dead_server_and_the_others(run, monkeypatch):
    with (
        RestartableServers() as servers,
        tsw.Cluster(servers.address) as cluster,
    ):
        tsw.EmbeddingTable("t", 2, cluster=cluster).lookup_or_create([1, 2, 3])
        first, second = servers.addresses
        code, whole = run_json(run, "info", servers.address)
        assert code == 0
        assert [s["version"] for s in whole["servers"]] == [tsw.__version__] * 2
        assert [s["shard"] for s in whole["servers"]] == [0, 1]
        assert sum(s["rows"] for s in whole["servers"]) == 3
        assert whole["tables"][0]["rows"] == 3
        monkeypatch.setenv(
            "TF_CONFIG", json.dumps({"cluster": {"ps": [first, second]}})
        )
        for words in ((), (first,), (first, f"--servers={first},{second}")):
            assert len(run_json(run, "info", *words)[1]["servers"]) == 2
        monkeypatch.delenv("TF_CONFIG")
        _, twice = run_json(run, "info", f"{first},{first}")
        assert twice["tables"][0]["rows"] == whole["servers"][0]["rows"]
        code, swapped = run_json(run, "info", f"{second},{first}")
        assert (
            code == 1 and "in shard order" in swapped["servers"][0]["problem"]
        )
        servers.stop(1)

        code, out, _ = run("info", servers.address, "--timeout=3")

        assert code == 1
        lines = out.splitlines()
        assert lines[0].endswith("1 of them dead")
        assert lines[2].split()[:4] == [first, "0", "of", "2"]
        assert lines[3].split() == [second, "dead"]
        assert any(line.startswith("t ") for line in lines)


def test_info_names_the_server_that_has_lost_a_table(run):
    with (
        RestartableServers() as servers,
        tsw.Cluster(servers.address) as cluster,
    ):
        tsw.EmbeddingTable("t", 2, cluster=cluster)
        servers.restart(1)

        code, found = run_json(run, "info", servers.address)

    assert code == 1
    assert found["tables"][0]["lost"] == f"on {servers.addresses[1]}"


def test_any_error_is_the_problem_of_its_server(run, monkeypatch):
    monkeypatch.setattr(info_command, "_ask", lambda *_: {}["version"])

    code, found = run_json(run, "info", "a:1")

    assert code == 1
    assert found["servers"][0]["problem"] == "KeyError('version')"


def test_tf_config_is_read_only_where_it_is_needed(run, cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")

    assert run("info", cluster.address)[0] == 0
    with pytest.raises(TfConfigError):
        run("stats")


# --- bench, completion, Ctrl-C ----------------------------------------------


def test_bench_measures_and_leaves_no_table(run, cluster, table):
    words = ("bench", cluster.address, "--seconds=0.1", "--batch=64")

    code, found = run_json(run, *words, "--max_p99_ms=1e6")

    assert code == 0 and found["healthy"]
    assert found["lookups"]["calls"] == found["pushes"]["calls"] > 0
    assert run(*words, "--max_p99_ms=0.001")[0] == 1
    assert "Unable to allocate" in run(*words, "--batch=1T")[2]
    assert cluster.tables() == ["user"]


def test_bench_keeps_its_first_error_if_drop_fails(run, cluster, monkeypatch):
    def drop(*_):
        raise TimeoutError("raise `timeout_secs` in tfswitch.connect")

    words = ("bench", cluster.address, "--seconds=0.1", "--batch=64")
    with monkeypatch.context() as patch:
        patch.setattr(tsw.Cluster, "drop", drop)
        code, out, error = run(*words)
        _, _, both = run(*words, "--batch=1T")
    for name in cluster.tables():
        cluster.drop(name)

    assert (code, out) == (1, "") and "could not be removed" in error
    assert error.endswith("\ntfswitch bench: raise --timeout\n")
    assert "could not be removed" in both and "Unable to allocate" in both
    assert both.count("\n") == 2


@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_removes_the_table_of_bench_or_says_how(hangs):
    with (
        ServerProcess() as server,
        tsw.Cluster(f"grpc://{server.address}") as cluster,
    ):
        words = ("bench", server.address, *(["--timeout=5"] if hangs else []))
        # A job that a shell has started in the background ignores SIGINT.
        hears = "signal.signal(signal.SIGINT, signal.default_int_handler)"
        bench = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import signal; {hears}; {COMMAND}",
                *words,
            ],
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        while not (names := cluster.tables()):
            assert bench.poll() is None
        if hangs:
            server.signal(signal.SIGSTOP)

        bench.send_signal(signal.SIGINT)

        _, error = bench.communicate()
        assert bench.returncode == 130, error
        # On a slow machine the first call takes over a second.
        lines = [
            line
            for line in error.splitlines()
            if not line.startswith("tfswitch: waiting for shard 0")
        ]
        if hangs:
            (line,) = lines
            assert f"`tfswitch drop {names[0]} --yes`" in line
        else:
            assert (lines, cluster.tables()) == ([], [])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["insp"], {"inspect"}),
        (["inspect", "--v"], {"--verify"}),
        (["token", "re"], {"revoke"}),
        (["serve", "--push"], {"--push_log", "--push_log_sync"}),
    ],
)
def test_bash_completes_commands_flags_and_choices(run, typed, expected):
    _, script, _ = run("completion", "bash")
    call = (
        f"COMP_WORDS=(tfswitch {' '.join(typed)}); COMP_CWORD={len(typed)}; "
        '_tfswitch; echo "${COMPREPLY[@]}"'
    )

    done = subprocess.run(
        ["bash", "-c", f"{script}\n{call}"], capture_output=True, text=True
    )

    assert expected <= set(done.stdout.split()), done.stderr


def test_commands_of_servers_and_files_need_no_tensorflow(cluster, saves):
    servers = f"--cluster={cluster.address}"
    commands = [
        ["info", cluster.address],
        ["get", "user", "1", servers],
        ["inspect", str(saves), "--verify"],
        ["diff", str(saves), str(saves)],
        ["shrink", "user", "--dry_run", servers],
        ["save", str(saves), servers],
        ["bench", cluster.address, "--seconds=0.1"],
    ]
    program = f"""
import sys
import tfswitch_command

sys.modules["tensorflow"] = None  # Any import of it now fails.
tfswitch_command._put_package()
from tfswitch.cli import main
for words in {commands}:
    print(words[0], main.run(words))
"""

    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
    )

    for words in commands:
        assert f"\n{words[0]} 0\n" in f"\n{told.stdout}", told.stderr
