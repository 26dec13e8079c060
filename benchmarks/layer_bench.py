"""Measures a training step of one embedding, against ParameterServerStrategy.

A step looks up a batch of ids and applies Adagrad to their rows with a given
gradient, in a tf.function. Variants, in interleaved rounds of one run:

    embedded    tfswitch, the table in this process
    grpc        tfswitch, the table on one tfswitch-server program
    grpc_ahead  the same; rows are read one batch ahead with exact=False, and a
                push is in flight, so that rows are as stale as with pss
    pss         tf.distribute.ParameterServerStrategy, one parameter server
                and one worker, with tf.nn.embedding_lookup and the Adagrad of
                tf_keras.optimizers (Keras 3 does not work with this strategy)
    pss_fused   the same with tf_keras.optimizers.legacy.Adagrad, which applies
                a sparse step in one op where the variable is
    pss_unique  pss_fused, and the worker makes its ids unique first

All variants run on loopback. The variables of ParameterServerStrategy have one
row per possible id. All variants start from the same rows, and after a few
steps the program checks that they read equal rows.

    python benchmarks/layer_bench.py --rounds=7 --steps=40
"""

import contextlib
import functools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags
from figures import report

import tfswitch as tsw

_FIELDS = flags.DEFINE_integer("fields", 26, "Ids per example.")
_EXAMPLES = flags.DEFINE_integer("examples", 2048, "Examples per batch.")
_DIM = flags.DEFINE_integer("dim", 16, "Floats per row.")
_ZIPF = flags.DEFINE_float("zipf", 1.2, "Exponent of the ids' frequencies.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1_000_000, "Possible ids.")
_OWN_IDS = flags.DEFINE_bool(
    "own_ids",
    False,
    "Give each field its own part of the ids, which makes more of a batch "
    "distinct; else all fields draw from all ids.",
)
_BATCHES = flags.DEFINE_integer("batches", 32, "Different batches.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each variant runs.")
_STEPS = flags.DEFINE_integer("steps", 40, "Steps per variant and round.")
_VARIANTS = flags.DEFINE_list(
    "variants",
    "embedded,grpc,grpc_ahead,pss,pss_fused,pss_unique",
    "Which to run.",
)
_SEED = flags.DEFINE_integer("seed", 1, "Of the ids.")
_TASK = flags.DEFINE_string("task", None, "Internal: be this task of PSS.")

LEARNING_RATE = 0.05
CHECKED_STEPS = 4

# Runs steps with the batches of these numbers; returns the sum of the rows
# that each read.
Runner = Callable[[Sequence[int]], list[float]]


def draw_ids() -> np.ndarray:
    """Ids of `(batches, examples, fields)`."""
    draw = np.random.default_rng(_SEED.value)
    parts = _FIELDS.value if _OWN_IDS.value else 1
    size = _VOCABULARY.value // parts
    frequencies = np.cumsum(np.arange(1, size + 1) ** -_ZIPF.value)
    shape = (_BATCHES.value, _EXAMPLES.value, _FIELDS.value)
    ranks = np.searchsorted(
        frequencies, draw.random(shape) * frequencies[-1], side="right"
    )
    # Frequent ids are spread over all ids, as hashed ids would be.
    ids = draw.permutation(size)[ranks]
    return ids + (np.arange(_FIELDS.value) % parts) * size


def draw_gradients() -> np.ndarray:
    """Gradients of `(examples, fields, dim)`, the same for each batch."""
    draw = np.random.default_rng(_SEED.value + 1)
    shape = (_EXAMPLES.value, _FIELDS.value, _DIM.value)
    return draw.normal(scale=1e-3, size=shape).astype(np.float32)


def tfswitch_runner(
    ids: np.ndarray, cluster: tsw.Cluster, name: str = "bench"
) -> Runner:
    layer = tsw.keras.DynamicEmbedding(
        _DIM.value,
        name=name,
        embeddings_initializer="zeros",
        optimizer=tsw.optimizers.Adagrad(LEARNING_RATE),
        cluster=cluster,
    )
    layer.build()
    batches, gradients = tf.constant(ids), tf.constant(draw_gradients())

    @tf.function
    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = layer(ids, training=True)
        layer.apply_gradients(
            tape.gradient(rows, layer.trainable_variables, gradients)
        )
        return tf.reduce_sum(rows)

    @functools.cache  # Tracing takes as long as a few steps.
    def batches_of(numbers: tuple[int, ...]) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(list(numbers))
        data = data.map(lambda number: batches[number])
        if name == "ahead":
            data = tsw.data.prefetch_embeddings(data, layer, exact=False)
        return data

    def run(numbers: Sequence[int]) -> list[float]:
        sums = [step(ids) for ids in batches_of(tuple(numbers))]
        return [float(total) for total in sums]

    return run


def pss_runner(
    ids: np.ndarray,
    strategy: tf.distribute.ParameterServerStrategy,
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    variant: str,
) -> Runner:
    with strategy.scope():
        table = tf.Variable(tf.zeros([_VOCABULARY.value, _DIM.value]))
        if variant == "pss":
            optimizer = tf_keras.optimizers.Adagrad(LEARNING_RATE)
            optimizer.build([table])
        else:
            optimizer = tf_keras.optimizers.legacy.Adagrad(LEARNING_RATE)
            optimizer._create_slots([table])
    gradients = draw_gradients()

    def lookup(ids: tf.Tensor) -> tf.Tensor:
        if variant != "pss_unique":
            return tf.nn.embedding_lookup(table, ids)
        found = tf.unique(tf.reshape(ids, [-1]))
        rows = tf.nn.embedding_lookup(table, found.y)
        rows = tf.gather(rows, found.idx)
        return tf.reshape(rows, [_EXAMPLES.value, _FIELDS.value, _DIM.value])

    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        def replica_step(number: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                rows = lookup(tf.constant(ids)[number])
            gradient = tape.gradient(rows, table, tf.constant(gradients))
            optimizer.apply_gradients([(gradient, table)])
            return tf.reduce_sum(rows)

        return strategy.run(replica_step, (number,))

    def run(numbers: Sequence[int]) -> list[float]:
        sums = [
            coordinator.schedule(step, (tf.constant(number),))
            for number in numbers
        ]
        coordinator.join()
        return [float(total.fetch()) for total in sums]

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


@contextlib.contextmanager
def pss_cluster() -> Iterator[tf.distribute.ParameterServerStrategy]:
    """Runs a parameter server and a worker of TensorFlow."""
    tasks = ("ps", "worker")
    with contextlib.ExitStack() as sockets:
        # All ports are chosen before the first one is freed again, so they
        # differ.
        ports = []
        for _ in tasks:
            listener = sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
    spec = {
        task: [f"127.0.0.1:{port}"]
        for task, port in zip(tasks, ports, strict=True)
    }
    with contextlib.ExitStack() as stack:
        for task in tasks:
            config = {"cluster": spec, "task": {"type": task, "index": 0}}
            process = subprocess.Popen(
                [sys.executable, __file__, f"--task={task}"],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)  # It serves until then.
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), rpc_layer="grpc"
        )
        yield tf.distribute.ParameterServerStrategy(resolver)


