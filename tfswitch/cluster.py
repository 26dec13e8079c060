"""Where tables live: in this process, or on parameter servers."""

import collections
import math
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tfswitch import _native
from tfswitch._connection import _addresses, _tf_config, _tls, _tokens
from tfswitch._connection._control_calls import call, integers
from tfswitch._connection._reports import ClusterStats, TableStats
from tfswitch._progress_bar import progress_bar
from tfswitch._settings._ranges import (
    PUSH_DEPTH,
    Range,
    bad_argument,
    checked_text,
    is_number,
)
from tfswitch._types import TableOrName

if TYPE_CHECKING:
    from tfswitch.dense import DenseTable
    from tfswitch.remote.store_checkpoints import RemoteCheckpoint
    from tfswitch.table import EmbeddingTable

_ACCEPTED = (
    '"local://" or "local://NAME" (this process), '
    '"grpc://host:port,host:port", "grpcs://host:port,host:port" (TLS) or '
    '"grpc+unix:///path" (servers in shard order), or "ray://NAME"'
)

_lock = threading.Lock()  # Released before each wait.
# Each fork takes this lock. Otherwise a child could inherit the lock while a
# thread of the parent holds it.
os.register_at_fork(
    before=_lock.acquire,
    after_in_parent=_lock.release,
    after_in_child=_lock.release,
)
_default: "Cluster | None" = None

# The values of `state` of `Cluster.restore`.
_STATES = ("saved", "reset_if_different", "reset")

# Days since 1970 that float32 tells apart.
_MAX_DAY = 2.0**22
_DAY = Range(
    f"None or a number from 0 to {_MAX_DAY:g}", lambda v: 0.0 <= v <= _MAX_DAY
)

_MAX_MEMORY = Range(
    "an integer from 0 to 2**62", lambda v: 0 <= v <= 2**62, int
)

# How many restores this process has made, by address. After a restore, a new
# Keras optimizer keeps the state of the rows.
num_restores: collections.Counter[str] = collections.Counter()


