"""Calls of the core by the name of a method, with JSON messages.

`protos/tfswitch/v1/control.proto` has the methods. In protobuf's JSON 64-bit
integers are strings, so a reader of a response makes them ints.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Caller(Protocol):
    """Has the methods."""

    def call(self, method: str, request_json: str) -> str: ...


def call(caller: Caller, method: str, **request: Any) -> dict[str, Any]:
    """Returns the response of a method.

    Args:
        caller: A `_native.Cluster`, a `_native.Table` for the cluster that it
            keeps open, or `_native` for methods that need no cluster.
        method: Name of the method.
        request: The fields of its request; those that are None are left out.
    """
    message = {k: v for k, v in request.items() if v is not None}
    return json.loads(caller.call(method, json.dumps(message)))


def integers(
    message: Mapping[str, Any], names: Iterable[str]
) -> dict[str, int]:
    """Returns fields of a message as ints."""
    return {name: int(message[name]) for name in names}