def serve_pss_task() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    )
    server.join()


def make_runners(
    ids: np.ndarray, stack: contextlib.ExitStack
) -> dict[str, Runner]:
    """Starts what the variants need and returns one runner for each."""
    runners: dict[str, Runner] = {}
    wanted = _VARIANTS.value
    # First, because connecting to its cluster renames this process's devices.
    pss = [name for name in wanted if name.startswith("pss")]
    if pss:
        strategy = stack.enter_context(pss_cluster())
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        for name in pss:
            runners[name] = pss_runner(ids, strategy, coordinator, name)
    if "embedded" in wanted:
        cluster = stack.enter_context(tsw.connect("local://bench"))
        runners["embedded"] = tfswitch_runner(ids, cluster)
    for name, depth, table in (
        ("grpc", 0, "bench"),
        ("grpc_ahead", 1, "ahead"),
    ):
        if name in wanted:
            address = stack.enter_context(tfswitch_server())
            cluster = stack.enter_context(
                tsw.connect(f"grpc://{address}", push_depth=depth)
            )
            runners[name] = tfswitch_runner(ids, cluster, table)
    return runners


def check_equal(runners: dict[str, Runner]) -> None:
    """Runs the first steps; all variants must read the same rows."""
    expected: list[float] | None = None
    for name, runner in runners.items():
        # All steps use the same batch, so each step reads the rows of the step
        # before.
        sums = runner([0] * CHECKED_STEPS)
        print(f"{name:10} sums of rows", [f"{total:.3f}" for total in sums])
        expected = expected or sums
        if name == "grpc_ahead":
            continue  # Its rows may lack the last step.
        np.testing.assert_allclose(sums, expected, rtol=1e-3, atol=1e-2)


def main(argv: Sequence[str]) -> None:
    del argv
    if _TASK.value:
        serve_pss_task()
        return
    ids = draw_ids()
    distinct = [len(np.unique(batch)) for batch in ids]
    print(
        f"{ids[0].size} ids per step, {statistics.mean(distinct):.0f} of them "
        f"distinct; {len(np.unique(ids))} distinct in {len(ids)} batches"
    )
    with contextlib.ExitStack() as stack:
        runners = make_runners(ids, stack)
        check_equal(runners)
        for runner in runners.values():  # Rows that exist, warm connections.
            runner(range(_BATCHES.value))
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(_ROUNDS.value):
            for name, runner in runners.items():
                numbers = [i % _BATCHES.value for i in range(_STEPS.value)]
                start = time.perf_counter()
                runner(numbers)
                elapsed = time.perf_counter() - start
                times[name].append(elapsed / _STEPS.value * 1000)

    suffix = ", own ids" if _OWN_IDS.value else ""
    print("variant     ms per step: median (least to most)   steps/s")
    for name, values in times.items():
        report(f"speed | {name}{suffix} | step", "ms", values)
        median = statistics.median(values)
        print(
            f"{name:10}  {median:8.2f} ({min(values):.2f} to "
            f"{max(values):.2f})  {1000 / median:20.1f}"
        )
    for ours, bar in (
        ("embedded", "at least 8"),
        ("grpc", "at least 5"),
        ("grpc_ahead", "at least 5"),
    ):
        for theirs in ("pss", "pss_fused", "pss_unique"):
            if ours in times and theirs in times:
                ratios = [
                    b / a
                    for a, b in zip(times[ours], times[theirs], strict=True)
                ]
                report(
                    f"speed | {ours}{suffix} | times {theirs}",
                    "",
                    ratios,
                    bar if theirs == "pss" and not suffix else "",
                )
                print(
                    f"{ours} against {theirs}: "
                    f"{statistics.median(ratios):.1f} times the steps per "
                    f"second ({min(ratios):.1f} to {max(ratios):.1f})"
                )


if __name__ == "__main__":
    app.run(main)
