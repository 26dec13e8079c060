"""Calls methods of the core by their names, with JSON messages.

`protos/tfswitch/v1/control.proto` has the methods. In protobuf's JSON, 64-bit
integers are strings; `integers` converts them.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Caller(Protocol):
    """An object of `_native`, or the module, on which methods are called."""

    def call(self, method: str, request_json: str) -> str: ...


def call(caller: Caller, method: str, **request: Any) -> dict[str, Any]:
    """Returns the response of a method.

    Args:
        caller: A `_native.Cluster`, a `_native.Table` for the cluster that it
            keeps open, or `_native` for methods that need no cluster.
        method: Name of the method.
        request: The fields of the request; fields that are None are left out.
    """
    message = {k: v for k, v in request.items() if v is not None}
    try:
        return json.loads(caller.call(method, json.dumps(message)))
    except PermissionError as error:
        # The error names only the RPC. A function may send several RPCs, so its
        # own name is added here.
        name = _called()
        raise PermissionError(
            f"`{name}`: {error}" if name else str(error)
        ) from None


def _called() -> str:
    """Returns the name of the function that the program has called.

    It is empty if the program is the command line.
    """
    frame, name = sys._getframe(2), ""
    while frame and (
        (module := frame.f_globals.get("__name__", "")).startswith("tfswitch.")
        and not module.startswith("tfswitch.cli.")
    ):
        code = frame.f_code  # Python 3.10 has no qualified name.
        name = getattr(code, "co_qualname", code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return name


def integers(
    message: Mapping[str, Any], names: Iterable[str]
) -> dict[str, int]:
    """Returns fields of a message as ints."""
    return {name: int(message[name]) for name in names}
