"""Traces: the spans of pulls, pushes and calls to servers."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode

import tfswitch as tsw
from tests.programs import environment
from tests.python.worker_threads import wait_until
from tests.support import ServerProcess, make_table, running_servers
from tfswitch import _native
from tfswitch._connection._control_calls import call
from tfswitch._settings._table_spec import TableSpec

IDS = np.array([3, 1, 3], np.int64)


@pytest.fixture
def traced() -> Iterator[SimpleNamespace]:
    """A provider whose spans `traced.spans()` returns, the earliest first."""
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def spans() -> list[sdk.ReadableSpan]:
        return sorted(exporter.get_finished_spans(), key=lambda s: s.start_time)

    yield SimpleNamespace(provider=provider, spans=spans)
    tsw.tracing.stop()


@contextlib.contextmanager
def tracing(traced: SimpleNamespace) -> Iterator[None]:
    tsw.tracing.start(traced.provider)
    try:
        yield
    finally:
        tsw.tracing.stop()


def named(spans, name):
    return [span for span in spans if span.name == name]


def children(spans, parent):
    return [
        span
        for span in spans
        if span.parent is not None
        and span.parent.span_id == parent.context.span_id
    ]


def test_a_call_contains_the_work_of_the_server_and_explains_its_time(traced):
    with running_servers(2) as address, tsw.Cluster(address) as cluster:
        table = make_table("user", 2, cluster=cluster)
        table.lookup(IDS)

        with tracing(traced):
            table.push(IDS, np.ones((3, 2), np.float32))

        spans = traced.spans()
        (push,) = named(spans, "tfswitch.push")
        assert dict(push.attributes) == {
            "tfswitch.tables": ("user",),
            "tfswitch.ids": 3,
            "tfswitch.keys": 2,
        }
        calls = children(spans, push)
        assert {c.name for c in calls} == {
            "tfswitch.v1.ParameterServer/PushMany"
        }
        ports = {int(a.rpartition(":")[2]) for a in address.split(",")}
        for each in calls:
            about = each.attributes
            assert each.kind == SpanKind.CLIENT
            assert about["rpc.method"] == "PushMany"
            assert about["rpc.grpc.status_code"] == 0
            assert about["server.port"] in ports
            assert about["tfswitch.request_bytes"] > 8
            assert about["tfswitch.response_bytes"] > 0
            times = [
                about[f"tfswitch.{part}_ns"]
                for part in ("wait", "work", "answer")
            ]
            assert sum(times) == each.end_time - each.start_time
            assert min(times) >= 0 < times[1]
            (work,) = children(spans, each)
            assert work.kind == SpanKind.SERVER
            assert work.start_time == each.start_time + times[0]
            assert work.end_time - work.start_time == times[1]
            assert push.start_time <= each.start_time
            assert each.end_time <= push.end_time


def test_fit_has_a_span_for_each_step_with_its_pull_and_push(traced):
    ids = keras.Input((2,), dtype="int64")
    rows = tsw.keras.DynamicEmbedding(2, name="word")(ids)
    model = keras.Model(ids, keras.layers.Flatten()(rows))
    model.compile("sgd", "mse")

    model.fit(
        np.arange(12).reshape(6, 2),
        np.zeros((6, 4)),
        batch_size=2,
        verbose=0,
        callbacks=[tsw.keras.callbacks.TraceSteps(traced.provider)],
    )

    spans = traced.spans()
    steps = named(spans, "step")
    assert [step.attributes["tfswitch.step"] for step in steps] == [0, 1, 2]
    for step in steps:
        # Rows in this process need no call to a server.
        assert [c.name for c in children(spans, step)] == [
            "tfswitch.pull",
            "tfswitch.push",
        ]
    assert {s.parent for s in steps} == {None}
    model.predict(np.zeros((1, 2)), verbose=0)
    assert call(_native, "TakeTraces")["spans"] == []


def test_spans_nest_in_those_of_the_program(traced):
    table = make_table("user", 2)
    tracer = traced.provider.get_tracer("program")

    with tracer.start_as_current_span("job"), tracing(traced):
        with tsw.tracing.span("outer"):
            with tsw.tracing.span("inner", {"kind": 1}):
                table.lookup(IDS)
            table.lookup(IDS[:1])
        table.lookup(IDS[:2])

    spans = traced.spans()
    of = {
        name: [
            s.attributes.get("tfswitch.ids", s.name) for s in children(spans, p)
        ]
        for name in ("job", "outer", "inner")
        for p in named(spans, name)
    }
    assert of == {"job": ["outer", 2], "outer": ["inner", 1], "inner": [3]}


def test_calls_are_in_the_span_that_began_last_of_those_still_open(traced):
    table = make_table("user", 2)
    has_begun, may_end = threading.Event(), threading.Event()

    def first():
        with tsw.tracing.span("first"):
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=first)
    with tracing(traced):
        thread.start()
        has_begun.wait()
        with tsw.tracing.span("second"):
            may_end.set()
            thread.join()
            table.lookup(IDS)
        table.lookup(IDS)

    spans = traced.spans()
    pulls = named(spans, "tfswitch.pull")
    (of_second,) = named(spans, "second")
    assert children(spans, of_second) == pulls[:1]
    assert pulls[1].parent is None


def test_fit_traces_after_a_fit_that_failed(traced):
    ids = keras.Input((2,), dtype="int64")
    rows = tsw.keras.DynamicEmbedding(2, name="word")(ids)
    model = keras.Model(ids, keras.layers.Flatten()(rows))
    model.compile("sgd", "mse")
    trace_steps = tsw.keras.callbacks.TraceSteps(traced.provider)

    class Failing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise ZeroDivisionError

    for others in ([Failing()], []):
        with (
            pytest.raises(ZeroDivisionError)
            if others
            else contextlib.nullcontext()
        ):
            model.fit(
                np.zeros((1, 2), np.int64),
                np.zeros((1, 4)),
                verbose=0,
                callbacks=[trace_steps, *others],
            )

    spans = traced.spans()
    failed, step = named(spans, "step")
    assert step.parent is None
    assert len(children(spans, step)) >= 2
    assert failed.end_time <= step.start_time
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_call_ends_when_its_answer_arrives_and_not_when_it_is_read(traced):
    with contextlib.ExitStack() as stack:
        slow, quick = (
            stack.enter_context(ServerProcess(shard_index=i, num_shards=2))
            for i in range(2)
        )
        address = f"grpc://{slow.address},{quick.address}"
        cluster = stack.enter_context(tsw.Cluster(address))
        table = make_table("user", 2, cluster=cluster)
        table.lookup_or_create(np.arange(10))
        slow.signal(signal.SIGSTOP)
        timer = threading.Timer(2.0, slow.signal, [signal.SIGCONT])
        timer.start()

        with tracing(traced):
            table.lookup(np.arange(10))
        timer.join()

    first, second = sorted(
        named(traced.spans(), "tfswitch.v1.ParameterServer/PullMany"),
        key=lambda span: span.attributes["tfswitch.shard"],
    )
    assert second.end_time < first.end_time


@pytest.mark.parametrize(
    ("work_begin", "work", "expected"),
    [
        (130, 50, (30, 50, 20)),
        (90, 50, (0, 50, 50)),  # The server's clock is behind,
        (900, 50, (50, 50, 0)),  # or before.
        (130, 500, (0, 100, 0)),
        (-5, -5, (0, 0, 100)),
    ],
)
def test_the_parts_of_a_call_are_within_it(work_begin, work, expected):
    record = {
        "begin_ns": "100",
        "end_ns": "200",
        "work_begin_ns": str(work_begin),
        "work_ns": str(work),
    }

    assert tsw.tracing._parts_of(record) == expected


def test_an_exception_of_a_processor_ends_neither_training_nor_tracing(
    traced, caplog
):
    class Broken(sdk.SpanProcessor):
        def on_start(self, span, parent_context=None):
            if span.name == "tfswitch.pull":
                raise ZeroDivisionError("broken")

    traced.provider.add_span_processor(Broken())
    table = make_table("user", 2)

    with tracing(traced):
        table.lookup_or_create(IDS)
        table.lookup(IDS)
        table.push(IDS, np.ones((3, 2), np.float32))

    assert [s.name for s in traced.spans()] == ["tfswitch.push"]
    (line,) = [r for r in caplog.records if "spans are lost" in r.message]
    assert "ZeroDivisionError: broken" in line.message


def test_a_program_that_ends_without_stop_exports_all_spans():
    program = """
