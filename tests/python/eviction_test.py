"""Which rows go when a table is shrunk, on servers mostly."""

import numpy as np
import pytest

import tfswitch as tsw
from tests.python.worker_threads import wait_until
from tests.support import make_table


@pytest.fixture
def cluster(make_cluster):
    """A cluster of servers, so that statistics travel in messages."""
    return make_cluster(2)


def push(table, ids, gradient=0.0, **kwargs):
    ids = np.asarray(ids, np.int64)
    gradients = np.full((*ids.shape, table.dim), gradient, np.float32)
    return int(table.push(ids, gradients, **kwargs))


def ids_of(table):
    return sorted(table.export_rows()[0].tolist())


def test_rows_that_are_not_seen_for_longer_go(cluster):
    table = make_table(eviction=tsw.eviction.Ttl(3))
    for day in range(6):
        cluster.day = day
        push(table, [day, 100])

    report = table.shrink()

    assert ids_of(table) == [2, 3, 4, 5, 100]
    assert report["evicted_rows"] == 2
    assert report["by"] == {
        "ttl": 2,
        "show_click_score": 0,
        "l2_norm": 0,
        "max_rows": 0,
    }
    assert report["remaining_rows"] == 5
    assert report["evicted_bytes"] == 2 * table.stats()["row_stride_bytes"]


def test_lookups_do_not_keep_rows(cluster):
    table = make_table(eviction=tsw.eviction.Ttl(3))
    cluster.day = 0
    push(table, [1])
    cluster.day = 10
    table.lookup_or_create([1])
    table.lookup([1])

    assert table.shrink()["evicted_rows"] == 1


def test_a_dry_run_of_another_day_does_not_change_the_day(cluster):
    table = make_table(eviction=tsw.eviction.Ttl(3))
    cluster.day = 1
    push(table, [1])
    cluster.day = 100
    assert table.shrink(dry_run=True)["evicted_rows"] == 1
    cluster.day = None

    # Nobody says a day: it is still the first.
    assert table.shrink(dry_run=True)["evicted_rows"] == 0


def test_a_dry_run_counts_and_touches_nothing(cluster):
    table = make_table(
        admission=tsw.admission.MinCount(2),
        statistics=tsw.statistics.Usage(),
    )
    policy = tsw.eviction.AnyOf([tsw.eviction.Ttl(3), tsw.eviction.MaxRows(15)])
    cluster.day = 0
    push(table, np.repeat(np.arange(10), 2))
    push(table, np.arange(50, 55))
    cluster.day = 5
    push(table, np.repeat(np.arange(20, 40), 2))
    before = table.usage(np.arange(60))

    dry = table.shrink(dry_run=True, policy=policy)

    assert ids_of(table) == [*range(10), *range(20, 40)]
    after = table.usage(np.arange(60))
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
    assert dry["by"]["ttl"] == 10
    # Each server keeps its share, rounded up.
    assert 2 <= dry["by"]["max_rows"] <= 5 + 4
    assert dry["evicted_candidates"] == 5
    assert str(dry).startswith(f"would evict {dry['evicted_rows']} of 30 rows")
    report = table.shrink(policy=policy)
    assert report == dry
    assert str(report) == str(dry).replace("would evict", "evicted")
    assert table.size() == dry["remaining_rows"]
    assert table.stats()["num_candidates"] == 0


@pytest.mark.parametrize(
    ("show", "click", "last_day"),
    # When Paddle's defaults delete a row: the feel of the reference, by hand.
    [(1, 1, 11), (8, 0, 0), (100, 10, 156)],
)
def test_a_row_goes_on_the_day_that_its_score_falls_below(
    embedded, show, click, last_day
):
    table = make_table(eviction=tsw.eviction.ShowClickScore(0.8))
    embedded.day = 0
    push(table, [1], shows=[show], clicks=[click])

    embedded.day = last_day
    assert table.shrink()["evicted_rows"] == 0
    embedded.day = last_day + 1
    report = table.shrink()
    assert report["by"]["show_click_score"] == 1
    assert table.size() == 0


def test_rows_of_small_norm_go(cluster):
    table = make_table(eviction=tsw.eviction.L2Norm(0.5))
    table.assign(
        [1, 2, 3, 4], [[0.3, 0.3], [0.3, 0.41], [0.0, -0.6], [0.0, 0.0]]
    )

    assert table.shrink()["by"]["l2_norm"] == 2
    assert ids_of(table) == [2, 3]


@pytest.mark.parametrize("order", ["lru", "lfu"])
def test_the_most_recent_or_frequent_rows_stay(embedded, order):
    table = make_table(statistics=tsw.statistics.Usage())
    policy = tsw.eviction.MaxRows(30, order=order)
    for i in range(100):
        embedded.day = i
        # The later, the more seldom.
        push(table, np.repeat([i], 100 - i))

    assert table.shrink(policy=policy)["by"]["max_rows"] == 70

    expected = range(70, 100) if order == "lru" else range(30)
    assert ids_of(table) == list(expected)
    assert table.shrink(policy=policy)["evicted_rows"] == 0


@pytest.mark.parametrize(("num_servers", "spare"), [(0, 0), (3, 3)])
def test_max_rows_is_shared_among_servers(make_cluster, num_servers, spare):
    """All are equal: as many stay as may, with each server's rounding."""
    cluster = make_cluster(num_servers)
    table = make_table(eviction=tsw.eviction.MaxRows(3000))
    cluster.day = 1
    push(table, np.arange(30_000))

    report = table.shrink()

    assert 3000 <= table.size() <= 3000 + spare
    assert report["remaining_rows"] == table.size()


