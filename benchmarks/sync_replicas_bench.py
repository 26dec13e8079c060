"""Runs TensorFlow's SyncReplicasOptimizer and tfswitch's in standard cases.

    python benchmarks/sync_replicas_bench.py             # who trains what
    python benchmarks/sync_replicas_bench.py --overhead  # steps per second

Sample i owns element i of a variable, the loss is minus the mean over the batch
and SGD's rate is 1. So at the end element i is the weight with which sample i
was trained; 0 means never. "stock" is tf.compat.v1.train.SyncReplicasOptimizer
with a tf.train.Server as `ps`, "ps" is tfswitch.train.SyncReplicasOptimizer
with the same servers, and "servers" is tfswitch's class with a tfswitch server.
Every worker is a process; a worker that does not end in time counts as hanging,
and is killed. `--plot` draws the lost samples.

The overhead is measured with equal data, two workers and `num_tokens=0`, on a
toy model and on a CTR model: 256 examples of 26 ids of a vocabulary of 100,000,
embeddings of dim 16 and three dense layers, Adagrad. The engines take turns;
figures are medians.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags
from figures import report

import tfswitch as tsw

v1 = tf.compat.v1

_OVERHEAD = flags.DEFINE_bool("overhead", False, "Measure steps per second.")
_CASES = flags.DEFINE_list("cases", None, "Which cases; default: all.")
_LIMIT = flags.DEFINE_float("limit", 40.0, "Seconds that a case may take.")
_REPS = flags.DEFINE_integer("reps", 3, "Of the overhead, per engine.")
_STEPS = flags.DEFINE_integer("steps", 300, "Of the overhead, measured.")
_PLOT = flags.DEFINE_string(
    "plot", None, "File for the plot, .svg; needs matplotlib."
)
_JOB = flags.DEFINE_string("job", None, "Of one process; set by itself.")

ENGINES = ("stock", "ps", "servers")

_LABELS = ("TensorFlow's", "tfswitch's", "tfswitch's on its own servers")
_WARM_UP = 30

# Sizes of each worker's batches, gradients per step, tokens at the start.
CASES: dict[str, dict[str, Any]] = {
    "other_ends_first": {"sizes": [[4] * 6, [4] * 4]},
    "chief_ends_first": {"sizes": [[4] * 4, [4] * 7]},
    "one_without_data": {"sizes": [[4] * 4, [4] * 4, []]},
    "even": {"sizes": [[4] * 6, [4] * 6]},
    "even_default_tokens": {"sizes": [[4] * 6, [4] * 6], "num_tokens": -1},
    "small_last_batch": {"sizes": [[4] * 3, [4, 4, 1]]},
    "backup_even": {"sizes": [[4] * 8] * 3, "aggregate": 2},
    "backup_uneven": {"sizes": [[4] * 10, [4] * 4, [4] * 6], "aggregate": 2},
    "repeated_ids": {"ids": [[[3, 1, 5, 5]], [[1, 3, 3, 7]]]},
}


def batches_of(case: dict[str, Any]) -> list[list[list[int]]]:
    """Ids of each worker's batches; each sample has its own."""
    if "ids" in case:
        return case["ids"]
    batches, first = [], 0
    for sizes in case["sizes"]:
        mine = []
        for size in sizes:
            mine.append(list(range(first, first + size)))
            first += size
        batches.append(mine)
    return batches


