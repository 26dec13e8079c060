"""Measures the parts of training steps."""

import time
from typing import Any

import tensorflow as tf

from tfswitch._connection._metric_samples import samples_of, texts_of
from tfswitch._settings._ranges import integers

_STEPS = integers(1, 1_000_000)
_SUM = "tfswitch_worker_call_duration_seconds_sum"


def step_shares(
    model: Any, dataset: tf.data.Dataset, steps: int = 100
) -> dict[str, float]:
    """Trains some steps, prints how long their parts take, and returns that.

    The parts may take place at the same time, so that they may add up to more
    than the step:

    * "input": making a batch, without the training.
    * "lookup": reading rows, and waiting for rows that are read ahead.
    * "push": updating rows. With `push_depth`, while the next step begins.
    * "rest": the step without lookups and pushes: dense layers and Python.

    Args:
        model: A compiled Keras model.
        dataset: The data for `model.fit`, with at least `steps` + 1 batches or
            with `repeat`.
        steps: How many steps to measure, after one that is not measured.

    Returns:
        Seconds for each part, and for the whole "step".

    Raises:
        ValueError: If `steps` is out of range, or the dataset has fewer
            batches.

    Example:

    >>> tsw.data.step_shares(model, dataset)
    step      14.31 ms
    input      1.20 ms    8 %
    lookup     3.02 ms   21 %
    push       4.15 ms   29 %
    rest       7.14 ms   50 %
    """
    steps = _STEPS.check("steps", steps)
    batches = iter(dataset)
    seconds = dict.fromkeys(("step", "input", "lookup", "push", "rest"), 0.0)
    done = -1
    for _ in batches:
        if done < 0:
            begin = time.perf_counter()
        done += 1
        if done == steps:
            break
    if done < steps:
        raise ValueError(
            f"step_shares: `dataset` has {done + 1} batches, and steps={steps} "
            f"needs {steps + 1}. Pass fewer steps, or dataset.repeat()."
        )
    seconds["input"] = (time.perf_counter() - begin) / steps
    del batches
    model.fit(dataset.take(1), verbose=0)
    before = _durations()
    begin = time.perf_counter()
    model.fit(dataset.take(steps), verbose=0)
    seconds["step"] = (time.perf_counter() - begin) / steps
    after = _durations()
    for part, call in (("lookup", "pull"), ("push", "push")):
        seconds[part] = (after[call] - before[call]) / steps
    in_step = seconds["lookup"] + seconds["push"]
    seconds["rest"] = max(0.0, seconds["step"] - in_step)
    for part, value in seconds.items():
        share = "" if part == "step" else f"{value / seconds['step']:7.0%}"
        print(f"{part:8}{value * 1e3:8.2f} ms{share}")
    return seconds


def _durations() -> dict[str, float]:
    """Returns the time of all pulls, and of all pushes, of this process."""
    sums = {"pull": 0.0, "push": 0.0}
    for sample in samples_of(texts_of(None)):
        if sample.name == _SUM:
            sums[sample.labels["call"]] += sample.value
    return sums


__all__ = ["step_shares"]
