"""The optimizers of Keras, DeepRec, FBGEMM and Paddle.

The fields of a class are its arguments, in the order of the fields of its
message.
"""

import dataclasses
from typing import Annotated

from tfswitch._settings._ranges import (
    Decay,
    Flag,
    NonNegative,
    NonPositive,
    Positive,
    Rate,
    Unit,
    integers,
)
from tfswitch._types import RateLike
from tfswitch.optimizers._base import Rule

# The names that `tfswitch.optimizers` exports.
__all__ = [
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "AdagradDecay",
    "Adam",
    "AdamW",
    "Ftrl",
    "GroupFtrl",
    "Lion",
    "Momentum",
    "PaddleAdagrad",
    "PaddleSharedAdam",
    "PaddleStdAdagrad",
    "RMSprop",
    "RowwiseAdagrad",
]


@dataclasses.dataclass(frozen=True, eq=False)
class SGD(Rule, kind="sgd", is_in_keras=True):
    """Gradient descent, with momentum if it is above 0.

    ```
    without momentum     w = w - lr g
    with momentum        v = momentum v - lr g
                         w = w + v
    Nesterov             v = momentum v - lr g
                         w = w + momentum v - lr g
    ```

    Source: `keras.optimizers.SGD`; Sutskever et al., 2013.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        momentum: In [0, 1]. If above 0, a row also stores its velocity `v`.
        nesterov: Whether to apply Nesterov momentum.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    """

    learning_rate: RateLike = 0.01
    momentum: Unit = 0.0
    nesterov: Flag = False


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum(SGD, kind="sgd"):
    """`SGD` with a momentum of 0.9 unless another is given.

    Example:

    >>> tsw.optimizers.Momentum(0.1)
    """

    momentum: Unit = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class Adagrad(Rule, kind="adagrad", is_in_keras=True):
    """Adagrad: steps shrink with the squares of a row's past gradients.

    ```
    a = a + g^2
    w = w - lr g / sqrt(a + epsilon)
    ```

    Source: `keras.optimizers.Adagrad`; Duchi et al., 2011.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        initial_accumulator_value: The initial value of `a`; at least 0.
        epsilon: Positive.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adagrad(0.05, max_weight=10.0, min_weight=-10.0)
    """

    learning_rate: RateLike = 0.001
    initial_accumulator_value: NonNegative = 0.1
    epsilon: Positive = 1e-7


@dataclasses.dataclass(frozen=True, eq=False)
class RowwiseAdagrad(Adagrad, kind="rowwise_adagrad", mixes_coordinates=True):
    """Adagrad with one accumulator for the whole row, 4 bytes instead of 4 D.

    ```
    a = a + mean(g^2)
    w = w - lr g / sqrt(a + epsilon)
    ```

    Source: FBGEMM's and TorchRec's `EXACT_ROWWISE_ADAGRAD` (Mudigere et al.,
    arXiv 2104.05158). There `a` starts at 0, and an epsilon of 1e-8 is added to
    the root. Here both are as in `Adagrad`. If D is 1, both optimizers are
    equal up to rounding.

    Arguments and errors are as for `Adagrad`.

    Example:

    >>> tsw.optimizers.RowwiseAdagrad(0.05)
    """


@dataclasses.dataclass(frozen=True, eq=False)
class AdagradDecay(Rule, kind="adagrad_decay"):
    """Adagrad that forgets, so that steps do not become 0 in a long run.

    Before a step, the accumulator of the row decays. k is the number of whole
    periods of `decay_step` steps since the last decay of the row:

    ```
    a = max(a decay_rate^k, initial_accumulator_value)
    ```

    and then

    ```
    a = a + g^2
    w = w - lr g / sqrt(a)
    ```

    Steps are those of the table, not of the row: `tfswitch.EmbeddingTable`
    counts them in `iterations` and sends them with each push.

    Source: DeepRec's `AdagradDecayOptimizer`, `adagrad_decay.py` and
    `training_ali_ops.cc`. There a row that was idle for several periods decays
    once per step until it has caught up; `compat=True` does that.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        initial_accumulator_value: The initial value of `a`, and its lower
            bound; positive.
        decay_step: Steps between decays; from 1 to 4294967295.
        decay_rate: In (0, 1].
        compat: Whether to decay as DeepRec does.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.AdagradDecay(0.05, decay_step=10_000)
    """

    learning_rate: RateLike = 0.001
    initial_accumulator_value: Positive = 0.1
    decay_step: Annotated[int, integers(1, 2**32 - 1)] = 100000
    decay_rate: Rate = 0.9
    compat: Flag = False


