"""The types of a table's rows in memory."""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tfswitch import optimizers as optimizers_lib
from tfswitch._settings._policy import Policy
from tfswitch._settings._ranges import bad_argument
from tfswitch._types import Config, Named
from tfswitch._warn_once import warn_once

if TYPE_CHECKING:
    from tfswitch.cluster import Cluster

_TYPES = ("float32", "float16", "bfloat16")
_ROUNDINGS = ("stochastic", "nearest")

# Optimizers that divide by the root of a mean of squares of gradients.
_MEANS_OF_SQUARES = (
    optimizers_lib.Adadelta,
    optimizers_lib.Adam,
    optimizers_lib.RMSprop,
)


@dataclasses.dataclass(frozen=True)
class StorageDtype(Policy):
    """The types of a row's floats: 32 bits, or 16 for half the memory.

    Lookups and pushes are float32 in any case. A step reads the row as float32,
    computes in float32, and rounds the values that it stores.

    Rounding to nearest loses every step that is smaller than half of the last
    bit. With bfloat16 this is a step that changes a weight by less than 1/512
    of its value. Moving averages in 16-bit slots stop changing for the same
    reason. Stochastic rounding rounds up or down at random, so that the
    expected value is exact, as in "Deep Learning with Limited Numerical
    Precision" (arXiv 1502.02551). The draw depends on the table's seed, the id
    and the number of the step, so a repeated training run gives the same rows.
    (Pushes in graphs of TensorFlow 1 have no number; the table draws one.)

    New and assigned rows are rounded to nearest. Finite numbers beyond the
    range of float16 (65,504) are stored as the largest finite number.

    Args:
        embeddings: "float32", "float16" (11 significant bits, from 6e-8 to
            65,504) or "bfloat16" (8 significant bits, the range of float32).
        slots: One of the same types, for the optimizer's state per coordinate.
            The state per row (Adam's count of steps) and statistics stay
            float32. Prefer bfloat16 to float16: means of squares underflow in
            float16, which makes steps of Adam and similar optimizers far too
            long. A table warns of this.
        rounding: "stochastic" or "nearest".

    Raises:
        ValueError: If an argument is something else.

    Example:

    >>> table = tsw.EmbeddingTable(
    ...     "word", 16, optimizer="adagrad",
    ...     storage_dtype=tsw.StorageDtype("bfloat16", slots="bfloat16"))
    >>> table.stats()["row_stride_bytes"]  # 128 in float32
    64
    """

    embeddings: str = "float32"
    slots: str = "float32"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        for name, values in (
            ("embeddings", _TYPES),
            ("slots", _TYPES),
            ("rounding", _ROUNDINGS),
        ):
            value = getattr(self, name)
            value = getattr(value, "name", value)  # tf.bfloat16
            if not isinstance(value, str) or value not in values:
                names = ", ".join(f'"{v}"' for v in values)
                raise bad_argument(name, value, f"one of {names}")
            object.__setattr__(self, name, value)
        if self.embeddings == self.slots == "float32":
            # Nothing is rounded. `rounding` gets a fixed value, so that all
            # objects for float32 are equal.
            object.__setattr__(self, "rounding", "stochastic")

    def to_table_config(self) -> dict[str, Any]:
        """Returns the `storage_dtype` field of a table config."""
        return {
            name: value.upper() for name, value in self.get_config().items()
        }


_FIELDS = {field.name for field in dataclasses.fields(StorageDtype)}
_Name = Literal["float32", "float16", "bfloat16"]
StorageDtypeLike = StorageDtype | _Name | Named | Config


def get(identifier: StorageDtypeLike | None) -> StorageDtype:
    """Returns the storage dtype that a user's value means.

    Args:
        identifier: A `StorageDtype`; the type of the embeddings, with float32
            slots; a config that its `get_config` or `to_config` returned; or
            None for float32.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(identifier, StorageDtype):
        return identifier
    if identifier is None:
        return StorageDtype()
    if isinstance(identifier, Mapping):
        config = identifier.get("config", identifier)
        if isinstance(config, Mapping) and config.keys() <= _FIELDS:
            return StorageDtype.from_config(config)
    name = getattr(identifier, "name", identifier)  # tf.bfloat16
    if isinstance(name, str) and name in _TYPES:
        return StorageDtype(name)
    raise ValueError(
        '`storage_dtype` must be a tfswitch.StorageDtype, or "float32", '
        f'"float16" or "bfloat16". Received: storage_dtype={identifier!r}'
    )


def warn_of_slots(
    owner: str,
    storage_dtype: StorageDtype,
    optimizer: optimizers_lib.Optimizer,
    cluster: "Cluster",
) -> None:
    """Warns, once per cluster, if an optimizer needs slots with more bits."""
    rules = (
        [rule for _, rule in optimizer.parts]
        if isinstance(optimizer, optimizers_lib.Segments)
        else [optimizer]
    )
    for rule in rules:
        name = type(rule).__name__
        problem = ""
        if storage_dtype.slots == "float16" and _has_mean_of_squares(rule):
            problem = f"the mean of squared gradients of {name} underflows"
            remedy = 'slots="bfloat16" or "float32"'
        if (
            storage_dtype.slots != "float32"
            and isinstance(rule, optimizers_lib.RMSprop)
            and rule.centered
        ):
            problem = (
                f"{name} with centered=True takes the difference of two "
                "averages, which is lost"
            )
            remedy = 'slots="float32"'
        if problem:
            warn_once(
                weakref.ref(cluster),
                f"{problem} {storage_dtype.slots}",
                f"{owner}: {problem} in {storage_dtype.slots} slots, and steps "
                f"become far too long. Make the storage dtype with {remedy}.",
                stacklevel=5,
            )
            return


def _has_mean_of_squares(rule: optimizers_lib.Optimizer) -> bool:
    # PaddleSharedAdam is no problem: it has one mean per row, which stays
    # float32.
    return isinstance(rule, _MEANS_OF_SQUARES) and not isinstance(
        rule, optimizers_lib.PaddleSharedAdam
    )
