"""Exports: what a base takes over from the last one, and schedules."""

import json
import queue
import types

import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.programs import run_python
from tests.support import RestartableServers, make_table
from tfswitch import export

DEADLINE_SECS = 60.0


def push(table, ids, **kwargs):
    table.push(ids, [[1.0, 1.0]] * len(ids), **kwargs)


def names_in(path):
    return sorted(file.name for file in path.iterdir() if file.name[0] != ".")


def manifest_of(path, name):
    return json.loads((path / name / "manifest.json").read_text())["content"]


@pytest.fixture(params=[0, 2], ids=["embedded", "two_servers"])
def table(request):
    """A table with the rows 1, 2, 3, in this process and on servers."""
    with running_cluster(request.param):
        table = make_table()
        push(table, [1, 2, 3])
        yield table


@pytest.fixture
def told():
    """Collects results of a schedule; `told.put` is its `log_fn`."""
    return queue.SimpleQueue()


def test_a_base_goes_on_with_format_and_rule(embedded, tmp_path):
    table = make_table(statistics=tsw.statistics.ShowClick(nonclk_coeff=1.0))
    push(table, [1, 2], shows=[5, 1])
    rule = export.ScoreRule(2.0, 0.5, 7.0)

    assert export.base(tmp_path, row_format="int8", rule=rule).num_rows == 1
    push(table, [2], shows=[3])
    assert export.delta(tmp_path).num_rows == 1
    assert export.base(tmp_path).num_rows == 2

    content = manifest_of(tmp_path, "base-00000003")
    assert content["rule"] == {
        "base_threshold": 2.0,
        "delta_threshold": 0.5,
        "delta_keep_days": 7.0,
    }
    assert content["tables"]["t"]["row_format"] == "int8"
    push(table, [9], shows=[1])
    report = export.base(tmp_path, row_format="float16", rule="all")
    assert report.num_rows == 3
    assert "rule" not in manifest_of(tmp_path, "base-00000004")


def test_memory_of_changes_is_in_stats(table, tmp_path):
    assert table.stats()["change_bytes"] == 0

    export.base(tmp_path)

    assert table.stats()["change_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_format": "int4"}, "`row_format` must be None or one of"),
        ({"rule": "some"}, "`rule` must be None"),
        ({"keep_bases": 0}, "`keep_bases` must be"),
        ({"base_every_secs": 0}, "`base_every_secs` must be"),
        ({"base_every_secs": float("nan")}, "`base_every_secs` must be"),
        ({"tables": "t"}, "`tables` must be a list of names or tables"),
        ({"tables": []}, "`tables` must have names"),
        ({"tables": [""]}, "`tables` must have names"),
    ],
)
def test_bad_arguments_of_a_schedule_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        export.Schedule(tmp_path, **arguments)


def test_a_schedule_writes_a_base_and_then_deltas(table, tmp_path):
    schedule = export.Schedule(tmp_path)

    first = schedule.export()
    push(table, [4])
    second = schedule.export()
    third = schedule.export()

    assert (first.kind, first.number, first.num_rows) == ("base", 1, 3)
    assert (second.kind, second.number, second.num_rows) == ("delta", 2, 1)
    assert not third.published
    assert str(second) == "delta 2: 1 rows, 0 removed"
    assert str(third) == "nothing has changed since export 2"
    assert names_in(tmp_path) == ["base-00000001", "delta-00000002"]


def test_a_base_comes_when_the_last_one_is_old(table, tmp_path, monkeypatch):
    schedule = export.Schedule(tmp_path, base_every_secs=100.0, keep_bases=1)
    schedule.export()
    begun = int(manifest_of(tmp_path, "base-00000001")["created_ms"]) / 1000
    for seconds, kind in ((99.0, "delta"), (101.0, "base")):
        clock = types.SimpleNamespace(time=lambda s=seconds: begun + s)
        monkeypatch.setattr(export, "time", clock)
        push(table, [4])
        # Another schedule, as after a restart of its program.
        again = export.Schedule(tmp_path, base_every_secs=100.0, keep_bases=1)
        assert again.export().kind == kind

    assert names_in(tmp_path) == ["base-00000003"]


