"""Requests of clients to the companion of server 0, as objects in the store.

A request is `requests/<id>.json`. The companion writes its answer,
`answers/<id>.json`, again and again while it works, so that the client sees
progress. The client removes both objects.
"""

import json
import re
from typing import Any

from tfswitch.remote._saves import DamagedError
from tfswitch.remote._store import Store, join

# The servers' own folder below their URL; no checkpoint may have this name.
SERVERS = "tfswitch-servers"
# This object names the cluster to which the URL belongs.
MARKER = join(SERVERS, "remote.json")
_REQUESTS = join(SERVERS, "requests")
_ANSWERS = join(SERVERS, "answers")
_FORMAT = "tfswitch-remote"
_VERSION = 1

MAX_BYTES = 64 << 10


def shard_folder(shard_index: int) -> str:
    """Returns the folder of one server's own saves."""
    return join(SERVERS, f"{shard_index:05d}")


def read_json(store: Store, path: str) -> dict[str, Any] | None:
    """Returns an object's JSON; None if it is not there.

    Raises:
        DamagedError: If the object is no JSON object.
    """
    text = store.read(path, MAX_BYTES)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DamagedError(f"'{store.url}/{path}' is damaged: expected JSON")
    return value


def write_json(store: Store, path: str, value: dict[str, Any]) -> None:
    """Writes a JSON object."""
    store.publish(path, json.dumps(value, indent=2).encode() + b"\n")


def check_marker(store: Store, cluster: str, num_shards: int) -> None:
    """Marks a URL as that of a cluster, unless another cluster has it.

    Raises:
        ValueError: If the URL belongs to another cluster, or has another
            version.
    """
    marker = {
        "format": _FORMAT,
        "version": _VERSION,
        "cluster": cluster,
        "num_shards": num_shards,
    }
    there = read_json(store, MARKER)
    if there is None:
        write_json(store, MARKER, marker)
    elif there != marker:
        raise ValueError(
            f"'{store.url}' belongs to {_describe(there)}, and this is a "
            f"server of {_describe(marker)}; give each cluster a URL of its "
            "own. For another number of servers, save with `cluster.save` and "
            "restore"
        )


def _describe(marker: dict[str, Any]) -> str:
    return (
        f"{marker.get('num_shards')} servers of cluster "
        f"{marker.get('cluster')!r} (format {marker.get('version')})"
    )


def checkpoint_path(path: str) -> str:
    """Returns the path of a checkpoint below the servers' folder.

    Raises:
        ValueError: If the path leads elsewhere.
    """
    parts = [part for part in path.split("/") if part != ""]
    if (
        ".." in parts
        or "." in parts
        or "\0" in path
        or not parts
        or parts[0] == SERVERS
    ):
        raise ValueError(
            "a checkpoint must lie below the servers' URL, under a name "
            f"without '..' that is not '{SERVERS}'. Received: {path!r}"
        )
    return "/".join(parts)


def request_ids(store: Store) -> list[str]:
    """Returns the ids of all requests."""
    return [
        name[: -len(".json")]
        for name in store.sizes(_REQUESTS)
        if re.fullmatch(r"[0-9a-f]{16}\.json", name)
    ]


def request_name(request_id: str) -> str:
    """Returns the path of a request."""
    return join(_REQUESTS, f"{request_id}.json")


def answer_name(request_id: str) -> str:
    """Returns the path of the answer to a request."""
    return join(_ANSWERS, f"{request_id}.json")


def clear_answers(store: Store) -> None:
    """Removes answers that clients have not removed."""
    store.remove(join(_ANSWERS, name) for name in store.sizes(_ANSWERS))
