"""How a table learns: one optimizer step per id and push, where the row lives.

Names, arguments and defaults are those of `keras.optimizers` where Keras has
the optimizer, and so is the arithmetic on the rows that a push touches. Rows
that it does not touch stay as they are: a momentum does not carry them on, as
Keras's dense updates would.

In the formulas `w` is an embedding, `g` the sum of the id's gradients in the
push, `lr` the learning rate of the push, and `D` the dimension.

`learning_rate` is a number, a Keras `LearningRateSchedule` (or any function of
the step), a variable, or a function without arguments; see
`tfswitch.EmbeddingTable.learning_rate`. A Keras optimizer in the place of one
of these shares its rate: to set that of the Keras optimizer sets the table's.

All optimizers but `Segments` take these options by keyword. They happen in this
order around the rule's own step:

    l2           g = g + l2 w. Only rows of the push: L2 is lazy.
    cowclip      `CowClip`: g = g min(1, T / |g|), T from |w| and the id's count
    clipvalue    each coordinate of g into [-clipvalue, clipvalue]
    clipnorm     g = g min(1, clipnorm / |g|), with the norm of the row
    weight_decay w = w - w weight_decay lr. Only rows of the push.
    (the rule)
    min_weight   each coordinate of w to at least that
    max_weight   each coordinate of w to at most that
    min_norm     the norm of the row w to at least that
    max_norm     the norm of the row w to at most that
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

_NUMBERS = (int, float, np.integer, np.floating)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, _NUMBERS)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


class _Range(NamedTuple):
    """What an argument may be, and how a message calls it."""

    contains: Callable[[float], bool]
    text: str


_ANY = _Range(lambda v: True, "a finite number")
_POSITIVE = _Range(lambda v: v > 0.0, "positive")
_AT_LEAST_0 = _Range(lambda v: v >= 0.0, "at least 0")
_AT_MOST_0 = _Range(lambda v: v <= 0.0, "at most 0")
_BELOW_1 = _Range(lambda v: 0.0 <= v < 1.0, "in [0, 1)")
_UP_TO_1 = _Range(lambda v: 0.0 <= v <= 1.0, "in [0, 1]")
_ABOVE_0_UP_TO_1 = _Range(lambda v: 0.0 < v <= 1.0, "in (0, 1]")


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """Base of all optimizers. Immutable."""

    learning_rate: Any = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.learning_rate, (bool, *_NUMBERS)):
            rate = check_learning_rate(self.learning_rate)
            object.__setattr__(self, "learning_rate", rate)
        elif not callable(self.learning_rate) and not hasattr(
            self.learning_rate, "assign"
        ):
            raise ValueError(
                "`learning_rate` must be a number, a schedule, a variable or a "
                "function. Received: "
                f"learning_rate={self.learning_rate!r}"
            )

    @property
    def is_elementwise(self) -> bool:
        """Whether each weight's step depends on its own gradient alone.

        The blocks of a `tfswitch.DenseTable` are no units of anything, so that
        its optimizer must be elementwise.
        """
        return self._mixing() is None

    def _mixing(self) -> str | None:
        """What makes weights depend on each other, for messages."""
        return None

    def check_elementwise(self, user: str) -> None:
        """Raises ValueError, in the name of `user`, if not elementwise."""
        if (mixing := self._mixing()) is not None:
            raise ValueError(
                f"{user} needs an optimizer that steps each weight by its own "
                "gradient alone, as its blocks are no rows of anything. "
                f"Received: {mixing}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the learning rate as it was given."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }

    def to_config(self) -> dict[str, Any]:
        """Returns what `get` makes this optimizer from."""
        return {
            "class_name": type(self).__name__,
            "config": self.get_config(),
        }

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `optimizer` field of a table config.

        It has no learning rate: that comes with each push.
        """
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Optimizer":
        """Makes an optimizer from what `get_config` returned."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.get_config() == other.get_config()

    __hash__ = None  # type: ignore[assignment]  # A schedule may not have one.


@dataclasses.dataclass(frozen=True)
class CowClip:
    """Clips the gradient of an id by the norm of its row and its count.

    ```
    T = r count max(|w|, sqrt(D) zeta)
    g = g min(1, T / |g|)
    ```

    `count` is how often the id is in the push, of one worker with `asp` and
    `ssp` and of all with `bsp`. Rare ids get small thresholds and frequent ones
    large ones, which is what lets batches grow; see `scale_for_batch`.

    Source: Zheng et al., "CowClip: Reducing CTR Prediction Model Training Time
    from 12 hours to 10 minutes on 1 GPU", arXiv 2204.06240, and its program
    `bytedance/LargeBatchCTR: clip.py`. There the gradient has the L2 term in it
    when it is clipped, and so it is here. With r other than 1 that program
    multiplies the floor by r twice; here once, as written above.

    Args:
        r: Positive.
        zeta: At least 0. With 0 a row of zeros never changes.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adam(1e-4, l2=1e-5, cowclip=tsw.optimizers.CowClip())
    """

    r: float = 1.0
    zeta: float = 1e-5

    def __post_init__(self) -> None:
        if not _is_number(self.r) or self.r <= 0.0:
            raise ValueError(
                f"`r` of CowClip must be positive. Received: r={self.r!r}"
            )
        if not _is_number(self.zeta) or self.zeta < 0.0:
            raise ValueError(
                "`zeta` of CowClip must be at least 0. "
                f"Received: zeta={self.zeta!r}"
            )
        object.__setattr__(self, "r", float(self.r))
        object.__setattr__(self, "zeta", float(self.zeta))


@dataclasses.dataclass(frozen=True, eq=False)
class _Rule(Optimizer):
    """An optimizer with options."""

    # The field of the wire's OptimizerConfig.
    _KIND: ClassVar[str] = ""
    # Whether a coordinate of the rule's step depends on the others.
    _MIXES_COORDINATES: ClassVar[bool] = False

    l2: float = dataclasses.field(default=0.0, kw_only=True)
    cowclip: CowClip | None = dataclasses.field(default=None, kw_only=True)
    clipvalue: float | None = dataclasses.field(default=None, kw_only=True)
    clipnorm: float | None = dataclasses.field(default=None, kw_only=True)
    weight_decay: float | None = dataclasses.field(default=None, kw_only=True)
    min_weight: float | None = dataclasses.field(default=None, kw_only=True)
    max_weight: float | None = dataclasses.field(default=None, kw_only=True)
    min_norm: float | None = dataclasses.field(default=None, kw_only=True)
    max_norm: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_AT_LEAST_0, "l2")
        if isinstance(self.cowclip, Mapping):
            object.__setattr__(self, "cowclip", CowClip(**self.cowclip))
        if self.cowclip is not None and not isinstance(self.cowclip, CowClip):
            raise ValueError(
                "`cowclip` must be a tfswitch.optimizers.CowClip or None. "
                f"Received: cowclip={self.cowclip!r}"
            )
        self._check(_POSITIVE, "clipvalue", "clipnorm", or_none=True)
        self._check(_AT_LEAST_0, "weight_decay", or_none=True)
        self._check(_ANY, "min_weight", "max_weight", or_none=True)
        self._check(_AT_LEAST_0, "min_norm", or_none=True)
        self._check(_POSITIVE, "max_norm", or_none=True)
        for kind in ("weight", "norm"):
            low, high = (
                getattr(self, f"min_{kind}"),
                getattr(self, f"max_{kind}"),
            )
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"`min_{kind}` must be at most `max_{kind}`. Received: "
                    f"min_{kind}={low!r}, max_{kind}={high!r}"
                )

    def _check(
        self, expected: _Range, *names: str, or_none: bool = False
    ) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None and or_none:
                continue
            if not _is_number(value) or not expected.contains(value):
                raise ValueError(
                    f"`{name}` must be {expected.text}"
                    f"{', or None' if or_none else ''}. "
                    f"Received: {name}={value!r}"
                )
            object.__setattr__(self, name, float(value))

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ValueError(
                f"`{name}` must be a bool. Received: {name}={value!r}"
            )

    def _mixing(self) -> str | None:
        if self._MIXES_COORDINATES:
            return f"optimizer={type(self).__name__}"
        for name in ("clipnorm", "cowclip", "min_norm", "max_norm"):
            if getattr(self, name) is not None:
                return f"{name}={getattr(self, name)!r}"
        return None

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the learning rate as it was given."""
        config = super().get_config()
        if self.cowclip is not None:
            config["cowclip"] = dataclasses.asdict(self.cowclip)
        return config

    @classmethod
    def _from_options(cls, options: Mapping[str, float]) -> dict[str, Any]:
        """The arguments that `_options` describes."""
        arguments: dict[str, Any] = {
            _PYTHON_NAMES.get(name, name): value
            for name, value in options.items()
            if not name.startswith("cowclip_")
        }
        if "cowclip_r" in options:
            arguments["cowclip"] = CowClip(
                options["cowclip_r"], options["cowclip_zeta"]
            )
        return arguments

    def _options(self) -> dict[str, float]:
        """Those that are on, by their names on the wire."""
        options = {
            "l2": self.l2 or None,
            "clip_value": self.clipvalue,
            "clip_norm": self.clipnorm,
            "weight_decay": self.weight_decay or None,
            "min_weight": self.min_weight,
            "max_weight": self.max_weight,
            "min_norm": self.min_norm or None,
            "max_norm": self.max_norm,
        }
        if self.cowclip is not None:
            options["cowclip_r"] = self.cowclip.r
            options["cowclip_zeta"] = self.cowclip.zeta
        return {
            name: value for name, value in options.items() if value is not None
        }

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `optimizer` field of a table config.

        It has no learning rate: that comes with each push.
        """
        # Those of the rule are declared without kw_only.
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if not field.kw_only and field.name != "learning_rate"
        }
        config: dict[str, Any] = {self._KIND: fields}
        if options := self._options():
            config["options"] = options
        return config


@dataclasses.dataclass(frozen=True, eq=False)
class SGD(_Rule):
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
        learning_rate: See the module's description.
        momentum: In [0, 1]. Above 0 a row holds its velocity.
        nesterov: Whether to apply Nesterov momentum.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    """

    _KIND = "sgd"

    learning_rate: Any = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_UP_TO_1, "momentum")
        self._check_bool("nesterov")


