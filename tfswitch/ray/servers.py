"""Parameter servers as actors of Ray."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfswitch._connection import _ray_addresses, _tls
from tfswitch._settings._ranges import bad_argument, is_number
from tfswitch.ray import _server_actor

# The most calls that an actor handles at a time. Each connected process makes
# one long call to each actor.
_MAX_CALLS = 10_000
# Flags that arguments of start_servers set.
_OWNED_FLAGS = {
    *("address", "shard_index", "num_shards", "data_dir", "cluster_name"),
    *("push_log", "tls_ca", "tls_cert", "tls_key", "token_file", "insecure"),
    "remote",
}
_PLACEMENTS = ("spread", "strict_spread", "pack", "strict_pack")

_Flag = str | float | os.PathLike[str] | None


class Servers:
    """The servers of a cluster. Made by `start_servers` and `get_servers`.

    Thread-safe. As a context manager it stops the servers at the end.

    Attributes:
        name: The name of the cluster.
        address: "ray://NAME", for `tfswitch.connect`.
    """

    def __init__(
        self, name: str, actors: Sequence[Any], group: PlacementGroup
    ) -> None:
        self.name = name
        self.address = f"{_ray_addresses.SCHEME}{name}"
        self._actors = list(actors)
        self._group = group

    @property
    def num_servers(self) -> int:
        """How many servers there are."""
        return len(self._actors)

    def addresses(self) -> list[str]:
        """Returns the present addresses, as "host:port" in shard order.

        Raises:
            ConnectionError: If Ray has given a server up.
        """
        try:
            infos = ray.get([actor.info.remote() for actor in self._actors])
        except RayError as error:
            raise ConnectionError(
                f"'{self.address}': {_ray_addresses.reason(error)}"
            ) from error
        return [info["address"] for info in infos]

    def stop(self, timeout_secs: float = 60.0) -> None:
        """Ends the servers, which save their rows first. Idempotent.

        Args:
            timeout_secs: How long the servers may take, in seconds; then they
                are killed.

        Raises:
            RuntimeError: If a server could not save its rows, or not in time.
        """
        if not self._actors:
            return
        _ray_addresses.forget(self.name)
        actors, self._actors = self._actors, []
        give_up = time.monotonic() + timeout_secs
        failures = []
        try:
            stopping = [actor.stop.remote() for actor in actors]
            for index, reference in enumerate(stopping):
                left = max(0.0, give_up - time.monotonic())
                try:
                    code = ray.get(reference, timeout=left)
                    failure = f"exit code {code}" if code else ""
                except GetTimeoutError:
                    failure = f"it took longer than {timeout_secs:g} s"
                except RayError as error:
                    failure = _ray_addresses.reason(error)
                if failure:
                    failures.append(f"server {index}: {failure}")
        finally:
            _remove(actors, self._group)
        if failures:
            raise RuntimeError(
                f"'{self.address}' has not ended well, and writes since the "
                f"last save may be lost: {'; '.join(failures)}"
            )

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except RuntimeError as error:
            if exc is None:
                raise
            # The caller gets the first error, so this error is only printed.
            print(f"tfswitch: warning: {error}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        return f"<tfswitch.ray.Servers {self.address!r}, {self.num_servers}>"


def start_servers(
    num_servers: int,
    *,
    name: str = "tfswitch",
    resources_per_server: Mapping[str, float] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    push_log: bool | None = None,
    tls: _tls.Tls | None = None,
    token_file: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    host: str | None = None,
    placement: str = "spread",
    server_flags: Mapping[str, _Flag | Sequence[_Flag]] | None = None,
    max_restarts: int = 10,
    detached: bool = False,
    runtime_env: Mapping[str, Any] | None = None,
    metrics_secs: float = 10.0,
    timeout_secs: float = 300.0,
) -> Servers:
    """Starts parameter servers as actors of a placement group.

    Each actor owns a server process. If the process, the actor or the node
    ends, Ray starts the actor again on a node with room. The server then
    recovers from `data_dir`, and connections to "ray://NAME" follow. The
    processes need no TensorFlow.

    Args:
        num_servers: How many servers to start.
        name: The name of this cluster of servers. Two clusters of servers in
            one Ray cluster need different names.
        resources_per_server: The resources of each bundle of the placement
            group, as Ray names them. None: `{"CPU": 1}`.
        data_dir: A folder of a volume that all nodes share; server i uses the
            folder `i` below it, and `Cluster.save` writes to the folder
            `checkpoints`. Or a URL of an object store, as for
            `tfswitch serve --remote` (docs/object_stores.md): a restarted
            server has the rows of its last uploaded save. None: a restarted
            server has no rows.
        push_log: Whether servers log each write, so that no acknowledged write
            is lost with a process or a node (docs/durability.md). None means
            yes if `data_dir` is a folder.
        tls: `cert` and `key` of the servers; with `ca` the servers ask for
            client certificates. The files must be on all nodes.
        token_file: The path, the same on all nodes, of the file with the hashes
            of tokens that clients may use (docs/access.md).
        insecure: Whether to serve other machines without TLS and tokens.
        host: The address that a server binds and that clients get. None: the
            node's address in Ray. Use "127.0.0.1" if all processes are on one
            machine.
        placement: "spread", "strict_spread" (one server on each node), "pack"
            or "strict_pack".
        server_flags: Other flags of `tfswitch serve --help`, such as
            `{"checkpoint_every": "5m"}`. A flag is repeated for each value of a
            list.
        max_restarts: How often each server is restarted; -1: always.
        detached: Whether the servers continue to run when this program ends;
            `get_servers` then finds these servers. If not, Ray kills the
            servers at the end of the program, so call `stop` to save their
            rows.
        runtime_env: Ray's environment of the actors.
        metrics_secs: How often, in seconds, the actors report rows, new rows
            per second and bytes of the tables to Ray's metrics. If servers
            require tokens, the actors take one from the environment
            (`runtime_env`), as clients do.
        timeout_secs: Longest time for the start of the servers, in seconds.

    Raises:
        ValueError: If an argument is not allowed, or servers of that name run.
        RuntimeError: If a server does not start; the message contains the
            output of the server. If this process is not connected to Ray.
        TimeoutError: If the servers have not started in time.

    Example:

    >>> ray.init("local")
    >>> with tsw.ray.start_servers(
    ...     2, data_dir="/tmp/run", host="127.0.0.1"
    ... ) as servers:
    ...     tsw.ray.run_workers(train, 3, servers=servers)
    """
    _check_arguments(num_servers, name, placement, metrics_secs)
    folder = _checked_folder(data_dir)
    flags = _flags_of_data(folder, push_log) | _flags_of_tls(tls)
    flags |= {"insecure": insecure, "token_file": token_file}
    flags |= _checked_flags(server_flags or {})
    _check_is_free(name)
    resources = dict(resources_per_server or {"CPU": 1})
    actor_options = {
        "lifetime": "detached" if detached else None,
        "max_restarts": max_restarts,
        "runtime_env": dict(runtime_env or {}),
        **_options_of_resources(resources),
    }
    give_up = time.monotonic() + timeout_secs
    group = placement_group(
        [resources] * num_servers,
        strategy=placement.upper(),
        lifetime=actor_options["lifetime"],
    )
    options = _server_actor.ServerOptions(
        name=name,
        num_servers=num_servers,
        host=host,
        data_dir=folder,
        flags=_as_arguments(flags),
        has_tls=tls is not None,
        namespace=_ray_addresses.NAMESPACE,
        group=group,
        metrics_secs=metrics_secs,
    )
    servers = Servers(name, [], group)
    try:
        _wait_for_resources(group, resources, num_servers, name, timeout_secs)
        for index in range(num_servers):
            servers._actors.append(_start_actor(options, index, actor_options))
        _wait_for_start(servers, give_up, timeout_secs)
    except BaseException:
        _remove(servers._actors, group)
        raise
    return servers


def _check_arguments(
    num_servers: int, name: str, placement: str, metrics_secs: float
) -> None:
    if not (is_number(num_servers, int) and num_servers >= 1):
        raise bad_argument("num_servers", num_servers, "an integer from 1")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise bad_argument("name", name, "letters, digits, '_', '-' and '.'")
    if placement not in _PLACEMENTS:
        raise bad_argument("placement", placement, " or ".join(_PLACEMENTS))
    if not is_number(metrics_secs, int, float) or metrics_secs <= 0:
        raise bad_argument("metrics_secs", metrics_secs, "seconds above 0")


def _checked_folder(data_dir: str | os.PathLike[str] | None) -> str | None:
    folder = None if data_dir is None else os.fspath(data_dir)
    if folder is None or _server_actor.is_url(folder) or os.path.isabs(folder):
        return folder
    raise bad_argument(
        "data_dir", data_dir, "an absolute path, as nodes have no other"
    )


def _flags_of_data(folder: str | None, push_log: bool | None) -> dict[str, Any]:
    if push_log and folder is None:
        raise bad_argument("push_log", push_log, "False without a `data_dir`")
    if push_log is None:
        push_log = folder is not None and not _server_actor.is_url(folder)
    return {"push_log": push_log}


def _flags_of_tls(tls: _tls.Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    if tls.cert is None or tls.server_name:
        raise bad_argument(
            "tls", tls, "one with `cert` and `key`, without `server_name`"
        )
    return {f"tls_{name}": getattr(tls, name) for name in ("ca", "cert", "key")}


def _checked_flags(server_flags: Mapping[str, Any]) -> Mapping[str, Any]:
    owned = _OWNED_FLAGS.intersection(server_flags)
    if owned:
        raise bad_argument(
            "server_flags",
            server_flags,
            f"flags that are not arguments of start_servers, as {min(owned)!r}",
        )
    return server_flags


def _check_is_free(name: str) -> None:
    """Raises an error unless this Ray cluster has no servers of that name."""
    if not ray.is_initialized():
        raise RuntimeError(
            "this process is not connected to Ray; call ray.init() first"
        )
    try:
        ray.get_actor(
            _ray_addresses.actor_name(name, 0), _ray_addresses.NAMESPACE
        )
    except ValueError:
        return
    raise ValueError(
        f"servers named {name!r} run in this Ray cluster already; connect "
        f"to '{_ray_addresses.SCHEME}{name}', or give these another `name`"
    )


def _options_of_resources(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns Ray's options of an actor that takes these resources."""
    others = dict(resources)
    return {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", 0),
        "memory": others.pop("memory", None),
        "resources": others,
    }