def test_each_row_counts_for_the_first_rule_that_applies(cluster):
    table = make_table(
        eviction=tsw.eviction.AnyOf(
            [
                tsw.eviction.L2Norm(1.0),
                tsw.eviction.Ttl(3),
                tsw.eviction.ShowClickScore(0.5),
            ]
        )
    )
    cluster.day = 0
    push(table, [1, 2], shows=[100, 0])
    cluster.day = 10
    push(table, [3, 4], shows=[0, 100])
    push(table, [5], gradient=5.0, shows=[100])

    assert table.shrink()["by"] == {
        "ttl": 2,
        "show_click_score": 1,
        "l2_norm": 1,
        "max_rows": 0,
    }
    assert ids_of(table) == [5]


def test_a_policy_may_come_with_the_call(cluster):
    table = make_table(statistics=tsw.statistics.Usage())
    cluster.day = 0
    push(table, [1])
    cluster.day = 5

    with pytest.raises(RuntimeError, match="has no eviction rules"):
        table.shrink()
    with pytest.raises(RuntimeError, match="of kind SHOW_CLICK"):
        table.shrink(policy=tsw.eviction.ShowClickScore())
    assert table.size() == 1
    with pytest.raises(ValueError, match="`dry_run` must be a bool"):
        table.shrink(tsw.eviction.Ttl(4))
    assert table.shrink(policy=tsw.eviction.Ttl(4))["evicted_rows"] == 1


def test_restored_tables_go_on_with_their_day(make_cluster, tmp_path):
    saving = make_cluster(2)
    table = make_table(eviction=tsw.eviction.Ttl(3))
    saving.day = 5
    push(table, np.arange(20))
    saving.save(str(tmp_path))
    for servers in (0, 3):
        loading = make_cluster(servers)
        table = make_table(eviction=tsw.eviction.Ttl(3, every_secs=3600))
        loading.restore(str(tmp_path))
        # Days since 1970 would be far beyond.
        assert table.shrink()["evicted_rows"] == 0
        assert table.size() == 20


def test_dense_tables_have_no_rows_to_evict(cluster):
    dense = tsw.DenseTable("dense", {"kernel": (3, 4)})
    dense.initialize([np.zeros((3, 4), np.float32)])

    with pytest.raises(RuntimeError, match="nothing of it is evicted"):
        dense._table.shrink(policy=tsw.eviction.L2Norm(1.0))

    np.testing.assert_array_equal(dense.pull()[0], np.zeros((3, 4)))


def test_an_evicted_id_starts_anew(cluster):
    table = make_table(
        eviction=tsw.eviction.Ttl(1), optimizer=tsw.optimizers.Adagrad(0.5)
    )
    cluster.day = 0
    push(table, [1, 2], gradient=1.0)
    first = table.lookup([1]).numpy()
    push(table, [1, 2], gradient=1.0)
    cluster.day = 5
    table.shrink()
    push(table, [1], gradient=1.0)

    np.testing.assert_array_equal(table.lookup([1]), first)
    assert table.usage([1])["count"].tolist() == [1]


def test_memory_of_evicted_rows_is_given_back_and_used_again(embedded):
    table = make_table(
        eviction=tsw.eviction.Ttl(1), dim=64, statistics=tsw.statistics.Usage()
    )
    ids = np.arange(300_000)
    embedded.day = 0
    push(table, ids)
    kept = ids[::10]
    embedded.day = 3
    push(table, kept, gradient=-1.0)
    full = table.stats()

    table.shrink()

    after = table.stats()
    resident = after["row_bytes"] + after["reserved_bytes"]
    assert resident < 0.35 * (full["row_bytes"] + full["reserved_bytes"])
    # Rows have moved, and are whole.
    values = table.lookup(kept).numpy()
    np.testing.assert_array_equal(values, np.ones((len(kept), 64)))
    push(table, ids)
    again = table.stats()
    assert again["num_rows"] == 300_000
    assert again["row_bytes"] + again["reserved_bytes"] <= 1.1 * (
        full["row_bytes"] + full["reserved_bytes"]
    )
    np.testing.assert_array_equal(table.lookup(kept), values)


def test_the_server_shrinks_by_itself(cluster):
    table = make_table(eviction=tsw.eviction.Ttl(0.5, every_secs=0.05))
    cluster.day = 0
    push(table, [1])
    cluster.day = 1
    push(table, [2])

    def only_the_second_is_left():
        # Each server uses the last day that it was told.
        push(table, np.full(1, 2))
        push(table, np.arange(100, 200))
        table.remove(np.arange(100, 200))
        return ids_of(table) == [2]

    wait_until(only_the_second_is_left)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tsw.eviction.Ttl(-1), "delete_after_unseen_days` must be"),
        (lambda: tsw.eviction.ShowClickScore(-0.5), "delete_threshold` must"),
        (lambda: tsw.eviction.L2Norm(float("inf")), "min_l2_norm` must be"),
        (lambda: tsw.eviction.MaxRows(1.5), "max_rows` must be"),
        (lambda: tsw.eviction.MaxRows(1, order="fifo"), "order` must be"),
        (lambda: tsw.eviction.Ttl(1, every_secs=-1), "every_secs` must be"),
        (lambda: tsw.eviction.AnyOf([]), "policies` must be"),
        (
            lambda: tsw.eviction.AnyOf([tsw.eviction.Ttl(1)] * 2),
            "policies` must be",
        ),
        (
            lambda: tsw.eviction.AnyOf([tsw.eviction.Ttl(1, every_secs=5)]),
            "every_secs` belongs to AnyOf",
        ),
    ],
)
def test_impossible_knobs_are_named(make, message):
    with pytest.raises(ValueError, match=f"`{message}"):
        make()