@dataclasses.dataclass(frozen=True, eq=False)
class Momentum(SGD):
    """`SGD` with a momentum of 0.9 unless another is given.

    Example:

    >>> tsw.optimizers.Momentum(0.1)
    """

    momentum: float = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class Adagrad(_Rule):
    """Adagrad: steps shrink with the squares of a row's past gradients.

    ```
    a = a + g^2
    w = w - lr g / sqrt(a + epsilon)
    ```

    Source: `keras.optimizers.Adagrad`; Duchi et al., 2011.

    Args:
        learning_rate: See the module's description.
        initial_accumulator_value: What `a` starts with; not negative.
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adagrad(0.05, max_weight=10.0, min_weight=-10.0)
    """

    _KIND = "adagrad"

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_AT_LEAST_0, "initial_accumulator_value")
        self._check(_POSITIVE, "epsilon")


@dataclasses.dataclass(frozen=True, eq=False)
class RowwiseAdagrad(Adagrad):
    """Adagrad with one accumulator for the whole row, 4 bytes instead of 4 D.

    ```
    a = a + mean(g^2)
    w = w - lr g / sqrt(a + epsilon)
    ```

    Source: FBGEMM's and TorchRec's `EXACT_ROWWISE_ADAGRAD` (Mudigere et al.,
    arXiv 2104.05158). There `a` starts at 0 and epsilon, 1e-8, is added to the
    root; here both are as in `Adagrad`, to which this is equal, up to rounding,
    if D is 1.

    Args:
        learning_rate: See the module's description.
        initial_accumulator_value: What `a` starts with; not negative.
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.RowwiseAdagrad(0.05)
    """

    _KIND = "rowwise_adagrad"
    _MIXES_COORDINATES = True


