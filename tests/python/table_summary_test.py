"""`EmbeddingTable.describe`, which reads a sample of a table."""

import numpy as np
import pytest

import tfswitch as tsw
from tests.support import make_table, running_servers
from tfswitch._table_summary import sample_rows


@pytest.fixture(params=[0, 2], ids=["local", "servers"])
def cluster(request):
    with running_servers(request.param) as address:
        with tsw.connect(address) as cluster:
            yield cluster


def lines_of(text):
    return {line[:12].strip(): line[12:] for line in text.splitlines()[1:]}


def test_describe_prints_settings_norms_and_use(cluster, capsys):
    table = make_table(
        "user",
        optimizer=tsw.optimizers.Adagrad(0.5, epsilon=0.1),
        admission=tsw.admission.MinCount(2),
        eviction=tsw.eviction.Ttl(30),
        statistics=tsw.statistics.ShowClick(),
    )
    cluster.day = 20_000
    table.assign(range(1, 5), np.array([[3.0, 4.0]] * 4) * [[1], [1], [2], [9]])
    table.push([1, 9], np.zeros((2, 2)), shows=[7, 1], clicks=[2, 0])
    table.remove([4])

    assert table.describe() is None

    text = capsys.readouterr().out
    assert text.splitlines()[0] == repr(table)
    lines = lines_of(text)
    assert lines["rows"] == "3 (4 made, 1 removed)"
    assert lines["row"].startswith("2 x float32, 7 floats of state")
    assert lines["optimizer"] == f"{table.optimizer!r}, sparse updates"
    assert lines["admission"] == f"{table.admission!r}, 1 ids wait"
    assert lines["eviction"] == repr(table.eviction)
    assert lines["statistics"] == repr(table.statistics)
    assert lines["sample"] == "3 rows"
    assert lines["norm"] == "min 5, median 5, p99 9.9, max 10"
    assert lines["click"] == "min 0, median 0, p99 1.96, max 2"
    assert lines["last use"] == "day 20000.0 (2024-10-04)"


def test_describe_of_a_table_without_rows_or_statistics(cluster, capsys):
    table = make_table("user")

    table.describe()

    lines = lines_of(capsys.readouterr().out)
    assert lines["sample"] == "0 rows"
    assert lines["statistics"] == "None"
    assert not {"norm", "count", "last use"} & lines.keys()


def test_only_a_sample_is_read(cluster, capsys):
    table = make_table("user", 64)
    num_rows = 40_000
    for ids in np.split(np.arange(num_rows), 10):
        table.assign(ids, np.zeros((len(ids), 64)))
    native, read = table._native, []

    class Counted:
        def __getattr__(self, name):
            return getattr(native, name)

        def visit_rows(self, with_slots, visit):
            def counted(ids, *rows):
                read.append(len(ids))
                visit(ids, *rows)

            native.visit_rows(with_slots, counted)

    table._native = Counted()
    table.describe(sample=1000)

    assert lines_of(capsys.readouterr().out)["sample"] == "1,000 rows"
    assert sum(read) < num_rows / 5
    # The ids of a sample are spread over all ids.
    ids, _ = sample_rows(table, 1000)
    assert abs(ids.mean() / num_rows - 0.5) < 0.1
    # The stream that was ended early leaves the connection as it was.
    assert table.size() == num_rows


@pytest.mark.parametrize("sample", [0, -1, 1.5, None])
def test_a_sample_of_no_rows_is_refused(sample):
    with pytest.raises(ValueError, match="sample"):
        make_table("t").describe(sample)
