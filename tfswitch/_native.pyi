"""Types of the pybind11 module: see cc/pybind/module.cc.

Ids are int64 arrays of any shape; rows are float32 of the ids' shape plus a
last axis. Failed calls raise what cc/pybind/status_exceptions.h says. Methods
may be called from any thread, and those that may block release the GIL.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

api_version: int
work_item_lost: int
work_item_in_step: int

def version() -> str: ...
def check_process() -> None: ...
def call(method: str, request_json: str) -> str: ...

class Cluster:
    def __init__(
        self,
        address: str,
        timeout: float,
        tls: tuple[str, str, str, str] | None = None,
        token: str = "",
        token_file: str = "",
    ) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def id(self) -> int: ...
    @property
    def num_shards(self) -> int: ...
    @property
    def is_remote(self) -> bool: ...
    def call(self, method: str, request_json: str) -> str: ...
    def end_step(self, weight: float) -> None: ...
    def advance_work_item(
        self, queue: str, epoch: int, index: int, offset: int
    ) -> None: ...
    def work_item_state(self, queue: str, epoch: int, index: int) -> int: ...
    def open_table(self, config_json: str) -> Table: ...
    def close(self) -> None: ...

class Table:
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def slot_floats(self) -> int: ...
    @property
    def is_remote(self) -> bool: ...
    def size(self) -> int: ...
    def pull(
        self, ids: npt.ArrayLike, insert_missing: bool
    ) -> npt.NDArray[np.float32]: ...
    def push(
        self,
        ids: npt.ArrayLike,
        gradients: npt.ArrayLike,
        learning_rate: float,
        insert_missing: bool,
        loss_scale: float = 1.0,
    ) -> int: ...
    def assign(
        self,
        ids: npt.ArrayLike,
        values: npt.ArrayLike,
        slots: npt.ArrayLike | None = None,
    ) -> None: ...
    def assign_missing(
        self, ids: npt.ArrayLike, values: npt.ArrayLike
    ) -> int: ...
    def dense_keys(self, num_blocks: int) -> npt.NDArray[np.int64]: ...
    def erase(self, ids: npt.ArrayLike) -> int: ...
    def call(self, method: str, request_json: str) -> str: ...
    def read_usage(
        self, ids: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]: ...
    def export_rows(
        self, with_slots: bool
    ) -> tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.float32],
        npt.NDArray[np.float32] | None,
    ]: ...
    def visit_rows(
        self,
        with_slots: bool,
        visit: Callable[
            [
                npt.NDArray[np.int64],
                npt.NDArray[np.float32],
                npt.NDArray[np.float32] | None,
            ],
            None,
        ],
    ) -> None: ...
    def close(self) -> None: ...

class Server:
    def __init__(
        self,
        address: str,
        shard_index: int,
        num_shards: int,
        num_threads: int = 0,
        max_message_bytes: int = 0,
        limits: Sequence[str] = (),
        checkpoint_root: str | None = None,
        tls: tuple[str, str, str, str] | None = None,
        token_file: str | None = None,
        is_insecure: bool = False,
    ) -> None: ...
    @property
    def address(self) -> str: ...
    def stop(self, grace: float) -> None: ...
