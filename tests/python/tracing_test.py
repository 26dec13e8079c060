"""Traces: the spans of pulls, pushes and calls to servers."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode

import tfswitch as tsw
from tests.python.worker_threads import wait_until
from tests.support import make_table, running_servers
from tfswitch import _native
from tfswitch._connection._control_calls import call

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
    assert len(traced.spans()) == len(spans)


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
    table = make_table("user", 2)
    call(_native, "SetTracing", is_on=True)
    try:
        for _ in range(16_384 + 5):
            table.lookup(IDS)
    finally:
        call(_native, "SetTracing", is_on=False)

    taken = call(_native, "TakeTraces")
    assert len(taken["spans"]) == 16_384
    assert taken["num_dropped"] == "5"