@dataclasses.dataclass(frozen=True, eq=False)
class AdagradDecay(_Rule):
    """Adagrad that forgets, so that steps do not become 0 in a long run.

    Before a step of a row, for the k times that `decay_step` steps have passed
    since its last decay:

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
        learning_rate: See the module's description.
        initial_accumulator_value: What `a` starts with, and its lower bound;
            positive.
        decay_step: Steps between decays; from 1 to 4294967295.
        decay_rate: In (0, 1].
        compat: Whether to decay as DeepRec does.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.AdagradDecay(0.05, decay_step=10_000)
    """

    _KIND = "adagrad_decay"

    learning_rate: Any = 0.001
    initial_accumulator_value: float = 0.1
    decay_step: int = 100000
    decay_rate: float = 0.9
    compat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_POSITIVE, "initial_accumulator_value")
        step = self.decay_step
        if (
            isinstance(step, bool)
            or not isinstance(step, (int, np.integer))
            or not 1 <= step < 2**32
        ):
            raise ValueError(
                "`decay_step` must be an integer from 1 to 4294967295. "
                f"Received: decay_step={step!r}"
            )
        object.__setattr__(self, "decay_step", int(step))
        self._check(_ABOVE_0_UP_TO_1, "decay_rate")
        self._check_bool("compat")


@dataclasses.dataclass(frozen=True, eq=False)
class Adam(_Rule):
    """Adam. Each row counts its own steps, so bias correction fits new rows.

    ```
    t = t + 1
    m = m + (g - m) (1 - beta_1)
    v = v + (g^2 - v) (1 - beta_2)
    w = w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)
    ```

    Source: `keras.optimizers.Adam`; Kingma and Ba, arXiv 1412.6980. Keras has
    one `t` for the variable. With that of the row this is also Paddle's
    `SparseAdamSGDRule`, whose epsilon is 1e-8.

    Args:
        learning_rate: See the module's description.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adam(0.001)
    """

    _KIND = "adam"

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_BELOW_1, "beta_1", "beta_2")
        self._check(_POSITIVE, "epsilon")


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW(Adam):
    """Adam with weight decay beside the gradient.

    ```
    w = w - w weight_decay lr
    ```

    and then the step of `Adam`. A row decays when it is pushed to, not in
    between.

    Source: `keras.optimizers.AdamW`; Loshchilov and Hutter, arXiv 1711.05101.

    Args:
        learning_rate: See the module's description.
        weight_decay: Not negative.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.AdamW(0.001, weight_decay=0.01)
    """

    _KIND = "adamw"

    # Keras's order: after the learning rate.
    weight_decay: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_AT_LEAST_0, "weight_decay")

    def _options(self) -> dict[str, float]:
        options = super()._options()
        options.pop("weight_decay", None)  # It is the rule's.
        return options


