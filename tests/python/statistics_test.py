"""Statistics of rows, mostly on servers."""

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw


@pytest.fixture
def cluster(make_cluster):
    """A cluster of servers, so that counts travel in messages."""
    return make_cluster(2)


def make_table(**kwargs):
    kwargs.setdefault("statistics", tsw.statistics.ShowClick())
    kwargs.setdefault("initializer", "zeros")
    kwargs.setdefault("optimizer", tsw.optimizers.Adagrad(0.5))
    return tsw.EmbeddingTable(
        kwargs.pop("name", "ad"), kwargs.pop("dim", 2), **kwargs
    )


def push(table, ids, **kwargs):
    ids = np.asarray(ids, np.int64)
    table.push(ids, np.ones((*ids.shape, table.dim), np.float32), **kwargs)


def test_pushes_count_occurrences_shows_and_clicks(cluster):
    table = make_table()
    cluster.day = 100

    push(table, [1, 2, 1], shows=[2, 3, 4], clicks=[1, 0, 0.5])
    push(table, [1])

    usage = table.usage([[1, 2], [3, 1]])
    assert usage["state"].tolist() == [[2, 2], [0, 2]]
    assert usage["count"].tolist() == [[3, 1], [0, 3]]
    # A push that says nothing of shows has one for each occurrence.
    assert usage["show"].tolist() == [[7, 3], [0, 7]]
    assert usage["click"].tolist() == [[1.5, 0], [0, 1.5]]
    assert usage["last_seen_day"].tolist() == [[100, 100], [0, 100]]
    np.testing.assert_allclose(
        usage["score"], [[0.1 * 5.5 + 1.5, 0.3], [0, 0.1 * 5.5 + 1.5]], 1e-6
    )
    np.testing.assert_allclose(usage["delta_score"], usage["score"], 1e-6)


def test_shows_and_clicks_decay_once_for_each_day_that_passes(cluster):
    table = make_table(
        statistics=tsw.statistics.ShowClick(show_click_decay_rate=0.9)
    )
    shows = clicks = np.float32(0)
    pushes = {3: (5, 2), 4: (1, 1), 7: (2, 0), 7.5: (4, 1), 20: (1, 0)}
    today = 3
    for day, (show, click) in pushes.items():
        cluster.day = day
        decay = np.float32(0.9) ** (int(day) - int(today))
        shows, clicks = shows * decay + show, clicks * decay + click
        today = day
        push(table, [9], shows=[show], clicks=[click])
        usage = table.usage([9])
        np.testing.assert_allclose(usage["show"], [shows], 1e-5)
        np.testing.assert_allclose(usage["click"], [clicks], 1e-5)
        assert usage["last_seen_day"].tolist() == [day]
    # Reading decays what is read, and not the row.
    cluster.day = 22
    np.testing.assert_allclose(table.usage([9])["show"], [shows * 0.81], 1e-5)
    cluster.day = 21
    np.testing.assert_allclose(table.usage([9])["show"], [shows * 0.9], 1e-5)
    # A day of the past neither decays nor ages.
    cluster.day = 4
    push(table, [9], shows=[5])
    np.testing.assert_allclose(table.usage([9])["show"], [shows + 5], 1e-5)
    assert table.usage([9])["last_seen_day"].tolist() == [20]
    # Clicks of all days, undecayed.
    total = 0.5 + sum(0.1 * (s - c) + c for s, c in pushes.values())
    np.testing.assert_allclose(table.usage([9])["delta_score"], [total], 1e-5)


def test_without_a_day_it_is_the_clocks(cluster):
    table = make_table(statistics=tsw.statistics.Usage())
    assert cluster.day is None

    push(table, [1])

    (day,) = table.usage([1])["last_seen_day"]
    assert abs(day - tf.timestamp().numpy() / 86400) < 0.5


def test_counting_does_not_change_how_rows_learn(cluster):
    plain = make_table(name="plain", statistics=None, dim=5)
    counted = make_table(name="counted", dim=5)
    random = np.random.default_rng(1)
    for _ in range(3):
        ids = random.integers(0, 50, 200)
        gradients = random.normal(size=(200, 5)).astype(np.float32)
        plain.push(ids, gradients)
        counted.push(ids, gradients, clicks=np.ones(200))

    ids = np.arange(50)
    np.testing.assert_array_equal(plain.lookup(ids), counted.lookup(ids))
    assert counted.usage(ids)["count"].sum() == 600


def test_training_lookups_and_assignments_make_rows_seen_today(cluster):
    table = make_table(statistics=tsw.statistics.Usage())
    cluster.day = 50
    push(table, [1])
    table.lookup_or_create([2])
    table.assign([3], [[1.0, 1.0]])

    usage = table.usage([1, 2, 3])
    assert usage["last_seen_day"].tolist() == [50, 50, 50]
    assert usage["count"].tolist() == [1, 0, 0]


