"""Restores of some tables, under other names, and to other optimizers."""

import io
import json
import sys
import threading
import warnings

import numpy as np
import pytest

import tfswitch as tsw
from tfswitch._progress_bar import progress_bar

IDS = np.arange(500)
ROWS = np.random.default_rng(1).normal(size=(500, 3)).astype(np.float32)
GRADIENTS = np.random.default_rng(2).normal(size=(500, 3))


def make(name, dim=3, optimizer=None, **kwargs):
    optimizer = optimizer or tsw.optimizers.Adam(0.1)
    return tsw.EmbeddingTable(name, dim, optimizer=optimizer, **kwargs)


def trained(name, **kwargs):
    """Makes a table whose rows have been stepped."""
    table = make(name, **kwargs)
    table.assign(IDS, ROWS)
    table.push(IDS, GRADIENTS)
    return table


def read(table):
    return table.lookup(IDS).numpy()


def num_rows(cluster):
    return {name: stats["num_rows"] for name, stats in cluster.stats().items()}


# --- Names ------------------------------------------------------------------


def test_a_table_that_was_saved_alone_is_restored_under_another_name(
    cluster, tmp_path
):
    user = trained("user")
    user.save(tmp_path)
    saved = read(user)
    user.push(IDS, GRADIENTS)
    stepped = read(user)

    report = cluster.restore(tmp_path, {"user": "copy"})

    assert report == {"tables": ["copy"], "num_rows": 500, "save": 1}
    assert cluster.tables() == ["copy", "user"]
    np.testing.assert_array_equal(read(user), stepped)
    copy = make("copy")
    np.testing.assert_array_equal(read(copy), saved)
    # The optimizer state came with the rows.
    copy.push(IDS, GRADIENTS)
    np.testing.assert_array_equal(read(copy), stepped)
    # It is a table of its own, also in the checkpoints to come.
    cluster.save(tmp_path / "both")
    copy.assign(IDS, ROWS)
    user.restore(tmp_path / "both", saved_name="copy")
    np.testing.assert_array_equal(read(user), stepped)
    np.testing.assert_array_equal(read(copy), ROWS)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ({"user": "new", "item": "new"}, ValueError, "two tables .*'new'"),
        ({"user": "new", "none": "other"}, KeyError, "'none'.*'user'"),
        ({"user": "new", "item": ""}, ValueError, "name"),
        ({"user": "new", "item": "a\nb"}, ValueError, "control"),
        ({"user": "new", "item": "n" * 250}, ValueError, "name"),
        ({"user": "new", "item": "narrow"}, RuntimeError, "dim 3.*'narrow'.*2"),
        ({}, ValueError, "at least one name"),
    ],
)
def test_names_that_cannot_be_are_refused_and_nothing_changes(
    cluster, tmp_path, names, error, message
):
    _tables = [trained("user"), trained("item"), make("narrow", 2)]
    cluster.save(tmp_path)
    before = num_rows(cluster)

    with pytest.raises(error, match=message):
        cluster.restore(tmp_path, names)

    assert num_rows(cluster) == before


# --- State ------------------------------------------------------------------


def test_the_state_of_another_optimizer_begins_anew_and_a_warning_names_it(
    cluster, tmp_path
):
    user, item = trained("user"), trained("item")
    saved = read(user)
    cluster.save(tmp_path)
    user.drop()
    user = trained("user", optimizer=tsw.optimizers.Adagrad(0.5))
    before = read(user)

    with pytest.raises(RuntimeError, match="state='reset_if_different'"):
        cluster.restore(tmp_path)
    np.testing.assert_array_equal(read(user), before)
    with pytest.warns(RuntimeWarning, match="state of 'user', because"):
        report = cluster.restore(tmp_path, state="reset_if_different")

    assert report["reset_tables"] == ["user"]
    np.testing.assert_array_equal(read(user), saved)
    fresh = make("fresh", optimizer=tsw.optimizers.Adagrad(0.5))
    fresh.assign(IDS, saved)
    for table in (user, fresh):
        table.push(IDS, GRADIENTS)
    np.testing.assert_array_equal(read(user), read(fresh))
    # That of the other table was kept.
    fresh = make("fresh_too")
    fresh.assign(IDS, saved)
    for table in (item, fresh):
        table.push(IDS, -GRADIENTS)
    assert np.abs(read(item) - read(fresh)).max() > 1e-3


def test_embeddings_are_restored_alone(cluster, tmp_path):
    user = trained("user", statistics=tsw.statistics.Usage())
    saved = read(user)
    user.save(tmp_path)
    assert user.usage(IDS)["count"].sum() == 500

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # It was asked for.
        report = user.restore(tmp_path, state="reset")

    assert report["reset_tables"] == ["user"]
    np.testing.assert_array_equal(read(user), saved)
    assert user.usage(IDS)["count"].sum() == 0


def test_a_state_that_is_none_is_named(embedded, tmp_path):
    with pytest.raises(ValueError, match=r"reset_if_different.*state='fresh'"):
        embedded.restore(tmp_path, state="fresh")


# --- Progress ---------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_a_file_nothing(
    embedded, tmp_path, monkeypatch
):
    _table = trained("user")
    for stream, progress, has_bar in (
        (Terminal(), None, True),
        (Terminal(), False, False),
        (io.StringIO(), None, False),
        (io.StringIO(), True, True),
    ):
        monkeypatch.setattr(sys, "stderr", stream)

        embedded.save(tmp_path, progress=progress)
        embedded.restore(tmp_path, progress=progress)

        shown = stream.getvalue()
        assert ("saving to" in shown) == has_bar
        assert ("restoring from" in shown) == has_bar
        assert (shown == "") == (not has_bar)


def test_a_bar_shows_the_rows_of_its_own_call(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())

    class Core:
        def __init__(self):
            self.ids = set()
            self.has_answered = threading.Semaphore(0)

        def call(self, method, request_json):
            self.ids.add(json.loads(request_json)["id"])
            self.has_answered.release()
            return '{"num_rows": "1250", "total_rows": "5000"}'

    core = Core()
    with progress_bar(core, "saving to 'x'", progress=True) as progress_id:
        for _ in range(2):  # The first answer has been shown then.
            assert core.has_answered.acquire(timeout=30)

    assert core.ids == {progress_id}
    assert "1,250 of 5,000 rows" in stream.getvalue()


def test_a_failed_restore_ends_its_bar(embedded, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    tsw.EmbeddingTable("t", 2)
    embedded.save(tmp_path / "here")

    with pytest.raises(KeyError, match=r"no checkpoint at .* has 'here'"):
        embedded.restore(tmp_path / "none", progress=True)

    assert "restoring from" in stream.getvalue()
