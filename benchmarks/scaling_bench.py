"""Predicts by simulation how many workers a cluster of servers can feed.

First measures 1, 2 and 4 workers and servers on this machine: the processor
time of a step, which looks up and pushes `--keys` ids of 16 floats through
TensorFlow's ops. A step of a worker costs

    worker   per_step + servers x per_message + keys x per_key
    server   per_message + keys of this server x per_key

The constants are fitted to all cases. Then a simulation runs the cases; its
processor times should be within a quarter of the measured ones. Last it runs
clusters that do not exist here: 100 servers of 8 cores and 10 to 1,000 workers
under asp, ssp and bsp, with servers that are alike, one slow server, and one
server with twice the keys of the others. Under ssp and bsp the first server
also counts the steps, and under bsp each worker tells each server of the end
of a round.

    pip install simpy matplotlib
    python benchmarks/scaling_bench.py --plot=docs/images/scaling.png
"""

import heapq
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from absl import app, flags
from figures import report

_KEYS = flags.DEFINE_multi_integer("keys", [1024, 8192], "Ids of a step.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of each worker.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often a case is measured.")
_PLOT = flags.DEFINE_string("plot", None, "A file for the plot.")
_COMPUTE_MS = flags.DEFINE_float("compute_ms", 20.0, "The model, of a step.")
_WORKER = flags.DEFINE_string("worker", None, "Internal: the servers.")

_COUNTS = (1, 2, 4)
_DIM = 16
_ROWS = 1_000_000
_WARM_UP = 30
# The assumed cluster.
_SERVERS, _CORES = 100, 8
_WORKERS = (10, 30, 100, 300, 1000)
_ROUND_TRIP = 200e-6
_BYTES_PER_SECOND = 25e9 / 8


class Case(NamedTuple):
    """A measured case: processor seconds of a step."""

    workers: int
    servers: int
    keys: int
    worker_cpu: float
    server_cpu: float  # All servers together.


class Costs(NamedTuple):
    """Processor seconds of a step."""

    worker_step: float
    worker_message: float
    worker_key: float
    server_message: float
    server_key: float


# --- The measurement ---------------------------------------------------------


def _work(address: str, keys: int) -> None:
    """Trains for `--steps`, and prints the processor seconds of one."""
    import tensorflow as tf

    import tfswitch as tsw

    tsw.connect(address)
    table = tsw.EmbeddingTable("t", _DIM, optimizer="adagrad", seed=1)
    random = np.random.default_rng(os.getpid())
    batches = [
        tf.constant(random.choice(_ROWS, keys, replace=False), tf.int64)
        for _ in range(16)
    ]

    @tf.function
    def step(ids: tf.Tensor) -> None:
        rows = table.lookup_or_create(ids)
        with tf.control_dependencies([rows]):
            table.push(ids, rows)

    for i in range(_WARM_UP):
        step(batches[i % 16])
    print("ready", flush=True)
    sys.stdin.readline()
    before = os.times()
    for i in range(_STEPS.value):
        step(batches[i % 16])
    after = os.times()
    cpu = after.user + after.system - before.user - before.system
    print(json.dumps(cpu / _STEPS.value), flush=True)
    sys.stdin.readline()


def _cpu_of(process: "subprocess.Popen[str]") -> float:
    text = pathlib.Path(f"/proc/{process.pid}/stat").read_text("ascii")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended: {process.args}")
    return line


def _tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    print(file=process.stdin, flush=True)