def test_the_layer_pushes_shows_and_clicks(cluster):
    layer = tsw.keras.DynamicEmbedding(
        2, name="word", statistics=tsw.statistics.ShowClick(), mask_zero=True
    )
    ids = tf.constant([[1, 2], [0, 1]])
    clicks = tf.constant([[1, 0], [7, 1]])

    with tf.GradientTape() as tape:
        outputs = layer(
            ids, training=True, shows=tf.constant([[3.0, 4], [9, 5]]),
            clicks=clicks,
        )  # fmt: skip
        loss = tf.reduce_sum(outputs)
    layer.apply_gradients(tape.gradient(loss, layer.trainable_weights))

    usage = layer.table.usage([0, 1, 2])
    assert usage["state"].tolist() == [0, 2, 2]
    assert usage["show"].tolist() == [0, 8, 4]
    assert usage["click"].tolist() == [0, 2, 0]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_the_layer_takes_shows_of_the_kind_of_its_ids(embedded, kind):
    layer = tsw.keras.DynamicEmbedding(
        2, combiner="sum", statistics=tsw.statistics.ShowClick()
    )
    ids = tf.ragged.constant([[1, 2], [1]])
    shows = tf.ragged.constant([[3.0, 4.0], [5.0]])
    if kind == "sparse":
        ids, shows = ids.to_sparse(), shows.to_sparse()

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids, training=True, shows=shows))
    layer.apply_gradients(tape.gradient(loss, layer.trainable_weights))

    assert layer.table.usage([1, 2])["show"].tolist() == [8, 4]
    with pytest.raises(ValueError, match="`clicks` must be of the kind"):
        layer(ids, training=True, clicks=tf.constant([1.0]))


def test_a_model_takes_clicks_as_an_input_of_fit(embedded):
    import keras

    ids = keras.Input((2,), dtype="int64", name="ids")
    clicks = keras.Input((2,), name="clicks")
    layer = tsw.keras.DynamicEmbedding(4, statistics=tsw.statistics.ShowClick())
    rows = layer(ids, clicks=clicks)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model([ids, clicks], outputs)
    model.compile("sgd", "mse")
    batch = np.array([[1, 2], [3, 1]])

    model.fit(
        [batch, np.array([[1.0, 0.0], [0.0, 1.0]])],
        np.zeros((2, 1)),
        epochs=3,
        verbose=0,
    )

    usage = layer.table.usage([1, 2, 3])
    assert usage["show"].tolist() == [6, 3, 3]
    assert usage["click"].tolist() == [6, 0, 0]


def test_statistics_are_saved_with_the_rows(make_cluster, tmp_path):
    saving = make_cluster(3)
    saving.day = 7
    table = make_table()
    push(table, np.arange(40), shows=np.arange(40.0), clicks=np.ones(40))
    saving.save(str(tmp_path))
    expected = table.usage(np.arange(40))
    for servers in (0, 2):
        loading = make_cluster(servers)
        loading.day = 7
        loading.restore(str(tmp_path))
        usage = make_table(cluster=loading).usage(np.arange(40))
        for name, values in expected.items():
            np.testing.assert_array_equal(usage[name], values)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, tsw.statistics.ShowClick()),
        (tsw.statistics.Usage(), tsw.statistics.ShowClick()),
        (tsw.statistics.ShowClick(), None),
    ],
)
def test_rows_go_on_with_other_statistics(cluster, tmp_path, before, after):
    table = make_table(name="t", statistics=before)
    push(table, [1, 2, 1])
    cluster.save(str(tmp_path), ["t"])
    push(table, [1, 2])
    expected = table.lookup([1, 2])
    cluster.drop("t")
    table = make_table(name="t", statistics=after)

    cluster.restore(str(tmp_path), ["t"])
    push(table, [1, 2])

    # With the accumulators of Adagrad.
    np.testing.assert_array_equal(table.lookup([1, 2]), expected)
    if before is not None and after is not None:
        assert table.usage([1, 2])["count"].tolist() == [3, 2]


def test_the_layer_s_policies_are_in_its_config(embedded):
    layer = tsw.keras.DynamicEmbedding(
        3,
        admission=tsw.admission.ShowClick(4, not_admitted=0.5),
        eviction=tsw.eviction.AnyOf(
            [tsw.eviction.Ttl(3), tsw.eviction.MaxRows(10, order="lfu")],
            every_secs=60,
        ),
        statistics=tsw.statistics.ShowClick(click_coeff=2.0),
    )

    copy = tsw.keras.DynamicEmbedding.from_config(layer.get_config())

    assert copy.table.admission == layer.table.admission
    assert copy.table.eviction == layer.table.eviction
    assert copy.table.statistics == layer.table.statistics
    assert copy.get_config()["eviction"] == layer.get_config()["eviction"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shows": [-1.0, 0]}, "shows of id 1 must be a finite number"),
        ({"clicks": [0, float("nan")]}, "clicks of id 2 must be a finite"),
        ({"shows": [1.0]}, "`shows` must have the shape of the ids"),
        ({"clicks": ["a", "b"]}, "`clicks` must be numbers"),
    ],
)
def test_bad_observations_are_refused_and_change_nothing(
    cluster, kwargs, message
):
    table = make_table()

    with pytest.raises(ValueError, match=message):
        push(table, [1, 2], **kwargs)

    assert table.size() == 0


