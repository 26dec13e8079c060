"""CowClip: keeps settings valid for large batches."""

import dataclasses
import math
from typing import Any

from tfswitch._settings._ranges import (
    FINITE_NON_NEGATIVE,
    FLAG,
    NonNegative,
    Positive,
    Range,
    check_fields,
)

_SIZE = Range("an integer of at least 1", lambda v: v >= 1 and v % 1 == 0)
_COUNT = Range("an integer of at least 0", lambda v: v >= 0 and v % 1 == 0)


@dataclasses.dataclass(frozen=True)
class CowClip:
    """Clips the gradient of an id by the norm of its row and its count.

    ```
    T = r count max(|w|, sqrt(D) zeta)
    g = g min(1, T / |g|)
    ```

    `count` is how often the id is in the push: of one worker with `asp` and
    `ssp`, of all workers with `bsp`. Rare ids get small thresholds and frequent
    ids large ones, so batches can be larger; see `scale_for_batch`.

    Source: Zheng et al., "CowClip: Reducing CTR Prediction Model Training Time
    from 12 hours to 10 minutes on 1 GPU", arXiv 2204.06240, and its program
    `bytedance/LargeBatchCTR: clip.py`. There, as here, the clipped gradient
    includes the L2 term. If r is not 1, that program multiplies `sqrt(D) zeta`
    by r twice. Here r is a factor only once, as in the formula above.

    Args:
        r: Positive.
        zeta: At least 0. With 0 a row of zeros never changes.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adam(1e-4, l2=1e-5, cowclip=tsw.optimizers.CowClip())
    """

    r: Positive = 1.0
    zeta: NonNegative = 1e-5

    def __post_init__(self) -> None:
        check_fields(self, " of CowClip")


@dataclasses.dataclass(frozen=True)
class BatchScaling:
    """The settings for a larger batch, returned by `scale_for_batch`.

    Attributes:
        scale: How many times larger the batch is.
        learning_rate: The embeddings' learning rate; unchanged.
        l2: The embeddings' L2.
        dense_learning_rate: The learning rate of the model's dense variables
            after the warm-up.
        warmup_steps: Steps over which the dense learning rate rises.
    """

    scale: float
    learning_rate: float
    l2: float
    dense_learning_rate: float
    warmup_steps: int

    def dense_schedule(self) -> Any:
        """Returns the dense learning rate for a Keras optimizer.

        This is a Keras schedule that rises linearly from 1e-8 over
        `warmup_steps` and then stays constant. Without warm-up it is a number.
        """
        if self.warmup_steps == 0:
            return self.dense_learning_rate
        from tfswitch._which_keras import keras

        return keras.optimizers.schedules.PolynomialDecay(
            initial_learning_rate=1e-8,
            decay_steps=self.warmup_steps,
            end_learning_rate=self.dense_learning_rate,
        )


def scale_for_batch(
    batch_size: int,
    *,
    base_batch_size: int,
    learning_rate: float,
    l2: float,
    dense_learning_rate: float,
    warmup_steps: int = 0,
    scale_l2: bool = True,
) -> BatchScaling:
    """Converts settings for one batch size to another batch size.

    The rules are those of the CowClip paper (Zheng et al., arXiv 2204.06240).
    For a batch s times as large, the learning rate of the embeddings stays,
    their L2 is multiplied by s, and the learning rate of the dense variables is
    multiplied by sqrt(s). The dense rate has a warm-up, which takes one epoch
    in the paper. Use these settings together with `CowClip`.

    The paper multiplies L2 by s because it applies L2 to all rows in every
    step, and an epoch has s times fewer steps. Here L2 is applied only to the
    rows of a push. An id in every batch also has s times fewer steps. But a
    rare id is in about as many batches of an epoch as before, so with s times
    the L2 it decays s times as much. With `scale_l2=False` L2 stays: rare ids
    then decay as before, and frequent ids decay less.


    Args:
        batch_size: The new batch size; positive. With several synchronous
            workers, give the sum of their batch sizes.
        base_batch_size: The batch size for which the other settings were
            chosen; positive.
        learning_rate: The embeddings' rate; at least 0.
        l2: The embeddings' L2; at least 0.
        dense_learning_rate: The dense variables' rate; at least 0.
        warmup_steps: Steps of the dense learning rate's warm-up; at least 0.
        scale_l2: Whether L2 is multiplied by s, as in the paper. Use False if
            most ids are rare and L2 matters.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    From 1,024 to 8,192 samples, with the paper's settings for Criteo:

    >>> scaled = tsw.optimizers.scale_for_batch(
    ...     8192, base_batch_size=1024, learning_rate=1e-4, l2=1e-5,
    ...     dense_learning_rate=8e-4, warmup_steps=4500)
    >>> scaled.l2, round(scaled.dense_learning_rate, 6)
    (8e-05, 0.002263)
    >>> embedding = tsw.keras.DynamicEmbedding(
    ...     10,
    ...     optimizer=tsw.optimizers.Adam(
    ...         scaled.learning_rate, l2=scaled.l2,
    ...         cowclip=tsw.optimizers.CowClip()),
    ... )
    >>> model.compile(keras.optimizers.Adam(scaled.dense_schedule()), ...)
    """
    for name, value, allowed in (
        ("batch_size", batch_size, _SIZE),
        ("base_batch_size", base_batch_size, _SIZE),
        ("learning_rate", learning_rate, FINITE_NON_NEGATIVE),
        ("l2", l2, FINITE_NON_NEGATIVE),
        ("dense_learning_rate", dense_learning_rate, FINITE_NON_NEGATIVE),
        ("warmup_steps", warmup_steps, _COUNT),
        ("scale_l2", scale_l2, FLAG),
    ):
        allowed.check(name, value)
    scale = batch_size / base_batch_size
    return BatchScaling(
        scale=scale,
        learning_rate=float(learning_rate),
        l2=l2 * (scale if scale_l2 else 1.0),
        dense_learning_rate=dense_learning_rate * math.sqrt(scale),
        warmup_steps=int(warmup_steps),
    )