@dataclasses.dataclass(frozen=True, eq=False)
class AMSGrad(Adam):
    """Adam whose second moment never shrinks.

    ```
    m, v, t as in Adam
    v_hat = max(v_hat, v)
    w = w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v_hat) + epsilon)
    ```

    Source: `keras.optimizers.Adam(amsgrad=True)`; Reddi et al., arXiv
    1904.09237. With `weight_decay` it is Keras's `AdamW(amsgrad=True)`.

    Args:
        learning_rate: See the module's description.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.AMSGrad(0.001)
    """

    _KIND = "amsgrad"


@dataclasses.dataclass(frozen=True, eq=False)
class RMSprop(_Rule):
    """Divides by the root of a moving average of squared gradients.

    ```
    v = rho v + (1 - rho) g^2
    q = rho q + (1 - rho) g                   if centered, else q = 0
    s = lr g / sqrt(max(v - q^2, 0) + epsilon)
    p = momentum p + s                        with momentum, else p = s
    w = w - p
    ```

    Source: `keras.optimizers.RMSprop`; Tieleman and Hinton, 2012; centered:
    Graves, arXiv 1308.0850. Keras has no `max`: there rounding can make the
    root that of a negative number.

    Args:
        learning_rate: See the module's description.
        rho: In [0, 1).
        momentum: In [0, 1]. Above 0 a row holds `p`.
        epsilon: Positive.
        centered: Whether to subtract the square of the mean gradient.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.RMSprop(0.001, rho=0.95, centered=True)
    """

    _KIND = "rmsprop"

    learning_rate: Any = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_BELOW_1, "rho")
        self._check(_UP_TO_1, "momentum")
        self._check(_POSITIVE, "epsilon")
        self._check_bool("centered")


@dataclasses.dataclass(frozen=True, eq=False)
class Adadelta(_Rule):
    """Steps as large as past steps were, relative to past gradients.

    ```
    a = rho a + (1 - rho) g^2
    s = sqrt(d + epsilon) g / sqrt(a + epsilon)
    d = rho d + (1 - rho) s^2
    w = w - lr s
    ```

    Source: `keras.optimizers.Adadelta`; Zeiler, arXiv 1212.5701, where the
    learning rate is 1.

    Args:
        learning_rate: See the module's description.
        rho: In [0, 1).
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Adadelta(1.0)
    """

    _KIND = "adadelta"

    learning_rate: Any = 0.001
    rho: float = 0.95
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_BELOW_1, "rho")
        self._check(_POSITIVE, "epsilon")


@dataclasses.dataclass(frozen=True, eq=False)
class Ftrl(_Rule):
    """Follows the regularised leader, per coordinate; L1 makes exact zeros.

    With p = -learning_rate_power, l1 to l2_shrinkage the strengths below:

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
        learning_rate: See the module's description.
        learning_rate_power: At most 0.
        initial_accumulator_value: What `n` starts with; positive.
        l1_regularization_strength: At least 0.
        l2_regularization_strength: At least 0.
        l2_shrinkage_regularization_strength: At least 0. Of the gradient, as
            the option `l2` is, but not of `n`.
        beta: At least 0.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Ftrl(0.1, l1_regularization_strength=0.01)
    """

    _KIND = "ftrl"

    learning_rate: Any = 0.001
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_AT_MOST_0, "learning_rate_power")
        self._check(_POSITIVE, "initial_accumulator_value")
        self._check(
            _AT_LEAST_0,
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
        )


@dataclasses.dataclass(frozen=True, eq=False)
class GroupFtrl(Ftrl):
    """FTRL that sets whole rows to 0, which a small export can leave out.

    n and z as in `Ftrl`, and

    ```
    w = (l1 - |z|) / |z| z / (n'^p / lr + 2 l2 + beta / lr)   if |z| > l1
    w = 0                                                     else
    ```

    Source: DeepRec's group FTRL of embedding variables, `training_ali_ops.cc`;
    Ni et al., "Adaptive optimizers with sparse group lasso", 2021, where l1 is
    multiplied by sqrt(D).

    Args:
        learning_rate: See the module's description.
        learning_rate_power: At most 0.
        initial_accumulator_value: What `n` starts with; positive.
        l1_regularization_strength: At least 0.
        l2_regularization_strength: At least 0.
        l2_shrinkage_regularization_strength: At least 0.
        beta: At least 0.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.GroupFtrl(0.1, l1_regularization_strength=0.05)
    """

    _KIND = "group_ftrl"
    _MIXES_COORDINATES = True


