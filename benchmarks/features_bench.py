"""A training step of many features: a layer for each against one for all.

A step looks up a batch of ids for each of 26 features and applies Adagrad with
a given gradient, in a tf.function. Variants, in interleaved rounds of one run:

    layers      a DynamicEmbedding for each feature
    together    one DynamicEmbeddings

Each variant runs with tables in this process (`embedded`) and on one
tfswitch-server program (`grpc`) on loopback. After a few steps the program
checks that both variants read equal rows.

    python benchmarks/features_bench.py --rounds=7 --steps=20
"""

import contextlib
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import report

import tfswitch as tsw

_FEATURES = flags.DEFINE_integer("features", 26, "Tables.")
_EXAMPLES = flags.DEFINE_integer("examples", 2048, "Ids of each per batch.")
_DIM = flags.DEFINE_integer("dim", 16, "Floats per row.")
_ZIPF = flags.DEFINE_float("zipf", 1.2, "Exponent of the ids' frequencies.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 40_000, "Ids per feature.")
_BATCHES = flags.DEFINE_integer("batches", 8, "Different batches.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each variant runs.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps per variant and round.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the ids.")

CHECKED_STEPS = 3

# Runs steps with the batches of these numbers; returns the sum of the rows
# that each read.
Runner = Callable[[Sequence[int]], list[float]]


def draw_ids() -> np.ndarray:
    """Ids of `(batches, features, examples)`."""
    draw = np.random.default_rng(_SEED.value)
    frequencies = np.cumsum(np.arange(1, _VOCABULARY.value + 1) ** -_ZIPF.value)
    shape = (_BATCHES.value, _FEATURES.value, _EXAMPLES.value)
    return np.searchsorted(
        frequencies, draw.random(shape) * frequencies[-1], side="right"
    )


def make_runner(
    ids: np.ndarray, cluster: tsw.Cluster, together: bool
) -> Runner:
    names = [f"f{i}" for i in range(_FEATURES.value)]
    kind = "together" if together else "layers"
    layers = {
        name: tsw.keras.DynamicEmbedding(
            _DIM.value,
            name=f"{kind}_{name}",
            embeddings_initializer="zeros",
            optimizer=tsw.optimizers.Adagrad(0.05),
            cluster=cluster,
        )
        for name in names
    }
    group = tsw.keras.DynamicEmbeddings(layers) if together else None
    for layer in [group] if group else layers.values():
        layer.build()
    batches = tf.constant(ids, tf.int64)
    draw = np.random.default_rng(_SEED.value + 1)
    gradient = tf.constant(
        draw.normal(scale=1e-3, size=(_EXAMPLES.value, _DIM.value)), tf.float32
    )

    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        inputs = dict(zip(names, tf.unstack(batches[number]), strict=True))
        with tf.GradientTape() as tape:
            if group:
                rows = group(inputs, training=True)
            else:
                rows = {
                    name: layer(inputs[name], training=True)
                    for name, layer in layers.items()
                }
            rows = list(rows.values())
        variables = [layer.trainable_variables for layer in layers.values()]
        gradients = tape.gradient(rows, variables, [gradient] * len(rows))
        if group:
            group.apply_gradients([each for (each,) in gradients])
        else:
            for layer, each in zip(layers.values(), gradients, strict=True):
                layer.apply_gradients(each)
        return tf.add_n([tf.reduce_sum(each) for each in rows])

    def run(numbers: Sequence[int]) -> list[float]:
        sums = [step(tf.constant(number)) for number in numbers]
        return [float(total) for total in sums]

    return run


@contextlib.contextmanager
def tfswitch_server() -> Iterator[str]:
    program = pathlib.Path(tsw.__file__).parent / "bin" / "tfswitch-server"
    with subprocess.Popen(
        [program, "--address=127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def main(argv: Sequence[str]) -> None:
    del argv
    ids = draw_ids()
    distinct = [len(np.unique(each)) for batch in ids for each in batch]
    print(
        f"{_FEATURES.value} features x {_EXAMPLES.value} ids, "
        f"{statistics.mean(distinct):.0f} distinct in each"
    )
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(tsw.connect("local://features_bench"))
        address = stack.enter_context(tfswitch_server())
        remote = stack.enter_context(tsw.connect(f"grpc://{address}"))
        runners = {
            (place, kind): make_runner(ids, cluster, kind == "together")
            for place, cluster in (("embedded", local), ("grpc", remote))
            for kind in ("layers", "together")
        }
        expected: list[float] | None = None
        for runner in runners.values():
            sums = runner([0] * CHECKED_STEPS)
            expected = expected or sums
            np.testing.assert_allclose(sums, expected, rtol=1e-3, atol=1e-2)
            runner(range(_BATCHES.value))
        times: dict[tuple[str, str], list[float]] = {k: [] for k in runners}
        numbers = [i % _BATCHES.value for i in range(_STEPS.value)]
        for _ in range(_ROUNDS.value):
            for key, runner in runners.items():
                start = time.perf_counter()
                runner(numbers)
                elapsed = time.perf_counter() - start
                times[key].append(elapsed / _STEPS.value * 1000)

    print("variant             ms per step: median (least to most)")
    for key, values in times.items():
        report(f"speed | {key[0]} | {key[1]}", "ms", values)
        print(
            f"{' '.join(key):18}  {statistics.median(values):8.2f} "
            f"({min(values):.2f} to {max(values):.2f})"
        )
    for place in ("embedded", "grpc"):
        pairs = zip(
            times[place, "layers"], times[place, "together"], strict=True
        )
        ratios = [layers / together for layers, together in pairs]
        report(f"speed | {place} | layers / together", "", ratios)
        print(
            f"{place}: together {statistics.median(ratios):.2f} times the "
            f"steps per second ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    app.run(main)
