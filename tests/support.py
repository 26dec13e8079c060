"""Servers for tests, in this process and as programs."""

import contextlib
import itertools
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import tfswitch as tsw
from tests.programs import environment

PACKAGE = pathlib.Path(tsw.__file__).parent
SERVER = PACKAGE / "bin" / "tfswitch-server"

_names = itertools.count()


def examples(count: int, in_long_runs: int | None = None) -> int:
    """How many examples a property is tried with: more in long runs.

    Args:
        count: In others.
        in_long_runs: None: 20 times as many.
    """
    if not os.environ.get("TFSWITCH_LONG_TESTS"):
        return count
    return count * 20 if in_long_runs is None else in_long_runs


@contextlib.contextmanager
def running_servers(num_servers: int) -> Iterator[str]:
    """Yields the address of new servers; 0: of tables in this process."""
    if num_servers == 0:
        address = f"local://test-{os.getpid()}-{next(_names)}"
        yield address
        # It would live as long as the process.
        with tsw.Cluster(address) as cluster:
            for name in cluster.tables():
                cluster.drop(name)
        return
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                tsw.Server(
                    shard_index=i, num_shards=num_servers, checkpoint_root="/"
                )
            )
            for i in range(num_servers)
        ]
        yield "grpc://" + ",".join(s.address for s in servers)


def make_table(
    name: str = "t", dim: int = 2, **kwargs: Any
) -> tsw.EmbeddingTable:
    """A table with rows of zeros. A step subtracts the gradient."""
    kwargs.setdefault("initializer", "zeros")
    kwargs.setdefault("optimizer", tsw.optimizers.SGD(1.0))
    return tsw.EmbeddingTable(name, dim, **kwargs)


_claims: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Returns ports below those that outgoing connections get.

    No other test process gets them while this one lives.
    """
    ports: list[int] = []
    candidates = list(range(20_000, 32_000))
    # Not the generator that Keras seeds: all processes would ask for the same.
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                claim.bind(f"\0tfswitch_test_port_{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        _claims.append(claim)
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports")


class RestartableServers:
    """Two servers in this process that can go away and come back, empty.

    Args:
        checkpoint_root: See `tsw.Server`.
        token_file: See `tsw.Server`.
    """

    def __init__(
        self,
        checkpoint_root: str | pathlib.Path = "/",
        token_file: str | pathlib.Path | None = None,
    ) -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.address = "grpc://" + ",".join(self.addresses)
        self._servers = [
            tsw.Server(
                address,
                shard_index=index,
                num_shards=2,
                checkpoint_root=checkpoint_root,
                token_file=token_file,
            ).start()
            for index, address in enumerate(self.addresses)
        ]

    def stop(self, index: int) -> None:
        self._servers[index].stop()

    def start(self, index: int) -> None:
        self._servers[index].start()

    def restart(self, index: int) -> None:
        self.stop(index)
        self.start(index)

    def __enter__(self) -> "RestartableServers":
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self._servers:
            server.stop()


class NotServingError(AssertionError):
    """A server program has ended before it served."""


class ServerProcess:
    """A server program, started from the command line.

    Args:
        command: The program, or `python -m tfswitch serve`, without flags.
        address: Where to listen.
        shard_index: See `tsw.Server`.
        num_shards: See `tsw.Server`.
        flags: Further flags of the program.
        variables: Further variables of its environment.

    Attributes:
        line: The first line that it printed.
        address: Where it listens, as it printed.

    Raises:
        NotServingError: If it ends instead.
    """

    def __init__(
        self,
        *,
        command: tuple[str, ...] = (str(SERVER),),
        address: str = "127.0.0.1:0",
        shard_index: int = 0,
        num_shards: int = 1,
        flags: tuple[str, ...] = ("--checkpoint_root=/",),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [
                *command,
                f"--address={address}",
                f"--shard_index={shard_index}",
                f"--num_shards={num_shards}",
                *flags,
            ],
            env=environment(**(variables or {})),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline()
        match = re.search(r"serving on (\S+)", self.line)
        if not match:
            self.kill()
            raise NotServingError(f"the server printed {self.line!r}")
        self.address = match[1]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:  # It may run on for a moment.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def wait(self) -> int:
        """Returns the exit code, negative for a signal."""
        return self._process.wait(timeout=60)

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
