"""Reads the settings of a table that exists from its message TableConfig."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tfswitch import admission, eviction, initializers
from tfswitch import optimizers as optimizers_lib
from tfswitch import statistics as statistics_lib
from tfswitch._settings._table_spec import TableSpec
from tfswitch.optimizers._conversion import (
    from_table_config,
    rules_from_table_config,
)


def spec_of(config: Mapping[str, Any]) -> TableSpec:
    """Returns the spec whose `to_table_config` is this config.

    Servers have no learning rate, so the optimizer has its default one.

    Raises:
        ValueError: If a setting is not known here.
    """
    absent = _values(config["admission"]["not_admitted"])
    when_full = config.get("when_full", "DEFAULT").lower()
    return TableSpec(
        initializer=_one_of(
            "initializer", config, initializers._CLASSES.values()
        ),
        optimizer=_optimizer_of(config["optimizer"]),
        admission=_one_of(
            "admission",
            config,
            admission._registry.classes,
            not_admitted=absent["constant"]
            if absent["kind"] == "constant"
            else absent["kind"],
        ),
        eviction=_eviction_of(_values(config["eviction"])),
        statistics=_statistics_of(**_values(config["statistics"])),
        when_full=None if when_full == "default" else when_full,
        update="dense" if config["optimizer"]["is_dense"] else "sparse",
        storage_dtype=_values(config["storage_dtype"]),
        seed=int(config["seed"]),
        capacity=int(config.get("capacity", 0)) or None,
        consistency=_values(config["consistency"]),
        layout=config["layout"],
        is_open=config["optimizer"]["is_open"],
    )


def _values(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with the values of Python: 64-bit integers and enums."""
    return {
        name: (int(value) if value.isdigit() else value.lower())
        if isinstance(value, str)
        else value
        for name, value in message.items()
    }


def _one_of(
    what: str, config: Mapping[str, Any], classes: Iterable[Any], **also: Any
) -> Any:
    """Returns the object of the field that is set in a oneof."""
    for cls in classes:
        if cls._KIND and cls._KIND in config[what]:
            return cls(**_values(config[what][cls._KIND]), **also)
    raise _not_known(what, config[what])


def _not_known(what: str, message: Any) -> ValueError:
    return ValueError(
        f"this version of tfswitch does not know the {what} of the table. "
        f"Install the version that made it. Received: {what}={message!r}"
    )


def _optimizer_of(message: Mapping[str, Any]) -> optimizers_lib.Optimizer:
    parts: list[tuple[int | None, optimizers_lib.Optimizer]] = []
    for segment, rule in zip(
        message["segments"], rules_from_table_config(message), strict=True
    ):
        if rule is None:
            raise _not_known("optimizer", message)
        rate = segment["learning_rate_scale"]
        part = dataclasses.replace(rule, learning_rate=rate)
        parts.append((segment["dim"] or None, part))
    return from_table_config(message) or optimizers_lib.Segments(parts)


def _eviction_of(values: dict[str, Any]) -> Any:
    every_secs = values.pop("every_secs")
    policies: list[Any] = []
    for cls in eviction._registry.classes:
        names = {f.name for f in dataclasses.fields(cls)} & values.keys()
        if names - {"order"}:  # Set even if `max_rows` is not.
            policies.append(cls(**{name: values[name] for name in names}))
    if len(policies) > 1:
        return eviction.AnyOf(policies, every_secs=every_secs)
    for policy in policies:
        return dataclasses.replace(policy, every_secs=every_secs)
    return None


def _statistics_of(kind: str, **values: Any) -> Any:
    if kind == "show_click":
        return statistics_lib.ShowClick(**values)
    return statistics_lib.Usage() if kind == "usage" else None
