"""DeepFM with batches of 1 to 32 times the size, with CowClip and without.

Trains on Frappe (288,609 samples of 10 one-hot fields) with several batch
sizes. Each rule derives the settings of a batch s times as large from those of
the smallest batch. Embeddings and dense variables learn with Adam; a rule
multiplies the settings by:

    rule        rate of embeddings   L2 of embeddings   dense rate   clip
    cowclip     1                    s                  sqrt(s)      CowClip
    unclipped   1                    s                  sqrt(s)      none
    sqrt        sqrt(s)              sqrt(s)            sqrt(s)      none
    linear      s                    1                  s            none

The first two are `tfswitch.optimizers.scale_for_batch`. With all rules the
dense rate warms up over the first epoch. With the smallest batch the last three
rules are the same, so they are trained once.

After each epoch the program measures the AUC of the validation split. It
reports the AUC of the test split after the epoch with the best validation. With
one seed, all rules start from the same variables and see the samples in the
same order. The incomplete batch at the end of an epoch is not trained. Rules
take turns; figures are medians.

    python benchmarks/cowclip_bench.py --plot=cowclip.png

With `--data=generated` the program makes random samples, to see it run.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import frappe
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import area_under_curve, report
from frappe import FIELDS, Data, Split

import tfswitch as tsw

RULES = ("cowclip", "unclipped", "sqrt", "linear")

_BATCH_SIZES = flags.DEFINE_list(
    "batch_sizes",
    ["256", "512", "1024", "2048", "4096", "8192"],
    "Samples per step.",
)
_BASE_BATCH_SIZE = flags.DEFINE_integer(
    "base_batch_size", None, "That of the settings below. Default: the least."
)
_RULES = flags.DEFINE_list("rules", list(RULES), "Which to train with.")
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Of each training.", lower_bound=1)
_SEEDS = flags.DEFINE_integer(
    "seeds", 3, "Trainings per batch size and rule.", lower_bound=1
)
_PLOT = flags.DEFINE_string("plot", None, "File for it; needs matplotlib.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-2, "Of embeddings.")
_L2 = flags.DEFINE_float("l2", 1e-6, "Of embeddings.")
_DENSE_LEARNING_RATE = flags.DEFINE_float(
    "dense_learning_rate", 3e-3, "Of dense variables."
)
_R = flags.DEFINE_float("r", 1.0, "Of CowClip.")
_ZETA = flags.DEFINE_float("zeta", 1e-5, "Of CowClip.")
_SPLIT = flags.DEFINE_enum(
    "split", "test", ["test", "valid"], "Whose AUC to report; valid to tune."
)
_VERBOSE = flags.DEFINE_bool("verbose", False, "Print each epoch.")

DIM = 10
HIDDEN = (100, 100, 100)
# The standard deviation of the embeddings' first values.
INITIAL_STDDEV = 1e-2

COLORS = {
    "cowclip": "#1f77b4",
    "unclipped": "#2ca02c",
    "sqrt": "#ff7f0e",
    "linear": "#d62728",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Returns the arguments of a rule for one batch size."""

    embedding: tsw.optimizers.Adam
    linear: tsw.optimizers.Adam
    dense: keras.optimizers.Optimizer


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one training."""

    auc: float
    best_epoch: int
    seconds: float  # For an epoch, without the evaluation.
    cpu_seconds: float


# By batch size and rule, one of each seed.
Results = dict[tuple[int, str], list[Result]]


def base_batch_size() -> int:
    """The batch size that the flags' settings are for."""
    return _BASE_BATCH_SIZE.value or min(map(int, _BATCH_SIZES.value))


