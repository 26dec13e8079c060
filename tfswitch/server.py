"""A parameter server inside a Python process, for tests and notebooks."""

import functools
import os
from collections.abc import Mapping
from types import TracebackType

from tfswitch import _native
from tfswitch._connection import _tls
from tfswitch._settings._ranges import bad_argument, is_number


class Server:
    """One shard of a cluster, served over gRPC from this process.

    In production run the program `tfswitch-server` (or `python -m tfswitch
    serve`), which does the same without Python.

    Args:
        address: "host:port" to listen on, port 0 for any free one, or
            "unix:/path".
        shard_index: Which shard of the cluster this is, from 0.
        num_shards: How many servers the cluster has.
        num_threads: Threads that serve; 0 for one per core.
        max_message_bytes: Longest message; 0 for 1 GiB.
        checkpoint_root: The folder below which clients may save and restore.
            Relative paths of clients start there. None means the current
            folder. If the current folder is "/", saves are refused.
        limits: The other bounds of the server, by the names of the flags of
            `tfswitch-server`, such as `{"max_buffer_bytes": 1 << 30}`. Bounds
            that are not named keep their defaults.
        tls: The server's TLS files. Clients must then connect to "grpcs://"
            and, if `ca` is set, show a certificate. None means plaintext.
        token_file: The file of `tfswitch token create`; clients must show one
            of its tokens (docs/access.md). None: clients need no token.
        insecure: Whether to serve on an address that other machines can reach
            without TLS, or with neither `token_file` nor `ca`.

    Example:

    >>> with tsw.Server() as server:
    ...     cluster = tsw.connect(f"grpc://{server.address}")
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        shard_index: int = 0,
        num_shards: int = 1,
        num_threads: int = 0,
        max_message_bytes: int = 0,
        checkpoint_root: str | os.PathLike[str] | None = None,
        limits: Mapping[str, int] | None = None,
        tls: _tls.Tls | None = None,
        token_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        limits = limits or {}
        for name, value, least in (
            ("shard_index", shard_index, 0),
            ("num_shards", num_shards, 1),
            ("num_threads", num_threads, 0),
            ("max_message_bytes", max_message_bytes, 0),
            *((name, value, 0) for name, value in limits.items()),
        ):
            if not (is_number(value, int) and value >= least):
                raise bad_argument(
                    name, value, f"an integer of at least {least}"
                )
        if shard_index >= num_shards:
            raise ValueError(
                "`shard_index` must be below `num_shards`. Received: "
                f"shard_index={shard_index}, num_shards={num_shards}"
            )
        tls_texts = _tls.texts(tls)
        if tls is not None and (tls.cert is None or tls.server_name):
            raise bad_argument(
                "tls", tls, "one with `cert` and `key`, without `server_name`"
            )
        self._asked_address = address
        self._shard_index = shard_index
        self._num_shards = num_shards
        self._make = functools.partial(
            _native.Server,
            address,
            shard_index,
            num_shards,
            num_threads,
            max_message_bytes,
            [f"{name}={value}" for name, value in limits.items()],
            None
            if checkpoint_root is None
            else os.path.abspath(checkpoint_root),
            tls_texts,
            None if token_file is None else os.fspath(token_file),
            bool(insecure),
        )
        self._native: _native.Server | None = None

    @property
    def address(self) -> str:
        """The address that clients connect to, with the actual port.

        Raises:
            RuntimeError: If the server is not running.
        """
        if self._native is None:
            raise RuntimeError(
                f"the server for '{self._asked_address}' does not run; call "
                "start() first"
            )
        return self._native.address

    def start(self) -> "Server":
        """Binds the address and serves; does nothing if it is running.

        Returns:
            This server.

        Raises:
            ValueError: If the address is malformed, if other machines can reach
                it and TLS or authentication is missing, if `limits` has an
                unknown name, or if a file cannot be used.
            ConnectionError: If the address cannot be bound.
        """
        if self._native is None:
            self._native = self._make()
        return self

    def stop(self, grace: float = 5.0) -> None:
        """Stops serving and frees the tables. Does nothing if it is stopped.

        Args:
            grace: How long running calls may take to end, in seconds.
        """
        if self._native is not None:
            self._native.stop(grace)
            self._native = None

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = (
            f"at {self._native.address!r}"
            if self._native is not None
            else f"for {self._asked_address!r}, not running"
        )
        return (
            f"<tfswitch.Server {where}, shard {self._shard_index} of "
            f"{self._num_shards}>"
        )