@dataclasses.dataclass(frozen=True, eq=False)
class PaddleAdagrad(_Rule):
    """The Adagrad of Paddle's CTR accessor: one sum per row, scaled by shows.

    ```
    s = g / shows            if show_scale and shows > 0, else s = g
    w = w - lr s sqrt(initial_g2sum / (initial_g2sum + G))
    G = G + mean(s^2)
    ```

    `G` starts at 0, and the step is by the `G` of before it. `shows` come with
    the push, `table.push(ids, gradients, shows=...)`; without them
    they are how often the id is in the push.

    Source: PaddlePaddle's `SparseAdaGradSGDRule`, `sparse_sgd_rule.cc`. There a
    push of 0 shows divides by 0.

    Args:
        learning_rate: See the module's description.
        initial_g2sum: Positive.
        show_scale: Whether gradients are divided by shows.
        **options: See the module's description. Paddle's own bounds are
            `min_weight=-10.0, max_weight=10.0`.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.PaddleAdagrad(0.05, min_weight=-10.0, max_weight=10.0)
    """

    _KIND = "paddle_adagrad"
    _MIXES_COORDINATES = True

    learning_rate: Any = 0.05
    initial_g2sum: float = 3.0
    show_scale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_POSITIVE, "initial_g2sum")
        self._check_bool("show_scale")


@dataclasses.dataclass(frozen=True, eq=False)
class PaddleStdAdagrad(PaddleAdagrad):
    """`PaddleAdagrad` with a sum for each coordinate: G = G + s^2.

    Source: PaddlePaddle's `StdAdaGradSGDRule`, `sparse_sgd_rule.cc`.

    Args:
        learning_rate: See the module's description.
        initial_g2sum: Positive.
        show_scale: Whether gradients are divided by shows.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.PaddleStdAdagrad(0.05)
    """

    _KIND = "paddle_std_adagrad"
    _MIXES_COORDINATES = False


@dataclasses.dataclass(frozen=True, eq=False)
class PaddleSharedAdam(Adam):
    """Adam with one pair of moments for the row, 12 bytes instead of 8 D + 4.

    Each coordinate steps with its own new moments, made from the row's old
    ones; the row keeps their means.

    ```
    m' = beta_1 m + (1 - beta_1) g
    v' = beta_2 v + (1 - beta_2) g^2
    w  = w - lr sqrt(1 - beta_2^t) / (1 - beta_1^t) m' / (sqrt(v') + epsilon)
    m  = mean(m'), v = mean(v')
    ```

    Source: PaddlePaddle's `SparseSharedAdamSGDRule`, `sparse_sgd_rule.cc`. It
    does not scale by shows, and neither does this.

    Args:
        learning_rate: See the module's description.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        epsilon: Positive.
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.PaddleSharedAdam(0.001)
    """

    _KIND = "paddle_shared_adam"
    _MIXES_COORDINATES = True

    epsilon: float = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class Lion(_Rule):
    """Steps of equal size, in the direction of a moving average's sign.

    ```
    w = w - lr sign(beta_1 m + (1 - beta_1) g)
    m = beta_2 m + (1 - beta_2) g
    ```

    Source: `keras.optimizers.Lion`; Chen et al., arXiv 2302.06675.

    Args:
        learning_rate: See the module's description. A third to a tenth of
            Adam's is usual.
        beta_1: In [0, 1).
        beta_2: In [0, 1).
        **options: See the module's description.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> tsw.optimizers.Lion(1e-4, weight_decay=0.01)
    """

    _KIND = "lion"

    learning_rate: Any = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(_BELOW_1, "beta_1", "beta_2")