def _measure(workers: int, servers: int, keys: int) -> Case:
    import tfswitch as tsw

    def start(*command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    program = pathlib.Path(tsw.__file__).parent / "bin" / "tfswitch-server"
    processes = [
        start(
            str(program),
            "--address=127.0.0.1:0",
            f"--shard_index={shard}",
            f"--num_shards={servers}",
        )
        for shard in range(servers)
    ]
    try:
        addresses = []
        for process in processes:
            found = re.search(r"serving on (\S+)", _line_of(process))
            assert found is not None
            addresses.append(found[1])
        flag = f"--worker=grpc://{','.join(addresses)}"
        trained = [
            start(
                sys.executable,
                __file__,
                flag,
                f"--keys={keys}",
                f"--steps={_STEPS.value}",
            )
            for _ in range(workers)
        ]
        own = list(processes)
        processes += trained
        for worker in trained:
            while _line_of(worker) != "ready\n":
                pass
        before = sum(map(_cpu_of, own))
        for worker in trained:
            _tell(worker)
        cpu = [json.loads(_line_of(worker)) for worker in trained]
        spent = sum(map(_cpu_of, own)) - before
        return Case(
            workers,
            servers,
            keys,
            statistics.fmean(cpu),
            spent / workers / _STEPS.value,
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _median_of(rounds: Sequence[Case]) -> Case:
    return rounds[0]._replace(
        worker_cpu=statistics.median(case.worker_cpu for case in rounds),
        server_cpu=statistics.median(case.server_cpu for case in rounds),
    )


def _fit(cases: Sequence[Case]) -> Costs:
    def solve(columns: list[list[float]], values: list[float]) -> list[float]:
        matrix, right = np.array(columns), np.array(values)
        # Relative errors count, so that small cases fit, too.
        found = np.linalg.lstsq(
            matrix / right[:, None], np.ones(len(right)), rcond=None
        )[0]
        return [max(0.0, float(value)) for value in found]

    worker = solve(
        [[1.0, case.servers, case.keys] for case in cases],
        [case.worker_cpu for case in cases],
    )
    server = solve(
        [[case.servers, case.keys] for case in cases],
        [case.server_cpu for case in cases],
    )
    return Costs(*worker, *server)


# --- The simulation ----------------------------------------------------------


class _Station:
    """A queue, first come first served, with some cores.

    Calls arrive in the order of time, so that the end of a call is known when
    it arrives.
    """

    def __init__(self, cores: int, speed: float = 1.0) -> None:
        self._free = [0.0] * cores
        self._speed = speed
        self.busy = 0.0

    def serve(self, now: float, secs: float) -> float:
        """Returns when a call that arrives now has been served."""
        secs /= self._speed
        self.busy += secs
        end = max(now, self._free[0]) + secs
        heapq.heapreplace(self._free, end)
        return end


class Cluster(NamedTuple):
    """A cluster to simulate."""

    workers: int
    servers: int
    keys: int
    mode: str  # "asp", "ssp(3)" or "bsp".
    cores: int = _CORES
    compute_secs: float = 0.0
    slow: float = 1.0  # The speed of the first server.
    hot: float = 1.0  # Keys of the first server over those of the others.


class Result(NamedTuple):
    """The result of a simulation."""

    steps_per_second: float  # One worker.
    worker_cpu: float  # One step.
    server_cpu: float
    utilisation: float  # The busiest server.


def simulate(cluster: Cluster, costs: Costs, steps: int) -> Result:
    """Runs `steps` steps of each worker."""
    import simpy

    env = simpy.Environment()
    random = np.random.default_rng(1)
    speeds = [cluster.slow] + [1.0] * (cluster.servers - 1)
    stations = [_Station(cluster.cores, speed) for speed in speeds]
    networks = [_Station(1) for _ in range(cluster.servers)]
    shares = np.array([cluster.hot] + [1.0] * (cluster.servers - 1))
    keys_of = shares / shares.sum() * cluster.keys
    # A pull and a push have a message to each server and one back: ids one way,
    # rows the other way.
    work = (costs.server_message + keys_of * costs.server_key) / 2
    on_wire = keys_of * (8 + 4 * _DIM) / _BYTES_PER_SECOND
    own = (
        costs.worker_step
        + cluster.servers * costs.worker_message
        + cluster.keys * costs.worker_key
    )
    bare = np.full(cluster.servers, costs.server_message / 2)
    no_bytes = np.zeros(cluster.servers)
    slack = {"asp": steps, "bsp": 0}.get(cluster.mode, 3)
    # waits[n] happens when all workers have ended n steps.
    waits = [env.event() for _ in range(steps + 1)]
    left = [cluster.workers] * (steps + 1)

    def call(stations: Sequence[_Station], work: Any, wires: Any) -> Any:
        end = max(
            station.serve(network.serve(env.now, wire), secs)
            for station, network, wire, secs in zip(
                stations, networks, wires, work, strict=False
            )
        )
        return env.timeout(end - env.now + _ROUND_TRIP)

    def worker(number: int) -> Iterator[Any]:
        yield env.timeout(random.uniform(0, cluster.compute_secs + own))
        for step in range(1, steps + 1):
            yield call(stations, work, on_wire)
            yield env.timeout(
                own + cluster.compute_secs * random.lognormal(0.0, 0.1)
            )
            yield call(stations, work, on_wire)
            if cluster.mode != "asp":  # The first server counts steps.
                yield call(stations[:1], bare, no_bytes)
            left[step] -= 1
            if left[step] == 0:
                waits[step].succeed()
            if step > slack:
                yield waits[step - slack]
            if cluster.mode == "bsp":  # Each worker tells each server.
                yield call(stations, bare, no_bytes)

    for number in range(cluster.workers):
        env.process(worker(number))
    env.run()
    everything = cluster.workers * steps
    return Result(
        steps / env.now,
        own,
        sum(station.busy for station in stations) / everything,
        max(station.busy for station in stations) / env.now / cluster.cores,
    )


# --- Tables and the plot -----------------------------------------------------


def _check(cases: Sequence[Case], costs: Costs) -> None:
    for case in cases:
        result = simulate(
            Cluster(case.workers, case.servers, case.keys, "asp", cores=2),
            costs,
            steps=50,
        )
        row = (
            f"{case.workers} worker(s), {case.servers} server(s), "
            f"{case.keys:,} ids"
        )
        for side, measured, simulated in (
            ("worker", case.worker_cpu, result.worker_cpu),
            ("servers", case.server_cpu, result.server_cpu),
        ):
            print(
                f"{row}: {side} {measured * 1e3:.2f} ms, simulated / measured "
                f"{simulated / measured:.2f}",
                flush=True,
            )
            report(f"cases | {row} | {side}", "ms", [measured * 1e3])
            report(
                f"cases | {row} | {side}: simulated / measured",
                "",
                [simulated / measured],
            )


def _predict(costs: Costs) -> dict[str, list[float]]:
    alone = simulate(_cluster(1, "asp"), costs, steps=100).steps_per_second
    lines: dict[str, list[float]] = {}
    variants: list[tuple[str, dict[str, float]]] = [
        ("alike", {}),
        ("one server at half speed", {"slow": 0.5}),
        ("one server with twice the keys", {"hot": 2.0}),
    ]
    for (name, setting), mode in itertools.product(
        variants, ("asp", "ssp(3)", "bsp")
    ):
        for workers in _WORKERS:
            result = simulate(_cluster(workers, mode, **setting), costs, 40)
            speed = result.steps_per_second / alone
            lines.setdefault(f"{mode}, {name}", []).append(speed)
            print(
                f"{mode}, {name}, {workers} workers: {speed:.2f} of the speed "
                f"of one, busiest server {result.utilisation:.0%}",
                flush=True,
            )
            report(
                f"prediction | {mode}, {name} | {workers} workers", "", [speed]
            )
            if name == "alike" and mode == "asp":
                report(
                    f"prediction | busiest server | {workers} workers",
                    "%",
                    [100 * result.utilisation],
                )
    return lines


def _cluster(workers: int, mode: str, **settings: float) -> Cluster:
    return Cluster(
        workers,
        _SERVERS,
        max(_KEYS.value),
        mode,
        compute_secs=_COMPUTE_MS.value / 1e3,
        **settings,
    )


def _plot(lines: dict[str, list[float]], path: str) -> None:
    from matplotlib import pyplot  # Not needed for anything else.

    figure, axes = pyplot.subplots(figsize=(8, 4))
    styles = {"alike": "-", "one server at half speed": "--"}
    colours = {"asp": "#1f77b4", "ssp(3)": "#2ca02c", "bsp": "#d62728"}
    for name, values in lines.items():
        mode, _, variant = name.partition(", ")
        axes.plot(
            _WORKERS,
            values,
            styles.get(variant, ":"),
            color=colours[mode],
            label=name,
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel(f"workers, with {_SERVERS} servers of {_CORES} cores")
    axes.set_ylabel("speed of a worker / speed alone")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})


def main(argv: list[str]) -> None:
    """Measures, checks the simulation, and predicts."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if _WORKER.value:
        _work(_WORKER.value, _KEYS.value[0])
        return
    cases = [
        _median_of(
            [_measure(workers, servers, keys) for _ in range(_ROUNDS.value)]
        )
        for workers, servers, keys in itertools.product(
            _COUNTS, _COUNTS, _KEYS.value
        )
    ]
    costs = _fit(cases)
    for name, value in costs._asdict().items():
        per = "key" if name.endswith("key") else name.rpartition("_")[2]
        print(f"{name}: {value * 1e6:.3f} us", flush=True)
        report(
            f"costs | {name.partition('_')[0]} | per {per}",
            "us",
            [value * 1e6],
        )
    _check(cases, costs)
    lines = _predict(costs)
    if _PLOT.value:
        _plot(lines, _PLOT.value)


if __name__ == "__main__":
    app.run(main)
