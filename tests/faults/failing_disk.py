"""A disk that fails for a server: failing_disk.c, and its plan."""

import ctypes
import mmap
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_FOREVER = 2**62


class _Plan(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("below", ctypes.c_char * 4096),
    )


class FailingDisk:
    """A disk below a folder, which fails in programs with the variables.

    Calls are those of write, pwrite, fsync, fdatasync, ftruncate and rename;
    the next one is call 1.

    Args:
        folder: The folder whose files fail.
        files: Folder for the library and its plan, not below `folder`.

    Attributes:
        variables: Environment variables for a program that uses this disk.
    """

    def __init__(self, folder: Path, files: Path) -> None:
        library = files / "failing_disk.so"
        if not library.exists():
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE],
                check=True,
            )
        path = files / "failing_disk.plan"
        path.write_bytes(bytes(ctypes.sizeof(_Plan)))
        with path.open("r+b") as file:
            self._plan = _Plan.from_buffer(mmap.mmap(file.fileno(), 0))
        self._plan.below = f"{folder}/".encode()
        self.variables = {
            "LD_PRELOAD": str(library),
            "FAILING_DISK": str(path),
        }

    @property
    def calls(self) -> int:
        """How many there were since the plan was made."""
        return self._plan.calls

    def work(self) -> None:
        """Stops failing, and counts calls from 1 again."""
        self._plan.first = 0
        self._plan.calls = 0

    def fail(
        self,
        call: int,
        error: int,
        *,
        forever: bool = False,
        after_bytes: int = 0,
    ) -> None:
        """Fails a call with an errno, or all from that one on.

        Args:
            call: Its number; the next one is 1.
            error: 0: ends the program.
            forever: Whether later ones fail as well.
            after_bytes: How many bytes of a write are written before it fails.
        """
        self.work()
        self._plan.error = error
        self._plan.bytes = after_bytes
        self._plan.last = _FOREVER if forever else call
        self._plan.first = call