@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Optimizer):
    """Parts of a row, each with an optimizer of its own.

    A row of a wide-and-deep model, whose first float is the wide weight:

    >>> tsw.optimizers.Segments([
    ...     (1, tsw.optimizers.Ftrl(0.1, l1_regularization_strength=0.01)),
    ...     (None, tsw.optimizers.Adagrad(0.05)),
    ... ])

    Options belong to the parts. Norms, for `clipnorm` and `cowclip`, are those
    of the part.

    Args:
        parts: Pairs of a dimension and an optimizer, from the first float of
            the row on. The last dimension may be None, for the rest of the row;
            else they must sum to the table's. An optimizer is whatever `get`
            takes; its learning rate must be a number.
        learning_rate: What the rates of the parts are multiplied by; as for
            other optimizers, so a schedule is given here.

    Raises:
        ValueError: If a part is none. When the table is created: if the
            dimensions do not sum to the table's.
    """

    parts: Any = ()
    learning_rate: Any = 1.0

    def __init__(self, parts: Sequence[Any], learning_rate: Any = 1.0) -> None:
        object.__setattr__(self, "parts", _to_parts(parts))
        object.__setattr__(self, "learning_rate", learning_rate)
        super().__post_init__()

    def _mixing(self) -> str | None:
        return "optimizer=Segments"

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the learning rate as it was given."""
        return {
            "parts": [[dim, part.to_config()] for dim, part in self.parts],
            "learning_rate": self.learning_rate,
        }

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `optimizer` field of a table config."""
        return {
            "segments": [
                {
                    "dim": dim or 0,
                    "learning_rate_scale": part.learning_rate,
                    "optimizer": part.to_table_config(),
                }
                for dim, part in self.parts
            ]
        }


def _to_parts(parts: Any) -> tuple[tuple[int | None, Optimizer], ...]:
    try:
        pairs = [tuple(part) for part in parts]
    except TypeError:
        pairs = []
    if not pairs or not all(len(pair) == 2 for pair in pairs):
        raise ValueError(
            "`parts` must be pairs of a dimension and an optimizer, at least "
            f"one. Received: parts={parts!r}"
        )
    found = []
    for i, (dim, optimizer) in enumerate(pairs):
        is_last = i + 1 == len(pairs)
        if not (dim is None and is_last) and (
            isinstance(dim, bool)
            or not isinstance(dim, (int, np.integer))
            or dim < 1
        ):
            raise ValueError(
                "the dimension of a part must be a positive integer, or None "
                f"for the last one. Received: parts[{i}]={pairs[i]!r}"
            )
        part = get(optimizer)
        if isinstance(part, Segments):
            raise ValueError(
                "a part has no parts of its own. "
                f"Received: parts[{i}]={pairs[i]!r}"
            )
        if not isinstance(part.learning_rate, float):
            raise ValueError(
                "the learning rate of a part must be a number: a schedule is "
                "that of all parts, Segments(..., learning_rate=schedule). "
                f"Received: parts[{i}]={pairs[i]!r}"
            )
        found.append((None if dim is None else int(dim), part))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class BatchScaling:
    """What `scale_for_batch` returns: settings for a larger batch.

    Attributes:
        scale: How many times larger the batch is.
        learning_rate: That of the embeddings; unchanged.
        l2: That of the embeddings.
        dense_learning_rate: That of the model's dense variables, after warm-up.
        warmup_steps: Steps over which the dense learning rate rises.
    """

    scale: float
    learning_rate: float
    l2: float
    dense_learning_rate: float
    warmup_steps: int

    def dense_schedule(self) -> Any:
        """Returns the dense learning rate as Keras's optimizers take it.

        A Keras schedule that rises linearly from 1e-8 over `warmup_steps` and
        then stays; without warm-up a number.
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
    """Carries settings that are good for one batch size over to another.

    With batches s times as large, as in CowClip (Zheng et al., arXiv
    2204.06240): the learning rate of the embeddings stays, their L2 is
    multiplied by s, and the learning rate of the dense variables by sqrt(s),
    with a warm-up, for which the paper takes the steps of one epoch. It is made
    to go with `CowClip`.

    The paper's L2 is of all rows in every step, and an epoch has s times fewer
    steps; hence the s. Here L2 is lazy. An id that is in every batch loses
    steps likewise, but one that is rare is in about as many batches of an epoch
    as before, and with s times the L2 it decays s times as much. With
    `scale_l2=False` the L2 stays: then rare ids decay as they did, and frequent
    ones less.

    Args:
        batch_size: That to scale to; positive. With several synchronous workers
            the sum of theirs.
        base_batch_size: The one that the other settings are for; positive.
        learning_rate: Of the embeddings; at least 0.
        l2: Of the embeddings; at least 0.
        dense_learning_rate: Of the dense variables; at least 0.
        warmup_steps: Steps of the dense learning rate's warm-up; at least 0.
        scale_l2: Whether L2 is multiplied by s, as in the paper. False where
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
    for name, value, least, is_integer in (
        ("batch_size", batch_size, 1, True),
        ("base_batch_size", base_batch_size, 1, True),
        ("learning_rate", learning_rate, 0, False),
        ("l2", l2, 0, False),
        ("dense_learning_rate", dense_learning_rate, 0, False),
        ("warmup_steps", warmup_steps, 0, True),
    ):
        if (
            not _is_number(value)
            or value < least
            or (is_integer and int(value) != value)
        ):
            kind = "an integer" if is_integer else "a finite number"
            raise ValueError(
                f"`{name}` must be {kind} of at least {least}. "
                f"Received: {name}={value!r}"
            )
    if not isinstance(scale_l2, bool):
        raise ValueError(
            f"`scale_l2` must be a bool. Received: scale_l2={scale_l2!r}"
        )
    scale = batch_size / base_batch_size
    return BatchScaling(
        scale=scale,
        learning_rate=float(learning_rate),
        l2=l2 * (scale if scale_l2 else 1.0),
        dense_learning_rate=dense_learning_rate * math.sqrt(scale),
        warmup_steps=int(warmup_steps),
    )