def free_port() -> int:
    """Returns a port below those that outgoing connections get."""
    for port in np.random.default_rng().integers(20000, 32000, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", int(port)))
            return int(port)
    raise RuntimeError("no free port")


# --- One process -------------------------------------------------------------


def _toy_model(job: dict[str, Any]) -> tuple[Any, Any, Any, list[Any]]:
    ids = v1.placeholder(tf.int64, [None])
    weights = v1.get_variable(
        "weights", [job["num_ids"]], initializer=v1.zeros_initializer()
    )
    return ids, -tf.reduce_mean(tf.gather(weights, ids)), tf.size(ids), []


def _ctr_model(job: dict[str, Any]) -> tuple[Any, Any, Any, list[Any]]:
    ids = v1.placeholder(tf.int64, [None, 26])
    lookups = []
    if job["engine"] != "servers":
        table = v1.get_variable(
            "embedding",
            [100_000, 16],
            initializer=v1.random_uniform_initializer(-0.05, 0.05),
        )
        rows = tf.gather(table, ids)
    else:
        served = tsw.EmbeddingTable(
            "embedding",
            16,
            optimizer=tsw.optimizers.Adagrad(0.05),
            consistency="bsp",
        )
        rows = served.lookup_or_create(ids)
        lookups.append((served, ids, rows))
    hidden = tf.reshape(rows, [-1, 26 * 16])
    for i, width in enumerate((128, 64, 1)):
        kernel = v1.get_variable(f"kernel{i}", [hidden.shape[1], width])
        bias = v1.get_variable(f"bias{i}", [width])
        hidden = hidden @ kernel + bias
        if width > 1:
            hidden = tf.nn.relu(hidden)
    labels = tf.cast(ids[:, :1] % 2, tf.float32)
    loss = tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels, hidden)
    )
    return ids, loss, tf.shape(ids)[0], lookups


def _run_worker(job: dict[str, Any]) -> None:
    index, count = job["index"], len(job["workers"])
    is_chief = index == 0
    is_stock = job["engine"] == "stock"
    target, config = "", None
    if job["engine"] != "servers":
        config = v1.ConfigProto(
            device_filters=["/job:ps", f"/job:worker/task:{index}"]
        )
        target = v1.train.Server(
            {"ps": [job["server"]], "worker": job["workers"]},
            job_name="worker",
            task_index=index,
            config=config,
        ).target
        place = v1.train.replica_device_setter(
            ps_tasks=1, worker_device=f"/job:worker/task:{index}"
        )
    else:
        tsw.connect(f"grpc://{job['server']}")
        place = "/job:localhost/task:0"
    make_model = _ctr_model if job["model"] == "ctr" else _toy_model
    inner = (
        v1.train.AdagradOptimizer(0.05)
        if job["model"] == "ctr"
        else v1.train.GradientDescentOptimizer(1.0)
    )
    with v1.device(place):
        ids, loss, size, lookups = make_model(job)
        step = v1.train.get_or_create_global_step()
        if is_stock:
            optimizer = v1.train.SyncReplicasOptimizer(
                inner, job["aggregate"], count
            )
            train_op = optimizer.minimize(loss, step)
            session_of = v1.train.MonitoredTrainingSession
        else:
            optimizer = tsw.train.SyncReplicasOptimizer(
                inner,
                job["aggregate"],
                count,
                batch_weight=size,
                task_index=index,
            )
            train_op = optimizer.minimize(loss, step, table_lookups=lookups)
            session_of = tsw.train.MonitoredTrainingSession
        hook = optimizer.make_session_run_hook(
            is_chief, num_tokens=job["num_tokens"]
        )
    with session_of(
        target,
        is_chief,
        job["folder"] if is_chief else None,
        hooks=[hook],
        config=config,
        log_step_count_steps=None,
        save_summaries_steps=None,
        save_summaries_secs=None,
    ) as session:
        print("ready", flush=True)
        if job["steps"]:
            _measure(job, session, train_op, ids)
        else:
            for batch in job["batches"][index]:
                session.run(train_op, {ids: batch})
        print(json.dumps({"trained": True}), flush=True)
        ended = time.perf_counter()
    print(json.dumps({"close_s": time.perf_counter() - ended}), flush=True)


def _measure(
    job: dict[str, Any], session: Any, train_op: Any, ids: Any
) -> None:
    random = np.random.default_rng(job["index"])
    shape = (256, 26) if job["model"] == "ctr" else (64,)
    limit = 100_000 if job["model"] == "ctr" else job["num_ids"]
    batches = [
        np.minimum(random.zipf(1.2, shape), limit) - 1 for _ in range(16)
    ]
    for i in range(_WARM_UP):
        session.run(train_op, {ids: batches[i % 16]})
    begun = time.perf_counter()
    for i in range(job["steps"]):
        session.run(train_op, {ids: batches[i % 16]})
    seconds = time.perf_counter() - begun
    print(json.dumps({"step_ms": 1e3 * seconds / job["steps"]}), flush=True)


