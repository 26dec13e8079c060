"""The files of exported models: damaged, missing, and when a save is killed."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.programs import run_python

INPUTS = {"ids": tf.TensorSpec([None], tf.int64)}


@pytest.fixture
def table(tmp_path):
    with tsw.connect(f"local://{tmp_path}"):
        table = tsw.EmbeddingTable("t", 2)
        table.assign(np.arange(1000), np.ones((1000, 2)))
        yield table


@pytest.fixture
def path(table, tmp_path):
    """The path of a model that is saved and not loaded."""
    tsw.saved_model.save(
        lambda ids: {"score": table.lookup(ids)}, tmp_path / "1", inputs=INPUTS
    )
    return tmp_path / "1"


def serve(path, ids=range(1000)):
    loaded = tf.saved_model.load(path)
    signature = loaded.signatures["serving_default"]
    return signature(ids=tf.constant(list(ids), tf.int64))["score"].numpy()


DEEP = "[" * 200_000 + "]" * 200_000


def test_a_model_file_that_cannot_be_read_is_named(path):
    """Each field by itself is for the tests of C++."""
    file = path / tsw.export._MODEL_FILE
    contents = file.read_text()
    fields = json.loads(contents)
    damaged = tf.errors.DataLossError
    unfit = tf.errors.FailedPreconditionError
    for text, error, message in [
        ({"version": 1}, unfit, "has format version 1"),
        ({"tables": {"t": 3}}, unfit, "has dim 2, the model has dim 3"),
        ({"tables": {"t": 2, "u": 2}}, unfit, "has no table 'u'"),
        ({"format": "other"}, damaged, "not JSON of a tfswitch-model"),
        ({"embedded": None}, damaged, "'mode' is missing"),
        ({"more": 1}, damaged, "more"),
        (DEEP, damaged, "is damaged"),
        (
            contents.replace('"version": 2', f'"version": {DEEP}'),
            damaged,
            "inside each other",
        ),
    ]:
        if isinstance(text, dict):
            changed = {**fields, **text}.items()
            text = json.dumps({k: v for k, v in changed if v is not None})
        file.write_text(text)

        with pytest.raises(error, match=message) as raised:
            tf.saved_model.load(path)

        assert str(path) in str(raised.value)


def test_a_missing_file_is_named(path, tmp_path):
    (base,) = path.glob("assets.extra/tfswitch/base-*")
    for missing, message in [
        (path / "assets/tfswitch_model.json", "assets/tfswitch_model.json"),
        (path / "assets.extra/tfswitch", "assets.extra/tfswitch"),
        (base, "no base export in"),
    ]:
        missing.rename(tmp_path / "away")
        with pytest.raises(FileNotFoundError, match=message):
            tf.saved_model.load(path)
        (tmp_path / "away").rename(missing)
    assert np.all(serve(path) == 1.0)


@pytest.mark.parametrize("name", ["manifest.json", "t.safetensors"])
def test_a_damaged_export_is_named_before_a_wrong_number_is_served(path, name):
    (file,) = path.glob(f"assets.extra/tfswitch/base-*/{name}")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    with pytest.raises(tf.errors.DataLossError, match="damaged") as raised:
        serve(path)
    assert str(file) in str(raised.value)


def test_all_is_on_the_disk_before_the_model_has_its_name(
    table, tmp_path, monkeypatch
):
    written = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        written.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(source, target):
        there = {str(entry) for entry in Path(source).rglob("*")}
        assert there | {str(source)} <= set(written)
        written.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    tsw.saved_model.save(
        lambda ids: {"score": table.lookup(ids)}, tmp_path / "1", inputs=INPUTS
    )
    assert written[-2:] == ["renamed", str(tmp_path)]


SAVE_AND_DIE = """
import os, signal, sys
import numpy as np, tensorflow as tf, tfswitch as tsw
from tfswitch import export

path, where = sys.argv[1:]
table = tsw.EmbeddingTable("t", 2)
table.assign(np.arange(1000), np.ones((1000, 2)))

def save(path):
    tsw.saved_model.save(
        lambda ids: {"score": table.lookup(ids)}, path,
        inputs={"ids": tf.TensorSpec([None], tf.int64)})

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

save(path + "/1")
rename = os.rename
if where == "rows":
    export.base = die
elif where == "flush":
    calls = iter(range(4))
    os.fsync = lambda fd: next(calls, None) is None and die()
elif where == "rename":
    os.rename = die
else:
    os.rename = lambda *names: (rename(*names), die())
save(path + "/2")
"""


@pytest.mark.parametrize(
    "where, is_there",
    [("rows", False), ("flush", False), ("rename", False), ("after", True)],
)
def test_a_save_that_is_killed_leaves_a_whole_model_or_none(
    tmp_path, where, is_there
):
    killed = run_python("-c", SAVE_AND_DIE, tmp_path, where, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert np.all(serve(tmp_path / "1") == 1.0)
    # Names of unfinished files begin with a dot: servers of versions skip them.
    seen = {e.name for e in tmp_path.iterdir() if not e.name.startswith(".")}
    assert seen == ({"1", "2"} if is_there else {"1"})
    if is_there:
        assert np.all(serve(tmp_path / "2") == 1.0)