def _start_actor(
    options: _server_actor.ServerOptions,
    index: int,
    actor_options: Mapping[str, Any],
) -> Any:
    # Sent by value, so that the actors do not import TensorFlow.
    ray.cloudpickle.register_pickle_by_value(_server_actor)
    actor_type: Any = ray.remote(_server_actor.ServerActor)
    return actor_type.options(
        name=_ray_addresses.actor_name(options.name, index),
        namespace=options.namespace,
        max_concurrency=_MAX_CALLS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            options.group, placement_group_bundle_index=index
        ),
        **actor_options,
    ).remote(options, index)


def get_servers(name: str = "tfswitch", timeout_secs: float = 30.0) -> Servers:
    """Returns running servers, such as detached servers of another program.

    Args:
        name: The name that `start_servers` got.
        timeout_secs: Longest wait for the servers, in seconds.

    Raises:
        ConnectionError: If Ray has no servers of that name.
        TimeoutError: If the servers do not answer in time.

    Example:

    >>> tsw.ray.get_servers("nightly").stop()
    """
    info = _ray_addresses.ask(name, 0, timeout_secs)
    actors = [
        ray.get_actor(
            _ray_addresses.actor_name(name, i), _ray_addresses.NAMESPACE
        )
        for i in range(info["num_servers"])
    ]
    return Servers(name, actors, info["group"])


