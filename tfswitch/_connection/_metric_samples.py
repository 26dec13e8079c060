"""Reads metrics of servers and of this process."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tfswitch import _native
from tfswitch._connection._control_calls import Caller, call


class Sample(NamedTuple):
    """A value of a metric, such as ("tfswitch_table_rows", {...}, 3.0)."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def series(self) -> str:
        """The name with labels, as Prometheus writes it."""
        if not self.labels:
            return self.name
        pairs = (
            '{}="{}"'.format(
                key,
                value.replace("\\", r"\\")
                .replace('"', r"\"")
                .replace("\n", r"\n"),
            )
            for key, value in sorted(self.labels.items())
        )
        return f"{self.name}{{{','.join(pairs)}}}"


def views_of(caller: Caller | None) -> list[dict[str, Any]]:
    """Returns what each server tells about itself: `ServerView` of the proto.

    Args:
        caller: A `_native.Cluster`; None for the calls of this process.
    """
    method = "GetProcessMetrics" if caller is None else "GetMetrics"
    views: list[dict[str, Any]] = call(caller or _native, method)["servers"]
    return views


def texts_of(caller: Caller | None) -> list[str]:
    """Returns Prometheus's text format: one text for each server."""
    return [view["metrics"] for view in views_of(caller)]


def samples_of(texts: Iterable[str]) -> list[Sample]:
    """Parses Prometheus's text format."""
    from prometheus_client import parser

    return [
        Sample(sample.name, sample.labels, float(sample.value))
        for text in texts
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    ]
