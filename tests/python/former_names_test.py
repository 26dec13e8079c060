"""Names that users may have from before, which still work and warn."""

import inspect
import sys

import keras
import pytest
import tensorflow as tf

import tfswitch as tsw


def table_of(**kwargs):
    return tsw.EmbeddingTable("t", 2, **kwargs)


@pytest.mark.parametrize(
    "use",
    [
        lambda path: table_of(row_type="float16").storage_dtype,
        lambda path: table_of(storage_dtype="float16").row_type,
        lambda path: table_of(storage_dtype=tsw.RowType("float16")),
        lambda path: tsw.keras.DynamicEmbedding(2, row_type="float16"),
        lambda path: tsw.export.Schedule(path, base_every_seconds=9.0),
        lambda path: tsw.export.Schedule(path, tell=print),
        lambda path: tsw.keras.ExportTables(path, every_seconds=9.0),
        lambda path: tsw.keras.ExportTables(path, every_batches=1, tell=print),
        lambda path: tsw.interchange.write_numpy(table_of(), path / "t.npz"),
        lambda path: tsw.saved_model.save(
            lambda ids: {"rows": table_of().lookup(ids)},
            path / "1",
            inputs={"ids": tf.TensorSpec([None], tf.int64)},
            deadline_seconds=5.0,
        ),
    ],
)
def test_a_former_name_works_and_warns(use, embedded, tmp_path) -> None:
    # It warns when it is imported for the first time.
    sys.modules.pop("tfswitch.interchange", None)
    vars(tsw).pop("interchange", None)

    with pytest.warns(DeprecationWarning, match="is called `.*` now"):
        use(tmp_path)


def test_a_former_name_beside_the_present_one_is_refused(embedded) -> None:
    with pytest.raises(TypeError, match="`row_type` is the former name of"):
        table_of(row_type="float16", storage_dtype="float16")


def test_a_layer_saved_with_a_former_name_is_loaded(embedded) -> None:
    layer = tsw.keras.DynamicEmbedding(2, storage_dtype="float16")
    config = keras.saving.serialize_keras_object(layer)
    settings = config["config"]
    settings["row_type"] = settings.pop("storage_dtype")

    with pytest.warns(DeprecationWarning, match="storage_dtype"):
        loaded = keras.saving.deserialize_keras_object(config)

    assert loaded.get_config() == layer.get_config()


def test_the_signature_has_the_present_names() -> None:
    assert "storage_dtype" in inspect.signature(tsw.EmbeddingTable).parameters
