"""Where the rows of tables in this process are."""

import dataclasses
import os
from typing import TYPE_CHECKING

from tfswitch._settings._ranges import bad_argument, integers

if TYPE_CHECKING:
    from tfswitch.cluster import Cluster

_MEMORY = integers(1, 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class TieredStorage:
    """Memory for the most used rows, and a folder for the others.

    The same as `tfswitch.connect("local://", max_memory=memory, cold_dir=path)`
    and a table with `when_full="disk"` (docs/cold_rows.md).

    Args:
        memory: The most bytes in memory, for all tables of this process
            together.
        path: The folder for rows on disk. It belongs to this process alone, and
            its files end with the process.

    Raises:
        ValueError: If `memory` is not an integer from 1, or `path` is empty.

    Example:

    >>> import tempfile
    >>> storage = tsw.TieredStorage(memory=2**30, path=tempfile.mkdtemp())
    >>> table = tsw.EmbeddingTable("item", 16, storage=storage)
    """

    memory: int
    path: str

    def __post_init__(self) -> None:
        _MEMORY.check("memory", self.memory)
        object.__setattr__(self, "path", os.fspath(self.path))
        if not self.path:
            raise bad_argument("path", self.path, "the path of a folder")

    def _use_in(self, cluster: "Cluster") -> None:
        """Bounds the memory of a cluster's tables.

        Raises:
            ValueError: If its tables are on servers, or if another table of
                this process has another storage.
            RuntimeError: If the folder is in use.
            OSError: If it cannot be written.
        """
        if cluster.is_remote:
            raise ValueError(
                "`storage` is for tables in this process. Start servers with "
                "--max_memory and --cold_dir, and give the table "
                f'when_full="disk". Received: storage={self!r}'
            )
        known = _KNOWN.get(cluster.address, self)
        if known != self:
            raise ValueError(
                "`storage` bounds all tables of this process, so it is the "
                f"same for all. Received: storage={self!r}, after {known!r}"
            )
        cluster._bound(max_memory=self.memory, cold_dir=self.path)
        _KNOWN[cluster.address] = self


# The storage of tables in this process, by the address of their cluster.
_KNOWN: dict[str, TieredStorage] = {}
