"""Samplers draw the ids of a sampled loss, and return expected counts.

TensorFlow's candidate samplers draw classes 0 to range_max - 1. The ids of a
table are arbitrary numbers, so a sampler here has a vocabulary, which is the
list of the ids of all classes.
"""

import abc
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# TensorFlow's own functions read the seed of `tf.random.set_seed` here.
from tensorflow.python.eager import context

from tfswitch._settings._ranges import bad_argument, is_number
from tfswitch._types import Config, TensorLike
from tfswitch.ops.id_tensors import to_id_array, to_id_tensor
from tfswitch.ops.resources import HOST, in_plain_graph


class SampledValues(NamedTuple):
    """A sampler's draw, in the order of TensorFlow's `sampled_values`.

    Attributes:
        sampled_candidates: int64, `[num_sampled]`: ids.
        true_expected_count: float32, `[batch_size, num_true]`: how often each
            label is expected in the sample.
        sampled_expected_count: float32, `[num_sampled]`: how often each drawn
            id is expected in the sample.
    """

    sampled_candidates: tf.Tensor
    true_expected_count: tf.Tensor
    sampled_expected_count: tf.Tensor


class Sampler(abc.ABC):
    """Draws ids of a vocabulary.

    Thread-safe. Works in eager mode and in graphs.

    A subclass defines `_draw` and `get_config`. To be saved with a model, it
    must also be registered by `keras.saving.register_keras_serializable`.

    Args:
        range_max: Size of the vocabulary, at least 1.
        ids: int64 or strings, `[range_max]`: the id of each class. None: the
            classes are the ids.
    """

    def __init__(self, range_max: int, ids: TensorLike | None = None) -> None:
        owner = type(self).__name__
        _check_positive("range_max", range_max, owner)
        self._range_max = int(range_max)
        self._vocabulary: _Vocabulary | None = None
        if ids is not None:
            self._vocabulary = _Vocabulary(ids, self._range_max, owner)

    @property
    def range_max(self) -> int:
        """Size of the vocabulary."""
        return self._range_max

    @property
    def ids(self) -> np.ndarray:
        """int64, `[range_max]`: the vocabulary, in the order of the classes."""
        if self._vocabulary is None:
            return np.arange(self._range_max)
        return self._vocabulary.ids.copy()

    def sample(
        self,
        labels: TensorLike,
        num_sampled: int,
        *,
        unique: bool = True,
        seed: int | None = None,
    ) -> SampledValues:
        """Draws ids for a batch.

        Args:
            labels: Ids of the vocabulary, `[batch_size, num_true]`. They do not
                influence the draw; their expected counts are returned.
            num_sampled: How many ids to draw for the whole batch.
            unique: Whether no id is drawn twice. The expected counts take this
                into account.
            seed: The seed of the operation. After `tf.random.set_seed`, draws
                repeat as those of TensorFlow's samplers do.

        Raises:
            ValueError: If shapes do not fit, `num_sampled` is larger than the
                vocabulary, or a label is not in the vocabulary: the message
                names the label. For labels in a graph the error is
                `tf.errors.InvalidArgumentError`.
        """
        owner = type(self).__name__
        labels = to_id_tensor(labels, owner)
        if labels.shape.rank != 2 or labels.shape[1] is None:
            raise ValueError(
                f"{owner}: labels must have shape (batch_size, num_true), with "
                f"num_true known. Received: labels of shape {labels.shape}"
            )
        check_num_sampled(num_sampled, owner)
        if unique and num_sampled > self._range_max:
            raise ValueError(
                f"{owner}: `num_sampled` must be at most the size of the "
                f"vocabulary, {self._range_max}. Received: "
                f"num_sampled={num_sampled}"
            )
        drawn = SampledValues(
            *self._draw(self._to_classes(labels), num_sampled, unique, seed)
        )
        if unique and num_sampled == self._range_max:
            # Each id is drawn exactly once; TensorFlow's ops only estimate this
            # count.
            drawn = SampledValues(drawn[0], *map(tf.ones_like, drawn[1:]))
        if self._vocabulary is None:
            return drawn
        return drawn._replace(
            sampled_candidates=self._vocabulary.to_ids(drawn.sampled_candidates)
        )

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as JSON values."""

    @classmethod
    def from_config(cls, config: Config) -> "Sampler":
        """Makes a sampler from the config that `get_config` returned."""
        return cls(**config)

    @abc.abstractmethod
    def _draw(
        self, classes: tf.Tensor, num_sampled: int, unique: bool, seed: Any
    ) -> Any:
        """Draws classes.

        Args:
            classes: int64, `[batch_size, num_true]`: the labels' classes.
            num_sampled: How many to draw.
            unique: Whether no class is drawn twice.
            seed: The seed of the operation, or None.

        Returns:
            A tuple in the order of `SampledValues`, with classes 0 to
            `range_max` - 1 in place of ids.
        """

    def _to_classes(self, labels: tf.Tensor) -> tf.Tensor:
        if self._vocabulary is not None:
            classes, is_known = self._vocabulary.to_classes(labels)
        else:
            classes = labels
            is_known = (labels >= 0) & (labels < self._range_max)
        message = (
            f"{type(self).__name__}: labels that are not in the vocabulary of "
            f"{self._range_max} ids are never sampled, so their loss is not "
            "known. Drop these examples, or make a sampler that has them. The "
            "first ones:"
        )
        if hasattr(is_known, "numpy"):
            unknown = labels.numpy()[~is_known.numpy()]
            if unknown.size:
                raise ValueError(f"{message} {unknown[:3].tolist()}")
            return classes
        unknown = tf.boolean_mask(labels, ~is_known)[:3]
        check = tf.debugging.Assert(
            tf.reduce_all(is_known), [message, unknown], summarize=3
        )
        with tf.control_dependencies([check]):
            return tf.identity(classes)

    def _ids_config(self) -> list[int] | None:
        return None if self._vocabulary is None else self.ids.tolist()


class LogUniformSampler(Sampler):
    """Draws class k with probability (log(k + 2) - log(k + 1)) / log(n + 1).

    This is nearly Zipf's law, so give the ids in order of falling frequency.
    Draws and expected counts are those of
    `tf.random.log_uniform_candidate_sampler`.

    Example:

    >>> sampler = tsw.nn.LogUniformSampler(3, ids=[70, 50, 60])
    >>> sampler.sample([[70]], num_sampled=2).sampled_candidates.shape
    TensorShape([2])

    Args:
        range_max: Size of the vocabulary, n.
        ids: int64 or strings, `[range_max]`, without repetition, the most
            frequent one first. None: ids are 0 to range_max - 1.

    Raises:
        ValueError: If `range_max` is not positive, or `ids` does not have that
            many different ids.
    """

    def get_config(self) -> dict[str, Any]:
        return {"range_max": self._range_max, "ids": self._ids_config()}

    def _draw(
        self, classes: tf.Tensor, num_sampled: int, unique: bool, seed: Any
    ) -> Any:
        return tf.random.log_uniform_candidate_sampler(
            classes,
            num_true=classes.shape[1],
            num_sampled=num_sampled,
            unique=unique,
            range_max=self._range_max,
            seed=seed,
        )


class UnigramSampler(Sampler):
    """Draws an id with a probability that follows its count.

    The probability is proportional to `count ** distortion`. Draws and expected
    counts are those of `tf.random.fixed_unigram_candidate_sampler`. The counts
    become a part of the graph, so for many millions of ids use
    `LogUniformSampler`. In eager mode, draws without a seed start over after
    each `tf.random.set_seed`, and samplers with the same counts then draw the
    same ids.

    Example:

    >>> sampler = tsw.nn.UnigramSampler(([70, 50], [10, 1]))
    >>> sampler.sample([[70]], num_sampled=2).sampled_candidates.shape
    TensorShape([2])

    Args:
        counts: Positive numbers `[n]`, of the ids 0 to n - 1; or a tuple of two
            lists: ids `[n]`, without repetition, and their counts.
        distortion: 1.0 for the counts themselves, 0.0 for a uniform
            distribution.

    Raises:
        ValueError: If counts are not positive, the number of ids differs, or
            `distortion` is not finite.
    """

    def __init__(
        self,
        counts: TensorLike | tuple[TensorLike, TensorLike],
        distortion: float = 0.75,
    ) -> None:
        ids = None
        if (
            isinstance(counts, tuple)
            and len(counts) == 2
            and all(np.ndim(part) == 1 for part in counts)
        ):
            ids, counts = counts
        counts = np.asarray(counts)
        if (
            counts.ndim != 1
            or counts.size == 0
            or counts.dtype.kind not in "iuf"
            or not np.all(np.isfinite(counts) & (counts > 0))
        ):
            raise ValueError(
                "UnigramSampler: `counts` must be a list of positive numbers. "
                "What was never seen can never be drawn: leave it out, and "
                "pass (ids, counts) of the rest. Received: "
                f"counts={np.array2string(counts, threshold=10)}"
            )
        if not isinstance(distortion, (int, float)) or not np.isfinite(
            distortion
        ):
            expected, owner = "a finite number", "UnigramSampler: "
            raise bad_argument("distortion", distortion, expected, owner)
        super().__init__(len(counts), ids)
        self._counts = counts
        self._distortion = float(distortion)
        self._lock = threading.Lock()
        self._functions: dict[Any, Any] = {}
        self._global_seed: Any = None

    def get_config(self) -> dict[str, Any]:
        return {
            "ids": self._ids_config(),
            "counts": self._counts.tolist(),
            "distortion": self._distortion,
        }

    @classmethod
    def from_config(cls, config: Config) -> "UnigramSampler":
        """Makes a sampler from the config that `get_config` returned."""
        arguments = dict(config)
        if (ids := arguments.pop("ids")) is not None:
            arguments["counts"] = (ids, arguments["counts"])
        return cls(**arguments)

    def _draw(
        self, classes: tf.Tensor, num_sampled: int, unique: bool, seed: Any
    ) -> Any:
        key = (int(classes.shape[1]), int(num_sampled), bool(unique), seed)
        if not tf.executing_eagerly():
            return self._drawing(*key)(classes)
        # The counts of ids are an attribute of the op. In a separate function
        # TensorFlow converts this attribute once, and not at each call.
        global_seed = context.global_seed()
        with self._lock:
            if global_seed != self._global_seed:
                # A function keeps the seed with which it was traced.
                self._functions.clear()
                self._global_seed = global_seed
            if key not in self._functions:
                self._functions[key] = self._function(*key)
            return self._functions[key](classes)

    def _function(
        self, num_true: int, num_sampled: int, unique: bool, seed: Any
    ) -> Any:
        draw = tf.function(
            self._drawing(num_true, num_sampled, unique, seed),
            input_signature=[tf.TensorSpec([None, num_true], tf.int64)],
            autograph=False,
        )
        # After many calls of set_seed, a direct call would make TensorFlow warn
        # of many traces.
        return draw.get_concrete_function()

    def _drawing(
        self, num_true: int, num_sampled: int, unique: bool, seed: Any
    ) -> Callable[[tf.Tensor], Any]:
        def draw(classes: tf.Tensor) -> Any:
            return tf.random.fixed_unigram_candidate_sampler(
                classes,
                num_true=num_true,
                num_sampled=num_sampled,
                unique=unique,
                range_max=self._range_max,
                distortion=self._distortion,
                unigrams=self._counts.astype(float).tolist(),
                seed=seed,
            )

        return draw


_CLASSES: dict[str, type[Sampler]] = {
    cls.__name__: cls for cls in (LogUniformSampler, UnigramSampler)
}


def is_custom(sampler: Sampler) -> bool:
    """Whether `from_config` does not know the sampler's class."""
    return type(sampler) not in _CLASSES.values()


