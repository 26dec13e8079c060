"""The optimizers once more, in NumPy, from their formulas alone.

Everything is vectors over rows: `w` and `g` are (rows, dim), and all rows take
part in each step. The C++ kernels go row by row in float32; these go in the
dtype of `w`, so that float64 tells what is rounding and what is not.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass
class Step:
    """What comes with a gradient; arrays are (rows, 1)."""

    learning_rate: float
    count: Any = 1.0
    shows: Any = 1.0
    global_step: int = 0


class State(dict):
    """Slots by name, made when first asked for."""

    def of(self, name, like, value=0.0):
        if name not in self:
            self[name] = np.full_like(like, value)
        return self[name]


Rule = Callable[[np.ndarray, np.ndarray, Step, State], np.ndarray]


def row_norm(x):
    return np.sqrt(np.sum(x * x, axis=1, keepdims=True))


def sgd(momentum=0.0, nesterov=False) -> Rule:
    def step(w, g, s, state):
        if momentum == 0.0:
            return w - s.learning_rate * g
        v = momentum * state.of("v", w) - s.learning_rate * g
        state["v"] = v
        if nesterov:
            return w + momentum * v - s.learning_rate * g
        return w + v

    return step


def adagrad(initial_accumulator_value=0.1, epsilon=1e-7) -> Rule:
    def step(w, g, s, state):
        a = state.of("a", w, initial_accumulator_value) + g**2
        state["a"] = a
        return w - s.learning_rate * g / np.sqrt(a + epsilon)

    return step


def rowwise_adagrad(initial_accumulator_value=0.1, epsilon=1e-7) -> Rule:
    def step(w, g, s, state):
        a = state.of("a", w[:, :1], initial_accumulator_value)
        a = a + np.mean(g**2, axis=1, keepdims=True)
        state["a"] = a
        return w - s.learning_rate * g / np.sqrt(a + epsilon)

    return step


def adagrad_decay(
    initial_accumulator_value=0.1,
    decay_step=100000,
    decay_rate=0.9,
    compat=False,
) -> Rule:
    def step(w, g, s, state):
        a = state.of("a", w, initial_accumulator_value)
        done = state.setdefault("periods", 0)
        now = (s.global_step + 1) // decay_step
        periods = max(0, now - done)
        if compat:
            periods = min(periods, 1)
        state["periods"] = done + periods
        if periods:
            a = np.maximum(a * decay_rate**periods, initial_accumulator_value)
        a = a + g**2
        state["a"] = a
        return w - s.learning_rate * g / np.sqrt(a)

    return step


def adam(
    beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=False, weight_decay=0.0
) -> Rule:
    def step(w, g, s, state):
        t = state["t"] = state.setdefault("t", 0) + 1
        m = state["m"] = beta_1 * state.of("m", w) + (1 - beta_1) * g
        v = state["v"] = beta_2 * state.of("v", w) + (1 - beta_2) * g**2
        if amsgrad:
            v = state["v_hat"] = np.maximum(state.of("v_hat", w), v)
        a = s.learning_rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        w = w - weight_decay * s.learning_rate * w
        return w - a * m / (np.sqrt(v) + epsilon)

    return step


def rmsprop(rho=0.9, momentum=0.0, epsilon=1e-7, centered=False) -> Rule:
    def step(w, g, s, state):
        v = state["v"] = rho * state.of("v", w) + (1 - rho) * g**2
        if centered:
            q = state["q"] = rho * state.of("q", w) + (1 - rho) * g
            v = v - q**2
        delta = s.learning_rate * g / np.sqrt(v + epsilon)
        if momentum:
            delta = state["p"] = momentum * state.of("p", w) + delta
        return w - delta

    return step


def adadelta(rho=0.95, epsilon=1e-7) -> Rule:
    def step(w, g, s, state):
        a = state["a"] = rho * state.of("a", w) + (1 - rho) * g**2
        d = state.of("d", w)
        delta = np.sqrt(d + epsilon) / np.sqrt(a + epsilon) * g
        state["d"] = rho * d + (1 - rho) * delta**2
        return w - s.learning_rate * delta

    return step


def ftrl(
    learning_rate_power=-0.5,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    l2_shrinkage_regularization_strength=0.0,
    beta=0.0,
    group=False,
) -> Rule:
    l1 = l1_regularization_strength

    def step(w, g, s, state):
        lr = s.learning_rate
        n = state.of("n", w, initial_accumulator_value)
        l2 = l2_regularization_strength + beta / (2 * lr)
        shrunk = g + 2 * l2_shrinkage_regularization_strength * w
        new_n = n + g**2
        sigma = (new_n**-learning_rate_power - n**-learning_rate_power) / lr
        z = state["z"] = state.of("z", w) + shrunk - sigma * w
        state["n"] = new_n
        scale = new_n**-learning_rate_power / lr + 2 * l2
        if not group:
            return np.where(
                np.abs(z) > l1, (np.sign(z) * l1 - z) / scale, 0.0
            ).astype(w.dtype)
        norm = row_norm(z)
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = (l1 - norm) / (scale * norm) * z
        return np.where(norm > l1, moved, 0.0).astype(w.dtype)

    return step


def _scaled(g, s, show_scale):
    if not show_scale:
        return g
    shows = np.asarray(s.shows, g.dtype)
    return g / np.where(shows > 0, shows, np.ones_like(shows))


def paddle_adagrad(initial_g2sum=3.0, show_scale=True) -> Rule:
    def step(w, g, s, state):
        total = state.of("G", w[:, :1])
        g = _scaled(g, s, show_scale)
        ratio = np.sqrt(initial_g2sum / (initial_g2sum + total))
        state["G"] = total + np.mean(g**2, axis=1, keepdims=True)
        return w - s.learning_rate * g * ratio

    return step


def paddle_std_adagrad(initial_g2sum=3.0, show_scale=True) -> Rule:
    def step(w, g, s, state):
        total = state.of("G", w)
        g = _scaled(g, s, show_scale)
        state["G"] = total + g**2
        ratio = np.sqrt(initial_g2sum / (initial_g2sum + total))
        return w - s.learning_rate * g * ratio

    return step


def paddle_shared_adam(beta_1=0.9, beta_2=0.999, epsilon=1e-8) -> Rule:
    def step(w, g, s, state):
        t = state["t"] = state.setdefault("t", 0) + 1
        m = beta_1 * state.of("m", w[:, :1]) + (1 - beta_1) * g
        v = beta_2 * state.of("v", w[:, :1]) + (1 - beta_2) * g**2
        state["m"] = np.mean(m, axis=1, keepdims=True)
        state["v"] = np.mean(v, axis=1, keepdims=True)
        a = s.learning_rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return w - a * m / (np.sqrt(v) + epsilon)

    return step


def lion(beta_1=0.9, beta_2=0.99) -> Rule:
    def step(w, g, s, state):
        m = state.of("m", w)
        state["m"] = beta_2 * m + (1 - beta_2) * g
        return w - s.learning_rate * np.sign(beta_1 * m + (1 - beta_1) * g)

    return step


def with_options(
    rule: Rule,
    l2=0.0,
    cowclip_r=0.0,
    cowclip_zeta=1e-5,
    clip_value=0.0,
    clip_norm=0.0,
    weight_decay=0.0,
    min_weight=-np.inf,
    max_weight=np.inf,
) -> Rule:
    def limit(g, threshold):
        norm = row_norm(g)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(norm > threshold, g * (threshold / norm), g)

    def step(w, g, s, state):
        g = g + l2 * w
        if cowclip_r:
            floor = np.sqrt(w.shape[1]) * cowclip_zeta
            g = limit(g, cowclip_r * s.count * np.maximum(row_norm(w), floor))
        if clip_value:
            g = np.clip(g, -clip_value, clip_value)
        if clip_norm:
            g = limit(g, clip_norm)
        w = w - weight_decay * s.learning_rate * w
        return np.clip(rule(w, g, s, state), min_weight, max_weight)

    return step


def run(rule: Rule, w, gradients, steps: list[Step]):
    """Returns the rows after the steps, and the state."""
    state = State()
    for g, s in zip(gradients, steps, strict=True):
        w = rule(w, np.asarray(g, w.dtype), s, state)
    return w, state