_CLASSES: dict[str, type[Optimizer]] = {
    cls.__name__: cls
    for cls in (
        SGD,
        Momentum,
        Adagrad,
        RowwiseAdagrad,
        AdagradDecay,
        Adam,
        AdamW,
        AMSGrad,
        RMSprop,
        Adadelta,
        Ftrl,
        GroupFtrl,
        PaddleAdagrad,
        PaddleStdAdagrad,
        PaddleSharedAdam,
        Lion,
        Segments,
    )
}
_KERAS = (
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adadelta",
    "Ftrl",
    "Lion",
)
# Options that the wire has under other names.
_PYTHON_NAMES = {"clip_value": "clipvalue", "clip_norm": "clipnorm"}
# What Keras's optimizers can be told that a table does not do, with the value
# that turns it off.
_UNSUPPORTED: dict[str, Any] = {
    "decay": 0.0,
    "global_clipnorm": None,
    "gradient_accumulation_steps": None,
    "loss_scale_factor": None,
    "use_ema": False,
}
# What they say of themselves that is no setting of a step.
_NO_SETTINGS = (
    "name",
    "ema_momentum",
    "ema_overwrite_frequency",
    "is_legacy_optimizer",
    "jit_compile",
)
# Where Keras 3 and tf_keras keep what `exclude_from_weight_decay` was told.
_EXCLUSIONS = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_names",
    "_exclude_from_weight_decay_pattern",
)


def have_equal_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether optimizers keep the same state, so that one goes on for another.

    Args:
        a: What `to_table_config` returned for one of them, maybe long ago.
        b: The same for the other.

    Returns:
        True if rules and segments are the same; other numbers do not matter,
        as long as the state is as long, which is for the caller to see.
    """
    return _rules_of(a) == _rules_of(b)


def _rules_of(config: Mapping[str, Any]) -> list[tuple[int, str]]:
    if "segments" in config:
        return [
            (segment["dim"], _rules_of(segment["optimizer"])[0][1])
            for segment in config["segments"]
        ]
    (rule,) = (name for name in config if name != "options")
    # AdamW has the state of Adam.
    return [(0, "adam" if rule == "adamw" else rule)]


class KerasRate:
    """The learning rate that a Keras optimizer has whenever it is asked."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self) -> Any:
        # tf_keras keeps that of a schedule in a variable, which a step updates.
        update = getattr(
            self._optimizer, "_compute_current_learning_rate", None
        )
        if update is not None:
            update()
        return self._optimizer.learning_rate

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KerasRate):
            return NotImplemented
        return self._optimizer is other._optimizer

    def __hash__(self) -> int:
        return id(self._optimizer)

    def __repr__(self) -> str:
        return f"the learning rate of {self._optimizer!r}"


def check_learning_rate(value: Any) -> float:
    """Returns `value` as a float.

    Raises:
        ValueError: If it is not a finite number of at least 0.
    """
    if not _is_number(value) or value < 0.0:
        raise ValueError(
            "`learning_rate` must be a finite number of at least 0. "
            f"Received: learning_rate={value!r}"
        )
    return float(value)


def get(identifier: Any) -> Optimizer:
    """Returns the optimizer that a user means.

    Args:
        identifier: None for `Adam()`, a name ("sgd", "rowwise_adagrad" or
            "RowwiseAdagrad"), an optimizer of this module, a Keras optimizer of
            the same name as one, or what `to_config` returned.

    Raises:
        ValueError: If there is no such optimizer, a Keras optimizer has a
            setting that tables do not have, or a config one that is not known.
    """
    if identifier is None:
        return Adam()
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        for name, cls in _CLASSES.items():
            if cls is Segments:
                continue
            kind = getattr(cls, "_KIND", "")
            if identifier.lower() in (name.lower(), kind):
                return cls()
    elif isinstance(identifier, Mapping):
        found = _CLASSES.get(str(identifier.get("class_name")))
        if found is not None:
            return _convert(found, identifier.get("config", {}))
    elif hasattr(identifier, "get_config"):  # Keras 3 or tf_keras.
        rule = from_keras(identifier)
        if not isinstance(rule.learning_rate, float):
            return rule
        return dataclasses.replace(rule, learning_rate=KerasRate(identifier))
    raise _not_known(identifier)