def test_a_base_follows_where_a_delta_cannot(table, tmp_path):
    schedule = export.Schedule(tmp_path, row_format="float16")
    schedule.export()
    table.cluster.drop("t")
    again = make_table()
    push(again, [8])

    report = schedule.export()

    assert (report.kind, report.num_rows) == ("base", 1)
    assert "only 0 of the 3 ids" in report.why_base
    assert str(report).endswith(report.why_base)
    (tmp_path / "base-00000002" / "manifest.json").write_text("damaged")
    assert schedule.export().kind == "base"


@pytest.mark.parametrize(("base_every_secs", "lost"), [(None, 0), (1e-6, 1)])
def test_a_base_leaves_no_table_out_that_a_server_has_lost(
    tmp_path, base_every_secs, lost
):
    def schedule(cluster):
        return export.Schedule(
            tmp_path, cluster=cluster, base_every_secs=base_every_secs
        )

    with RestartableServers() as servers:
        # Each as in a program of its own.
        exporter, trainer = (tsw.Cluster(servers.address) for _ in range(2))
        for name in ("t", "u"):
            push(make_table(name, cluster=trainer), [1, 2, 3, 4])
        trainer.close()
        ours = schedule(exporter)
        assert ours.export().kind == "base"
        servers.restart(lost)
        trainer = tsw.Cluster(servers.address)

        for each in (ours, schedule(trainer)):
            with pytest.raises(
                OSError, match=f"shard {lost} has lost table 't'"
            ):
                each.export()

        assert names_in(tmp_path) == ["base-00000001"]
        trainer.reset_lost_tables()
        assert ours.export().published
        exporter.close()
        trainer.close()


def test_a_base_by_hand_leaves_no_table_out_unless_told(embedded, tmp_path):
    with pytest.raises(KeyError, match="no tables to export"):
        export.base(tmp_path)
    tables = [make_table(name) for name in ("t", "u")]
    for table in tables:
        push(table, [1])
    export.base(tmp_path)
    embedded.drop("u")

    with pytest.raises(KeyError, match=r"'u', which base-00000001 in .* has"):
        export.base(tmp_path)
    assert export.base(tmp_path, tables=["t"]).num_rows == 1
    assert export.base(tmp_path).number == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tables": ["t", "u"]}, "'u' is not in base-00000001"),
        ({"tables": ["u"]}, "'u' is not in base-00000001"),
        ({"tables": None}, "'u' is not in base-00000001"),
        ({"row_format": "int8"}, "to be int8, and are float16 in base-0"),
        ({"rule": export.ScoreRule(2.0)}, "by another rule than in base-0"),
        ({"rule": "all"}, "all rows are asked for, and a rule chose"),
    ],
)
def test_a_base_comes_where_the_last_export_is_another(
    embedded, tmp_path, options, why
):
    tables = [
        make_table(name, statistics=tsw.statistics.ShowClick())
        for name in ("t", "u")
    ]
    for table in tables:
        push(table, [1], shows=[5])
    rule = export.ScoreRule(0.1, 0.2, 3.0)
    export.base(tmp_path, tables=["t"], row_format="float16", rule=rule)
    same = {"tables": ["t"], "row_format": "float16", "rule": rule}
    assert not export.Schedule(tmp_path, **same).export().published

    schedule = export.Schedule(tmp_path, **{**same, **options})
    report = schedule.export()

    assert (report.kind, report.number) == ("base", 2)
    assert why in report.why_base
    assert not schedule.export().published


def test_a_saved_model_says_which_tables_are_exported(embedded, tmp_path):
    table = make_table()
    push(table, [1])
    path = tmp_path / "model"
    tsw.saved_model.save(
        lambda ids: {"vectors": table.lookup(ids)},
        path,
        inputs={"ids": tf.TensorSpec([None], tf.int64)},
    )
    push(make_table("u"), [1])
    push(table, [2])

    report = export.Schedule(path).export()

    assert (report.kind, report.num_rows) == ("delta", 1)