@dataclasses.dataclass(frozen=True, eq=False)
class Adam(Rule, kind="adam", is_in_keras=True):
    """Adam. Each row counts its own steps, so bias correction fits new rows.

    ```
    t = t + 1
    m = m + (g - m) (1 - beta_1)
    v = v + (g^2 - v) (1 - beta_2)
    w = w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)
    ```

    Source: `keras.optimizers.Adam`; Kingma and Ba, arXiv 1412.6980. Keras has
    one `t` for the variable. With a `t` for each row this is also Paddle's
    `SparseAdamSGDRule`, whose epsilon is 1e-8.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        beta_1, beta_2: In [0, 1).
        epsilon: Positive.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adam(0.001)
    """

    learning_rate: RateLike = 0.001
    beta_1: Decay = 0.9
    beta_2: Decay = 0.999
    epsilon: Positive = 1e-7


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW(Adam, kind="adamw", is_in_keras=True):
    """Adam with weight decay beside the gradient.

    ```
    w = w - w weight_decay lr
    ```

    and then the step of `Adam`. A row decays when it is pushed to, not in
    between.

    Source: `keras.optimizers.AdamW`; Loshchilov and Hutter, arXiv 1711.05101.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        weight_decay: At least 0.
        beta_1, beta_2, epsilon: As for `Adam`.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.AdamW(0.001, weight_decay=0.01)
    """

    # `weight_decay` is defined here so that it comes after the learning rate,
    # as in Keras.
    weight_decay: NonNegative = 0.004


@dataclasses.dataclass(frozen=True, eq=False)
class AMSGrad(Adam, kind="amsgrad"):
    """Adam whose second moment never shrinks.

    ```
    m, v, t as in Adam
    v_hat = max(v_hat, v)
    w = w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v_hat) + epsilon)
    ```

    Source: `keras.optimizers.Adam(amsgrad=True)`; Reddi et al., arXiv
    1904.09237. With `weight_decay` it is Keras's `AdamW(amsgrad=True)`.

    Arguments and errors are as for `Adam`.

    Example:

    >>> tsw.optimizers.AMSGrad(0.001)
    """


@dataclasses.dataclass(frozen=True, eq=False)
class RMSprop(Rule, kind="rmsprop", is_in_keras=True):
    """Divides by the root of a moving average of squared gradients.

    ```
    v = rho v + (1 - rho) g^2
    q = rho q + (1 - rho) g                   if centered, else q = 0
    s = lr g / sqrt(max(v - q^2, 0) + epsilon)
    p = momentum p + s                        with momentum, else p = s
    w = w - p
    ```

    Source: `keras.optimizers.RMSprop`; Tieleman and Hinton, 2012; centered:
    Graves, arXiv 1308.0850. Keras has no `max`: there rounding can lead to the
    root of a negative number.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        rho: In [0, 1).
        momentum: In [0, 1]. If above 0, a row also stores `p`.
        epsilon: Positive.
        centered: Whether to subtract the square of the mean gradient.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.RMSprop(0.001, rho=0.95, centered=True)
    """

    learning_rate: RateLike = 0.001
    rho: Decay = 0.9
    momentum: Unit = 0.0
    epsilon: Positive = 1e-7
    centered: Flag = False


@dataclasses.dataclass(frozen=True, eq=False)
class Adadelta(Rule, kind="adadelta", is_in_keras=True):
    """Scales gradients by the size of past steps over that of past gradients.

    ```
    a = rho a + (1 - rho) g^2
    s = sqrt(d + epsilon) g / sqrt(a + epsilon)
    d = rho d + (1 - rho) s^2
    w = w - lr s
    ```

    Source: `keras.optimizers.Adadelta`; Zeiler, arXiv 1212.5701, where the
    learning rate is 1.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        rho: In [0, 1).
        epsilon: Positive.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adadelta(1.0)
    """

    learning_rate: RateLike = 0.001
    rho: Decay = 0.95
    epsilon: Positive = 1e-7


