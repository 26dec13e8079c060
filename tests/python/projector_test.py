"""`tfswitch.io.write_projector`: files for TensorBoard's projector."""

import json
from urllib.parse import quote

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.support import make_table, running_servers


@pytest.fixture(params=[0, 2], ids=["local", "servers"])
def cluster(request):
    with running_servers(request.param) as address:
        with tsw.connect(address) as cluster:
            yield cluster


@pytest.fixture
def table(cluster):
    """Ids 1 to 6. Id i has the row [i, -i] and was pushed i times."""
    table = make_table(statistics=tsw.statistics.Usage())
    ids = np.arange(1, 7)
    table.push(np.repeat(ids, ids), np.zeros((ids.sum(), 2)))
    table.assign(ids, np.stack([ids, -ids], axis=1).astype(np.float32))
    return table


def read(log_dir, name="t"):
    """Returns the rows and the lines of metadata of a table."""
    folder = log_dir / "projector" / quote(name, safe="")
    rows = np.loadtxt(folder / "tensors.tsv", delimiter="\t", ndmin=2)
    lines = (folder / "metadata.tsv").read_text(encoding="utf-8")
    assert lines.endswith("\n")
    return rows.astype(np.float32), lines.removesuffix("\n").split("\n")


def test_the_rows_that_are_used_most_are_written(table, tmp_path):
    assert tsw.io.write_projector(tmp_path / "new" / "logs", table, top=2) == 2

    rows, labels = read(tmp_path / "new" / "logs")
    np.testing.assert_array_equal(rows, [[6, -6], [5, -5]])
    assert labels == ["6", "5"]


def test_a_table_without_statistics_writes_a_sample(cluster, tmp_path):
    table = make_table()
    table.assign(range(50), np.repeat(np.arange(50.0), 2).reshape(50, 2))

    assert tsw.io.write_projector(tmp_path, table, top=7) == 7

    rows, labels = read(tmp_path)
    assert [str(int(row[0])) for row in rows] == labels
    assert len(set(labels)) == 7


def test_given_ids_are_written_in_their_order_to_the_last_bit(
    cluster, tmp_path
):
    table = make_table()
    value = np.nextafter(np.float32(0.1), np.float32(1))
    table.assign([3, 4], [[value, 1e-30], [1e30, -value]])

    tsw.io.write_projector(tmp_path, table, [4, 8, 3], metadata=["a", 5, None])

    rows, labels = read(tmp_path)
    np.testing.assert_array_equal(rows, table.lookup([4, 8, 3]).numpy())
    assert labels == ["a", "5", "3"]


def test_one_column_of_labels_has_no_header(table, tmp_path):
    names = {6: "tab\there", 5: "two\r\nlines\\", 4: "  "}

    tsw.io.write_projector(tmp_path, table, top=4, metadata=names)

    assert read(tmp_path)[1] == ["tab\\there", "two\\nlines\\\\", "-", "3"]


def test_several_columns_have_a_header(table, tmp_path):
    def labels(ids):
        assert ids.dtype == np.int64
        return [(f"name {i}", i * 0.5) for i in ids]

    tsw.io.write_projector(
        tmp_path, table, top=2, metadata=labels, columns=["title", "price"]
    )
    assert read(tmp_path)[1] == ["title\tprice", "name 6\t3.0", "name 5\t2.5"]

    tsw.io.write_projector(tmp_path, table, top=2, metadata={6: ["x", ""]})
    assert read(tmp_path)[1] == ["label 1\tlabel 2", "x\t-", "5\t-"]


def test_strings_are_labels_of_their_rows(table, tmp_path):
    words = tf.constant(["Apfel", "Öl"])
    table.assign(words, [[1.0, 2.0], [3.0, 4.0]])

    tsw.io.write_projector(tmp_path, table, words)
    rows, labels = read(tmp_path)
    np.testing.assert_array_equal(rows, [[1, 2], [3, 4]])
    assert labels == ["Apfel", "Öl"]

    tsw.io.write_projector(tmp_path, table, ["Öl"], metadata={"Öl": "oil"})
    assert read(tmp_path)[1] == ["oil"]


def test_the_config_keeps_other_entries(table, tmp_path):
    config = tmp_path / "projector_config.pbtxt"
    config.write_text('embeddings {\n  tensor_name: "theirs"\n}')
    other = make_table("other/table", cluster=table.cluster)
    other.assign([1], [[0.0, 0.0]])

    for each in (table, other, table):
        tsw.io.write_projector(tmp_path, each)

    assert config.read_text().count("tensor_name") == 3
    assert config.read_text().startswith('embeddings {\n  tensor_name: "theirs')
    assert (tmp_path / "projector" / "other%2Ftable" / "tensors.tsv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top": 0}, "top"),
        ({"metadata": ["a"]}, "dict or a function"),
        ({"metadata": np.array(["a"])}, "dict or a function"),
        ({"ids": [1, 2], "metadata": ["a"]}, "each of 2 ids.*1 labels"),
        ({"ids": [1], "metadata": [("a", "b")], "columns": ["c"]}, "1 values"),
        ({"ids": [1, 2], "metadata": [("a", "b"), "c"]}, "id 2.*2 values"),
        ({"ids": []}, "no rows to write"),
        ({"ids": [1.5]}, "integers"),
    ],
)
def test_wrong_arguments_write_nothing(arguments, message, tmp_path):
    table = make_table()
    table.assign([1], [[0.0, 0.0]])

    with pytest.raises(ValueError, match=message):
        tsw.io.write_projector(tmp_path, table, **arguments)

    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_files(table, tmp_path):
    # TensorFlow 2.21 does not install TensorBoard.
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.projector import projector_plugin as plugin_lib
    from werkzeug import test as werkzeug_test
    from werkzeug import wrappers

    words = {6: ("sechs", "a\tb"), 5: ("fünf", "")}
    tsw.io.write_projector(tmp_path, table, top=3, metadata=words)
    plugin = plugin_lib.ProjectorPlugin(
        base_plugin.TBContext(
            logdir=str(tmp_path),
            data_provider=NoRuns(),
            assets_zip_provider=None,
        )
    )

    def get(route, **arguments):
        client = werkzeug_test.Client(
            plugin.get_plugin_apps()[route], wrappers.Response
        )
        return client.get(
            "/", query_string={"run": ".", **arguments}
        ).get_data()

    assert json.loads(get("/runs")) == ["."]
    (embedding,) = json.loads(get("/info"))["embeddings"]
    assert embedding["tensorName"] == "t"
    assert embedding["tensorShape"] == [3, 2]
    rows = np.frombuffer(get("/tensor", name="t"), np.float32)
    np.testing.assert_array_equal(rows, [6, -6, 5, -5, 4, -4])
    assert get("/metadata", name="t").decode().split("\n") == [
        "label 1\tlabel 2",
        "sechs\ta\\tb",
        "fünf\t-",
        "4\t-",
        "",
    ]


class NoRuns:
    """A data provider of TensorBoard without runs."""

    def list_runs(self, ctx, experiment_id):
        return []