def _run_process(job: dict[str, Any]) -> None:
    v1.disable_eager_execution()
    if job["role"] == "worker":
        _run_worker(job)
        return
    server = v1.train.Server(
        {"ps": [job["server"]], "worker": job["workers"]},
        job_name="ps",
        task_index=0,
    )
    print("ready", flush=True)
    server.join()


# --- All of them -------------------------------------------------------------


class Process:
    """This program in another process."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, f"--job={json.dumps(job)}"],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_for_line(self) -> str:
        """Returns the next line that it prints."""
        line = self._process.stdout.readline().strip()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(self._errors.read()[-4000:])
        return line

    def measured(self) -> dict[str, Any]:
        """Returns the first finding that it prints."""
        while not (line := self.wait_for_line()).startswith("{"):
            pass
        return json.loads(line)

    def finish(self, deadline: float) -> dict[str, Any]:
        """Returns what it printed, and how it ended."""
        try:
            output, _ = self._process.communicate(
                timeout=max(0.1, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            code = "does not close" if "trained" in output else "hangs"
        else:
            code = f"exit {self._process.returncode}"
        found: dict[str, Any] = {"ended": code}
        for line in output.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        return found

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._errors.close()


@contextlib.contextmanager
def _running_server(engine: str, job: dict[str, Any]) -> Iterator[str]:
    if engine == "servers":
        with tsw.Server() as server:
            yield server.address
        return
    process = Process({**job, "role": "ps"})
    try:
        process.wait_for_line()
        yield job["server"]
    finally:
        process.kill()


def _final_weights(engine: str, server: str, num_ids: int) -> np.ndarray:
    if engine == "servers":
        with tsw.Cluster(f"grpc://{server}") as cluster:
            table = tsw.DenseTable(
                "sync_replicas/variables",
                {"weights": (num_ids,)},
                optimizer=tsw.optimizers.SGD(0.0),
                consistency="bsp",
                cluster=cluster,
            )
            return table.pull()[0].numpy()
    with tf.Graph().as_default(), tf.device("/job:ps/task:0"):
        weights = v1.get_variable("weights", [num_ids])
        # The workers have gone.
        config = v1.ConfigProto(device_filters=["/job:ps"])
        with v1.Session(f"grpc://{server}", config=config) as session:
            return session.run(weights)


def run_case(
    engine: str,
    batches: Sequence[Sequence[Sequence[int]]],
    *,
    aggregate: int | None = None,
    num_tokens: int = 0,
    model: str = "toy",
    steps: int = 0,
    limit: float = 60.0,
) -> dict[str, Any]:
    """Trains with worker processes.

    Args:
        engine: "stock" or "servers".
        batches: Ids of each worker's batches.
        aggregate: Gradients per step; None: as many as workers.
        num_tokens: For the stock class.
        model: "toy" or "ctr".
        steps: The number of steps to measure, in place of `batches`.
        limit: The seconds after which a worker counts as hanging.

    Returns:
        "ended" and other findings of each worker, as "workers"; without `steps`
        the "weights" that samples were trained with.
    """
    num_ids = 1 + max(
        (i for mine in batches for batch in mine for i in batch), default=0
    )
    with contextlib.ExitStack() as stack:
        job = {
            "engine": engine,
            "server": f"127.0.0.1:{free_port()}",
            "workers": [f"127.0.0.1:{free_port()}" for _ in batches],
            "batches": batches,
            "num_ids": num_ids,
            "aggregate": aggregate or len(batches),
            "num_tokens": num_tokens,
            "model": model,
            "steps": steps,
            "folder": stack.enter_context(tempfile.TemporaryDirectory()),
            "role": "worker",
        }
        server = stack.enter_context(_running_server(engine, job))
        job["server"] = server
        workers = []
        for index in range(len(batches)):
            workers.append(Process({**job, "index": index}))
            stack.callback(workers[-1].kill)
            # The others look for the chief's variables every 30 s only.
            if engine == "stock" and index == 0:
                workers[0].wait_for_line()
        deadline = time.monotonic() + limit
        if steps:
            # Not until they have closed, which takes the stock class minutes.
            return {"workers": [worker.measured() for worker in workers]}
        found = [worker.finish(deadline) for worker in workers]
        weights = _final_weights(engine, server, num_ids)
    return {"workers": found, "weights": weights}


def _compare_cases() -> None:
    lost: dict[str, list[float]] = {}
    print(
        "| case | engine | workers end | samples never trained | weights "
        "| session closes, s |"
    )
    print("|---|---|---|---|---|---|")
    for name in _CASES.value or CASES:
        case = CASES[name]
        batches = batches_of(case)
        samples = sorted({i for mine in batches for b in mine for i in b})
        for engine in ENGINES:
            found = run_case(
                engine,
                batches,
                aggregate=case.get("aggregate"),
                num_tokens=case.get("num_tokens", 0),
                limit=_LIMIT.value,
            )
            weights = found["weights"][samples]
            never = int((np.abs(weights) < 1e-6).sum())
            report(f"never trained | {name} | {engine}", "", [never])
            lost.setdefault(name, []).append(100.0 * never / len(samples))
            ends = ", ".join(w["ended"] for w in found["workers"])
            values = " ".join(f"{w:.3g}" for w in sorted(set(weights.round(5))))
            closing = [
                f"{w['close_s']:.2f}" if "close_s" in w else "-"
                for w in found["workers"]
            ]
            print(
                f"| {name} | {engine} | {ends} | {never} of {len(samples)} | "
                f"{values} | {', '.join(closing)} |",
                flush=True,
            )
    if _PLOT.value:
        _plot(lost, _PLOT.value)


def _plot(lost: dict[str, list[float]], path: str) -> None:
    from matplotlib import pyplot  # Not needed for anything else.

    figure, axes = pyplot.subplots(figsize=(8, 4))
    places = np.arange(len(lost))
    for i, label in enumerate(_LABELS):
        axes.barh(
            places + 0.25 * i,
            [values[i] for values in lost.values()],
            0.25,
            label=label,
        )
    axes.set_yticks(places + 0.25, [name.replace("_", " ") for name in lost])
    axes.invert_yaxis()
    axes.set_xlabel("samples that were never trained, %")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _compare_speed() -> None:
    for model in ("toy", "ctr"):
        times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for rep in range(_REPS.value):
            for engine in ENGINES if rep % 2 == 0 else ENGINES[::-1]:
                found = run_case(
                    engine,
                    [[[0]], [[63]]],
                    model=model,
                    steps=_STEPS.value,
                )
                times[engine].append(round(found["workers"][0]["step_ms"], 2))
        medians = {e: statistics.median(times[e]) for e in ENGINES}
        for engine in ENGINES:
            row = f"speed | {model} |"
            report(f"{row} {engine}", "ms", times[engine])
            if engine != "stock" and model == "toy":
                slower = medians[engine] - medians["stock"]
                bar = "at most 5 ms" if engine == "ps" else "at most 1 ms"
                report(f"{row} {engine} - stock", "ms", [slower], bar)
            elif engine != "stock":
                ratio = medians["stock"] / medians[engine]
                bar = "at least 1" if engine == "servers" else ""
                report(f"{row} stock / {engine}", "", [ratio], bar)
            print(
                f"{model}: {engine} {medians[engine]:.2f} ms per step "
                f"{times[engine]}; - stock "
                f"{medians[engine] - medians['stock']:+.2f} ms, steps/s / "
                f"stock {medians['stock'] / medians[engine]:.2f}",
                flush=True,
            )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if _JOB.value is not None:
        _run_process(json.loads(_JOB.value))
    elif _OVERHEAD.value:
        _compare_speed()
    else:
        _compare_cases()


if __name__ == "__main__":
    app.run(main)
