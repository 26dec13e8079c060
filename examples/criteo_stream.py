"""Trains on a stream of raw Criteo lines, without a vocabulary.

    python examples/criteo_stream.py day_0.gz day_1.gz
    zcat day_*.gz | python examples/criteo_stream.py -

A line has a label (0 or 1), 13 integers and 26 strings, separated by tabs; any
but the label may be empty. Each string becomes a 64-bit id by its field and its
hash, and an id gets a row when it is first seen. Every batch is predicted
before it is learnt from, so the AUC and the log loss that are printed are those
of lines that the model had not seen ("progressive validation").
"""

import contextlib
import pathlib
import sys
import warnings
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf
from absl import app, flags

import tfswitch as tsw

_ADDRESS = flags.DEFINE_string(
    "address",
    None,
    "Where the table lives, as tfswitch.connect takes it; default: here.",
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 512, "Lines per step.")
_DIM = flags.DEFINE_integer("dim", 16, "Floats per embedding.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.05, "Of Adagrad.")
_REPORT_EVERY = flags.DEFINE_integer(
    "report_every", 100, "Batches between two reports.", lower_bound=1
)

NUM_INTEGERS = 13
NUM_STRINGS = 26


def read_lines(files: Sequence[str]) -> tf.data.Dataset:
    """Lines of files, one after the other; "-" is the standard input."""
    lines = tf.data.Dataset.from_tensor_slices(tf.zeros([0], tf.string))
    for name in files:
        if name == "-":
            more = tf.data.Dataset.from_generator(
                lambda: (line.rstrip("\n") for line in sys.stdin),
                output_signature=tf.TensorSpec([], tf.string),
            )
        elif not pathlib.Path(name).is_file():
            raise app.UsageError(f"there is no file {name!r}")
        else:
            more = tf.data.TextLineDataset(
                name, compression_type="GZIP" if name.endswith(".gz") else ""
            )
        lines = lines.concatenate(more)
    return lines


def parse(lines: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Turns lines into features and labels.

    Args:
        lines: Strings, `(batch,)`.

    Returns:
        "numbers", float32 `(batch, 26)`: logarithms of the integers, and which
        of them are missing. "ids", int64 `(batch, 26)`. And the labels,
        float32 `(batch, 1)`.
    """
    cells = tf.io.decode_csv(
        lines,
        [[0.0]] + [[float("nan")]] * NUM_INTEGERS + [[""]] * NUM_STRINGS,
        field_delim="\t",
        use_quote_delim=False,
    )
    labels = cells[0][:, tf.newaxis]
    integers, strings = cells[1:14], cells[14:]
    integers = tf.stack(integers, axis=1)
    missing = tf.math.is_nan(integers)
    integers = tf.where(missing, 0.0, integers)
    # Counts, mostly, but a few are negative.
    numbers = tf.sign(integers) * tf.math.log1p(tf.abs(integers))
    features = {
        "numbers": tf.concat([numbers, tf.cast(missing, tf.float32)], axis=1),
        "ids": tf.stack(
            [to_ids(i, values) for i, values in enumerate(strings)], axis=1
        ),
    }
    return features, labels


def to_ids(field: int, values: tf.Tensor) -> tf.Tensor:
    """Hashes a field's strings to 59 bits, with the field in the 5 above them.

    So the same string in two fields gives two ids. Among 10 million values of a
    field, a given value shares its id with another one with a probability of
    about 0.01 %. The empty string is a value like any other.
    """
    return tsw.ids.pack(field, values, slot_bits=5)


def build_model(dim: int, learning_rate: float) -> keras.Model:
    """A small DeepFM: linear weights, pairs of fields, and a network."""
    numbers = keras.Input((2 * NUM_INTEGERS,), name="numbers")
    ids = keras.Input((NUM_STRINGS,), dtype="int64", name="ids")
    rows = tsw.keras.DynamicEmbedding(
        1 + dim,
        name="criteo",
        embeddings_initializer=tsw.initializers.RandomNormal(stddev=0.01),
        optimizer=tsw.optimizers.Adagrad(learning_rate),
    )(ids)
    linear, vectors = rows[:, :, 0], rows[:, :, 1:]
    pairs = (
        keras.ops.square(keras.ops.sum(vectors, axis=1))
        - keras.ops.sum(keras.ops.square(vectors), axis=1)
    ) / 2.0
    deep = keras.layers.concatenate([keras.layers.Flatten()(vectors), numbers])
    for units in (128, 64):
        deep = keras.layers.Dense(units, "relu")(deep)
    parts = [
        keras.ops.sum(linear, axis=1, keepdims=True),
        keras.ops.sum(pairs, axis=1, keepdims=True),
        keras.layers.Dense(1)(deep),
    ]
    outputs = keras.layers.Activation("sigmoid")(keras.layers.add(parts))
    model = keras.Model({"numbers": numbers, "ids": ids}, outputs)
    model.compile(
        keras.optimizers.Adagrad(learning_rate),
        "binary_crossentropy",
        metrics=[
            keras.metrics.AUC(name="auc", num_thresholds=1000),
            keras.metrics.BinaryCrossentropy(name="logloss"),
        ],
    )
    return model


class Report(keras.callbacks.Callback):
    """Prints the metrics so far and the table's size.

    In the only epoch of `fit` these metrics are computed from predictions that
    were made before the step of their batch.
    """

    def __init__(self, table: tsw.EmbeddingTable) -> None:
        super().__init__()
        self._table = table
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._batches = batch + 1
        if self._batches % _REPORT_EVERY.value == 0:
            self._print(logs or {})

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._batches % _REPORT_EVERY.value:
            self._print(logs or {})

    def _print(self, logs: dict) -> None:
        stats = self._table.stats()
        megabytes = (stats["index_bytes"] + stats["row_bytes"]) / 1e6
        print(
            f"{self._batches} batches: AUC {logs['auc']:.4f}, "
            f"log loss {logs['logloss']:.4f}; "
            f"{stats['num_rows']} rows, {megabytes:.1f} MB"
        )


def main(argv: Sequence[str]) -> None:
    files = argv[1:]
    if not files:
        raise app.UsageError("name the files to read, or - for the input")
    keras.utils.set_random_seed(1)
    # A stream has no length that Keras could know.
    warnings.filterwarnings("ignore", "Your input ran out of data")
    batches = (
        read_lines(files)
        .batch(_BATCH_SIZE.value)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(2)
    )
    with _connected():
        model = build_model(_DIM.value, _LEARNING_RATE.value)
        table = model.get_layer("criteo").table
        model.fit(
            batches,
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[Report(table)],
        )


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    if not _ADDRESS.value:
        yield
        return
    with tsw.connect(_ADDRESS.value):
        yield


if __name__ == "__main__":
    app.run(main)
