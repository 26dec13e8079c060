"""Metrics of click models, and the metrics of this process.

`Calibration`, `GroupAUC` and `NormalizedEntropy` are metrics for Keras 3 and
for tf_keras. `read` and `serve` show what this process and its tables do.

The states of these metrics are sums, so
`tfswitch.keras.callbacks.GlobalMetrics` can add the states of several workers.
"""

from typing import Any

import tensorflow as tf

from tfswitch._settings import _ranges
from tfswitch._types import TensorLike
from tfswitch.keras import _backend
from tfswitch.metrics._process import MetricsServer, read, serve

__all__ = [
    "Calibration",
    "GroupAUC",
    "MetricsServer",
    "NormalizedEntropy",
    "read",
    "serve",
]

_WEIGHTINGS = ("samples", "positives", "equal")
_EPSILON = 1e-7  # As in Keras: the least argument of a logarithm.


class _SumMetric(_backend.keras.metrics.Metric):
    """A metric of probabilities whose states are sums."""

    def __init__(self, name: str, dtype: Any, from_logits: bool) -> None:
        super().__init__(name=name, dtype=dtype)
        self._from_logits = bool(from_logits)

    def _add_sum(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self.add_weight(name=name, shape=shape, initializer="zeros")

    def _flat(self, values: Any) -> tf.Tensor:
        return tf.reshape(tf.cast(values, self.dtype), [-1])

    def _probabilities(self, y_pred: Any) -> tf.Tensor:
        values = self._flat(y_pred)
        return tf.sigmoid(values) if self._from_logits else values

    def _weights(self, sample_weight: Any, like: tf.Tensor) -> tf.Tensor:
        """Returns the weights, one for each prediction, or one for all."""
        if sample_weight is None:
            return tf.ones_like(like)
        return tf.broadcast_to(self._flat(sample_weight), tf.shape(like))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        config: dict[str, Any] = super().get_config()
        config["from_logits"] = self._from_logits
        return config


@_backend.register_keras_serializable(package="tfswitch")
class Calibration(_SumMetric):
    """Clicks over predicted clicks (COPC): `sum(w * y) / sum(w * p)`.

    A result of 1 means that the predictions are right on average. A result
    below 1 means that they are too high, above 1 that they are too low. The
    result is NaN before the first prediction.

    Args:
        name: Name of the metric.
        dtype: The dtype of the states and the result; float32 by default.
        from_logits: Whether predictions are logits, not probabilities.

    Example:

    >>> metric = tsw.metrics.Calibration()
    >>> metric.update_state([0, 1, 0, 0], [0.25, 0.75, 0.5, 0.5])
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self,
        name: str = "calibration",
        dtype: tf.DType | str | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name, dtype, from_logits)
        self._clicks = self._add_sum("clicks")
        self._predicted = self._add_sum("predicted")

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: Labels from 0 to 1, of any shape.
            y_pred: Predictions, as many as labels.
            sample_weight: One for each prediction, or one for all.
        """
        predicted = self._probabilities(y_pred)
        weights = self._weights(sample_weight, predicted)
        self._clicks.assign_add(tf.reduce_sum(weights * self._flat(y_true)))
        self._predicted.assign_add(tf.reduce_sum(weights * predicted))

    def result(self) -> Any:
        """Returns the metric, a scalar."""
        return tf.divide(self._clicks, self._predicted)


@_backend.register_keras_serializable(package="tfswitch")
class NormalizedEntropy(_SumMetric):
    """Log loss, divided by that of a model that predicts the mean label.

    `mean(-y log p - (1 - y) log(1 - p)) / (-c log c - (1 - c)
    log(1 - c))` with the mean label `c`. A result below 1 means that the model
    is better than a constant click rate. Unlike the log loss, results for data
    with different click rates can be compared. The result is NaN as long as all
    labels are equal.

    Source: He et al., "Practical Lessons from Predicting Clicks on Ads at
    Facebook", ADKDD 2014.

    Args:
        name: Name of the metric.
        dtype: The dtype of the states and the result; float32 by default.
        from_logits: Whether predictions are logits, not probabilities.

    Example:

    >>> metric = tsw.metrics.NormalizedEntropy()
    >>> metric.update_state([0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25])
    >>> round(float(metric.result()), 6)
    1.0
    """

    def __init__(
        self,
        name: str = "normalized_entropy",
        dtype: tf.DType | str | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name, dtype, from_logits)
        self._loss = self._add_sum("loss")
        self._clicks = self._add_sum("clicks")
        self._shows = self._add_sum("shows")

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike | None = None,
    ) -> None:
        """Adds a batch; the arguments are as for `Calibration`."""
        labels = self._flat(y_true)
        if self._from_logits:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(
                labels=labels, logits=self._flat(y_pred)
            )
        else:
            losses = _cross_entropy(labels, self._flat(y_pred))
        weights = self._weights(sample_weight, losses)
        self._loss.assign_add(tf.reduce_sum(weights * losses))
        self._clicks.assign_add(tf.reduce_sum(weights * labels))
        self._shows.assign_add(tf.reduce_sum(weights))

    def result(self) -> Any:
        """Returns the metric, a scalar."""
        shows = tf.convert_to_tensor(self._shows)
        rate = self._clicks / shows
        entropy = tf.where(
            (rate > 0.0) & (rate < 1.0),
            _cross_entropy(rate, rate),
            tf.cast(float("nan"), self.dtype),
        )
        return self._loss / shows / entropy


