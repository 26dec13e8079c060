"""A folder of an object store, as fsspec reaches it."""

import contextlib
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# The bytes that are read at a time when a file is checked or fetched.
BLOCK_BYTES = 8 << 20

# The protocols of stores in which a reader may see part of an unfinished
# object. There an object is written under another name, and then renamed.
_WITHOUT_ATOMIC_WRITES = {"file", "local", "hdfs", "arrow_hdfs"}


def is_url(path: object) -> bool:
    """Whether a path is in a store rather than on a disk."""
    return isinstance(path, str) and "://" in path


def join(*parts: str) -> str:
    """Joins paths with a slash, and leaves out empty ones."""
    return "/".join(filter(None, parts))


class Store:
    """A folder of a store. Objects have paths relative to it.

    Thread-safe. Methods raise the errors of fsspec, which are `OSError`s for
    most stores, unless documented otherwise.

    Args:
        url: For example "s3://bucket/folder".

    Raises:
        ValueError: If fsspec does not know this kind of URL.
        ImportError: If fsspec, or its package for this store, is missing. The
            message names what to install.
    """

    def __init__(self, url: str) -> None:
        if not is_url(url) or "::" in url:
            raise ValueError(
                "a folder of an object store must be given as PROTOCOL://PATH, "
                f"such as s3://bucket/folder. Received: {url!r}"
            )
        try:
            import fsspec

            protocol = url.split("://", 1)[0]
            self._is_disk = protocol in ("file", "local")
            options = {"auto_mkdir": True} if self._is_disk else {}
            self._files, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise ImportError(
                f"'{url}' needs fsspec, and its package for this store: "
                "`pip install 'tfswitch-ps[remote]'` brings what s3:// needs; "
                "gs:// needs gcsfs, hdfs:// needs pyarrow. The error was: "
                f"{error}"
            ) from error
        self.url = url.rstrip("/")
        self._root = root.rstrip("/")
        self._is_atomic = protocol not in _WITHOUT_ATOMIC_WRITES

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the bytes of all objects below a folder, by their paths."""
        base = join(self._root, folder)
        self._files.invalidate_cache()
        try:
            found = self._files.find(base, detail=True)
        except FileNotFoundError:
            return {}
        return {
            name[len(base) :].lstrip("/"): int(info["size"] or 0)
            for name, info in found.items()
            if name.startswith(base + "/")
        }

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Returns the contents of an object; None if it is not there.

        Raises:
            OSError: If the store fails, or the object has more than
                `max_bytes`.
        """
        self._files.invalidate_cache()
        try:
            # Reads with one call, so that all bytes are of the same version of
            # the object.
            data = self._files.cat_file(
                join(self._root, path), start=0, end=max_bytes + 1
            )
        except FileNotFoundError:
            return None
        if len(data) > max_bytes:
            raise OSError(
                f"'{self.url}/{path}' has more than {max_bytes} bytes"
            )
        return data

    def _blocks(self, path: str) -> Iterator[bytes]:
        self._files.invalidate_cache()
        with self._files.open(
            join(self._root, path), "rb", block_size=BLOCK_BYTES
        ) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def copy(
        self,
        path: str,
        num_bytes: int,
        write: Callable[[bytes], object],
    ) -> int:
        """Passes an object's blocks to `write`; returns their zlib.crc32.

        Returns -1 if the object is longer or shorter than `num_bytes`.
        """
        crc = count = 0
        for block in self._blocks(path):
            count += len(block)
            crc = zlib.crc32(block, crc)
            if count > num_bytes:
                return -1
            write(block)
        return crc if count == num_bytes else -1

    def put(self, local: str, path: str, progress: Callable[[], None]) -> None:
        """Uploads a file. Meanwhile a reader may see a part of the file."""
        self._files.put_file(
            local, join(self._root, path), callback=_callback(progress)
        )

    def publish(self, path: str, data: bytes) -> None:
        """Writes an object at once: no reader sees only a part of it."""
        name = join(self._root, path)
        if self._is_atomic:
            self._files.pipe_file(name, data)
            return
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        self._files.pipe_file(temporary, data)
        if not self._is_disk:
            # HDFS cannot rename to a present name.
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(name)
        self._files.mv(temporary, name)

    def remove(self, paths: Iterable[str]) -> None:
        """Removes objects; missing ones are ignored."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(join(self._root, path))


def _callback(progress: Callable[[], None]) -> Any:
    import fsspec

    class Callback(fsspec.callbacks.Callback):
        def call(self, *args: Any, **kwargs: Any) -> None:
            progress()

    return Callback()
