"""The parser of the command line's arguments, and types of their values."""

import argparse
import contextlib
import math
import re
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from absl import app

_Number = TypeVar("_Number", int, float)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS = {
    "": 1,
    **{unit: 1000**i for i, unit in enumerate("kMGT", 1)},
    "B": 10**9,
    **{f"{unit}i": 1024**i for i, unit in enumerate("KMGT", 1)},
}


class ParserFoundError(Exception):
    """Carries the parser of a command to `tfswitch completion`."""

    def __init__(self, parser: "Parser") -> None:
        super().__init__()
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """Parses the words of a command; flags cannot be abbreviated.

    Attributes:
        is_collected: Whether a parser raises itself in place of parsing.
    """

    is_collected = False

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            f"tfswitch {command}", description=description, allow_abbrev=False
        )

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses what it knows; all methods that parse call this one."""
        if Parser.is_collected:
            raise ParserFoundError(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises the error that ends the program with one line."""
        raise app.UsageError(
            f"{message}. `{self.prog} --help` lists what there is."
        )


def duration(text: str) -> float:
    """Returns seconds, from text such as "30s", "5m", "24h" or "1d"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ArgumentTypeError(
            "expected a duration, such as 30s, 5m, 24h or 1d. Received: "
            f"{text!r}"
        )
    return seconds


def at_least(least: _Number) -> Callable[[str], _Number]:
    """Returns the argument type of finite numbers from `least` on."""

    def parse(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            number = type(least)(text)
            if least <= number < math.inf:
                return number
        kind = "an integer" if isinstance(least, int) else "a finite number"
        raise ArgumentTypeError(
            f"expected {kind} from {least:g} on. Received: {text!r}"
        )

    return parse


def quantity(least: int) -> Callable[[str], int]:
    """Returns the argument type of counts such as "2.5M", "1B" or "512Mi"."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"([\d_]+(?:\.\d+)?)([kMGTB]|[KMGT]i|)", text)
        count = float(match[1]) * _UNITS[match[2]] if match else -1.0
        if not least <= count < 2**53:
            raise ArgumentTypeError(
                f"expected a number from {least} on, such as 30000, 2.5M, 1B "
                f"(a thousand M) or 512Mi. Received: {text!r}"
            )
        return round(count)

    return parse


def names(text: str) -> list[str]:
    """Returns the comma-separated parts."""
    return [name.strip() for name in text.split(",")]
