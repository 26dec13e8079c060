"""Measures whole training steps of a model, and what hides the exchange.

A step reads the rows of `--examples` x 26 ids, computes an MLP 256-128-64, and
updates with Adagrad. Variants take turns, each in a process of its own, on the
same batches, which a dataset gives them:

    compute         the MLP alone, on a constant in place of the rows
    embedded        tfswitch, tables in this process
    embedded_ahead  the same with `prefetch_embeddings` and push_depth=1
    grpc            tfswitch, tables on one tfswitch-server program
    grpc_ahead      the same with `prefetch_embeddings` and push_depth=1
    grpc_inexact    the same with exact=False
    keras_1m, keras_10m
                    keras.layers.Embedding with so many rows
    tfra            TensorFlow Recommenders Addons 0.8.1, in a virtual
                    environment that this program makes

    python benchmarks/step_bench.py --rounds=7 --steps=40
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from absl import app, flags
from figures import report
from tfra_env import python_of

_EXAMPLES = flags.DEFINE_integer("examples", 2048, "Examples per batch.")
_ZIPF = flags.DEFINE_float("zipf", 1.05, "Exponent of the ids' frequencies.")
_BATCHES = flags.DEFINE_integer("batches", 32, "Different batches.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each variant runs.")
_STEPS = flags.DEFINE_integer("steps", 40, "Steps per variant and round.")
_VARIANTS = flags.DEFINE_list(
    "variants",
    "compute,embedded,embedded_ahead,grpc,grpc_ahead,grpc_inexact,keras_1m,"
    "keras_10m,tfra",
    "Which to run.",
)
_TFRA = flags.DEFINE_string(
    "tfra_folder", "build/tfra-env", "The virtual environment of TFRA."
)
_VARIANT = flags.DEFINE_string("variant", None, "Internal: be this variant.")
_SERVER = flags.DEFINE_string("server", None, "Internal: a server's address.")

_FIELDS, _DIM, _IDS = 26, 16, 1_000_000

# Pairs of variants, and bars for the ratio of their times.
_RATIOS = {
    ("embedded_ahead", "compute"): "at most 1.25",
    ("grpc", "grpc_ahead"): "at least 1.15",
    ("grpc", "grpc_inexact"): "at least 1.25",
    ("tfra", "embedded_ahead"): "",
    ("keras_1m", "embedded_ahead"): "",
    ("keras_10m", "embedded_ahead"): "",
}


def _draw() -> tuple[np.ndarray, np.ndarray]:
    """Returns ids of `(batches, examples, 26)`, and labels."""
    draw = np.random.default_rng(1)
    frequencies = np.cumsum(np.arange(1, _IDS + 1) ** -_ZIPF.value)
    shape = (_BATCHES.value, _EXAMPLES.value, _FIELDS)
    ranks = np.searchsorted(
        frequencies, draw.random(shape) * frequencies[-1], side="right"
    )
    labels = draw.integers(0, 2, (*shape[:2], 1)).astype(np.float32)
    return draw.permutation(_IDS)[ranks], labels


def _embedding(name: str, keras: Any) -> Any:
    if name.startswith("keras"):
        rows = {"keras_1m": _IDS, "keras_10m": 10 * _IDS}[name]
        return keras.layers.Embedding(rows, _DIM)
    if name == "tfra":
        import tensorflow_recommenders_addons as tfra

        return tfra.dynamic_embedding.keras.layers.Embedding(
            _DIM,
            initializer=keras.initializers.RandomUniform(-0.05, 0.05),
            devices=["/CPU:0"],
            init_capacity=_IDS,
            name="rows",
        )
    import tfswitch as tsw

    tsw.connect(
        f"grpc://{_SERVER.value}" if name.startswith("grpc") else "local://",
        push_depth=0 if name in ("embedded", "grpc") else 1,
    )
    return tsw.keras.DynamicEmbedding(
        _DIM, name=name, optimizer=tsw.optimizers.Adagrad(0.05), capacity=_IDS
    )


def _make(name: str) -> Callable[[int], None]:
    """Returns a function that makes steps."""
    import tensorflow as tf

    keras = tf.keras
    layers: list[Any] = [keras.layers.Flatten()]
    layers += [keras.layers.Dense(n, "relu") for n in (256, 128, 64)]
    mlp = keras.Sequential([*layers, keras.layers.Dense(1)])
    optimizer: Any = keras.optimizers.Adagrad(0.05)
    if name == "compute":
        rows = tf.random.normal([_EXAMPLES.value, _FIELDS, _DIM])
        model: Any = lambda ids, training: mlp(rows, training=training)  # noqa: E731
        mlp.build(rows.shape)
        variables = lambda: mlp.trainable_variables  # noqa: E731
    else:
        ids = keras.Input((_FIELDS,), dtype="int64")
        model = keras.Model(ids, mlp(_embedding(name, keras)(ids)))
        variables = lambda: model.trainable_variables  # noqa: E731
    if name == "tfra":
        import tensorflow_recommenders_addons as tfra

        optimizer = tfra.dynamic_embedding.DynamicEmbeddingOptimizer(optimizer)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
        gradients = tape.gradient(loss, variables())
        optimizer.apply_gradients(zip(gradients, variables(), strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices(_draw()).repeat()
    if name.endswith(("ahead", "inexact")):
        import tfswitch as tsw

        data = tsw.data.prefetch_embeddings(
            data, model, exact=name.endswith("ahead")
        )
    else:
        data = data.prefetch(1)
    batches = iter(data)

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = step(*next(batches))
        float(loss)

    return run


def _serve(name: str) -> None:
    """Makes steps for each line on stdin, and prints its figures."""
    run = _make(name)
    # Keras's Adagrad updates all rows of an Embedding, so few steps take long.
    is_slow = name.startswith("keras")
    steps = _STEPS.value // 10 + 1 if is_slow else _STEPS.value
    run(3 if is_slow else _BATCHES.value + 8)
    print("{}", flush=True)  # Ready.
    for _ in sys.stdin:
        run(1 if is_slow else 3)
        cpu, begin = time.process_time(), time.perf_counter()
        run(steps)
        figures = {
            "wall": (time.perf_counter() - begin) / steps * 1e3,
            "cpu": (time.process_time() - cpu) / steps * 1e3,
        }
        print(json.dumps(figures), flush=True)


def _start(name: str, server: str) -> subprocess.Popen[str]:
    python = python_of(_TFRA.value) if name == "tfra" else sys.executable
    own = {"TF_USE_LEGACY_KERAS": "1"} if name == "tfra" else {}
    return subprocess.Popen(
        [
            python,
            __file__,
            f"--variant={name}",
            f"--server={server}",
            f"--examples={_EXAMPLES.value}",
            f"--zipf={_ZIPF.value}",
            f"--batches={_BATCHES.value}",
            f"--steps={_STEPS.value}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | own,
    )


def _read(name: str, program: subprocess.Popen[str]) -> dict[str, float]:
    """Returns what a program prints next."""
    assert program.stdout is not None
    line = next((x for x in program.stdout if x.startswith("{")), None)
    if line is None:
        raise RuntimeError(f"'{name}' ended with {program.wait()}")
    figures: dict[str, float] = json.loads(line)
    return figures


def _run_rounds(server: str, cpu_of_server: Callable[[], float]) -> None:
    programs: dict[str, subprocess.Popen[str]] = {}
    for name in _VARIANTS.value:
        programs[name] = _start(name, server)
        _read(name, programs[name])  # It is ready.
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(_ROUNDS.value):
        for name, program in programs.items():
            assert program.stdin is not None
            before = cpu_of_server()
            program.stdin.write("\n")
            program.stdin.flush()
            figures = _read(name, program)
            figures["cpu"] += (cpu_of_server() - before) / _STEPS.value * 1e3
            rounds[name].append(figures)
    for program in programs.values():
        program.communicate()
    cores = len(os.sched_getaffinity(0))
    for name, values in rounds.items():
        busy = [v["wall"] * cores / v["cpu"] for v in values]
        bar = "at most 1.12" if name == "grpc_ahead" else ""
        for figure, unit, numbers, to_reach in (
            ("step", "ms", [v["wall"] for v in values], ""),
            ("CPU of all processes", "ms", [v["cpu"] for v in values], ""),
            ("step / (CPU / cores)", "", busy, bar),
        ):
            report(f"step | {name} | {figure}", unit, numbers, to_reach)
            print(
                f"{name}, {figure}: {statistics.median(numbers):.2f} {unit} "
                f"({min(numbers):.2f} to {max(numbers):.2f})"
            )
    for (above, below), bar in _RATIOS.items():
        if above in rounds and below in rounds:
            ratios = [
                a["wall"] / b["wall"]
                for a, b in zip(rounds[above], rounds[below], strict=True)
            ]
            report(
                f"ratio | {above} / {below} | time of a step", "", ratios, bar
            )
            print(f"{above} / {below}: {statistics.median(ratios):.3f}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if _VARIANT.value is not None:
        _serve(_VARIANT.value)
        return
    root = pathlib.Path(__file__).parents[1]
    with subprocess.Popen(
        [root / "tfswitch/bin/tfswitch-server", "--address=127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        stat = pathlib.Path(f"/proc/{server.pid}/stat")

        def cpu_of_server() -> float:
            ticks = stat.read_text(encoding="utf-8").split(") ")[1].split()
            return sum(map(int, ticks[11:13])) / os.sysconf("SC_CLK_TCK")

        try:
            _run_rounds(address, cpu_of_server)
        finally:
            server.terminate()


if __name__ == "__main__":
    app.run(main)