def settings(rule: str, batch_size: int, samples: int) -> Settings:
    """Returns the settings that a rule makes of the flags."""
    scaled = tsw.optimizers.scale_for_batch(
        batch_size,
        base_batch_size=base_batch_size(),
        learning_rate=_LEARNING_RATE.value,
        l2=_L2.value,
        dense_learning_rate=_DENSE_LEARNING_RATE.value,
        warmup_steps=samples // batch_size,
    )
    clip = None
    if rule == "cowclip":
        clip = tsw.optimizers.CowClip(_R.value, _ZETA.value)
    elif rule == "sqrt":
        root = math.sqrt(scaled.scale)
        scaled = dataclasses.replace(
            scaled,
            learning_rate=_LEARNING_RATE.value * root,
            l2=_L2.value * root,
        )
    elif rule == "linear":
        scaled = dataclasses.replace(
            scaled,
            learning_rate=_LEARNING_RATE.value * scaled.scale,
            l2=_L2.value,
            dense_learning_rate=_DENSE_LEARNING_RATE.value * scaled.scale,
        )
    return Settings(
        embedding=tsw.optimizers.Adam(
            scaled.learning_rate, l2=scaled.l2, cowclip=clip
        ),
        # As in the paper's program, which does not clip the linear weights.
        linear=tsw.optimizers.Adam(scaled.learning_rate, l2=scaled.l2),
        dense=keras.optimizers.Adam(scaled.dense_schedule()),
    )


def deepfm(chosen: Settings, seed: int) -> keras.Model:
    """Maps packed ids `(batch, fields)` to a logit."""
    ids = keras.Input((FIELDS,), dtype="int64")
    # The linear weight, then the vector.
    rows = tsw.keras.DynamicEmbedding(
        1 + DIM,
        embeddings_initializer=tsw.initializers.RandomNormal(
            stddev=INITIAL_STDDEV
        ),
        optimizer=tsw.optimizers.Segments(
            [(1, chosen.linear), (DIM, chosen.embedding)]
        ),
        seed=seed,
    )(ids)
    linear, vectors = rows[:, :, 0], rows[:, :, 1:]
    # Sum of the products of all pairs.
    pairs = (
        keras.ops.square(keras.ops.sum(vectors, axis=1))
        - keras.ops.sum(keras.ops.square(vectors), axis=1)
    ) / 2.0
    deep = keras.layers.Flatten()(vectors)
    for units in HIDDEN:
        deep = keras.layers.Dense(units, "relu")(deep)
    logits = keras.layers.add(
        [
            keras.ops.sum(linear, axis=1, keepdims=True),
            keras.ops.sum(pairs, axis=1, keepdims=True),
            keras.layers.Dense(1)(deep),
        ]
    )
    return keras.Model(ids, logits)


