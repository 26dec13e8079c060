"""Flags that are durations."""

import re
import threading

from absl import flags

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _DurationParser(flags.ArgumentParser[float]):
    """Seconds, from text such as "30s", "5m", "24h" or "1d"."""

    syntactic_help = "a duration, such as 30s, 5m, 24h or 1d"

    def parse(self, argument: str | float) -> float:
        if isinstance(argument, (int, float)):
            return float(argument)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", argument.strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"expected {self.syntactic_help}")
        return seconds

    def flag_type(self) -> str:
        return "duration"


class _DurationSerializer(flags.ArgumentSerializer[float]):
    """The text of a default."""

    def serialize(self, value: float) -> str:
        return f"{value:g}s"


def define(
    name: str, default: str | None, help: str
) -> flags.FlagHolder[float]:
    """Defines a flag whose value is a number of seconds."""
    return flags.DEFINE(
        _DurationParser(), name, default, help, serializer=_DurationSerializer()
    )