def _cross_entropy(labels: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    predicted = tf.clip_by_value(predicted, _EPSILON, 1.0 - _EPSILON)
    return -labels * tf.math.log(predicted) - (1.0 - labels) * tf.math.log(
        1.0 - predicted
    )


@_backend.register_keras_serializable(package="tfswitch")
class GroupAUC(_SumMetric):
    """The mean of the AUCs of groups, such as users (GAUC).

    The AUC over all samples is higher if a model distinguishes users who click
    much from users who click little. The AUC of one user shows how well the
    model orders what this user has seen. Groups whose labels are all equal have
    no AUC and are left out. The result is NaN if no group has an AUC.

    Each group has a histogram of predictions, in `num_bins` equal parts of 0
    to 1; predictions in one part count as equal. A group is an integer. Groups
    from 0 to `num_groups` - 1 have a histogram each. Any other group uses the
    histogram of its remainder modulo `num_groups`, and the groups of one
    histogram count as one group. The states take 8 bytes times `num_groups`
    times `num_bins`, and each batch copies them.

    Source: Zhou et al., "Deep Interest Network for Click-Through Rate
    Prediction", KDD 2018, which weighs users by impressions.

    Args:
        num_groups: Number of histograms, at least 1.
        num_bins: Number of parts of each histogram, at least 2.
        weighting: The weight of a group in the mean: "samples", the sum of the
            weights of its samples; "positives", the sum of the weights of its
            clicks; "equal", the same weight for all groups.
        name: Name of the metric.
        dtype: The dtype of the states and the result; float32 by default.
        from_logits: Whether predictions are logits, not probabilities.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> metric = tsw.metrics.GroupAUC(num_groups=10)
    >>> metric.update_state(
    ...     [0, 1, 1, 0], [0.1, 0.2, 0.8, 0.9], groups=[7, 7, 8, 8])
    >>> float(metric.result())
    0.5
    """

    def __init__(
        self,
        num_groups: int = 1000,
        num_bins: int = 200,
        weighting: str = "samples",
        name: str = "group_auc",
        dtype: tf.DType | str | None = None,
        from_logits: bool = False,
    ) -> None:
        _ranges.integers(1, 2**31 - 1).check("num_groups", num_groups)
        _ranges.integers(2, 2**31 - 1).check("num_bins", num_bins)
        if weighting not in _WEIGHTINGS:
            raise _ranges.bad_argument(
                "weighting", weighting, f"one of {_WEIGHTINGS}"
            )
        super().__init__(name, dtype, from_logits)
        self._num_groups = int(num_groups)
        self._num_bins = int(num_bins)
        self._weighting = weighting
        shape = (self._num_groups, self._num_bins)
        self._positives = self._add_sum("positives", shape)
        self._negatives = self._add_sum("negatives", shape)

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike | None = None,
        groups: TensorLike | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: Labels from 0 to 1, of any shape. Without `groups` integers
                of shape `[batch_size, 2]`: label and group of each sample.
            y_pred: Predictions, as many as labels.
            sample_weight: One for each prediction, or one for all.
            groups: Integers, as many as labels.

        Raises:
            ValueError: If there are no groups.
        """
        y_true = tf.convert_to_tensor(y_true)
        if groups is None:
            if y_true.shape.rank != 2 or y_true.shape[1] not in (None, 2):
                raise ValueError(
                    f"metric '{self.name}' needs the group of each sample: "
                    "pass `groups=`, or labels of shape [batch_size, 2] with "
                    f"label and group. Received: shape {y_true.shape}"
                )
            y_true, groups = y_true[:, 0], y_true[:, 1]
        labels = self._flat(y_true)
        predicted = self._probabilities(y_pred)
        weights = self._weights(sample_weight, predicted)
        group = tf.math.floormod(
            tf.reshape(tf.cast(groups, tf.int64), [-1]), self._num_groups
        )
        last = self._num_bins - 1
        part = tf.cast(predicted * self._num_bins, tf.int64)
        places = tf.stack([group, tf.clip_by_value(part, 0, last)], axis=1)
        for state, counts in (
            (self._positives, weights * labels),
            (self._negatives, weights * (1.0 - labels)),
        ):
            state.assign(
                tf.tensor_scatter_nd_add(
                    tf.convert_to_tensor(state), places, counts
                )
            )

    def result(self) -> Any:
        """Returns the metric, a scalar."""
        positives = tf.convert_to_tensor(self._positives)
        negatives = tf.convert_to_tensor(self._negatives)
        below = tf.cumsum(negatives, axis=1, exclusive=True) + negatives / 2.0
        pairs_in_order = tf.reduce_sum(positives * below, axis=1)
        num_positives = tf.reduce_sum(positives, axis=1)
        num_negatives = tf.reduce_sum(negatives, axis=1)
        pairs = num_positives * num_negatives
        weights = {
            "samples": num_positives + num_negatives,
            "positives": num_positives,
            "equal": tf.ones_like(pairs),
        }[self._weighting] * tf.cast(pairs > 0.0, self.dtype)
        areas = tf.math.divide_no_nan(pairs_in_order, pairs)
        return tf.reduce_sum(weights * areas) / tf.reduce_sum(weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "num_groups": self._num_groups,
            "num_bins": self._num_bins,
            "weighting": self._weighting,
        }
