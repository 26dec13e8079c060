"""The actor that owns a server process.

Ray sends this module to the actor's process by value. The module imports no
part of tfswitch that imports TensorFlow. So an actor starts sooner and needs
less memory, and nodes with servers need no TensorFlow.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import ray
from ray.util import metrics

# How long a new server waits for the lock on its data folder. After Ray has
# given up a node, the former server there may still live and hold the lock.
_LOCK_SECS = 120.0
_LOCK_TEXT = "another process writes to"
_KEPT_LINES = 20
_RETRY_SECS = 5.0


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How the servers of a cluster are started; see `start_servers`.

    Attributes:
        flags: Further flags of each server.
        has_tls: Whether clients need TLS.
        namespace: The namespace of the actors.
        group: Their placement group.
    """

    name: str
    num_servers: int
    host: str | None
    data_dir: str | None
    flags: list[str]
    has_tls: bool
    namespace: str
    group: Any
    metrics_secs: float


def is_url(data_dir: str) -> bool:
    """Whether `data_dir` is the URL of an object store, not a folder."""
    return "://" in data_dir


class ServerActor:
    """One server, which lives no longer than the actor.

    If the server ends by itself, so does the actor, and Ray starts both again.
    """

    def __init__(self, options: ServerOptions, index: int) -> None:
        self._options = options
        self._index = index
        self._address = ""
        self._lines: collections.deque[str] = collections.deque(
            maxlen=_KEPT_LINES
        )
        self._is_ready = threading.Event()
        self._stops = threading.Event()
        self._error = ""
        self._process: subprocess.Popen[str] | None = None
        self._is_again = (
            ray.get_runtime_context().was_current_actor_reconstructed
        )
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        host = options.host or ray.util.get_node_ip_address()
        self._command = [
            sys.executable,
            "-c",
            "import tfswitch_command; tfswitch_command.main()",
            "serve",
            *self._data_flags(),
            f"--address={host}:0",
            f"--shard_index={index}",
            f"--num_shards={options.num_servers}",
            *options.flags,
        ]
        # This thread starts the server. The thread lives as long as the
        # process, because the server would end with the thread.
        threading.Thread(target=self._run, daemon=True).start()
        self._is_ready.wait()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _data_flags(self) -> list[str]:
        data_dir = self._options.data_dir
        if data_dir is None:
            return []
        flags = [f"--cluster_name={self._options.name}"]
        if is_url(data_dir):
            # A temporary folder: rows that are not uploaded yet are lost with
            # this process.
            self._folder = tempfile.TemporaryDirectory(prefix="tfswitch-")
            flags += [f"--data_dir={self._folder.name}/data"]
            return [*flags, f"--remote={data_dir}"]
        # All servers share this folder, because a save contains files of all
        # servers.
        checkpoints = os.path.join(data_dir, "checkpoints")
        # The server reports the error more clearly.
        with contextlib.suppress(OSError):
            os.makedirs(checkpoints, exist_ok=True)
        flags += [f"--data_dir={os.path.join(data_dir, str(self._index))}"]
        return [*flags, f"--checkpoint_root={checkpoints}"]

    async def info(self) -> dict[str, Any]:
        """Returns the server's address, and facts that clients need.

        Raises:
            RuntimeError: If the server did not start. The message has the last
                lines of its output.
        """
        if self._error:
            raise RuntimeError(
                f"server {self._index} of '{self._options.name}' did not "
                f"start:\n{self._error}"
            )
        if self._index == 0 and self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._measure, daemon=True).start()
        return {
            "address": self._address,
            "num_servers": self._options.num_servers,
            "has_tls": self._options.has_tls,
            "group": self._options.group,
        }

    async def wait_for_end(self, address: str) -> None:
        """Returns when the server is not at the address any more.

        If this process ends, Ray raises an error in the caller.
        """
        if address == self._address:
            await asyncio.Event().wait()

    async def stop(self) -> int:
        """Ends the server, which saves its rows; returns its exit code."""
        self._stops.set()
        process = self._process
        if process is None or self._error:
            return 0
        process.terminate()
        while process.poll() is None:
            await asyncio.sleep(0.05)
        self._clean()
        return process.returncode

    def _clean(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _run(self) -> None:
        try:
            self._run_to_its_end()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self._is_ready.set()

    def _run_to_its_end(self) -> None:
        give_up = time.monotonic() + _LOCK_SECS
        while True:
            code = self._run_once()
            if self._stops.is_set():
                return
            text = "\n".join(self._lines)
            if self._is_ready.is_set():
                print(f"the server ended with exit code {code}", flush=True)
                self._clean()
                os._exit(1)
            if self._is_again and _LOCK_TEXT not in text:
                # The cause may be temporary, so the actor ends and Ray starts
                # it again.
                print(f"the server did not start: exit code {code}", flush=True)
                time.sleep(_RETRY_SECS)
                self._clean()
                os._exit(1)
            if _LOCK_TEXT not in text or time.monotonic() > give_up:
                self._error = text or f"exit code {code}"
                self._is_ready.set()
                return
            time.sleep(1.0)

    def _run_once(self) -> int:
        _put_package()
        from tfswitch.cli._processes import ending_with_parent

        self._lines.clear()
        with subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C at the driver's terminal must not reach the server.
            start_new_session=True,
            preexec_fn=ending_with_parent(()),
        ) as process:
            self._process = process
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                self._lines.append(line.rstrip())
                _, serves, address = line.partition(" serving on ")
                if serves and not self._is_ready.is_set():
                    self._address = address.split()[0].rstrip(",")
                    self._is_ready.set()
            return process.wait()

    async def _cluster_address(self) -> str:
        actors = [
            ray.get_actor(f"{self._options.name}/{i}", self._options.namespace)
            for i in range(self._options.num_servers)
        ]
        infos: Any = await asyncio.gather(*(a.info.remote() for a in actors))
        scheme = "grpcs" if self._options.has_tls else "grpc"
        return f"{scheme}://{','.join(info['address'] for info in infos)}"

    def _measure(self) -> None:
        """Reports the rows of all servers to Ray's metrics."""
        assert self._loop is not None
        _put_package()
        from tfswitch._connection._reports import TableStats
        from tfswitch.cluster import Cluster

        name = self._options.name
        if self._options.has_tls and not any(
            os.environ.get(f"TFSWITCH_TLS_{kind}") for kind in ("CA", "CERT")
        ):
            print(
                f"no metrics of '{name}': set TFSWITCH_TLS_CA, and "
                "TFSWITCH_TOKEN_FILE, in the env_vars of `runtime_env`",
                flush=True,
            )
            return
        keys = ("cluster", "table")
        rows = metrics.Gauge("tfswitch_rows", "Rows of a table.", keys)
        memory = metrics.Gauge("tfswitch_bytes", "Memory of a table.", keys)
        rate = metrics.Gauge(
            "tfswitch_rows_made_per_second", "New rows of a table.", keys
        )
        former: dict[str, tuple[float, int]] = {}
        error = ""
        while not self._stops.wait(self._options.metrics_secs):
            try:
                address = asyncio.run_coroutine_threadsafe(
                    self._cluster_address(), self._loop
                ).result()
                with Cluster(address, timeout_secs=5.0) as cluster:
                    infos = cluster._list()
            except (
                *(OSError, RuntimeError, ValueError),
                ray.exceptions.RayError,
            ) as present:
                if str(present) != error:
                    error = str(present)
                    print(f"no metrics of '{name}': {error}", flush=True)
                if isinstance(present, PermissionError):
                    return
                continue  # A server that is away comes back.
            now = time.monotonic()
            for info in infos:
                table, stats = info["config"]["name"], TableStats(info)
                tags = {"cluster": name, "table": table}
                rows.set(stats["num_rows"], tags)
                memory.set(stats.memory_bytes, tags)
                made = stats["inserted_rows"]
                then, before = former.get(table, (now, made))
                if now > then:
                    # A restarted server counts from 0.
                    rate.set(max(0, made - before) / (now - then), tags)
                former[table] = now, made


def _put_package() -> None:
    """Makes modules of tfswitch importable without TensorFlow."""
    if "tfswitch" not in sys.modules:
        import tfswitch_command

        tfswitch_command._put_package()