@pytest.mark.parametrize(
    ("make", "knob"),
    [
        (lambda: tsw.statistics.ShowClick(nonclk_coeff=-1), "nonclk_coeff"),
        (lambda: tsw.statistics.ShowClick(click_coeff="1"), "click_coeff"),
        (
            lambda: tsw.statistics.ShowClick(show_click_decay_rate=0.0),
            "show_click_decay_rate",
        ),
    ],
)
def test_impossible_knobs_are_named(make, knob):
    with pytest.raises(ValueError, match=f"`{knob}` must be"):
        make()


def test_policies_that_need_shows_refuse_statistics_without(embedded):
    with pytest.raises(
        ValueError, match=r"needs tfswitch.statistics.ShowClick"
    ):
        make_table(
            statistics=tsw.statistics.Usage(),
            eviction=tsw.eviction.ShowClickScore(),
        )


@pytest.mark.parametrize("day", [-1, float("nan"), "today", 1e9])
def test_a_day_that_is_none_is_refused(embedded, day):
    with pytest.raises(ValueError, match="`day` must be"):
        embedded.day = day
    assert embedded.day is None


@pytest.mark.parametrize(
    ("kind", "mask_zero"),
    [("dense", False), ("ragged", True), ("ragged", False), ("sparse", True)],
)
def test_shows_of_another_structure_are_refused(embedded, kind, mask_zero):
    layer = tsw.keras.DynamicEmbedding(
        2,
        combiner="sum",
        mask_zero=mask_zero,
        statistics=tsw.statistics.ShowClick(),
    )
    ids = tf.ragged.constant([[1], [2, 3]])
    shows = tf.ragged.constant([[10.0, 20.0], [30.0]])
    if kind == "sparse":
        ids, shows = ids.to_sparse(), shows.to_sparse()
    if kind == "dense":
        ids, shows = tf.constant([[1, 2]]), tf.constant([[1.0, 2.0, 3.0]])

    @tf.function(reduce_retracing=True)
    def train(ids, shows):
        return layer(ids, training=True, shows=shows)

    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match="shows"
    ):
        train(ids, shows)


def test_stats_sum_the_usage_of_all_rows(cluster):
    table = make_table(
        statistics=tsw.statistics.ShowClick(
            nonclk_coeff=0.5, click_coeff=2, show_click_decay_rate=0.5
        )
    )
    assert "usage" not in table.stats()
    assert table.stats(usage=True)["usage"] == {
        "count": 0,
        "show": 0,
        "click": 0,
        "score": 0,
    }
    cluster.day = 10
    ids = np.arange(300)
    push(table, ids, shows=np.full(300, 4.0), clicks=np.full(300, 1.0))
    cluster.day = 11  # All decay once.
    push(table, ids[:100], shows=np.full(100, 1.0))

    stats = table.stats(usage=True)

    assert stats["num_rows"] == 300
    assert stats["usage"] == {
        "count": 400,
        "show": 300 * 2 + 100,
        "click": 150,
        "score": (700 - 150) * 0.5 + 150 * 2,
    }
    # Nothing has gone, and a row that goes is summed no more.
    report = table.shrink(policy=tsw.eviction.ShowClickScore(2))
    assert report["evicted_rows"] == 200  # (2 - 0.5) * 0.5 + 0.5 * 2 = 1.75
    assert report["remaining_usage"] == {"count": 200, "show": 300, "click": 50}
    assert table.stats(usage=True)["usage"]["count"] == 200


def test_stats_have_the_usage_that_is_counted(embedded):
    table = make_table(statistics=tsw.statistics.Usage())
    push(table, [1, 1, 2])
    assert table.stats(usage=True)["usage"] == {"count": 3}

    plain = tsw.EmbeddingTable("plain", 2)
    with pytest.raises(RuntimeError, match="table 'plain' counts nothing"):
        plain.stats(usage=True)
    with pytest.raises(
        ValueError, match=r"'plain' counts nothing.*statistics="
    ):
        plain.usage([1])


def test_without_statistics_usage_has_the_counts_of_waiting_ids_alone(cluster):
    table = make_table(statistics=None, admission=tsw.admission.MinCount(2))
    push(table, [1, 1, 2])

    usage = table.usage([1, 2, 3])

    assert usage["state"].tolist() == [2, 1, 0]
    np.testing.assert_array_equal(usage["count"], [np.nan, 1, 0])