def to_config(sampler: Sampler) -> dict[str, Any]:
    """Returns the config from which `from_config` makes the sampler."""
    return {
        "class_name": type(sampler).__name__,
        "config": sampler.get_config(),
    }


def from_config(config: Config) -> Sampler:
    """Makes a sampler from its config."""
    cls = _CLASSES.get(config["class_name"])
    if cls is None:
        raise ValueError(
            f"a sampler must be one of {', '.join(_CLASSES)}. Received: "
            f"class_name={config['class_name']!r}"
        )
    return cls.from_config(config["config"])


def check_num_sampled(num_sampled: int, owner: str) -> None:
    """Raises ValueError unless `num_sampled` is a positive integer."""
    _check_positive("num_sampled", num_sampled, owner)


def _check_positive(name: str, value: Any, owner: str) -> None:
    if not (is_number(value, int, np.integer) and value >= 1):
        raise bad_argument(name, value, "a positive integer", f"{owner}: ")


class _Vocabulary:
    """Classes 0 to n - 1 and their ids. Thread-safe.

    Args:
        ids: The ids that a user passed.
        size: n.
        owner: The name for messages.
    """

    def __init__(self, ids: Any, size: int, owner: str) -> None:
        self.ids = to_id_array(ids, owner).astype(np.int64)
        if self.ids.shape != (size,):
            raise ValueError(
                f"{owner}: `ids` must be of shape ({size},), one for each "
                f"class. Received: ids of shape {self.ids.shape}"
            )
        order = np.argsort(self.ids, kind="stable")
        ordered = self.ids[order]
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.size:
            raise ValueError(
                f"{owner}: `ids` must not repeat. Received {repeated[0]} twice"
            )
        self._arrays = {"ids": self.ids, "order": order, "ordered": ordered}
        self._lock = threading.Lock()
        self._tensors: dict[str, tf.Tensor] = {}

    def to_ids(self, classes: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._tensor("ids"), classes)

    def to_classes(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns classes, and whether each id has got a class."""
        ordered = self._tensor("ordered")
        places = tf.searchsorted(ordered, tf.reshape(ids, [-1]))
        places = tf.reshape(
            tf.minimum(places, len(self.ids) - 1), tf.shape(ids)
        )
        classes = tf.gather(self._tensor("order"), places)
        classes.set_shape(ids.shape)
        return classes, tf.equal(tf.gather(ordered, places), ids)

    def _tensor(self, name: str) -> tf.Tensor:
        if in_plain_graph():
            return tf.constant(self._arrays[name])
        # All functions share this tensor; a constant would be copied into each
        # one.
        with self._lock:
            if name not in self._tensors:
                with tf.init_scope(), tf.device(HOST):
                    self._tensors[name] = tf.constant(self._arrays[name])
            return self._tensors[name]