import numpy as np
from opentelemetry import trace
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace import export
import tfswitch as tsw

provider = sdk.TracerProvider()
processor = export.BatchSpanProcessor(
    export.ConsoleSpanExporter(formatter=lambda span: span.name)
)
provider.add_span_processor(processor)
table = tsw.EmbeddingTable("user", 2)
tsw.tracing.start(provider)
table.lookup([1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
    )

    assert done.stdout == "tfswitch.pull", done.stderr


@pytest.mark.parametrize("has_tables", [False, True])
def test_a_fork_in_a_span_ends_tracing_in_the_child(has_tables):
    program = """
import os, sys
from opentelemetry.sdk import trace as sdk
import tfswitch as tsw
from tfswitch import _native

if eval(sys.argv[1]):
    tsw.EmbeddingTable("user", 2).lookup([1])
tsw.tracing.start(sdk.TracerProvider())
with tsw.tracing.span("parent"):
    child = os.fork()
if not child:
    if not eval(sys.argv[1]):
        cluster = _native.Cluster("local://", 30.0)
        cluster.open_table(sys.argv[2]).pull([1], False)
        print(_native.call("TakeTraces", "{}"), flush=True)
    os._exit(0)
print("child", os.waitpid(child, 0)[1])
"""
    spec = TableSpec(optimizer="sgd", seed=1)
    config = json.dumps(spec.to_table_config("user", 2))
    done = subprocess.run(
        [sys.executable, "-c", program, str(has_tables), config],
        env=environment(),
        capture_output=True,
        text=True,
    )

    assert done.stdout.endswith("child 0\n"), done.stderr
    assert ('"spans":[]' in done.stdout) == (not has_tables)


def test_spans_are_made_while_the_program_runs(traced):
    table = make_table("user", 2)
    tsw.tracing.start(traced.provider)

    table.lookup(IDS)

    wait_until(lambda: named(traced.spans(), "tfswitch.pull"))


def test_a_failed_call_has_its_error(traced):
    with running_servers(2) as address, tsw.Cluster(address) as cluster:
        with tracing(traced), pytest.raises(KeyError):
            cluster.drop("nothing")

    failed = [
        s for s in traced.spans() if s.status.status_code != StatusCode.UNSET
    ]
    assert {s.name for s in failed} == {
        "tfswitch.v1.ParameterServer/ListTables"
    }
    for each in failed:
        assert each.status.status_code == StatusCode.ERROR
        assert "'nothing'" in each.status.description
        assert each.attributes["rpc.grpc.status_code"] == 5  # NOT_FOUND
        # The server tells its times also when it refuses.
        assert len(children(traced.spans(), each)) == 1


def test_reading_a_table_is_one_span_per_server(traced):
    with running_servers(2) as address, tsw.Cluster(address) as cluster:
        table = make_table("user", 2, cluster=cluster)
        table.lookup_or_create(np.arange(10))
        with tracing(traced):
            table.export_rows()

    exports = named(traced.spans(), "tfswitch.v1.ParameterServer/Export")
    assert [s.attributes["tfswitch.shard"] for s in exports] == [0, 1]
    assert all(s.attributes["tfswitch.response_bytes"] > 0 for s in exports)


def test_without_tracing_nothing_is_kept(traced):
    table = make_table("user", 2)
    with tracing(traced):
        pass

    with tsw.tracing.span("step"):
        table.lookup(IDS)

    assert call(_native, "TakeTraces") == {"spans": [], "num_dropped": "0"}
    assert traced.spans() == []


def test_spans_that_nobody_takes_are_dropped_and_counted():
    spec = TableSpec(optimizer="sgd", seed=1)
    config = spec.to_table_config("user", 2)
    with running_servers(0) as address, tsw.Cluster(address) as cluster:
        # An op would take a hundred times as long.
        table = cluster._native.open_table(json.dumps(config))
        call(_native, "SetTracing", is_on=True)
        try:
            for _ in range(16_384 + 5):
                table.pull(IDS, False)
        finally:
            call(_native, "SetTracing", is_on=False)

    taken = call(_native, "TakeTraces")
    assert len(taken["spans"]) == 16_384
    assert taken["num_dropped"] == "5"
