"""Servers with a push log that are killed and started again."""

import random
import subprocess
import time
from pathlib import Path

from tests.support import SERVER, ServerProcess, free_ports


class Servers:
    """A cluster of servers with data folders.

    Args:
        folder: Gets the folders of the servers.
        num_servers: The number of servers.
        flags: Further flags of each server.

    Attributes:
        addresses: The servers' addresses, which do not change.
        address: The address for `tsw.connect`.
    """

    def __init__(
        self, folder: Path, num_servers: int, flags: tuple[str, ...] = ()
    ) -> None:
        self._folder = folder
        self._flags = flags
        ports = free_ports(num_servers)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.address = "grpc://" + ",".join(self.addresses)
        self._servers = [self._start(i) for i in range(num_servers)]

    def _flags_of(self, shard: int) -> tuple[str, ...]:
        return (
            f"--data_dir={self._folder}/{shard}",
            "--push_log",
            "--checkpoint_every=1s",
            *self._flags,
        )

    def _start(self, shard: int) -> ServerProcess:
        return ServerProcess(
            address=self.addresses[shard],
            shard_index=shard,
            num_shards=len(self.addresses),
            flags=self._flags_of(shard),
        )

    def kill(self, shard: int, rng: random.Random) -> tuple[int, float]:
        """Kills a server, and now and then once more while it recovers.

        Returns:
            How often it was killed, and the seconds that its last start took.
        """
        self._servers[shard].kill()
        num_kills = 1
        if rng.random() < 0.4:
            server = subprocess.Popen(
                [
                    str(SERVER),
                    "--address=127.0.0.1:0",
                    f"--shard_index={shard}",
                    f"--num_shards={len(self.addresses)}",
                    *self._flags_of(shard),
                ],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(rng.uniform(0.0, 0.06))
            server.kill()
            server.wait()
            num_kills += 1
        begin = time.perf_counter()
        self._servers[shard] = self._start(shard)
        return num_kills, time.perf_counter() - begin

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.kill()
