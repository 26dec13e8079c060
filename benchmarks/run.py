"""Runs the benchmarks, and makes their pages.

    python benchmarks/run.py                      # all suites: many hours
    python benchmarks/run.py table exchange       # these
    python benchmarks/run.py --page               # tables and plots of docs/

A suite is a program of this folder, with the flags for its page. Its figures
are written to a JSON file in `--out`. To publish them, use
`--out=docs/benchmarks/figures`, and then `--page`. benchmarks/README.md
describes the build.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import pages

ROOT = pathlib.Path(__file__).parents[1]
_BUILT = "build-bench/benchmarks"
_DENSE = f"{_BUILT}/exchange_bench --keys=977 --rows=977 --dim=1024"
_REQUESTS = (
    "python benchmarks/serving_request_bench.py "
    "--program=build-bench/benchmarks/time_requests --rounds=3"
)

SUITES = {
    "table": [
        f"{_BUILT}/table_bench",
        f"{_BUILT}/table_bench --keys=5000000 --changes --reps=11",
    ],
    "insert": [
        f"{_BUILT}/table_bench --keys=4000000 --batch=65536 --inserts",
        "python benchmarks/insert_bench.py",
    ],
    "step": ["python benchmarks/step_bench.py"],
    "optimizers": [f"{_BUILT}/optimizers_bench"],
    "row_life": [f"{_BUILT}/row_life_bench --reps=9"],
    "storage_dtype": [
        f"{_BUILT}/storage_dtype_bench --reps=9",
        f"{_BUILT}/storage_dtype_bench --reps=9 --adam --keys=3000000",
    ],
    "storage_dtype_auc": [
        "python benchmarks/storage_dtype_auc.py --seeds=5",
        "python benchmarks/storage_dtype_auc.py --seeds=5 --optimizer=adam",
    ],
    "wire_dtype_auc": [
        "python benchmarks/storage_dtype_auc.py --seeds=5 --wire"
    ],
    "dense_updates": [f"{_BUILT}/dense_updates_bench"],
    "dense_updates_auc": ["python benchmarks/dense_updates_auc.py"],
    "exchange": [
        f"{_BUILT}/exchange_bench",
        f"{_BUILT}/exchange_bench --unix",
        _DENSE,
        f"{_DENSE} --sgd",
    ],
    "workers": [f"{_BUILT}/workers_bench"],
    "layer": [
        "python benchmarks/layer_bench.py --rounds=15 --steps=40",
        "python benchmarks/layer_bench.py --rounds=9 --own_ids",
    ],
    "features": ["python benchmarks/features_bench.py"],
    "sync_replicas": [
        "python benchmarks/sync_replicas_bench.py --overhead",
        "python benchmarks/sync_replicas_bench.py",
    ],
    "serving": [f"{_BUILT}/serving_bench"],
    "serving_request": [_REQUESTS, f"{_REQUESTS} --hidden=400,400,400"],
    "row_format_auc": ["python benchmarks/row_format_auc.py"],
    "freshness": ["python benchmarks/freshness_bench.py"],
    "durability": ["python benchmarks/durability_bench.py"],
    "security": [f"python benchmarks/security_bench.py --bench={_BUILT}"],
    "soak": ["python benchmarks/soak.py"],
    "scale": [
        "python benchmarks/scale_bench.py",
        "python benchmarks/scale_bench.py --full --secs=3600",
    ],
    "tiered": ["python benchmarks/tiered_bench.py"],
    "scaling": [
        "python benchmarks/scaling_bench.py --plot=docs/images/scaling.png"
    ],
    "cowclip": ["python benchmarks/cowclip_bench.py"],
    "examples_auc": ["python benchmarks/examples_auc.py"],
}


def machine() -> dict[str, Any]:
    """Returns the machine that has measured the figures."""
    lines = re.findall(
        r"^(.+?)\s*: (.*)$",
        pathlib.Path("/proc/cpuinfo").read_text("utf-8"),
        re.MULTILINE,
    )
    cpu = dict(reversed(lines))  # For the first core.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "family": int(cpu.get("cpu family", 0)),
        "model": int(cpu.get("model", 0)),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of all parts, None for those that are missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for key, *packages in (
        ("tfswitch", "tfswitch-ps"),
        ("tensorflow", "tensorflow", "tensorflow-cpu"),
        ("keras", "keras"),
    ):
        found[key] = None
        for package in packages:
            try:
                found[key] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    for key, command in (
        ("commit", ["git", "describe", "--always", "--dirty"]),
        ("compiler", ["c++", "--version"]),
    ):
        output = subprocess.run(
            command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
        ).stdout
        found[key] = output.partition("\n")[0] or None
    return found


def make_figure(
    name: str, unit: str, to_reach: str, values: list[float]
) -> pages.Figure:
    """Returns a figure with three significant digits, an AUC with five.

    Whole numbers without a unit are counts and keep all digits.
    """
    median = statistics.median(values)
    digits = 5 if unit == "AUC" else 2
    if unit == "" and all(value.is_integer() for value in values):
        digits = 0
    elif unit != "AUC" and median:
        digits = max(0, digits - math.floor(math.log10(abs(median))))
    is_many = len(values) > 1
    return {
        "name": name,
        "unit": unit,
        "median": round(median, digits) + 0.0,  # Which is 0.0 for -0.0.
        "min": round(min(values), digits) if is_many else None,
        "max": round(max(values), digits) if is_many else None,
        "rounds": len(values),
        "digits": digits,
        "to_reach": to_reach,
    }


def run(command: str, times: int) -> list[pages.Figure]:
    """Runs a command a number of times, and returns the figures of all runs."""
    words = command.split()
    if words[0] == "python":
        words[0] = sys.executable
    values: dict[str, list[float]] = {}
    described: dict[str, tuple[str, str]] = {}
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        for _ in range(times):
            print(f"\n==> {command}", flush=True)
            subprocess.run(
                words,
                cwd=ROOT,
                check=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TFSWITCH_FIGURES": file.name,
                },
            )
        for line in file:
            name, unit, to_reach, *rounds = line.rstrip("\n").split("\t")
            described[name] = unit, to_reach
            values.setdefault(name, []).extend(map(float, rounds))
    return [
        make_figure(name, *described[name], rounds)
        for name, rounds in values.items()
    ]


def save(path: pathlib.Path, suite: str, runs: list[pages.Run]) -> None:
    """Writes the runs of a suite, a figure on each line."""
    texts = []
    for one in runs:
        head = {key: one[key] for key in one if key != "figures"}
        figures = ",\n".join(map(json.dumps, one["figures"]))
        texts.append(f'{json.dumps(head)[:-1]}, "figures": [\n{figures}\n]}}')
    body = ",\n".join(texts)
    path.write_text(f'{{"suite": "{suite}", "runs": [\n{body}\n]}}\n', "utf-8")


def main() -> None:
    """Does as the arguments say."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", help="default: all")
    parser.add_argument("--page", action="store_true", help="make the pages")
    parser.add_argument("--times", type=int, default=1, help="of each command")
    parser.add_argument("--note", default="", help="of what else ran meanwhile")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "build-bench" / "results"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no suite {', '.join(unknown)}; there are {[*SUITES]}")
    if arguments.page:
        pages.write()
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.date.today().isoformat(),
        "note": arguments.note,
        "machine": machine(),
        "versions": versions(),
    }
    failed = []
    for suite in arguments.suites or SUITES:
        try:
            runs = [
                {
                    "command": command,
                    **about,
                    "figures": run(command, arguments.times),
                }
                for command in SUITES[suite]
            ]
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{suite}: {error}")
        else:
            save(arguments.out / f"{suite}.json", suite, runs)
    if failed:
        sys.exit("\n".join(["failed; is it built?", *failed]))


if __name__ == "__main__":
    main()
