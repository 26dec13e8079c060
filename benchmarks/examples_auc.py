"""AUC of two of the examples, which print more than this needs.

    python benchmarks/examples_auc.py

Runs examples/deepfm_movielens.py, which compares DeepFM on two servers with the
same on keras.layers.Embedding, and examples/stream_days.py with three seeds.
"""

import pathlib
import re
import subprocess
import sys

from figures import report

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def output_of(example: str, *flags: str) -> str:
    """Runs an example; returns what it has printed."""
    print("running", example, *flags, flush=True)
    program = [sys.executable, str(EXAMPLES / example), *flags]
    output = subprocess.run(
        program, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(output, flush=True)
    return output


def main() -> None:
    """Runs both, and hands over the figures."""
    output = output_of("deepfm_movielens.py", "--demo")
    found = re.search(
        r"tfswitch (\S+), keras.layers.Embedding (\S+), difference (\S+)",
        output,
    )
    assert found, "the example has printed no AUC"
    names = ("tfswitch", "keras.layers.Embedding", "difference")
    for name, auc in zip(names, found.groups(), strict=True):
        bar = "at most 0.003" if name == "difference" else ""
        report(f"deepfm | 5 epochs | {name}", "AUC", [float(auc)], bar)
    for seed in (1, 2, 3):
        output = output_of("stream_days.py", f"--seed={seed}")
        *_, at_end = re.findall(r"^ *\d+ +\d+ +.*$", output, re.MULTILINE)
        waiting = map(int, at_end.split()[3::4])
        for arm, auc, rows, most in re.findall(
            r"^(\w+): AUC (\S+) of .*, (\d+) rows .*, (\S+) MB at most$",
            output,
            re.MULTILINE,
        ):
            report(f"stream | {arm} | rows at the end", "", [int(rows)])
            report(f"stream | {arm} | waiting", "", [next(waiting)])
            report(f"stream | {arm} | most memory", "MB", [float(most)])
            report(f"stream | {arm} | AUC", "AUC", [float(auc)])


if __name__ == "__main__":
    main()