def train(data: Data, rule: str, batch_size: int, seed: int) -> Result:
    """Trains a new model, and takes the AUC of its best epoch."""
    keras.utils.set_random_seed(seed)
    ids, labels = data.train
    chosen = settings(rule, batch_size, len(labels))
    model = deepfm(chosen, seed)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    ids_spec = tf.TensorSpec((None, FIELDS), tf.int64)

    @tf.function
    def step(batch: tf.Tensor, truth: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(truth[:, None], model(batch, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        chosen.dense.apply(gradients, variables)

    @tf.function(input_signature=[ids_spec])
    def predict(batch: tf.Tensor) -> tf.Tensor:
        return model(batch, training=False)[:, 0]

    def auc(split: Split) -> float:
        parts = [
            predict(tf.constant(split[0][i : i + 8192])).numpy()
            for i in range(0, len(split[1]), 8192)
        ]
        return area_under_curve(split[1], np.concatenate(parts))

    order = np.random.default_rng(seed)
    count = len(labels) // batch_size * batch_size
    seconds, cpu_seconds, valid, reported = [], [], [], []
    for epoch in range(_EPOCHS.value):
        shuffled = order.permutation(len(labels))[:count]
        start, cpu_start = time.perf_counter(), time.process_time()
        for i in range(0, count, batch_size):
            chunk = shuffled[i : i + batch_size]
            step(tf.constant(ids[chunk]), tf.constant(labels[chunk]))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        valid.append(auc(data.valid))
        reported.append(
            valid[-1] if _SPLIT.value == "valid" else auc(data.test)
        )
        if _VERBOSE.value:
            print(
                f"  epoch {epoch + 1}: valid {valid[-1]:.4f}, "
                f"{seconds[-1]:.1f} s",
                flush=True,
            )
    best = int(np.argmax(valid))
    # The first epoch traces the graph.
    return Result(
        auc=reported[best],
        best_epoch=best + 1,
        seconds=statistics.median(seconds[1:] or seconds),
        cpu_seconds=statistics.median(cpu_seconds[1:] or cpu_seconds),
    )


def train_all(data: Data) -> Results:
    """Trains with all batch sizes, rules and seeds, and prints each."""
    results: Results = {}
    for seed in range(1, 1 + _SEEDS.value):
        for size in map(int, _BATCH_SIZES.value):
            plain = None  # Without a clip; at the base, one for all rules.
            for rule in _RULES.value:
                is_same = size == base_batch_size() and rule != "cowclip"
                if is_same and plain:
                    result = plain
                else:
                    result = train(data, rule, size, seed)
                    print(
                        f"seed {seed}, batch {size}, {rule}: "
                        f"AUC {result.auc:.4f} after epoch "
                        f"{result.best_epoch}; {result.seconds:.2f} s "
                        f"per epoch, {result.cpu_seconds:.2f} s of CPU",
                        flush=True,
                    )
                if is_same:
                    plain = result
                results.setdefault((size, rule), []).append(result)
    return results


def median(results: list[Result], field: str) -> float:
    """Returns the median over the seeds of one field."""
    return statistics.median(getattr(result, field) for result in results)


def print_table(results: Results, samples: int) -> None:
    rules = _RULES.value
    columns = {"auc": "AUC", "seconds": "s", "cpu_seconds": "CPU s"}
    width = 10 * len(rules)
    print(
        f"\n{'':15}"
        + "".join(f"  {title:{width}}" for title in columns.values())
        + f"\n{'batch':>7}{'steps':>8}"
        + ("  " + "".join(f"{rule:>10}" for rule in rules)) * len(columns)
    )
    for size in map(int, _BATCH_SIZES.value):
        print(f"{size:7}{samples // size:8}", end="")
        for field in columns:
            digits = 4 if field == "auc" else 2
            cells = [median(results[size, rule], field) for rule in rules]
            print("  " + "".join(f"{x:10.{digits}f}" for x in cells), end="")
        print()
    print("Steps, seconds and CPU seconds are those of an epoch.")
    for (size, rule), cell in results.items():
        report(f"auc | {rule} | {size}", "AUC", [r.auc for r in cell])
        seconds = [r.cpu_seconds for r in cell]
        report(f"auc | CPU of an epoch, {rule} | {size}", "s", seconds)
    for rule in rules:
        sizes = [size for size, other in results if other == rule]
        least, most = (
            median(results[end(sizes), rule], "auc") for end in (min, max)
        )
        report(
            f"auc | {rule} | {max(sizes)} less {min(sizes)}",
            "AUC",
            [most - least],
            "at least -0.002" if rule == "cowclip" else "",
        )
    if _SEEDS.value > 1:
        spread = max(
            max(r.auc for r in cell) - min(r.auc for r in cell)
            for cell in results.values()
        )
        print(
            f"Medians of {_SEEDS.value} seeds, whose AUC differs by at most "
            f"{spread:.4f}."
        )


def plot(results: Results, path: str) -> None:
    from matplotlib import pyplot  # Not needed for anything else.

    sizes = [int(size) for size in _BATCH_SIZES.value]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.4))
    for rule in _RULES.value:
        cells = [results[size, rule] for size in sizes]
        style = {
            "color": COLORS[rule],
            "label": rule,
            "marker": "o",
            "markersize": 4 if rule == "cowclip" else 7,
            "fillstyle": "full" if rule == "cowclip" else "none",
        }
        left.plot(sizes, [median(cell, "auc") for cell in cells], **style)
        right.plot(sizes, [median(cell, "seconds") for cell in cells], **style)
    left.set_ylabel("AUC")
    right.set_ylabel("seconds per epoch")
    right.set_ylim(bottom=0.0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if unknown := set(_RULES.value) - set(RULES):
        raise app.UsageError(f"unknown rules: {', '.join(sorted(unknown))}")
    data = frappe.read()
    counts = [len(split[1]) for split in (data.train, data.valid, data.test)]
    print(
        "samples: {} to train with, {} of validation, {} of test".format(
            *counts
        )
    )
    results = train_all(data)
    print_table(results, counts[0])
    if _PLOT.value:
        plot(results, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