class Cluster:
    """A connection to all shards of a cluster. Made by `tfswitch.connect`.

    Thread-safe. If a server is away, calls fail with `ConnectionError` or
    `TimeoutError`. Once the server is back, calls work again.

    Attributes:
        address: The address as it was given to `connect`.
        timeout_secs: Longest wait of one call for a server, in seconds.
        push_depth: How many pushes may be in flight; for tables without a
            `push_depth` of their own.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_secs: float | None = None,
        on_lost_tables: str = "fail",
        tls: _tls.Tls | None = None,
        token: str | os.PathLike[str] | None = None,
        push_depth: int = 0,
        max_memory: int | None = None,
        cold_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _addresses.check_has_no_token("address", address)
        if not isinstance(address, str) or not address.startswith(
            ("local://", "grpc://", "grpcs://", "grpc+unix://", "ray://")
        ):
            raise bad_argument("address", address, _ACCEPTED)
        # Removes spaces, so that equal addresses are equal texts.
        address = re.sub(r"\s*,\s*", ",", address.strip())
        may_move = address.startswith("ray://")
        if timeout_secs is None:
            timeout_secs = _timeout_of_environment(300.0 if may_move else 30.0)
        if not (
            is_number(timeout_secs, int, float) and 0 < timeout_secs < math.inf
        ):
            raise bad_argument(
                "timeout_secs", timeout_secs, "a positive number of seconds"
            )
        if on_lost_tables not in ("fail", "recreate"):
            raise bad_argument(
                "on_lost_tables", on_lost_tables, '"fail" or "recreate"'
            )
        self.push_depth = PUSH_DEPTH.check("push_depth", push_depth)
        self.address = address
        self.timeout_secs = float(timeout_secs)
        if may_move:
            # Only this form of address needs Ray.
            from tfswitch._connection import _ray_addresses

            _ray_addresses.follow(address, self.timeout_secs)
        # Checks the texts, because pybind11's error for a wrong argument would
        # print all arguments, and so the token.
        self._native = _native.Cluster(
            checked_text("address", address),
            self.timeout_secs,
            _tls.texts(tls),
            *_tokens.texts(token),
        )
        call(
            self._native,
            "Configure",
            recreate_lost_tables=on_lost_tables == "recreate",
        )
        self._bound(max_memory, cold_dir)
        self._closed = False
        self._previous: Cluster | None = None
        # Called by close(), to make the process's worker leave its group.
        self._before_close: weakref.WeakMethod[Callable[[], None]] | None = None

    def _bound(
        self, max_memory: int | None, cold_dir: str | os.PathLike[str] | None
    ) -> None:
        """Bounds the memory of tables in this process, as `connect` does."""
        settings: dict[str, Any] = {}
        if max_memory is not None:
            settings["max_memory"] = _MAX_MEMORY.check("max_memory", max_memory)
        if cold_dir is not None:
            settings["cold_dir"] = os.fspath(cold_dir)
        if settings:
            call(self._native, "Configure", **settings)

    @property
    def num_shards(self) -> int:
        """How many servers there are; 1 if tables are in this process."""
        return self._native.num_shards

    @property
    def is_remote(self) -> bool:
        """Whether tables are on servers rather than in this process."""
        return self._native.is_remote

    @property
    def day(self) -> float | None:
        """The day of pushes from now on, in days since 1970.

        Shows and clicks decay from day to day, and a pushed row stores the day
        as its `last_seen_day`. None, the default, means the present time. Set
        the day to train on data of other days, such as a stream that is read
        again; small numbers such as 0 and 1 work as well. The day applies to
        this process and to all tables of the cluster. If a call has no day, a
        server uses the day of the last call that had one.

        Raises:
            ValueError: If the new value is neither None nor a number of at
                least 0.

        Example:

        >>> for day, dataset in enumerate(stream):
        ...     cluster.day = day
        ...     model.fit(dataset)
        ...     table.shrink()
        """
        day = float(call(self._native, "Configure")["day"])
        return None if day < 0.0 else day

    @day.setter
    def day(self, day: float | None) -> None:
        value = -1.0 if day is None else _DAY.check("day", day)
        call(self._native, "Configure", day=value)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def tables(self) -> list[str]:
        """Returns the names of all tables, sorted."""
        return sorted(info["config"]["name"] for info in self._list())

    def table(self, name: str) -> "EmbeddingTable | DenseTable":
        """Opens a table that exists, with the settings that it was made with.

        A token that may only read the table is enough. Servers do not keep
        learning rates: set `learning_rate` of the result before you train.

        Args:
            name: The name of the table.

        Returns:
            An `EmbeddingTable`, or a `DenseTable` if the table is one.

        Raises:
            KeyError: If there is no such table. The message names the tables of
                the cluster.
            ValueError: If a setting of the table is not known here.
            ConnectionError, TimeoutError: If a server does not answer.

        Example:

        >>> tsw.connect("grpc://ps0:7077").table("movie")
        <tfswitch.EmbeddingTable 'movie', dim 16, on 'grpc://ps0:7077'>
        """
        if not isinstance(name, str) or not name:
            raise bad_argument("name", name, "the name of a table")
        # Commands use clusters without TensorFlow.
        from tfswitch._settings._from_config import spec_of
        from tfswitch.dense import DenseTable
        from tfswitch.table import EmbeddingTable

        config = self._list(name)[0]["config"]
        spec = spec_of(config)
        if spec.layout:
            return DenseTable._of(name, spec, self)
        return EmbeddingTable._of(name, config["dim"], spec, self)

    def stats(self) -> ClusterStats:
        """Returns row counts and memory of all tables by name.

        Each value is a dict, as `EmbeddingTable.stats` returns. The attribute
        `servers` of the result has a dict for each server, which says how the
        server protects its tables: `has_tls`, `has_client_certificates`,
        `has_tokens`, `is_insecure`.

        The text `lost` of a table is empty, or names the server that has lost
        its part of the table in a restart. The other numbers of this table then
        count only the remaining parts.

        Example:

        >>> tsw.connect("local://").stats()
        {'user': 3 rows, 104.0 KiB}
        """
        return ClusterStats(
            self._stats(),
            servers=self._servers(),
        )

    def save(
        self,
        path: str | os.PathLike[str],
        tables: Sequence[TableOrName] = (),
        *,
        keep: int = 2,
        drop: Sequence[TableOrName] = (),
        progress: bool | None = None,
    ) -> dict[str, Any]:
        """Saves tables as a checkpoint that any number of servers can load.

        A save of all tables also has the positions of work queues
        (`tfswitch.data.WorkQueue`). Workers with consistency `bsp` may continue
        to train: their tables are saved as of the end of one step of all
        workers.

        A folder contains several saves, and each save is complete: if `tables`
        names only some tables, all other tables are taken over from the last
        save.

        Args:
            path: A folder below the `--checkpoint_root` of the servers, which
                refuse other paths. Every server writes its rows there, so
                servers on several machines need a shared folder. Or a URL below
                the servers' `--remote`, such as "s3://bucket/folder/name": then
                the save is uploaded there before the call ends
                (docs/object_stores.md).
            tables: Names, or table objects of this cluster; empty for all.
            keep: How many saves stay in the folder, this one included, from 1.
                If a table was made again under the same name, the newest and
                the largest save of its former rows stay as well.
            drop: Tables of the last save that the new save may leave out, given
                as in `tables`. A save of all tables is refused if any other
                table of the last save is missing. Not allowed if `tables` names
                some.
            progress: Whether to show a bar on stderr. None means yes if stderr
                is a terminal. Without a bar, a line shows the progress after
                one second, and then every ten seconds.

        Returns:
            `{"tables": [names], "num_rows": n, "save": its number in the
            folder, from 1}`.

        Raises:
            ValueError: If an argument has a value that is not allowed, or
                `tables` and `drop` both name tables.
            KeyError: If there is no table of that name.
            OSError: If a server has lost its part of a table, or the path is
                not below a server's folder (`PermissionError`).
            RuntimeError: If a file cannot be written (on a full disk, for
                example), a table of the last save is missing, or a server has
                no folder for checkpoints. Nothing is saved then.
            ImportError: If a package for the URL is missing.
            TimeoutError: If the upload makes no progress for the cluster's
                timeout. The servers have the save, and continue the upload.

        Example:

        >>> cluster.save("s3://bucket/run/epoch_3")
        {'tables': ['user'], 'num_rows': 1000, 'save': 1}
        """
        if not (is_number(keep, int) and keep >= 1):
            raise ValueError(
                f"`keep` must be an integer of at least 1. Received: {keep!r}"
            )
        remote = self._remote_checkpoint(path)
        # The new save gets the number after the last save in the store.
        before = 0 if remote is None else remote.fetch()
        request = {
            "path": os.fspath(path) if remote is None else remote.path,
            "tables": self._names("tables", tables),
            "keep": keep,
            "dropped_tables": self._names("drop", drop),
        }
        task = f"saving to '{os.fspath(path)}'"
        with progress_bar(self._native, task, progress) as progress_id:
            report = call(
                self._native, "Save", progress_id=progress_id, **request
            )
        result = _checkpoint_report(report)
        if remote is not None:
            if result["save"] <= before:
                raise OSError(
                    f"save {result['save']} of '{remote.path}' does not follow "
                    f"save {before} in '{os.fspath(path)}': that URL is of "
                    f"other servers than those of {self.address}"
                )
            remote.upload(result["save"])
        return result

    def _remote_checkpoint(
        self, path: str | os.PathLike[str]
    ) -> "RemoteCheckpoint | None":
        """Returns the checkpoint of a URL; None for a path."""
        if not isinstance(path, str) or "://" not in path:
            return None
        if not self.is_remote:
            raise bad_argument(
                "path",
                path,
                "a folder, as tables of this process are saved without a "
                "server that could upload them",
            )
        # Only URLs need fsspec.
        from tfswitch.remote.store_checkpoints import RemoteCheckpoint

        return RemoteCheckpoint(path, self.timeout_secs)

    def restore(
        self,
        path: str | os.PathLike[str],
        tables: Sequence[TableOrName] | Mapping[str, str] = (),
        *,
        save: int | None = None,
        state: str = "saved",
        progress: bool | None = None,
    ) -> dict[str, Any]:
        """Replaces tables by their saved rows, once all servers have read them.

        A table that does not exist is made with its saved settings. An existing
        table keeps its settings. Tables that are not named stay as they are. A
        restore of all tables also restores work queues.

        Args:
            path: A folder that `save` wrote, on this or another cluster, or a
                URL below the servers' `--remote`.
            tables: Names, or table objects of this cluster; empty for all
                tables of the checkpoint. Or a dict from names in the checkpoint
                to names of tables in this cluster.
            save: The number of the save. None means the newest save that can be
                read; a warning names newer saves that are damaged.
            state: The state to restore besides embeddings. "saved": optimizer
                state, statistics and counts of admission; a table whose
                optimizer has another state is an error.
                "reset_if_different": the same, but a table whose optimizer has
                another state starts with initial state, and a warning names it.
                "reset": embeddings alone; all else starts from initial values.
            progress: As for `save`.

        Returns:
            `{"tables": [their names here], "num_rows": n, "save": number}`,
            with "reset_tables": [names of tables that start with initial
            optimizer state] if there are such tables, and with "skipped": [why
            newer saves could not be restored] if there are such saves.

        Raises:
            ValueError: If an argument has a value that is not allowed, or two
                tables would get one name.
            KeyError: If the checkpoint, the save or one of the tables does not
                exist.
            OSError: If the checkpoint is damaged, or the path is not below a
                server's folder (`PermissionError`); nothing has changed then.
            RuntimeError: If an existing table or work queue has settings that
                do not fit those in the save, or a server has no folder for
                checkpoints. Nothing has changed then.

        Example:

        >>> cluster.restore("ckpt", {"user": "user_of_may"}, state="reset")
        {'tables': ['user_of_may'], 'num_rows': 3, 'save': 1,
        'reset_tables': ['user_of_may']}
        """
        if save is not None and not (is_number(save, int) and save >= 1):
            raise ValueError(
                "`save` must be None or the number of a save, from 1. "
                f"Received: {save!r}"
            )
        if state not in _STATES:
            raise bad_argument(
                "state", state, '"saved", "reset_if_different" or "reset"'
            )
        if isinstance(tables, Mapping) and not tables:
            raise bad_argument(
                "tables", tables, "at least one name, or none in a list for all"
            )
        remote = self._remote_checkpoint(path)
        if remote is not None:
            remote.fetch()
        request: dict[str, Any] = {
            "path": os.fspath(path) if remote is None else remote.path,
            "tables": self._names("tables", tables),
            "new_names": tables if isinstance(tables, Mapping) else None,
            "save": save,
            "state": state.upper(),
        }
        task = f"restoring from '{os.fspath(path)}'"
        with progress_bar(self._native, task, progress) as progress_id:
            report = call(
                self._native, "Restore", progress_id=progress_id, **request
            )
        num_restores[self.address] += 1
        if report["skipped"]:
            warnings.warn(
                f"restored save {report['save']} of '{os.fspath(path)}', as "
                "newer ones cannot be read: " + "; ".join(report["skipped"]),
                RuntimeWarning,
                stacklevel=2,
            )
        if report["reset_tables"] and state != "reset":
            warnings.warn(
                f"restored '{os.fspath(path)}' without the optimizer state of "
                f"{', '.join(map(repr, report['reset_tables']))}, because "
                "another optimizer saved it; it starts from initial values",
                RuntimeWarning,
                stacklevel=2,
            )
        return _checkpoint_report(report)

    def reset_lost_tables(self) -> list[dict[str, Any]]:
        """Makes the lost parts of tables again, without their rows.

        A restarted server may have lost its part of a table. Calls for the
        table then fail with an error that names the table and the server, until
        a checkpoint is restored or this method is called. This method makes the
        lost part again, without rows; the rows on other servers stay. Other
        processes that use the table get the same error, and must call this
        method, too.

        Returns:
            For each table with a lost part `{"table": name, "shards": [indices
            of the servers that had lost their part], "num_lost_rows": n}`. The
            number of lost rows comes from the last `size`, `stats` or `save` of
            this process; without such a call it is None. The list of shards is
            empty if another process has already made the lost parts again.

        Raises:
            ConnectionError, TimeoutError: If a server does not answer.

        Example:

        >>> cluster.reset_lost_tables()
        [{'table': 'item', 'shards': [1], 'num_lost_rows': 1020}]
        """
        response = call(self._native, "ResetLostTables")
        return [
            {
                "table": table["table"],
                "shards": table["shards"],
                "num_lost_rows": int(table["num_lost_rows"])
                if "num_lost_rows" in table
                else None,
            }
            for table in response["tables"]
        ]

    def drop(self, name: TableOrName) -> None:
        """Removes a table with all its rows, for all its users.

        Later calls for the table fail with `KeyError`, or in graphs with
        `tf.errors.NotFoundError`, until a table of that name is made again.
        Checkpoints keep the table; name it in the argument `drop` of the next
        `save`.

        Args:
            name: The name of the table, or its object.

        Raises:
            KeyError: If there is no such table. The message names the tables of
                the cluster.
            ConnectionError, TimeoutError: If a server does not answer. The
                message says whether the table may have been dropped.

        Example:

        >>> cluster.drop("user_of_last_week")
        """
        (name,) = self._names("name", [name])
        call(self._native, "DropTable", table=name)

    def flush(self) -> None:
        """Waits until no push of this process to the cluster is in flight.

        Saves, exports, reads, ends of epochs and the end of the program wait by
        themselves. Call `flush` before another process reads what this one has
        trained with `push_depth`.

        Raises:
            ConnectionError, OSError, ValueError: If a push has failed. The
                message names its step.

        Example:

        >>> for batch in dataset:
        ...     train_step(batch)
        >>> cluster.flush()
        """
        # Each call that is more than a question waits for pushes in flight.
        call(self._native, "Configure")

    def close(self) -> None:
        """Closes this connection; tables that are in use stay connected.

        A `tfswitch.train.Worker` that was made with this cluster leaves its
        group.
        """
        global _default
        with _lock:
            if _default is self:
                _default = None
        if not self._closed and self._before_close is not None:
            before_close = self._before_close()
            if before_close is not None:
                before_close()
        self._closed = True
        self._native.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _default
        with _lock:
            if _default is self:
                previous = self._previous
                _default = (
                    None if previous is None or previous.closed else previous
                )
        self.close()

    def __repr__(self) -> str:
        return f"<tfswitch.Cluster {self.address!r}>"

    def _names(self, argument: str, tables: Iterable[TableOrName]) -> list[str]:
        given = tables if isinstance(tables, str) else list(tables)
        names = names_of(argument, given)
        cluster_of(given, self)
        return names

    def _servers(self) -> list[dict[str, bool]]:
        return call(self._native, "GetServers")["servers"]

    def _group_stats(self, group: str) -> dict[str, Any]:
        """Returns a GetGroupStatsResponse; KeyError if there is no group."""
        return call(self._native, "GetGroupStats", group=group)

    def _stats(self, name: str = "") -> dict[str, TableStats]:
        exchange = call(self._native, "Prefetches")  # Before the others wait.
        return {
            info["config"]["name"]: TableStats(info, exchange)
            for info in self._list(name)
        }

    def _list(self, name: str = "") -> list[dict[str, Any]]:
        return call(self._native, "ListTables", table=name)["tables"]


def connect(
    address: str = "local://",
    *,
    timeout_secs: float | None = None,
    on_lost_tables: str = "fail",
    tls: _tls.Tls | None = None,
    token: str | os.PathLike[str] | None = None,
    push_depth: int = 0,
    max_memory: int | None = None,
    cold_dir: str | os.PathLike[str] | None = None,
) -> Cluster:
    """Connects to a cluster and makes it the default for new tables.

    Without a call of `connect`, tables live in this process. If the environment
    variable TF_CONFIG has an entry "ps", tables live on the servers of this
    entry. The timeout is then TFSWITCH_TIMEOUT_SECS, and TLS is used if one of
    the variables TFSWITCH_TLS_CA, TFSWITCH_TLS_CERT, TFSWITCH_TLS_KEY and
    TFSWITCH_TLS_SERVER_NAME is set.

    Args:
        address: One of
            "local://": tables live in this process;
            "local://NAME": also in this process, but apart from tables of other
                names;
            "grpc://host:port,host:port": servers, in shard order;
            "grpcs://host:port,host:port": the same over TLS;
            "grpc+unix:///path": one server on this machine;
            "ray://NAME": the servers of `tfswitch.ray.start_servers`. If Ray
            restarts a server elsewhere, connections follow.
        timeout_secs: Longest wait of a call for a server, in seconds. None
            means the value of the environment variable TFSWITCH_TIMEOUT_SECS.
            Without this variable it means 30, and for "ray://" 300, because Ray
            may need that long to restart a server.
        on_lost_tables: The reaction to a server that was restarted and has lost
            its part of a table. "fail": calls for the table fail, with
            `OSError`, or `tf.errors.DataLossError` in graphs, until a
            checkpoint is restored or `Cluster.reset_lost_tables` is called.
            "recreate": the lost part is made again without rows, calls
            continue, and one warning on stderr says so. The choice applies to
            all calls of this process with this address and timeout, until the
            next `connect` with both.
        tls: TLS files, for "grpcs://" only. They apply to this cluster and its
            tables, also in graphs. They also apply to other uses of the address
            by this process, such as loaded SavedModels, until the next
            `connect` to the address. None means the `tls` of the last `connect`
            to the address. Fields that are None come from the environment
            variables TFSWITCH_TLS_CA, TFSWITCH_TLS_CERT, TFSWITCH_TLS_KEY and
            TFSWITCH_TLS_SERVER_NAME, if they are set.
        token: The token, for servers that require one (docs/access.md), or a
            `pathlib.Path` of a file with the token. A changed file is read
            again. The token applies to the same uses as `tls`. None means the
            `token` of the last `connect` to the address, else TFSWITCH_TOKEN or
            the file of TFSWITCH_TOKEN_FILE. The token is sent over TLS, and
            over plaintext only within this machine.
        push_depth: How many pushes may be in flight while the program does its
            next work, 0 to 64; for tables without a `push_depth` of their own.
            See `EmbeddingTable`.
        max_memory: The most bytes for the rows and the index of all tables in
            this process. At this ceiling new ids get no rows, or evict others:
            see `when_full` of `EmbeddingTable`. 0 removes the ceiling, and None
            leaves it as it is. Servers have the flag `--max_memory` instead.
        cold_dir: The folder for rows that tables in this process with
            `when_full="disk"` move to disk at `max_memory`. It is for this
            process only, and its files end with the process. Servers have the
            flag `--cold_dir` instead.

    Returns:
        The cluster. In a `with` statement it is closed at the end, and the
        former default cluster becomes the default again.

    Raises:
        ValueError: If the address has another form or contains a token, another
            argument is out of range, a file cannot be used, or a token would go
            to another machine without TLS.
        PermissionError: If a server rejects the token, or requires a token and
            got none.
        ConnectionError, TimeoutError: If a server does not answer. The message
            names the server.
        RuntimeError: If this process was forked from one that uses tfswitch.
            Each later call fails as well. The message names the remedy.

    Example:

    >>> with tsw.connect("grpc://ps0:7077,ps1:7077") as cluster:
    ...     table = tsw.EmbeddingTable("user", 16)
    """
    global _default
    cluster = Cluster(
        address,
        timeout_secs=timeout_secs,
        on_lost_tables=on_lost_tables,
        tls=tls,
        token=token,
        push_depth=push_depth,
        max_memory=max_memory,
        cold_dir=cold_dir,
    )
    with _lock:
        cluster._previous = _default
        _default = cluster
    return cluster


def default_cluster() -> Cluster:
    """Returns the cluster that tables use by default."""
    global _default
    with _lock:
        if _default is not None:
            return _default
    cluster = Cluster(_tf_config.cluster_address() or "local://")
    with _lock:
        if _default is None:
            _default = cluster
        global_default = _default
    if global_default is not cluster:
        cluster.close()
    return global_default


def cluster_of(
    tables: Iterable[TableOrName], cluster: Cluster | None = None
) -> Cluster:
    """Returns the one cluster that all tables are in.

    Args:
        tables: Table objects, or names of tables in the cluster.
        cluster: The argument `cluster` of the calling function. None means the
            cluster of the table objects or, without objects, the default
            cluster.

    Raises:
        ValueError: If an object is of another cluster.
    """
    found, whose = cluster, "the cluster of this call is"
    for table in tables:
        if isinstance(table, str):
            continue
        if found is None:
            found, whose = table.cluster, f"table '{table.name}' is in"
        elif table.cluster.address != found.address:
            raise ValueError(
                f"table '{table.name}' is in {table.cluster.address!r}, and "
                f"{whose} {found.address!r}. Give one call the tables of one "
                "cluster, and as `cluster`, where it takes one, that or none"
            )
    if found is None:
        return default_cluster()
    if cluster is None and found.closed:
        # A table stays usable after its cluster object is closed. The default
        # cluster may be an open connection to the same servers.
        with _lock:
            if _default is not None and _default.address == found.address:
                return _default
    return found


def names_of(argument: str, tables: Iterable[TableOrName]) -> list[str]:
    """Returns the names of tables that are given as names or objects."""
    if isinstance(tables, str):
        raise ValueError(
            f"`{argument}` must be a list of names or tables. "
            f"Received: {argument}={tables!r}; write [{tables!r}]"
        )
    names: list[Any] = [
        table.name
        if not isinstance(table, str)
        and isinstance(getattr(table, "cluster", None), Cluster)
        else table
        for table in tables
    ]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"`{argument}` must have names or tables. Received: "
            f"{argument}={names!r}"
        )
    return names


def _timeout_of_environment(default: float) -> float:
    text = os.environ.get("TFSWITCH_TIMEOUT_SECS", "")
    try:
        timeout_secs = float(text or default)
    except ValueError:
        timeout_secs = math.nan
    if 0.0 < timeout_secs < math.inf:
        return timeout_secs
    raise ValueError(
        "the environment variable TFSWITCH_TIMEOUT_SECS must be a positive "
        f"number of seconds. Received: TFSWITCH_TIMEOUT_SECS={text!r}"
    )


def _checkpoint_report(report: dict[str, Any]) -> dict[str, Any]:
    result = {**report, **integers(report, ("num_rows", "save"))}
    for name in ("skipped", "reset_tables"):
        if not result.get(name):
            result.pop(name, None)
    return result
