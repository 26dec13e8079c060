"""Each write counts once, whatever happens to calls and answers."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tfswitch as tsw
from tests.faults.proxy import Fault, FaultyProxy, Plan, random_plan
from tests.faults.training import bsp_rows, count_table, new_seed, start_bsp
from tests.python.worker_threads import in_threads
from tests.support import examples, running_servers

# Long runs take more kills.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@contextlib.contextmanager
def faulty_servers(
    num_servers: int, make_plan: Callable[[int], Plan]
) -> Iterator[tuple[str, list[FaultyProxy]]]:
    """Yields the address of new servers behind proxies, and these."""
    with running_servers(num_servers) as address, contextlib.ExitStack() as all:
        proxies = [
            all.enter_context(FaultyProxy(target, make_plan(shard)))
            for shard, target in enumerate(
                address.removeprefix("grpc://").split(",")
            )
        ]
        yield "grpc://" + ",".join(p.address for p in proxies), proxies


def count_faults(proxies: list[FaultyProxy]) -> dict[Fault, int]:
    counts = dict.fromkeys(Fault, 0)
    for proxy in proxies:
        for (_, fault), count in proxy.faults.items():
            counts[fault] += count
    return counts


def test_asp_writes_count_once_and_reads_are_right(tmp_path: Path) -> None:
    seed = new_seed()
    num_rounds = examples(10)
    with (
        faulty_servers(2, lambda shard: random_plan(seed + shard)) as (
            address,
            proxies,
        ),
        tsw.connect(address, timeout_secs=60.0) as cluster,
    ):
        counts = count_table(cluster)
        ids = np.arange(100)

        def push() -> None:
            for _ in range(num_rounds):
                counts.push(ids, -np.ones((ids.size, 1), np.float32))

        def assign_and_remove() -> None:
            own = np.arange(1000, 1020)
            for number in range(1, num_rounds):
                values = np.full((own.size, 1), number, np.float32)
                counts.assign(own, values)
                np.testing.assert_array_equal(counts.lookup(own), values)
                assert counts.remove(own) == own.size
                np.testing.assert_array_equal(counts.lookup(own), 0 * values)

        def create_and_drop() -> None:
            for number in range(num_rounds // 3):
                table = tsw.EmbeddingTable("other", 1, initializer="ones")
                table.push([1, 2, 3], np.ones((3, 1), np.float32))
                assert table.size() == 3, number
                del table
                cluster.drop("other")
                assert "other" not in cluster.tables()

        def save() -> None:
            for number in range(num_rounds // 3):
                saved = cluster.save(tmp_path / "save", ["count"])
                assert saved["save"] >= number + 1

        in_threads(push, push, assign_and_remove, create_and_drop, save)

        rows = counts.lookup(ids).numpy()
        np.testing.assert_array_equal(rows, np.full_like(rows, 2 * num_rounds))
        cluster.save(tmp_path / "save", ["count"])
        counts.assign(ids, -rows)
        cluster.restore(tmp_path / "save", ["count"])
        np.testing.assert_array_equal(counts.lookup(ids), rows)
        assert counts.size() == ids.size
        assert min(count_faults(proxies).values()) > 0


def pushes_only(plan: Plan) -> Plan:
    return lambda method: plan(method) if method == "PushMany" else None


def test_a_push_that_fails_counts_at_most_once() -> None:
    seed = new_seed()
    num_pushes = examples(25)
    with faulty_servers(2, lambda shard: lambda method: None) as (
        address,
        proxies,
    ):
        with contextlib.ExitStack() as stack:
            for attempt in range(100):
                try:
                    hasty = stack.enter_context(
                        tsw.Cluster(address, timeout_secs=0.15)
                    )
                    counts = count_table(hasty)
                    break
                except (ConnectionError, TimeoutError):
                    # No proxy fails yet, but this machine may be slow.
                    assert attempt < 99
            for shard, proxy in enumerate(proxies):
                proxy.plan = pushes_only(random_plan(seed + shard, share=0.6))
            acknowledged = []
            for number in range(num_pushes):
                try:
                    # Ids of both servers, which no other push has.
                    counts.push(
                        2 * number + np.arange(2),
                        -np.ones((2, 1), np.float32),
                    )
                except (ConnectionError, TimeoutError):
                    acknowledged += [False] * 2
                else:
                    acknowledged += [True] * 2
            for proxy in proxies:
                proxy.plan = lambda method: None
        with tsw.Cluster(address) as cluster:
            rows = count_table(cluster).lookup(range(2 * num_pushes)).numpy()
    assert set(rows[acknowledged, 0]) == {1.0}
    failed = set(rows[~np.array(acknowledged), 0])
    assert failed and failed <= {0.0, 1.0}


def joins_once(plan: Plan) -> Plan:
    """Passes each Join once: a second one would be another process."""

    def plan_but_joins(method: str) -> Fault | None:
        fault = plan(method)
        comes_twice = fault in (Fault.STRAY, Fault.TWICE)
        return None if method == "Join" and comes_twice else fault

    return plan_but_joins


def test_bsp_ends_with_the_bits_of_an_undisturbed_run() -> None:
    seed = new_seed()
    num_steps = examples(8)

    def run(address: str) -> bytes:
        for call in start_bsp(address, num_steps):
            call.result()
        return bsp_rows(address)

    with running_servers(2) as address:
        whole = run(address)
    with faulty_servers(
        2, lambda shard: joins_once(random_plan(seed + shard))
    ) as (address, proxies):
        disturbed = run(address)
        assert min(count_faults(proxies).values()) > 0

    assert disturbed == whole


def test_the_proxy_passes_on_answers_streams_and_errors() -> None:
    with (
        faulty_servers(1, lambda shard: lambda method: None) as (address, _),
        tsw.connect(address),
    ):
        with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        table = tsw.EmbeddingTable("user", 2, initializer="ones")
        table.lookup_or_create(range(5))
        ids, values = table.export_rows()
        assert sorted(ids) == list(range(5))
        np.testing.assert_array_equal(values, np.ones((5, 2)))
        with pytest.raises(ValueError, match="'user' exists"):
            tsw.EmbeddingTable("user", 3)