def _wait_for_resources(
    group: PlacementGroup,
    resources: Mapping[str, float],
    num_servers: int,
    name: str,
    timeout_secs: float,
) -> None:
    if group.wait(1.0):
        return
    print(
        f"tfswitch: waiting for {num_servers} times {dict(resources)} of Ray, "
        f"for the servers of '{name}', for up to {timeout_secs:g} s",
        file=sys.stderr,
        flush=True,
    )
    give_up = time.monotonic() + timeout_secs
    while not group.wait(1.0):
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"Ray has not had {num_servers} times {dict(resources)} for "
                f"the servers of '{name}' within {timeout_secs:g} s. It has in "
                f"all {ray.cluster_resources()}, and free are "
                f"{ray.available_resources()}"
            )


def _wait_for_start(
    servers: Servers, give_up: float, timeout_secs: float
) -> None:
    for index, actor in enumerate(servers._actors):
        left = max(0.01, give_up - time.monotonic())
        try:
            ray.get(actor.info.remote(), timeout=left)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"server {index} of '{servers.name}' did not start within "
                f"{timeout_secs:g} s. It may still be recovering its rows: see "
                "the logs of its actor"
            ) from error
        except RayError as error:
            why = _ray_addresses.reason(error)
            if "--insecure" in why:
                raise RuntimeError(
                    "the servers can be reached by other machines: pass `tls` "
                    "and `token_file` to start_servers, or `insecure=True`; or "
                    f"host='127.0.0.1' if all is on one machine. {why}"
                ) from None
            raise RuntimeError(why) from None


def _remove(actors: Sequence[Any], group: PlacementGroup) -> None:
    if not ray.is_initialized():  # Without Ray there are no actors.
        return
    for actor in actors:
        # The actor may have ended by itself.
        with contextlib.suppress(RayError):
            ray.kill(actor)
    remove_placement_group(group)


def _as_arguments(values: Mapping[str, _Flag | Sequence[_Flag]]) -> list[str]:
    arguments = []
    for name, value in values.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, os.PathLike):
                each = os.path.abspath(each)
            if each is True:
                arguments.append(f"--{name}")
            elif each is not None and each is not False:
                arguments.append(f"--{name}={each}")
    return arguments
