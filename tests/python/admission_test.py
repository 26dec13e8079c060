"""When ids get rows, and what they read as until then, on servers mostly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfswitch as tsw
from tests.conftest import running_cluster

UNKNOWN, CANDIDATE, ROW = 0, 1, 2


@pytest.fixture
def cluster(make_cluster):
    """A cluster of servers, so that counts travel in messages."""
    return make_cluster(2)


def make_table(admission, **kwargs):
    kwargs.setdefault("initializer", tsw.initializers.Constant(1.0))
    kwargs.setdefault("optimizer", tsw.optimizers.SGD(0.5))
    return tsw.EmbeddingTable(
        kwargs.pop("name", "user"),
        kwargs.pop("dim", 2),
        admission=admission,
        **kwargs,
    )


def push(table, ids, gradient=1.0, **kwargs):
    ids = np.asarray(ids, np.int64)
    gradients = np.full((*ids.shape, table.dim), gradient, np.float32)
    return int(table.push(ids, gradients, **kwargs))


def states(table, ids):
    return table.usage(ids)["state"].tolist()


def test_an_id_gets_its_row_with_the_push_of_its_min_count_th_occurrence(
    cluster,
):
    table = make_table(tsw.admission.MinCount(3))

    assert push(table, [7, 8]) == 0
    assert push(table, [7]) == 0
    assert states(table, [7, 8, 9]) == [CANDIDATE, CANDIDATE, UNKNOWN]
    assert table.stats()["num_candidates"] == 2

    assert push(table, [7]) == 1
    # The row is new, and has taken the step of the push that admitted it.
    np.testing.assert_array_equal(table.lookup([7, 8]), [[0.5, 0.5], [0, 0]])
    assert states(table, [7, 8]) == [ROW, CANDIDATE]
    assert table.size() == 1
    assert table.stats()["num_candidates"] == 1


def test_training_lookups_create_nothing_and_count_nothing(cluster):
    table = make_table(tsw.admission.MinCount(1))

    np.testing.assert_array_equal(table.lookup_or_create([3]), [[0.0, 0.0]])

    assert table.size() == 0
    assert states(table, [3]) == [UNKNOWN]
    assert push(table, [3]) == 1


@given(
    batches=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=12), max_size=8
    ),
    min_count=st.integers(1, 5),
)
def test_exact_counts_for_any_split_into_batches(batches, min_count):
    with running_cluster(0):
        table = make_table(tsw.admission.MinCount(min_count))
        seen = dict.fromkeys(range(6), 0)
        admitted = set()
        for batch in batches:
            for i in batch:
                seen[i] += 1
            admitted |= {i for i in set(batch) if seen[i] >= min_count}
            push(table, batch)
            ids, _ = table.export_rows()
            assert set(ids.tolist()) == admitted


def test_ids_without_a_row_read_as_configured(cluster):
    expected = [0.25, 0.25]
    table = make_table(tsw.admission.MinCount(2, not_admitted=0.25))
    push(table, [1])

    for read in (table.lookup, table.lookup_or_create):
        np.testing.assert_array_equal(read([1, 2, 1]), [expected] * 3)
    push(table, [1])
    np.testing.assert_array_equal(table.lookup([1]), [[0.5, 0.5]])


def test_the_shared_row_is_one_of_the_initializer_and_the_same_for_all_ids(
    cluster,
):
    table = make_table(
        tsw.admission.MinCount(2, not_admitted="shared"),
        initializer=tsw.initializers.RandomUniform(0.5, 1.0),
        dim=4,
        seed=3,
    )

    rows = table.lookup([1, 2, -9]).numpy()

    assert (rows >= 0.5).all() and (rows <= 1.0).all()
    assert (rows == rows[0]).all()
    assert len(set(rows[0].tolist())) == 4
    assert table.size() == 0


def two_stage(**kwargs):
    return make_table(
        tsw.admission.ShowClick(1.0, not_admitted="weight"),
        optimizer=tsw.optimizers.Segments(
            [
                (1, tsw.optimizers.Adam(0.25)),
                (None, tsw.optimizers.Adagrad(0.5)),
            ]
        ),
        dim=3,
        **kwargs,
    )


def test_two_stage_rows_learn_a_weight_first(cluster):
    table = two_stage()
    # The same optimizers, with a row from the start.
    whole = tsw.EmbeddingTable(
        "whole",
        3,
        initializer=tsw.initializers.Constant(1.0),
        optimizer=table.optimizer,
    )
    gradients = [[1.0, 2.0, 3.0], [-0.5, 1.0, 1.0], [2.0, -1.0, 4.0]]
    for i, gradient in enumerate(gradients):
        admitted = int(table.push([7], [gradient], shows=[5]))
        assert admitted == (1 if i > 0 else 0)
        if i < 1:
            gradient = [gradient[0], 0.0, 0.0]
        whole.push([7], [gradient])
        expected = whole.lookup([7]).numpy()
        if i < 1:
            expected[0, 1:] = 0.0
        np.testing.assert_array_equal(table.lookup([7]), expected)
        np.testing.assert_array_equal(table.lookup_or_create([7]), expected)

    assert table.size() == 1
    assert table.usage([7])["show"].tolist() == [15.0]
    np.testing.assert_array_equal(table.lookup([8]), [[0.0, 0.0, 0.0]])


def test_the_first_embedding_gradient_of_a_two_stage_row_counts(cluster):
    # Paddle initialises the embedding with this push and drops its gradient.
    table = two_stage()

    table.push([7], [[0.0, 2.0, 0.0]], shows=[10])

    row = table.lookup([7]).numpy()[0]
    step = 0.5 * 2.0 / np.sqrt(0.1 + 4.0)
    np.testing.assert_allclose(row, [1.0, 1.0 - step, 1.0], rtol=1e-6)


def test_weights_of_two_stage_rows_are_in_checkpoints(cluster, tmp_path):
    table = two_stage(name="t")
    table.push([1, 2], np.ones((2, 3), np.float32), shows=[5, 10])
    rows = table.lookup([1, 2]).numpy()
    cluster.save(str(tmp_path), ["t"])
    table.push([1, 2], np.ones((2, 3), np.float32), shows=[5, 5])
    later = table.lookup([1, 2]).numpy()

    cluster.restore(str(tmp_path), ["t"])
    np.testing.assert_array_equal(table.lookup([1, 2]), rows)
    table.push([1, 2], np.ones((2, 3), np.float32), shows=[5, 5])
    np.testing.assert_array_equal(table.lookup([1, 2]), later)


def test_a_weight_needs_an_optimizer_of_its_own(cluster):
    with pytest.raises(ValueError, match=r"Segments\(\[\(1, a\), \(None, b\)"):
        make_table(tsw.admission.MinCount(2, not_admitted="weight"))
    assert cluster.tables() == []


def test_assigned_ids_need_no_admission(cluster):
    table = make_table(tsw.admission.MinCount(5))
    push(table, [1, 2])

    table.assign([1], [[3.0, 4.0]])

    assert states(table, [1, 2]) == [ROW, CANDIDATE]
    assert table.stats()["num_candidates"] == 1
    assert push(table, [1, 2]) == 1


def test_removed_ids_have_to_be_admitted_again(cluster):
    table = make_table(tsw.admission.MinCount(2))
    push(table, [1, 1, 2])

    assert table.remove([1, 2]) == 1

    assert states(table, [1, 2]) == [UNKNOWN, UNKNOWN]
    assert push(table, [1, 2]) == 0


def test_a_show_click_score_admits(cluster):
    table = make_table(tsw.admission.ShowClick(2.0))
    assert table.statistics == tsw.statistics.ShowClick()

    push(table, [1, 2], shows=[10, 10], clicks=[0, 1])  # 1.0 and 1.9
    assert states(table, [1, 2]) == [CANDIDATE, CANDIDATE]
    push(table, [1, 2], shows=[1, 1])  # 1.1 and 2.0
    assert states(table, [1, 2]) == [CANDIDATE, ROW]

    usage = table.usage([2])
    assert usage["show"].tolist() == [11.0]
    assert usage["click"].tolist() == [1.0]
    np.testing.assert_allclose(usage["score"], [2.0], rtol=1e-6)


def test_the_score_of_waiting_ids_decays_by_day(cluster):
    table = make_table(
        tsw.admission.ShowClick(1.0),
        statistics=tsw.statistics.ShowClick(show_click_decay_rate=0.5),
    )
    cluster.day = 10
    push(table, [1], shows=[8])  # 0.8
    cluster.day = 12
    push(table, [1], shows=[7])  # 0.2 + 0.7
    assert states(table, [1]) == [CANDIDATE]
    np.testing.assert_allclose(table.usage([1])["score"], [0.9], rtol=1e-6)
    push(table, [1], shows=[1])
    assert states(table, [1]) == [ROW]


def test_probability_admits_its_share_of_occurrences(cluster):
    table = make_table(tsw.admission.Probability(0.25))
    ids = np.arange(20_000)

    push(table, ids)
    first = table.size()
    push(table, np.repeat(ids, 2))

    # Five standard deviations of a binomial.
    assert abs(first - 5000) < 5 * (20_000 * 0.25 * 0.75) ** 0.5
    expected = 20_000 * (1 - 0.75**3)
    assert abs(table.size() - expected) < 5 * (expected * 0.75**3) ** 0.5


def test_probability_is_drawn_alike_with_the_same_seed():
    sizes = []
    for _ in range(2):
        with running_cluster(0):
            table = make_table(tsw.admission.Probability(0.5), seed=4)
            push(table, np.arange(100))
            sizes.append(sorted(table.export_rows()[0].tolist()))
    assert sizes[0] == sizes[1]
    assert 20 < len(sizes[0]) < 80


def test_admission_state_is_part_of_a_checkpoint(
    make_cluster, tmp_path, num_servers=3
):
    path = str(tmp_path / "checkpoint")
    policies = {
        "exact": tsw.admission.MinCount(3),
        "bloom": tsw.admission.BloomMinCount(3, capacity=1000),
        "score": tsw.admission.ShowClick(0.25),
    }
    saving = make_cluster(num_servers)
    for name, admission in policies.items():
        table = make_table(admission, name=name)
        push(table, np.arange(100))
        push(table, np.arange(200))
    saving.save(path)
    for servers in (0, 1, 2):
        loading = make_cluster(servers)
        for name, admission in policies.items():
            make_table(admission, name=name, cluster=loading)
        loading.restore(path)
        for name, admission in policies.items():
            table = make_table(admission, name=name, cluster=loading)
            assert table.size() == 0
            push(table, np.arange(200))
            ids, _ = table.export_rows()
            assert sorted(ids.tolist()) == list(range(100)), (name, servers)


def test_rows_stay_admitted_when_a_higher_threshold_restores_them(
    cluster, tmp_path
):
    table = make_table(tsw.admission.MinCount(2), name="t")
    push(table, [1, 1, 2])
    cluster.save(str(tmp_path), ["t"])
    cluster.drop("t")
    table = make_table(tsw.admission.MinCount(3), name="t")

    cluster.restore(str(tmp_path), ["t"])

    # The count goes on, under the new threshold.
    assert states(table, [1, 2]) == [ROW, CANDIDATE]
    assert push(table, [1, 2]) == 1
    assert push(table, [1, 2]) == 2


def test_counts_begin_again_under_another_kind_of_policy(cluster, tmp_path):
    table = make_table(tsw.admission.MinCount(2), name="t")
    push(table, [1, 1, 2])
    cluster.save(str(tmp_path), ["t"])
    cluster.drop("t")
    table = make_table(tsw.admission.BloomMinCount(2, capacity=100), name="t")

    cluster.restore(str(tmp_path), ["t"])

    assert states(table, [1, 2]) == [ROW, UNKNOWN]
    assert push(table, [1, 2]) == 1


@pytest.mark.parametrize(
    ("make", "knob"),
    [
        (lambda: tsw.admission.MinCount(0), "min_count"),
        (lambda: tsw.admission.MinCount(2**24 + 1), "min_count"),
        (lambda: tsw.admission.BloomMinCount(70_000), "min_count"),
        (lambda: tsw.admission.BloomMinCount(2, capacity=0), "capacity"),
        (
            lambda: tsw.admission.BloomMinCount(2, false_positive_rate=1.0),
            "false_positive_rate",
        ),
        (
            lambda: tsw.admission.BloomMinCount(2, not_admitted="weight"),
            "not_admitted",
        ),
        (lambda: tsw.admission.Probability(1.5), "probability"),
        (lambda: tsw.admission.ShowClick(float("nan")), "embedx_threshold"),
        (
            lambda: tsw.admission.MinCount(2, not_admitted="ones"),
            "not_admitted",
        ),
        (lambda: make_table("min_count"), "admission"),
        (
            lambda: tsw.admission.MinCount(2, not_admitted=float("inf")),
            "not_admitted",
        ),
    ],
)
def test_impossible_knobs_are_named(make, knob):
    with pytest.raises(ValueError, match=f"`{knob}` must be"):
        make()
