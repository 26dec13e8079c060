"""Metrics of servers and of the process tell what was done."""

import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.support import ServerProcess, make_table

PAGE = Path(__file__).parents[2] / "docs/metrics_reference.md"
# In the page, but not of a server with plaintext and without workers.
NOT_HERE = {
    "tfswitch_certificate_expiry_timestamp_seconds",
    "tfswitch_group_contributions_total",
    "tfswitch_group_lost_workers_total",
    "tfswitch_group_rounds_total",
    "tfswitch_group_staleness_steps_total",
    "tfswitch_group_workers",
    "tfswitch_model_data_timestamp_seconds",
    "tfswitch_model_version",
    "tfswitch_worker_steps_total",
}


def _names(series: str) -> str:
    name = series.split("{")[0]
    return re.sub(r"_(bucket|count|sum)$", "", name)


def test_counters_of_a_server_equal_what_was_done(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    flags = (f"--data_dir={folder}", "--push_log", "--checkpoint_root=/")
    with ServerProcess(flags=flags) as server:
        cluster = tsw.connect(f"grpc://{server.address}")
        before = tsw.metrics.read()
        table = make_table(
            "movie",
            statistics=tsw.statistics.Usage(),
        )
        table.lookup_or_create(np.arange(7000) % 10)
        table.lookup(np.arange(12))
        table.push([1, 2, 2], np.ones((3, 2), np.float32))
        with pytest.raises(KeyError):
            cluster.table("none")
        table.shrink(policy=tsw.eviction.MaxRows(4))
        values = tsw.metrics.read(cluster)

        def of(series: str, labels: str = "") -> float:
            return values[f'{series}{{{labels}shard="0",table="movie"}}']

        prefix = "tfswitch_table_"
        assert of(f"{prefix}rows") == 4
        assert of(f"{prefix}created_rows_total") == 10
        assert of(f"{prefix}removed_rows_total") == 6
        rule = 'rule="max_rows",'
        assert of(f"{prefix}evicted_rows_total", rule) == 6
        assert of(f"{prefix}pulls_total") == 2
        assert of(f"{prefix}pulled_keys_total") == 10 + 12
        assert of(f"{prefix}missing_keys_total") == 10 + 2
        assert of(f"{prefix}refused_keys_total") == 0
        assert of(f"{prefix}pushes_total") == 1
        assert of(f"{prefix}pushed_keys_total") == 2
        calls = 'tfswitch_calls_total{{call="{}",code="{}",shard="0"}}'
        assert values[calls.format("PullMany", "OK")] == 2
        assert values[calls.format("ListTables", "NOT_FOUND")] >= 1
        pulls = (
            'tfswitch_call_duration_seconds_count{call="PullMany",shard="0"}'
        )
        assert values[pulls] == 2
        assert values['tfswitch_log_bytes{shard="0"}'] > 0
        assert values['tfswitch_save_timestamp_seconds{shard="0"}'] == 0
        ids = 'tfswitch_worker_ids_total{call="pull"}'
        assert values[ids] - before[ids] == 7012
        keys = 'tfswitch_worker_keys_total{call="push"}'
        assert values[keys] - before[keys] == 2
        # A pull of many keys, so that some are sampled.
        for _ in range(10):
            table.lookup(np.arange(5000))
        ids = tf.data.Dataset.from_tensor_slices([[1], [2]])
        layer = tsw.keras.DynamicEmbedding(table.dim, table=table)
        for batch in tsw.data.prefetch_embeddings(ids, layer):
            layer(batch)
        values = tsw.metrics.read(cluster)
        read_ahead = (
            'tfswitch_worker_prefetches_total{{result="{}",table="movie"}}'
        )
        assert values[read_ahead.format("miss")] == 0
        hits = values[read_ahead.format("hit")]
        assert hits + values[read_ahead.format("late")] == 2
        assert 1 <= of(f"{prefix}hottest_over_mean")

        server = tsw.metrics.serve(0, cluster=cluster)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.port}/metrics"
        ) as answer:
            types = re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.M)
        server.close()
        assert types.count("process_resident_memory_bytes") == 1
        assert len(types) == len(set(types))

        documented = set(
            re.findall(r"`((?:tfswitch|process)_\w+)`", PAGE.read_text())
        )
        assert {_names(name) for name in values} == documented - NOT_HERE


def test_serve_answers_prometheus_for_tables_in_the_process() -> None:
    cluster = tsw.connect("local://metrics_test")
    table = make_table("user")
    table.lookup_or_create([1, 2, 3])
    server = tsw.metrics.serve(0)
    address = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    assert 'tfswitch_table_rows{shard="0",table="user"} 3.0\n' in text
    assert "# TYPE tfswitch_worker_call_duration_seconds histogram\n" in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(OSError, match=f"127.0.0.1:{server.port}.*another"):
        tsw.metrics.serve(server.port)
    with pytest.raises(ValueError, match="port=70000"):
        tsw.metrics.serve(70000)
    server.close()
    del table
    with pytest.raises(OSError):
        urllib.request.urlopen(address)
    cluster.close()
