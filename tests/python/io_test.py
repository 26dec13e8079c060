"""Tables to and from files, on each kind of cluster."""

import contextlib
import gzip
import json
import os
import resource
import struct
import sys
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.support import examples
from tfswitch._connection import _rows
from tfswitch.io import (
    _layout,
    read_numpy,
    read_parquet,
    read_tfrecord,
    write_numpy,
    write_parquet,
    write_tfrecord,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

FORMATS = {
    "numpy": (write_numpy, read_numpy),
    "parquet": (write_parquet, read_parquet),
    "tfrecord": (write_tfrecord, read_tfrecord),
}

each_format = pytest.mark.parametrize(
    ("write", "read"), FORMATS.values(), ids=list(FORMATS)
)

# Rows of one server come as those of several do.
each_kind = pytest.mark.parametrize(
    "cluster", [0, 3], indirect=True, ids=["embedded", "three_servers"]
)


def make_table(name="user", dim=2, **kwargs):
    kwargs.setdefault("optimizer", "adam")
    return tsw.EmbeddingTable(name, dim, **kwargs)


def filled_table(name="user", num_rows=50, **kwargs):
    """A table of rows that have learnt."""
    table = make_table(name, **kwargs)
    draw = np.random.default_rng(1)
    ids = draw.integers(INT64_MIN, INT64_MAX, num_rows)
    table.push(ids, draw.normal(size=(num_rows, table.dim)))
    return table


def rows_of(table):
    """Whole rows by id, as bytes: equal only if every bit is."""
    ids, values, slots = table._export_with_slots()
    return {
        row_id: (value.tobytes(), state.tobytes())
        for row_id, value, state in zip(
            ids.tolist(), values, slots, strict=True
        )
    }


def values_of(table):
    return {row_id: value for row_id, (value, _) in rows_of(table).items()}


def write_examples(path, *records):
    """Records are dicts of lists; those of ints and of floats."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            if isinstance(record, bytes):
                writer.write(record)
                continue
            example = tf.train.Example()
            for name, values in record.items():
                feature = example.features.feature[name]
                if all(isinstance(value, int) for value in values):
                    feature.int64_list.value.extend(values)
                else:
                    feature.float_list.value.extend(values)
            writer.write(example.SerializeToString())


def write_columns(path, **columns):
    pq.write_table(pa.table(columns), path)


# --- Round trips ------------------------------------------------------------


@each_kind
@each_format
def test_with_slots_training_goes_on_as_if_nothing_had_been(
    cluster, tmp_path, write, read
):
    table = filled_table()
    copy = make_table("copy")

    assert write(table, tmp_path / "rows", slots=True) == 50
    assert read(copy, tmp_path / "rows", slots=True) == 50

    assert rows_of(copy) == rows_of(table)
    ids, _ = table.export_rows()
    for each in (table, copy):
        each.iterations = 7
        each.push(ids, np.ones((50, 2)))
    assert rows_of(copy) == rows_of(table)


@each_format
@given(
    rows=st.dictionaries(
        st.integers(INT64_MIN, INT64_MAX),
        hnp.arrays(
            np.float32,
            3,
            elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
        ),
        max_size=8,
    )
)
@settings(max_examples=examples(20))
def test_any_ids_and_finite_values_come_back(
    tmp_path_factory, write, read, rows
):
    path = tmp_path_factory.mktemp("any") / "rows"
    with running_cluster(0):
        table = make_table(dim=3)
        table.assign(
            list(rows), np.reshape(list(rows.values()), (len(rows), 3))
        )
        copy = make_table("copy", dim=3)

        assert write(table, path) == read(copy, path) == len(rows)

        assert values_of(copy) == {k: v.tobytes() for k, v in rows.items()}


@each_format
def test_an_empty_table_makes_a_file_without_rows(
    embedded, tmp_path, write, read
):
    table = make_table()

    assert write(table, tmp_path / "rows", slots=True) == 0
    assert read(table, tmp_path / "rows", slots=True) == 0

    assert table.size() == 0


@each_format
def test_rows_of_optimizers_without_state_have_no_slots(
    embedded, tmp_path, write, read
):
    table = filled_table(optimizer="sgd")
    copy = make_table("copy", optimizer="sgd")

    write(table, tmp_path / "rows", slots=True)
    assert read(copy, tmp_path / "rows", slots=True) == 50

    assert rows_of(copy) == rows_of(table)


@each_format
def test_statistics_come_along_with_slots(embedded, tmp_path, write, read):
    statistics = tsw.statistics.ShowClick()
    table = make_table(statistics=statistics)
    table.push([3, 4], np.zeros((2, 2)), shows=[5, 1], clicks=[2, 0])
    copy = make_table("copy", statistics=statistics)

    write(table, tmp_path / "rows", slots=True)
    read(copy, tmp_path / "rows", slots=True)

    assert copy.usage([3, 4])["click"].tolist() == [2.0, 0.0]
    assert rows_of(copy) == rows_of(table)


# --- What reading does to a table -------------------------------------------


@each_format
def test_reading_leaves_other_rows_and_the_state_of_present_ones(
    embedded, tmp_path, write, read
):
    table = make_table(optimizer=tsw.optimizers.Adagrad(0.5))
    table.assign([1], [[5.0, 6.0]])
    write(table, tmp_path / "rows")
    table.push([1, 2], np.ones((2, 2)))
    before = rows_of(table)

    read(table, tmp_path / "rows")

    after = rows_of(table)
    assert after[2] == before[2]
    assert after[1] == (np.float32([5.0, 6.0]).tobytes(), before[1][1])


@each_kind
def test_of_repeated_ids_the_last_row_stays(cluster, tmp_path, monkeypatch):
    # Within a call, and in another one.
    monkeypatch.setattr(_rows, "_CALL_BYTES", 64)
    ids = [7, 7, 7, 7, 7, 7, 8, 7]
    values = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    np.savez(tmp_path / "a.npz", ids=ids, values=values)
    write_columns(
        tmp_path / "b", id=pa.array(ids), embedding=pa.array(values.tolist())
    )
    write_examples(
        tmp_path / "c",
        *(
            {"id": [row_id], "embedding": value}
            for row_id, value in zip(ids, values.tolist(), strict=True)
        ),
    )

    for (_, read), name in zip(
        FORMATS.values(), ("a.npz", "b", "c"), strict=True
    ):
        table = make_table(name)
        assert read(table, tmp_path / name) == 8
        assert table.size() == 2
        np.testing.assert_array_equal(
            table.lookup([7, 8]), [[14.0, 15.0], [12.0, 13.0]]
        )


# --- What files look like ---------------------------------------------------


def test_npz_files_have_the_arrays_that_numpy_users_expect(embedded, tmp_path):
    table = make_table(optimizer="adagrad")
    table.assign([9, -4], [[1.0, 2.0], [3.0, 4.0]])

    write_numpy(table, tmp_path / "rows.npz", slots=True)

    with np.load(tmp_path / "rows.npz") as arrays:
        values = dict(
            zip(arrays["ids"].tolist(), arrays["values"].tolist(), strict=True)
        )
        assert values == {-4: [3.0, 4.0], 9: [1.0, 2.0]}
        assert arrays["slots"].shape == (2, 2)
        metadata = json.loads(str(arrays["metadata"]))
    assert metadata["table"] == "user"
    assert metadata["dim"] == 2
    assert "adagrad" in metadata["optimizer"]["segments"][0]


def test_parquet_files_have_typed_columns_and_metadata(embedded, tmp_path):
    table = make_table()
    table.assign([9, -4, 5], np.arange(6.0).reshape(3, 2))
    path = tmp_path / "rows.parquet"

    write_parquet(
        table,
        path,
        slots=True,
        id_column="user.id",
        embedding_column="vector",
        compression="zstd",
        rows_per_group=2,
    )

    file = pq.ParquetFile(path)
    assert file.num_row_groups == 2
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    schema = file.schema_arrow
    assert schema.names == ["user.id", "vector", "slots"]
    assert schema.field("user.id").type == pa.int64()
    assert schema.field("vector").type == pa.list_(pa.float32(), 2)
    assert schema.field("slots").type == pa.list_(pa.float32(), 5)
    assert json.loads(schema.metadata[b"tfswitch"])["table"] == "user"
    assert sorted(file.read().column("user.id").to_pylist()) == [-4, 5, 9]
    copy = make_table("copy")
    assert (
        read_parquet(copy, path, id_column="user.id", embedding_column="vector")
        == 3
    )
    assert values_of(copy) == values_of(table)


def test_tfrecord_files_have_an_example_for_each_row(embedded, tmp_path):
    table = make_table()
    table.assign([-4], [[3.0, 4.0]])
    path = tmp_path / "rows.tfrecord.gz"

    write_tfrecord(
        table, path, id_feature="user", slots=True, compression="gzip"
    )

    gzip.decompress(path.read_bytes())
    (first,) = tf.data.TFRecordDataset(str(path), "GZIP")
    features = tf.train.Example.FromString(first.numpy()).features.feature
    assert features["user"].int64_list.value == [-4]
    assert features["embedding"].float_list.value == [3.0, 4.0]
    assert len(features["slots"].float_list.value) == 5
    copy = make_table("copy")
    assert read_tfrecord(copy, path, id_feature="user", compression="gzip") == 1
    assert values_of(copy) == values_of(table)


# --- Files of other programs ------------------------------------------------


@pytest.mark.parametrize(
    ("id_type", "embedding_type"),
    [
        (pa.int64(), pa.list_(pa.float16())),
        (pa.int32(), pa.list_(pa.float32(), 2)),
        (pa.uint8(), pa.large_list(pa.float64())),
    ],
    ids=str,
)
def test_parquet_columns_of_other_types_are_read(
    embedded, tmp_path, id_type, embedding_type
):
    rows = np.array([[1.5, 2.5], [3.5, 4.5]])
    halves = rows.astype(np.float16) if "half" in str(embedding_type) else rows
    write_columns(
        tmp_path / "rows",
        other=pa.array(["x", None]),
        id=pa.array([1, 2], id_type),
        embedding=pa.array(list(halves), embedding_type),
    )
    table = make_table()

    assert read_parquet(table, tmp_path / "rows") == 2

    np.testing.assert_array_equal(table.lookup([1, 2]), rows)


def test_a_folder_is_read_in_the_order_of_names(embedded, tmp_path):
    folder = tmp_path / "export"
    (folder / "day=1").mkdir(parents=True)
    (folder / "_temporary").mkdir()
    for name, value in (
        ("b.parquet", 2.0),
        ("a.parquet", 1.0),
        ("day=1/c.parquet", 3.0),
        ("_temporary/z.parquet", 9.0),
        (".z.parquet", 9.0),
    ):
        write_columns(folder / name, id=[1], embedding=[[value, value]])
    (folder / "_SUCCESS").touch()
    (folder / "notes.txt").write_text("no rows")
    table = make_table()

    assert read_parquet(table, folder) == 3

    np.testing.assert_array_equal(table.lookup([1]), [[3.0, 3.0]])


def test_patterns_and_lists_of_files_are_read_in_order(embedded, tmp_path):
    for name, row_id in (("part-1", 1), ("part-0", 0), ("last", 2)):
        write_examples(
            tmp_path / name, {"id": [row_id], "embedding": [1.0, row_id + 0.5]}
        )
    table = make_table()

    paths = [str(tmp_path / "part-*"), tmp_path / "last"]
    assert read_tfrecord(table, paths) == 3

    np.testing.assert_array_equal(
        table.lookup([0, 1, 2]), [[1.0, 0.5], [1.0, 1.5], [1.0, 2.5]]
    )


def test_large_row_groups_are_not_read_at_once(embedded, tmp_path, monkeypatch):
    num_rows, dim = 50_000, 128
    floats = np.random.default_rng(1).random(num_rows * dim, np.float32)
    write_columns(
        tmp_path / "rows",
        id=np.arange(num_rows) % 7,
        embedding=pa.FixedSizeListArray.from_arrays(floats, dim),
    )
    assert pq.ParquetFile(tmp_path / "rows").num_row_groups == 1
    in_use = []

    def assign_rows(table, rows, assign_rows=_rows.assign_rows):
        in_use.append(pa.total_allocated_bytes())
        assign_rows(table, rows)

    monkeypatch.setattr(_layout, "assign_rows", assign_rows)

    table = make_table(dim=dim)
    assert read_parquet(table, tmp_path / "rows") == num_rows

    assert max(in_use) < floats.nbytes / 2


def test_large_arrays_are_not_read_at_once(embedded, tmp_path):
    table = filled_table(dim=64, num_rows=40_000)
    write_numpy(table, tmp_path / "rows", slots=True)

    with traced_memory() as peak:
        read_numpy(table, tmp_path / "rows", slots=True)

    assert peak[0] < os.path.getsize(tmp_path / "rows") / 4


@pytest.mark.parametrize(
    ("save", "order", "id_type", "dtype"),
    [
        (np.savez, "C", ">i4", "f8"),
        (np.savez, "F", "u1", "f2"),
        (np.savez_compressed, "C", "i8", "i4"),
        (np.savez_compressed, "F", "i2", "f4"),
    ],
)
def test_arrays_come_in_any_order_and_type_and_compressed(
    embedded, tmp_path, monkeypatch, save, order, id_type, dtype
):
    monkeypatch.setattr(_rows, "_CALL_BYTES", 100)
    ids = np.arange(50, dtype=id_type)
    values = np.random.default_rng(1).normal(0, 9, (50, 2)).astype(dtype)
    save(tmp_path / "rows.npz", ids=ids, values=np.asarray(values, order=order))
    table = make_table()

    assert read_numpy(table, tmp_path / "rows.npz") == 50

    np.testing.assert_array_equal(
        table.lookup(np.arange(50)), values.astype(np.float32)
    )


# --- Tables larger than the memory ------------------------------------------


@contextlib.contextmanager
def traced_memory():
    """Yields a list that has the most bytes in use afterwards."""
    peak = [0]
    tracemalloc.start()
    try:
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("write", [write_numpy, write_parquet])
def test_writing_takes_memory_for_a_run_and_not_for_the_table(
    embedded, tmp_path, write
):
    table = filled_table(dim=32, num_rows=50_000)
    rows = 50_000 * (8 + 4 * 32 * 3)
    options = {"rows_per_group": 1000} if write is write_parquet else {}
    arrow_before = pa.total_allocated_bytes()

    with traced_memory() as peak:
        write(table, tmp_path / "rows", slots=True, **options)

    assert os.listdir(tmp_path) == ["rows"]
    # A message of an export is 8192 rows, which is 3 MB of these 20.
    assert peak[0] < rows / 3
    assert pa.total_allocated_bytes() - arrow_before < rows / 10


@each_kind
def test_what_a_visitor_raises_ends_the_export(cluster):
    table = filled_table()
    seen = []

    def visit(ids, values, slots):
        seen.append((len(ids), values.shape, slots))
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        table._native.visit_rows(False, visit)

    assert seen == [(seen[0][0], (seen[0][0], 2), None)]
    assert table.size() == 50


# --- Slots of another optimizer ---------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("numpy", {"optimizer": "rmsprop"}, r"adagrad.*'word' has .*rmsprop"),
        ("parquet", {"optimizer": "sgd"}, r"adagrad.*'word' has .*sgd"),
        (
            "parquet",
            {"optimizer": "adagrad", "statistics": tsw.statistics.Usage()},
            r"statistics None.*with \{'kind': 'USAGE'",
        ),
    ],
)
def test_slots_of_another_optimizer_are_refused_by_name(
    embedded, tmp_path, name, options, message
):
    write, read = FORMATS[name]
    write(filled_table(optimizer="adagrad"), tmp_path / "rows", slots=True)
    table = make_table("word", **options)

    with pytest.raises(ValueError, match=message):
        read(table, tmp_path / "rows", slots=True)

    assert table.size() == 0
    assert read(table, tmp_path / "rows") == 50


def test_other_numbers_of_the_same_rule_do_not_matter(embedded, tmp_path):
    table = filled_table(optimizer=tsw.optimizers.Adam(beta_1=0.8))
    write_parquet(table, tmp_path / "rows", slots=True)
    copy = make_table("copy", optimizer=tsw.optimizers.AdamW(beta_1=0.9))

    read_parquet(copy, tmp_path / "rows", slots=True)

    assert rows_of(copy) == rows_of(table)


def test_slots_of_records_are_checked_by_their_number(embedded, tmp_path):
    write_tfrecord(
        filled_table(optimizer="adam"), tmp_path / "rows", slots=True
    )
    table = make_table("word", optimizer="adagrad")

    with pytest.raises(ValueError, match=r"'slots' must have 2 .* got 5"):
        read_tfrecord(table, tmp_path / "rows", slots=True)


@each_format
def test_slots_that_are_not_in_the_file_are_missed(
    embedded, tmp_path, write, read
):
    table = filled_table()
    write(table, tmp_path / "rows")

    with pytest.raises(ValueError, match=r"no \w+ 'slots'.*slots=True"):
        read(table, tmp_path / "rows", slots=True)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [('{"version": 2}', "version 2"), ("[" * 100_000, r"rows\.npz")],
    ids=["later", "lists inside lists"],
)
def test_metadata_that_cannot_be_read_are_refused_for_slots(
    embedded, tmp_path, metadata, message
):
    table = filled_table(optimizer="adagrad")
    ids, values, slots = table._export_with_slots()
    np.savez(
        tmp_path / "rows",
        metadata=metadata,
        ids=ids,
        values=values,
        slots=slots,
    )

    with pytest.raises(ValueError, match=f"{message}.*slots=False"):
        read_numpy(table, tmp_path / "rows.npz", slots=True)
    assert read_numpy(table, tmp_path / "rows.npz") == 50


# --- Bad input --------------------------------------------------------------


def check_refused(read, path, message):
    """Reading names the file and what is wrong with it, and sets no row."""
    table = make_table()

    with pytest.raises(ValueError, match=f"{path.name}': .*{message}"):
        read(table, path)

    assert table.size() == 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": [1]}, r"no array 'values', only \['ids'\].*table\.assign"),
        (
            {"ids": [1], "values": [[1.0, 2.0, 3.0]]},
            r"'values' must be of shape \(1, 2\) for 1 ids and table 'user', "
            r"got \(1, 3\)",
        ),
        (
            {"ids": [1, 2], "values": [[1.0, 2.0]]},
            r"shape \(2, 2\).*got \(1, 2\)",
        ),
        ({"ids": [[1]], "values": [[1.0, 2.0]]}, r"'ids' must be of rank 1"),
        (
            {"ids": [1.0], "values": [[1.0, 2.0]]},
            r"'ids' must hold integers, got float64. Cast",
        ),
        (
            {"ids": ["a"], "values": [[1.0, 2.0]]},
            r"'ids' must hold integers, got <U1.*hash_strings",
        ),
        (
            {"ids": [1], "values": [["a", "b"]]},
            r"'values' must hold floats, 2 for each id, got <U1",
        ),
        (
            {"ids": [4, 5], "values": [[1.0, 2.0], [3.0, np.nan]]},
            r"'values' has nan in row 1 \(id 5\) at place 1.*Leave the row",
        ),
        (
            {"ids": [4], "values": [[1e300, 0.0]]},
            r"'values' has 1e\+300 in row 0 \(id 4\)",
        ),
    ],
)
def test_what_is_wrong_with_arrays_is_named(
    embedded, tmp_path, arrays, message
):
    np.savez(tmp_path / "bad.npz", **arrays)

    check_refused(read_numpy, tmp_path / "bad.npz", message)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"id": [1], "vector": [[1.0, 2.0]]},
            r"no column 'embedding', only \['id', 'vector'\]. Pass its name as "
            "`id_column` or `embedding_column`",
        ),
        (
            {"id": ["a"], "embedding": [[1.0, 2.0]]},
            r"'id' must hold integers, got string.*hash_strings",
        ),
        (
            {"id": [1], "embedding": [1.0]},
            r"'embedding' must hold floats, 2 for each id, got double",
        ),
        (
            {"id": [1], "embedding": [[1, 2]]},
            r"must hold floats, 2 for each id, got list<",
        ),
        (
            {"id": [1, 2], "embedding": [[1.0, 2.0], [3.0]]},
            r"'embedding' must have 2 values a row as the rows of table "
            r"'user', got 1 in row 1 \(id 2\)",
        ),
        (
            {
                "id": [1],
                "embedding": pa.array([[1.0] * 3], pa.list_(pa.float32(), 3)),
            },
            r"must have 2 values a row as the rows of table 'user', got 3",
        ),
        (
            {"id": [1, None], "embedding": [[1.0, 2.0]] * 2},
            r"'id' has null in row 1\. Leave the row out",
        ),
        (
            {"id": [1, 2], "embedding": [[1.0, 2.0], None]},
            r"'embedding' has null in row 1 \(id 2\)",
        ),
        (
            {"id": [1, 2], "embedding": [[1.0, 2.0], [3.0, None]]},
            r"'embedding' has null in row 1 \(id 2\)",
        ),
        (
            {"id": [1, 2], "embedding": [[1.0, 2.0], [-np.inf, 1.0]]},
            r"'embedding' has -inf in row 1 \(id 2\) at place 0",
        ),
    ],
)
def test_what_is_wrong_with_columns_is_named(
    embedded, tmp_path, columns, message
):
    write_columns(tmp_path / "bad", **columns)

    check_refused(read_parquet, tmp_path / "bad", message)


def test_columns_of_one_name_are_refused(embedded, tmp_path):
    column = pa.array([1])
    pq.write_table(
        pa.Table.from_arrays([column, column], ["id", "id"]), tmp_path / "bad"
    )

    with pytest.raises(ValueError, match="2 columns 'id'; rename"):
        read_parquet(make_table(), tmp_path / "bad")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"id": [1], "vector": [1.0, 2.0]}],
            r"no feature 'embedding'. Pass its name as `id_feature`",
        ),
        (
            [{"id": [1], "embedding": [1.0, 2.0]}, {"embedding": [1.0, 2.0]}],
            r"'id' must have 1 values a row, got 0 in row 1",
        ),
        (
            [{"id": [1], "embedding": [1.0, 2.0, 3.0]}],
            r"'embedding' must have 2 values a row as the rows of table "
            r"'user', got 3 in row 0 \(id 1\)",
        ),
        (
            [
                {"id": [1], "embedding": [1.0, 2.0]},
                {"id": [1.5], "embedding": [1.0, 2.0]},
            ],
            r"'id' must be of kind int64_list, got float_list in row 1",
        ),
        (
            [{"id": [1], "embedding": [1, 2]}],
            r"'embedding' must be of kind float_list, got int64_list in row 0",
        ),
        ([b"\xff\xff"], r"no tf.train.Example in row 0"),
        (
            [{"id": [8], "embedding": [1.0, float("nan")]}],
            r"'embedding' has nan in row 0 \(id 8\) at place 1",
        ),
    ],
)
def test_what_is_wrong_with_records_is_named(
    embedded, tmp_path, records, message
):
    write_examples(tmp_path / "bad", *records)

    check_refused(read_tfrecord, tmp_path / "bad", message)


MANY_BYTES = 1 << 24


@pytest.mark.parametrize(
    ("name", "descr", "shape", "header_bytes", "compression", "message"),
    [
        (
            "metadata",
            f"<U{MANY_BYTES // 4}",
            (),
            0,
            zipfile.ZIP_DEFLATED,
            f"it has {MANY_BYTES} bytes, and at most 1048576 are read",
        ),
        (
            "metadata",
            "<U1",
            (),
            MANY_BYTES,
            zipfile.ZIP_DEFLATED,
            f"it has a header of {MANY_BYTES} bytes",
        ),
        (
            "values",
            f"<U{MANY_BYTES // 8}",
            (1, 2),
            0,
            zipfile.ZIP_DEFLATED,
            "must hold floats, 2 for each id",
        ),
        (
            "values",
            "<f4",
            (1, 2),
            0,
            zipfile.ZIP_BZIP2,
            "it is not compressed as NumPy does it",
        ),
        ("ids", "<i8", (-1,), 0, zipfile.ZIP_STORED, r"of shape \(-1,\)"),
    ],
    ids=["text", "header", "dtype", "compression", "negative"],
)
def test_arrays_are_refused_before_they_are_inflated(
    embedded, tmp_path, name, descr, shape, header_bytes, compression, message
):
    np.savez(
        tmp_path / "rows.npz",
        **{
            what: array
            for what, array in (("ids", [1]), ("values", [[1.0, 2.0]]))
            if what != name
        },
    )
    header = repr({"descr": descr, "fortran_order": False, "shape": shape})
    header = header.ljust(header_bytes).encode()
    with zipfile.ZipFile(tmp_path / "rows.npz", "a") as archive:
        archive.writestr(
            f"{name}.npy",
            b"\x93NUMPY\x02\0"
            + struct.pack("<I", len(header))
            + header
            + bytes(MANY_BYTES),
            compression,
        )
    table = make_table()

    with (
        traced_memory() as peak,
        pytest.raises(
            (OSError, ValueError), match=rf"rows\.npz'.*'{name}'.*{message}"
        ),
    ):
        read_numpy(table, tmp_path / "rows.npz")

    assert peak[0] < MANY_BYTES / 4
    assert table.size() == 0


def test_records_longer_than_rows_are_refused(embedded, tmp_path):
    """TensorFlow would end the process, which has no such memory."""
    # The length has its checksum.
    record = struct.pack("<QI", 1 << 40, 0xE46B3DAA) + bytes(100)
    (tmp_path / "rows").write_bytes(record)
    write_examples(tmp_path / "good", {"id": [1], "embedding": [1.0, 2.0]})
    with gzip.open(tmp_path / "rows.gz", "wb") as stream:
        stream.write((tmp_path / "good").read_bytes() + record)

    for name, compression in (("rows", None), ("rows.gz", "gzip")):
        with pytest.raises(
            OSError, match=rf"{name}'.* a record has {1 << 40} bytes, and at"
        ):
            read_tfrecord(
                make_table(), tmp_path / name, compression=compression
            )


def test_rows_before_a_bad_batch_are_set_and_counted(
    embedded, tmp_path, monkeypatch
):
    monkeypatch.setattr(_rows, "_CALL_BYTES", 32)  # Two rows.
    values = np.ones((6, 2))
    values[5, 1] = np.nan
    write_columns(
        tmp_path / "bad",
        id=pa.array(range(10, 16)),
        embedding=pa.array(values.tolist()),
    )
    write_examples(
        tmp_path / "worse",
        *(
            {"id": [10 + i], "embedding": value}
            for i, value in enumerate(values.tolist())
        ),
    )

    for name, read in (("bad", read_parquet), ("worse", read_tfrecord)):
        table = make_table(name)
        with pytest.raises(
            ValueError, match=r"nan in row 5 \(id 15\).* 4 rows before it"
        ):
            read(table, tmp_path / name)
        assert sorted(table.export_rows()[0].tolist()) == [10, 11, 12, 13]


def test_columns_of_all_files_are_checked_before_the_first_row(
    embedded, tmp_path
):
    write_columns(tmp_path / "a", id=[1], embedding=[[1.0, 2.0]])
    write_columns(tmp_path / "b", id=[1], vector=[[1.0, 2.0]])
    table = make_table()

    with pytest.raises(ValueError, match="b': there is no column"):
        read_parquet(table, [tmp_path / "a", tmp_path / "b"])

    assert table.size() == 0


@each_format
def test_missing_files_are_named(embedded, tmp_path, write, read):
    for paths, message in {
        tmp_path / "nowhere": r"no file '.*nowhere'",
        "part-*": r"no file 'part-\*'",
        (): "no files to read",
    }.items():
        if read is read_numpy and paths == ():
            continue  # It reads one file.
        with pytest.raises(FileNotFoundError, match=message):
            read(make_table(), paths)


def test_folders_without_files_are_named(embedded, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*\.parquet file in"):
        read_parquet(make_table(), tmp_path)
    with pytest.raises(IsADirectoryError, match=r"pattern such as '.*/\*'"):
        read_tfrecord(make_table(), tmp_path)
    with pytest.raises(OSError, match=r"is no \.npz file"):
        read_numpy(make_table(), tmp_path)


@each_format
@pytest.mark.parametrize("damage", ["empty", "cut", "other", "flipped"])
def test_damaged_files_are_named(embedded, tmp_path, write, read, damage):
    path = tmp_path / "rows"
    write(filled_table(num_rows=500), path)
    content = path.read_bytes()
    place = len(content) // 2
    if read is read_tfrecord:
        # Half the length of a record is left, which TensorFlow takes for the
        # end. Records are not all equally long, and their order is random.
        begin = 0
        while begin < place:
            begin += 16 + int.from_bytes(content[begin : begin + 8], "little")
        place = begin + 4
    path.write_bytes(
        {
            "empty": b"",
            "cut": content[:place],
            "other": b"id,embedding\n1,2\n" * 20,
            "flipped": content[:place]
            + bytes([content[place] ^ 255])
            + content[place + 1 :],
        }[damage]
    )
    if read is read_tfrecord and damage == "empty":
        assert read(make_table("copy"), path) == 0  # A file without records.
        return

    with pytest.raises(OSError, match=f"'{path}'.*(damaged|cannot be read)"):
        read(make_table("copy"), path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_bit_of_a_damaged_array_file_is_told_otherwise(
    embedded, tmp_path, save
):
    """Whatever zipfile and NumPy make of it: the documented types, named."""
    path = tmp_path / "rows.npz"
    table = make_table()
    save(path, ids=[3, 5], values=np.array([[1.0, 2.0], [3.0, 4.0]], "f4"))
    content = path.read_bytes()
    assert read_numpy(table, path) == 2
    whole = rows_of(table)
    told = 0
    # In place: many file systems write a file that replaces another to disk at
    # once.
    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                try:
                    read_numpy(table, path)
                except (OSError, ValueError) as error:
                    assert f"'{path}'" in str(error), (place, bit)
                    assert not str(error).endswith(": "), (place, bit)
                    told += 1
            os.pwrite(file.fileno(), bytes([byte]), place)
            # Dates and the like change nothing.
            assert rows_of(table) == whole, place
    assert told > 4 * len(content)


def test_files_compressed_otherwise_are_named(embedded, tmp_path):
    table = filled_table()
    for written, asked in ((None, "gzip"), ("gzip", None)):
        write_tfrecord(table, tmp_path / "rows", compression=written)
        with pytest.raises(OSError, match=r"rows' is no .*, compressed other"):
            read_tfrecord(table, tmp_path / "rows", compression=asked)


@each_format
def test_other_things_than_tables_are_refused(tmp_path, write, read):
    layer = tsw.keras.DynamicEmbedding(2)
    for call in (write, read):
        with pytest.raises(ValueError, match=r"layer\.table"):
            call(layer, tmp_path / "rows")


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (
            write_parquet,
            {"compression": "zip"},
            "`compression` must be one of .*'zip'",
        ),
        (write_parquet, {"rows_per_group": 0}, "`rows_per_group` must be .*=0"),
        (
            write_parquet,
            {"id_column": "embedding"},
            r"columns must differ. Received: \['embedding', 'embedding'\]",
        ),
        (
            read_parquet,
            {"id_column": "slots", "slots": True},
            "columns must differ",
        ),
        (
            write_tfrecord,
            {"compression": "snappy"},
            "None or \"gzip\". .*'snappy'",
        ),
        (
            read_tfrecord,
            {"id_feature": ""},
            "`id_feature` must be a name. .*=''",
        ),
    ],
)
def test_bad_arguments_are_named(embedded, tmp_path, call, options, message):
    with pytest.raises(ValueError, match=message):
        call(make_table(), tmp_path / "rows", **options)

    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_the_command_that_installs_it_is_named(
    embedded, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    table = make_table()

    for call in (write_parquet, read_parquet):
        with pytest.raises(ImportError, match="pip install 'pyarrow>=16"):
            call(table, tmp_path / "rows")

    write_numpy(table, tmp_path / "rows")


# --- Publishing -------------------------------------------------------------


@each_format
def test_a_file_is_replaced_when_the_new_one_is_complete(
    embedded, tmp_path, write, read, monkeypatch
):
    table = filled_table()
    path = tmp_path / "rows"
    path.write_bytes(b"old")
    replaced = []

    def replace(source, target, replace=os.replace):
        replaced.append((target.read_bytes(), source.stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    before = os.umask(0o027)
    try:
        write(table, path)
    finally:
        os.umask(before)

    assert replaced == [(b"old", path.stat().st_size)]
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]
    # The umask decides who may read it.
    assert path.stat().st_mode & 0o777 == 0o640


@each_format
def test_a_write_that_fails_names_the_file_and_leaves_the_old_one(
    embedded, tmp_path, write, read, monkeypatch
):
    table = filled_table(num_rows=5000)
    path = tmp_path / "rows"
    path.write_bytes(b"old")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=f"'{path}' cannot be written"):
            write(table, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def fsync(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no space left"):
        write(table, path)

    assert [file.name for file in tmp_path.iterdir()] == ["rows"]
    assert path.read_bytes() == b"old"


@each_format
def test_places_where_no_file_can_be_are_named(embedded, tmp_path, write, read):
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nowhere'"):
        write(make_table(), tmp_path / "nowhere" / "rows")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write(make_table(), tmp_path)
