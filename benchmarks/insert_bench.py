"""Measures how long new rows take through the op, against TFRA.

A round makes a table and looks up batches of new ids until it has `--rows`
rows of 16 floats with an Adagrad slot. Variants take turns, each in a process
of its own, on the same ids. The first round is not counted, because the host of
a virtual machine provides memory only when it is first touched.

    growing, reserved   tfswitch, a table in this process: `lookup_or_create`,
                        without and with `capacity`
    tfra_growing, tfra_reserved
                        TensorFlow Recommenders Addons 0.8.1, in a virtual
                        environment that this program makes: a single upsert of
                        as many floats, which computes no first values; without
                        and with `init_size`
    tfra_training       the same with `init_size`, and all that a training step
                        does for new ids: a lookup, and upserts of rows and
                        slots

    python benchmarks/insert_bench.py --rows=4000000 --rounds=5
"""

import json
import os
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

_ROWS = flags.DEFINE_integer("rows", 4_000_000, "Rows of a table.")
_BATCH = flags.DEFINE_integer("batch", 65_536, "New ids of a batch.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each variant runs.")
_VARIANTS = flags.DEFINE_list(
    "variants",
    "growing,reserved,tfra_growing,tfra_reserved,tfra_training",
    "Which to run.",
)
_TFRA = flags.DEFINE_string(
    "tfra_folder", "build/tfra-env", "The virtual environment of TFRA."
)
_VARIANT = flags.DEFINE_string("variant", None, "Internal: be this variant.")

_DIM = 16
# The variant with which each of ours is compared.
_RIVALS = {"growing": "tfra_growing", "reserved": "tfra_reserved"}


# A function that inserts a batch, and tables to empty after the round.
_Made = tuple[Callable[[Any], object], list[Any]]


_BARS = {"growing": "at most 120", "reserved": "at most 80"}


def _tfswitch(name: str, round_number: int) -> _Made:
    import tfswitch as tsw

    table = tsw.EmbeddingTable(
        f"t{round_number}",
        _DIM,
        optimizer="adagrad",
        capacity=_ROWS.value if name == "reserved" else None,
    )
    table.size()  # Makes the table.
    return table.lookup_or_create, [table]


def _tfra(name: str, round_number: int) -> _Made:
    import tensorflow as tf
    import tensorflow_recommenders_addons as tfra

    def variable(part: str, dim: int) -> Any:
        return tfra.dynamic_embedding.get_variable(
            f"{part}{round_number}",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=dim,
            initializer=tf.keras.initializers.RandomUniform(-0.05, 0.05),
            devices=["/CPU:0"],
            init_size=0 if name == "tfra_growing" else _ROWS.value,
        )

    if name != "tfra_training":
        rows = variable("rows", 2 * _DIM)
        values = tf.zeros([_BATCH.value, 2 * _DIM])

        def upsert(ids: Any) -> None:
            rows.upsert(ids, values[: tf.shape(ids)[0]])

        return upsert, [rows]
    rows, slots = variable("rows", _DIM), variable("slots", _DIM)

    def insert(ids: Any) -> Any:
        found = rows.lookup(ids)
        rows.upsert(ids, found)
        slots.upsert(ids, tf.fill(tf.shape(found), 0.1))
        return found

    return insert, [rows, slots]


def _serve(name: str) -> None:
    """Runs a round for each line on stdin, and prints its figures."""
    import tensorflow as tf

    make = _tfswitch if name in _RIVALS else _tfra
    ids = np.random.default_rng(1).integers(0, 2**62, _ROWS.value)
    batches = [
        tf.constant(ids[i : i + _BATCH.value])
        for i in range(0, len(ids), _BATCH.value)
    ]
    for round_number, _ in enumerate(sys.stdin):
        python_function, tables = make(name, round_number)
        insert = tf.function(
            python_function,
            input_signature=[tf.TensorSpec([None], tf.int64)],
        )
        insert.get_concrete_function()
        time.sleep(3.0)  # The memory of a table with a capacity gets ready.
        cpu, walls = time.process_time(), []
        for batch in batches:
            begin = time.perf_counter()
            insert(batch)
            walls.append(time.perf_counter() - begin)
        per_row = 1e9 / len(ids)
        figures = {
            "cpu": (time.process_time() - cpu) * per_row,
            "wall": sum(walls) * per_row,
            "worst": max(walls) * 1e3,
        }
        num_rows = int(tables[0].size())
        if num_rows != len(ids):
            raise RuntimeError(f"{name}: {num_rows} rows of {len(ids)} ids")
        for table in tables:
            table.drop() if name in _RIVALS else table.clear()
        print(json.dumps(figures), flush=True)


def _start(name: str) -> subprocess.Popen[str]:
    python = sys.executable
    if name.startswith("tfra"):
        python = python_of(_TFRA.value)
    command = [
        python,
        __file__,
        f"--variant={name}",
        f"--rows={_ROWS.value}",
        f"--batch={_BATCH.value}",
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if _VARIANT.value is not None:
        _serve(_VARIANT.value)
        return
    programs = {name: _start(name) for name in _VARIANTS.value}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for number in range(-1, _ROUNDS.value):
        for name, program in programs.items():
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write("\n")
            program.stdin.flush()
            line = next(
                (line for line in program.stdout if line.startswith("{")), None
            )
            if line is None:
                raise RuntimeError(f"'{name}' ended with {program.wait()}")
            if number >= 0:
                rounds[name].append(json.loads(line))
    for name, program in programs.items():
        program.communicate()
        for figure, unit, bar in (
            ("cpu", "ns", _BARS.get(name, "")),
            ("wall", "ns", ""),
            ("worst", "ms", ""),
        ):
            values = [values[figure] for values in rounds[name]]
            report(f"op | {name} | {figure}", unit, values, bar)
            print(
                f"{name}, {figure}: {statistics.median(values):.0f} {unit} "
                f"({min(values):.0f} to {max(values):.0f})"
            )
    for name, rival in _RIVALS.items():
        if name not in programs or rival not in programs:
            continue
        for figure in ("cpu", "wall"):
            ratios = [
                theirs[figure] / ours[figure]
                for theirs, ours in zip(
                    rounds[rival], rounds[name], strict=True
                )
            ]
            report(
                f"ratio | {rival} / {name} | {figure}",
                "",
                ratios,
                "at least 3",
            )
            print(
                f"{rival} / {name}, {figure}: {statistics.median(ratios):.2f}"
            )


if __name__ == "__main__":
    app.run(main)
