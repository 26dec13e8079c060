"""The TF_CONFIG environment variable, which launchers of TensorFlow jobs set.

    {"cluster": {"ps": ["host:port"], "chief": [...], "worker": [...]},
     "task": {"type": "worker", "index": 1}}

The "ps" entries of the variable are tfswitch servers, in shard order. The
chief, if there is one, is worker 0.
"""

import contextlib
import json
import os
from typing import Any, NamedTuple

from tfswitch._connection._tokens import without_secrets

_WORKER_TYPES = ("chief", "master", "worker")


class TfConfigError(ValueError):
    """The environment variable TF_CONFIG cannot be read."""


class Task(NamedTuple):
    """The role of this process: the task `number` of its `type`."""

    type: str
    number: int


def ps_addresses() -> list[str]:
    """Returns the "ps" entries; none if the variable is not set."""
    return _job("ps")


def cluster_address() -> str | None:
    """Returns the address of the "ps" entries; None if there are none.

    The address has the form for TLS if the environment names TLS files for
    clients.
    """
    servers = ps_addresses()
    if not servers:
        return None
    has_tls = any(
        os.environ.get(f"TFSWITCH_TLS_{name}")
        for name in ("CA", "CERT", "KEY", "SERVER_NAME")
    )
    return ("grpcs://" if has_tls else "grpc://") + ",".join(servers)


def num_workers() -> int:
    """Returns how many workers there are, chief included; 0 if not known."""
    return sum(len(_job(name)) for name in _WORKER_TYPES)


def worker_id() -> int | None:
    """Returns the number of this worker, or None if this is no worker."""
    present = task()
    if present is None or present.type not in _WORKER_TYPES:
        return None
    before = _WORKER_TYPES[: _WORKER_TYPES.index(present.type)]
    return present.number + sum(len(_job(name)) for name in before)


def task() -> Task | None:
    """Returns this process's task, or None if the variable names none."""
    config = _read()
    found = config.get("task")
    if not found:
        return None
    # The caught errors may contain a token, so the new error does not refer to
    # them.
    present = None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        present = Task(str(found["type"]), int(found["index"]))
    if (
        present is None
        or present.number < 0
        or str(present.number) != str(found["index"])
    ):
        raise _bad()
    return present


def _job(name: str) -> list[str]:
    cluster = _read().get("cluster", {})
    tasks = cluster.get(name, []) if isinstance(cluster, dict) else None
    # Some launchers write a single chief as a string.
    if isinstance(tasks, str):
        tasks = [tasks]
    if not isinstance(tasks, list) or not all(
        isinstance(address, str) for address in tasks
    ):
        raise _bad()
    return tasks


def _read() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return {}
    config = None
    with contextlib.suppress(ValueError):
        config = json.loads(text)
    if not isinstance(config, dict):
        raise _bad()
    return config


def _bad() -> TfConfigError:
    return TfConfigError(
        "the environment variable TF_CONFIG must hold a JSON object such as "
        '{"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, "task": '
        '{"type": "worker", "index": 0}}. Received: '
        f"TF_CONFIG={without_secrets(os.environ.get('TF_CONFIG', ''))!r}"
    )
