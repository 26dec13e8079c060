"""The settings of a table's rows, which tables and layers have in common."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfswitch import admission as admission_lib
from tfswitch import consistency as consistency_lib
from tfswitch import eviction as eviction_lib
from tfswitch import initializers as initializers_lib
from tfswitch import optimizers as optimizers_lib
from tfswitch import statistics as statistics_lib
from tfswitch import storage_dtype as storage_dtype_lib
from tfswitch._settings._ranges import Range, bad_argument
from tfswitch.optimizers._conversion import from_table_config

# The policies that need shows and clicks.
_NEED_SHOW_CLICK = (admission_lib.ShowClick, eviction_lib.ShowClickScore)
_NEED_USAGE = (eviction_lib.Ttl, eviction_lib.MaxRows)

_SEED = Range(
    "an integer from 0 to 2**64 - 1",
    lambda v: 0 <= v < 2**64,
    int,
    or_none=True,
)


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The arguments of `EmbeddingTable` about its rows, as objects.

    Making a spec turns names and other forms of a setting into objects.

    Attributes:
        optimizer: None if it is not known yet.
        seed: None if it is not known yet.
        layout: The layout of a dense table's rows.
        is_open: Whether `optimizer` and `update` are defaults that may still
            change. A present table then keeps its own optimizer, and a new
            table may get another optimizer before its first push.

    Raises:
        ValueError: If a setting is out of range.
    """

    initializer: Any = "uniform"
    optimizer: Any = None
    admission: Any = None
    eviction: Any = None
    statistics: Any = None
    update: str = "sparse"
    storage_dtype: Any = None
    seed: int | None = None
    consistency: Any = None
    layout: str = ""
    is_open: bool = False

    def __post_init__(self) -> None:
        if self.update not in ("sparse", "dense"):
            raise bad_argument("update", self.update, '"sparse" or "dense"')
        self._set(seed=_SEED.check("seed", self.seed))
        admission = admission_lib.get(self.admission)
        eviction = eviction_lib.get(self.eviction)
        self._set(
            initializer=initializers_lib.get(self.initializer),
            consistency=consistency_lib.get(self.consistency),
            admission=admission,
            eviction=eviction,
            statistics=_find_statistics(self.statistics, admission, eviction),
            storage_dtype=storage_dtype_lib.get(self.storage_dtype),
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
            optimizer["update"] = "DENSE"
        if self.is_open:
            optimizer["is_open"] = True
        config: dict[str, Any] = {
            "name": name,
            "dim": dim,
            "optimizer": optimizer,
            "initializer": self.initializer.to_table_config(),
            "seed": self.seed,
            "consistency": self.consistency.to_table_config(),
        }
        if self.layout:
            config["layout"] = self.layout
        for setting, default in {
            "admission": admission_lib.Always(),
            "eviction": None,
            "statistics": None,
            "storage_dtype": storage_dtype_lib.StorageDtype(),
        }.items():
            value = getattr(self, setting)
            if value != default:
                config[setting] = value.to_table_config()
        return config

    def with_optimizer(self, config: Mapping[str, Any]) -> "TableSpec":
        """Returns this spec with a config's optimizer, if Python has it."""
        optimizer = from_table_config(config)
        if optimizer is None:
            return self
        return dataclasses.replace(
            self,
            optimizer=optimizer,
            update="dense" if config.get("update") == "DENSE" else "sparse",
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the settings that Keras stores, by their names here."""
        return {
            "seed": self.seed,
            "consistency": self.consistency.get_config(),
            "admission": self.admission.to_config(),
            "eviction": self.eviction and self.eviction.to_config(),
            "statistics": self.statistics and self.statistics.to_config(),
            "update": self.update,
            "storage_dtype": self.storage_dtype.get_config(),
        }


# The default settings of a table.
DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(TableSpec)
}


def _find_statistics(statistics: Any, admission: Any, eviction: Any) -> Any:
    """Returns the given statistics, or else those that the policies need.

    Raises:
        ValueError: If a policy needs a number that `statistics` do not count.
    """
    given = statistics_lib.get(statistics)
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