@dataclasses.dataclass(frozen=True, eq=False)
class Ftrl(Rule, kind="ftrl", is_in_keras=True):
    """Follows the regularised leader, per coordinate; L1 makes exact zeros.

    p is -learning_rate_power; l1, l2 and l2_shrinkage are the three strengths:

    ```
    n' = n + g^2
    z  = z + g + 2 l2_shrinkage w - (n'^p - n^p) / lr w
    w  = (clip(z, -l1, l1) - z) / (n'^p / lr + 2 l2 + beta / lr)
    n  = n'
    ```

    A push whose learning rate is 0 changes nothing.

    Source: `keras.optimizers.Ftrl` and TensorFlow's `ResourceApplyFtrlV2`;
    McMahan et al., "Ad click prediction: a view from the trenches", 2013.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`.
        learning_rate_power: At most 0.
        initial_accumulator_value: The initial value of `n`; positive.
        l1_regularization_strength, l2_regularization_strength: At least 0.
        l2_shrinkage_regularization_strength: At least 0. Its term is part of
            the gradient, as that of the option `l2`, but does not change `n`.
        beta: At least 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Ftrl(0.1, l1_regularization_strength=0.01)
    """

    learning_rate: RateLike = 0.001
    learning_rate_power: NonPositive = -0.5
    initial_accumulator_value: Positive = 0.1
    l1_regularization_strength: NonNegative = 0.0
    l2_regularization_strength: NonNegative = 0.0
    l2_shrinkage_regularization_strength: NonNegative = 0.0
    beta: NonNegative = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class GroupFtrl(Ftrl, kind="group_ftrl", mixes_coordinates=True):
    """FTRL that sets whole rows to 0, so that a small export can omit them.

    n and z as in `Ftrl`, and

    ```
    w = (l1 - |z|) / |z| z / (n'^p / lr + 2 l2 + beta / lr)   if |z| > l1
    w = 0                                                     else
    ```

    Source: DeepRec's group FTRL of embedding variables, `training_ali_ops.cc`;
    Ni et al., "Adaptive optimizers with sparse group lasso", 2021, where l1 is
    multiplied by sqrt(D).

    Arguments and errors are as for `Ftrl`.

    Example:

    >>> tsw.optimizers.GroupFtrl(0.1, l1_regularization_strength=0.05)
    """


@dataclasses.dataclass(frozen=True, eq=False)
class PaddleAdagrad(Rule, kind="paddle_adagrad", mixes_coordinates=True):
    """The Adagrad of Paddle's CTR accessor: one sum per row, scaled by shows.

    ```
    s = g / shows            if show_scale and shows > 0, else s = g
    w = w - lr s sqrt(initial_g2sum / (initial_g2sum + G))
    G = G + mean(s^2)
    ```

    `G` starts at 0, and a step uses the `G` of the step before. A push gives
    the shows, `table.push(ids, gradients, shows=...)`. By default the shows are
    how often the id is in the push.

    Source: PaddlePaddle's `SparseAdaGradSGDRule`, `sparse_sgd_rule.cc`. There a
    push of 0 shows divides by 0.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`. Paddle's own bounds
            are `min_weight=-10.0, max_weight=10.0`.
        initial_g2sum: Positive.
        show_scale: Whether gradients are divided by shows.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.PaddleAdagrad(0.05, min_weight=-10.0, max_weight=10.0)
    """

    learning_rate: RateLike = 0.05
    initial_g2sum: Positive = 3.0
    show_scale: Flag = True


@dataclasses.dataclass(frozen=True, eq=False)
class PaddleStdAdagrad(PaddleAdagrad, kind="paddle_std_adagrad"):
    """`PaddleAdagrad` with a sum for each coordinate: G = G + s^2.

    Source: PaddlePaddle's `StdAdaGradSGDRule`, `sparse_sgd_rule.cc`.

    Arguments and errors are as for `PaddleAdagrad`.

    Example:

    >>> tsw.optimizers.PaddleStdAdagrad(0.05)
    """


@dataclasses.dataclass(frozen=True, eq=False)
class PaddleSharedAdam(Adam, kind="paddle_shared_adam", mixes_coordinates=True):
    """Adam with one pair of moments for the row, 12 bytes instead of 8 D + 4.

    Each coordinate computes its own new moments from the old moments of the
    row, and steps with these. The row keeps the means of the new moments.

    ```
    m' = beta_1 m + (1 - beta_1) g
    v' = beta_2 v + (1 - beta_2) g^2
    w  = w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m' / (sqrt(v') + epsilon)
    m  = mean(m'), v = mean(v')
    ```

    Source: PaddlePaddle's `SparseSharedAdamSGDRule`, `sparse_sgd_rule.cc`.
    Neither that rule nor this optimizer scales by shows.

    Arguments and errors are as for `Adam`.

    Example:

    >>> tsw.optimizers.PaddleSharedAdam(0.001)
    """

    epsilon: Positive = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class Lion(Rule, kind="lion", is_in_keras=True):
    """Steps of equal size, in the direction of a moving average's sign.

    ```
    w = w - lr sign(beta_1 m + (1 - beta_1) g)
    m = beta_2 m + (1 - beta_2) g
    ```

    Source: `keras.optimizers.Lion`; Chen et al., arXiv 2302.06675.

    Args:
        learning_rate, **options: See `tfswitch.optimizers`. A third to a tenth
            of Adam's learning rate is usual.
        beta_1, beta_2: In [0, 1).

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Lion(1e-4, weight_decay=0.01)
    """

    learning_rate: RateLike = 0.001
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