def test_a_delta_comes_where_a_base_that_is_due_fails(
    table, tmp_path, told, monkeypatch
):
    schedule = export.Schedule(tmp_path, base_every_secs=1e-6, log_fn=told.put)
    publish = export._publish

    def fail_bases(cluster, folder, options):
        if not options["delta"]:
            raise OSError("the disk is full")
        return publish(cluster, folder, options)

    monkeypatch.setattr(export, "_publish", fail_bases)
    assert not schedule.try_export()  # There is none to follow.
    monkeypatch.undo()
    schedule.try_export()
    push(table, [4])
    monkeypatch.setattr(export, "_publish", fail_bases)

    assert not schedule.try_export()
    push(table, [5])
    with pytest.raises(OSError, match="disk is full"):
        schedule.export()

    failed, base, failed_again, delta = (told.get() for _ in range(4))
    assert str(failed) == str(failed_again) == "the disk is full"
    assert (base.kind, delta.kind, delta.num_rows) == ("base", "delta", 1)
    assert names_in(tmp_path)[1:] == ["delta-00000002", "delta-00000003"]


def test_a_thread_survives_whatever_is_raised(embedded, tmp_path, told):
    table = make_table()
    push(table, [1])
    errors = [ZeroDivisionError("on purpose")]

    def connect():
        if errors:
            raise errors.pop()
        return embedded

    def tell(result):
        told.put(result)
        raise LookupError("on purpose")

    schedule = export.Schedule(tmp_path, cluster=connect, log_fn=tell)
    schedule.start(0.01)

    assert isinstance(told.get(timeout=DEADLINE_SECS), ZeroDivisionError)
    assert told.get(timeout=DEADLINE_SECS).kind == "base"
    assert not told.get(timeout=DEADLINE_SECS).published
    schedule.stop()


def test_a_schedule_runs_until_its_wait_ends_it(table, tmp_path, told):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        push(table, [10 + len(waits)])
        return len(waits) == 3

    export.Schedule(tmp_path, log_fn=told.put).run(30.0, wait)

    assert [told.get().kind for _ in range(3)] == ["base", "delta", "delta"]
    assert told.empty()
    assert 0.0 <= waits[0] <= 30.0


def test_a_thread_exports_until_it_is_stopped(table, tmp_path, told):
    schedule = export.Schedule(tmp_path, log_fn=told.put)
    schedule.start(0.01)
    with pytest.raises(RuntimeError, match="have been started already"):
        schedule.start(0.01)

    assert told.get(timeout=DEADLINE_SECS).kind == "base"
    push(table, [7])
    while True:
        report = told.get(timeout=DEADLINE_SECS)
        if report.published:
            break
    schedule.stop()
    schedule.stop()

    assert (report.kind, report.num_rows) == ("delta", 1)
    while not told.empty():
        told.get()
    push(table, [8])
    schedule.start(0.01)
    assert told.get(timeout=DEADLINE_SECS).number == 3
    schedule.stop()


def test_a_thread_ends_with_the_program(tmp_path):
    program = f"""
import queue
import tfswitch as tsw
table = tsw.EmbeddingTable("t", 2)
table.push([1], [[1.0, 1.0]])
told = queue.SimpleQueue()
tsw.export.Schedule({str(tmp_path)!r}, log_fn=told.put).start(0.001)
print(told.get(timeout={DEADLINE_SECS}))
"""
    result = run_python("-c", program)

    assert result.stdout == "base 1: 1 rows, 0 removed\n"


def test_the_program_does_not_wait_for_a_silent_server(tmp_path):
    program = f"""
import socket
import tfswitch as tsw
tsw.export._EXIT_SECS = 0.1
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind({str(tmp_path / "s")!r})
    listener.listen()
    address = "grpc+unix://" + listener.getsockname()
    tsw.export.Schedule(
        {str(tmp_path)!r},
        cluster=lambda: tsw.Cluster(address, timeout_secs=1e4),
    ).start(0.001)
    connection = listener.accept()
    print("asked")
    raise SystemExit(7)
"""
    result = run_python("-c", program, check=False)

    assert (result.returncode, result.stdout) == (7, "asked\n"), result.stderr
