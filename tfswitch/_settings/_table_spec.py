"""The settings of a table's rows, which tables and layers have in common."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from tfswitch import admission as admission_lib
from tfswitch import consistency as consistency_lib
from tfswitch import eviction as eviction_lib
from tfswitch import initializers as initializers_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch import statistics as statistics_lib
from tfswitch import storage_dtype as storage_dtype_lib
from tfswitch._settings._ranges import (
    PUSH_DEPTH,
    bad_argument,
    check_fields,
    check_wire_dtype,
    choices,
    integers,
)
from tfswitch.optimizers._conversion import from_table_config
from tfswitch.storage import TieredStorage

# The policies that need shows and clicks.
_NEED_SHOW_CLICK = (admission_lib.ShowClick, eviction_lib.ShowClickScore)
_NEED_USAGE = (eviction_lib.Ttl, eviction_lib.MaxRows)

# The settings that are objects, and the functions that make these objects.
_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "initializer": initializers_lib.get,
    "consistency": consistency_lib.get,
    "admission": admission_lib.get,
    "eviction": eviction_lib.get,
    "statistics": statistics_lib.get,
    "storage_dtype": storage_dtype_lib.get,
}

_CAPACITY = integers(1, 2**48)._replace(
    text="an integer from 1 to 2**48", or_none=True
)
_SEED = integers(0, 2**64 - 1)._replace(
    text="an integer from 0 to 2**64 - 1", or_none=True
)
_PUSH_DEPTH = PUSH_DEPTH._replace(or_none=True)
_WHEN_FULL = choices("refuse", "evict", "disk")._replace(or_none=True)


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The arguments of `EmbeddingTable` about its rows, as objects.

    Making a spec turns names and other forms of a setting into objects.

    Attributes:
        optimizer: None if it is not known yet.
        seed: None if it is not known yet.
        capacity: The expected number of rows. Specs that differ only here are
            equal, because it does not change the rows.
        storage: Bounds the memory of this process, for when_full="disk". It
            does not take part in comparisons, and is not stored.
        push_depth: How many pushes of this process may be in flight, or None
            for the cluster's. It does not take part in comparisons either.
        wire_dtype: The type in which this process exchanges rows and gradients
            with servers. It does not take part in comparisons either.
        layout: The layout of a dense table's rows.
        is_open: Whether `optimizer` and `update` are defaults that may still
            change. A table that exists then keeps its own optimizer, and a new
            table may get another optimizer before its first push.

    Raises:
        ValueError: If a setting is out of range.
    """

    initializer: Any = "uniform"
    optimizer: Any = None
    admission: Any = None
    eviction: Any = None
    statistics: Any = None
    when_full: Annotated[str | None, _WHEN_FULL] = None
    storage: TieredStorage | None = dataclasses.field(
        default=None, compare=False
    )
    update: Annotated[str, choices("sparse", "dense")] = "sparse"
    storage_dtype: Any = None
    seed: Annotated[int | None, _SEED] = None
    consistency: Any = None
    capacity: Annotated[int | None, _CAPACITY] = dataclasses.field(
        default=None, compare=False
    )
    push_depth: Annotated[int | None, _PUSH_DEPTH] = dataclasses.field(
        default=None, compare=False
    )
    wire_dtype: str = dataclasses.field(default="float32", compare=False)
    layout: str = ""
    is_open: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.storage is not None:
            if not isinstance(self.storage, TieredStorage):
                raise bad_argument(
                    "storage", self.storage, "a tfswitch.TieredStorage"
                )
            if self.when_full not in (None, "disk"):
                raise bad_argument(
                    "when_full", self.when_full, '"disk", because of `storage`'
                )
            self._set(when_full="disk")
        self._set(wire_dtype=check_wire_dtype(self.wire_dtype))
        for name, get in _OBJECTS.items():
            self._set(**{name: get(getattr(self, name))})
        self._set(
            statistics=_find_statistics(
                self.statistics, self.admission, self.eviction
            )
        )
        if self.optimizer is not None:
            self._set(optimizer=optimizers_lib.get(self.optimizer))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def to_table_config(self, name: str, dim: int) -> dict[str, Any]:
        """Returns the message TableConfig of a table with these rows."""
        optimizer = self.optimizer.to_table_config()
        if self.update == "dense":
            optimizer["is_dense"] = True
        if self.is_open:
            optimizer["is_open"] = True
        config: dict[str, Any] = {
            "name": name,
            "dim": dim,
            "optimizer": optimizer,
            "seed": self.seed,
            "layout": self.layout,
        }
        if self.capacity is not None:
            config["capacity"] = self.capacity
        if self.when_full is not None:
            config["when_full"] = self.when_full.upper()
        if self.wire_dtype != "float32":
            config["wire_dtype"] = self.wire_dtype.upper()
        for setting in _OBJECTS:
            if (value := getattr(self, setting)) is not None:
                config[setting] = value.to_table_config()
        return config

    def with_optimizer(self, config: Mapping[str, Any]) -> "TableSpec":
        """Returns this spec with the optimizer of a config, if it is known."""
        optimizer = from_table_config(config)
        if optimizer is None:
            return self
        return dataclasses.replace(
            self,
            optimizer=optimizer,
            update="dense" if config.get("is_dense") else "sparse",
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the settings that Keras stores, by their names here."""
        config: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "seed",
                "update",
                "when_full",
                "capacity",
                "push_depth",
                "wire_dtype",
            )
        }
        for name in _OBJECTS:
            value = getattr(self, name)
            config[name] = None if value is None else value.to_config()
        del config["initializer"]  # A layer stores its own initializer.
        return config


# The default settings of a table.
DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(TableSpec)
}


def _find_statistics(given: Any, admission: Any, eviction: Any) -> Any:
    """Returns the given statistics, or else those that the policies need.

    Raises:
        ValueError: If a policy needs a number that `statistics` do not count.
    """
    policies = [admission, *getattr(eviction, "policies", [eviction])]
    for policy in policies:
        if isinstance(policy, _NEED_SHOW_CLICK):
            if given is None:
                given = statistics_lib.ShowClick()
            if not isinstance(given, statistics_lib.ShowClick):
                raise ValueError(
                    f"{policy!r} needs tfswitch.statistics.ShowClick. "
                    f"Received: statistics={given!r}"
                )
    if given is None and any(isinstance(p, _NEED_USAGE) for p in policies):
        given = statistics_lib.Usage()
    return given