def from_table_config(config: Mapping[str, Any]) -> Optimizer | None:
    """Returns what has the `to_table_config`, with its default learning rate.

    None if it is one of several optimizers in a row.
    """
    config = dict(config)
    options = config.pop("options", {})
    config.pop("update", None)  # Of the table, not of the rule.
    ((kind, fields),) = config.items()
    for cls in _CLASSES.values():
        if issubclass(cls, _Rule) and kind == cls._KIND:
            return cls(**fields, **cls._from_options(options))
    return None


def from_keras(optimizer: Any, *, ignore: Sequence[str] = ()) -> Optimizer:
    """Returns the optimizer that a Keras one stands for.

    Its `clipnorm` becomes one of each row's gradient, its `weight_decay` one of
    the rows of a push.

    Args:
        optimizer: A Keras SGD, Adagrad, Adam, AdamW, RMSprop, Adadelta, Ftrl or
            Lion.
        ignore: Settings that do not matter here.

    Raises:
        ValueError: If it is another one, has a setting without counterpart
            (`exclude_from_weight_decay` is one), or a learning rate that cannot
            be described.
    """
    name = type(optimizer).__name__
    if name not in _KERAS:
        raise _not_known(optimizer)
    if "weight_decay" not in ignore and any(
        getattr(optimizer, place, None) for place in _EXCLUSIONS
    ):
        raise ValueError(
            "variables excluded from weight decay have no counterpart on a "
            "table: all that it holds decays. Received: a Keras "
            f"{name} with `exclude_from_weight_decay`. Leave that call out, or "
            "pass an object of tfswitch.optimizers without `weight_decay`."
        )
    rate = _keras_learning_rate(optimizer)
    try:
        described = optimizer.get_config()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"a Keras {name} does not tell its settings. Pass an object "
            f"tfswitch.optimizers.{name}(learning_rate, ...) instead. "
            f"Received: learning_rate={rate!r}. The reason: {error}"
        ) from error
    config = {
        key: value
        for key, value in described.items()
        # None is off, also for what a later Keras may have.
        if key not in ignore and value is not None
    }
    config["learning_rate"] = rate
    return _convert(_CLASSES[name], config)


def _not_known(identifier: Any) -> ValueError:
    return ValueError(
        "`optimizer` must be one of the names "
        f"{', '.join(name.lower() for name in _CLASSES if name != 'Segments')}"
        f"; an object of tfswitch.optimizers; or a Keras {', '.join(_KERAS)}. "
        f"Received: {identifier!r}"
    )


def _keras_learning_rate(optimizer: Any) -> Any:
    # What was given, where `learning_rate` of a legacy optimizer is its value.
    legacy = getattr(optimizer, "_hyper", {}).get("learning_rate")
    rate = getattr(optimizer, "_learning_rate", legacy)
    # A schedule stays one: maybe nobody ever steps this optimizer.
    if callable(rate):
        return rate
    try:
        return float(np.asarray(optimizer.learning_rate))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`learning_rate` of a Keras optimizer must be a number, a schedule "
            f"or a function. Received: {type(optimizer).__name__} with "
            f"learning_rate={optimizer.learning_rate!r}"
        ) from error


def _convert(cls: type[Optimizer], config: Mapping[str, Any]) -> Optimizer:
    config = {k: v for k, v in config.items() if k not in _NO_SETTINGS}
    # With its weight decay, if it is one of AdamW.
    if cls in (Adam, AdamW) and config.pop("amsgrad", False):
        cls = AMSGrad
    for name, off in _UNSUPPORTED.items():
        value = config.pop(name, off)
        # tf_keras writes False and 0 for "off" in places.
        if value != off and value not in (False, 0, None):
            raise ValueError(
                f"`{name}` of a Keras optimizer has no counterpart in an "
                f"embedding table. Received: {name}={value!r}. Leave it out, "
                "or pass an object of tfswitch.optimizers."
            )
    for name in ("clipnorm", "clipvalue"):
        if not config.get(name):
            config.pop(name, None)
    decay = config.get("weight_decay")
    if (
        decay is None or decay is False
    ):  # 0.0 is not: AdamW has another default.
        config.pop("weight_decay", None)
    names = [field.name for field in dataclasses.fields(cls)]
    for name in config:
        if name not in names:
            raise ValueError(
                f"{cls.__name__} has no setting `{name}`; it has "
                f"{', '.join(names)}. Received: {name}={config[name]!r}"
            )
    return cls.from_config(config)
