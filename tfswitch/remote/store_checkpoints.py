"""Checkpoints that a client saves to URLs of stores, and restores from them."""

import secrets
import sys
import time
from typing import Any

from tfswitch.remote import _request_mailbox, _saves
from tfswitch.remote._store import Store, is_url, join

__all__ = ["RemoteCheckpoint", "is_url"]

_SAY_AFTER_SECS = 1.0
_POLL_SECS = 0.1
_LONGEST_POLL_SECS = 1.0


class RemoteCheckpoint:
    """A checkpoint below the `--remote` of servers.

    Args:
        url: The URL of the checkpoint.
        timeout_secs: How long the companion of the servers may be silent, in
            seconds.

    Attributes:
        path: The path of the checkpoint on the servers.

    Raises:
        ValueError: If no servers have their saves at or above the URL.
        ImportError: If a package is missing that the URL needs.
        OSError: If the store cannot be read; some stores raise other errors.
    """

    def __init__(self, url: str, timeout_secs: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_secs = timeout_secs
        protocol, path = self._url.split("://", 1)
        parts = path.split("/")
        for count in range(len(parts) - 1, 0, -1):
            # Stops before the root of a URL such as file:///folder, which
            # belongs to no servers.
            if not any(parts[:count]):
                break
            store = Store(f"{protocol}://{'/'.join(parts[:count])}")
            if (
                _request_mailbox.read_json(store, _request_mailbox.MARKER)
                is not None
            ):
                self._store = store
                self.path = _request_mailbox.checkpoint_path(
                    "/".join(parts[count:])
                )
                return
        raise ValueError(
            f"no servers have their saves above '{url}': it must lie below the "
            "URL that `tfswitch serve --data_dir=D --remote=URL` was started "
            "with, and servers must have been started so"
        )

    def fetch(self) -> int:
        """Waits until the servers have the checkpoint, if the store has one.

        Returns:
            The number of the checkpoint's newest save, or 0 without a save.

        Raises:
            OSError: If it is damaged.
            TimeoutError: If the servers' side was silent for `timeout_secs`.
        """
        manifest = join(self.path, _saves.NEWEST)
        if self._store.read(manifest, _saves.MAX_MANIFEST_BYTES) is None:
            return 0
        return self._ask("fetch", 0, f"for the servers to have '{self._url}'")

    def upload(self, save: int) -> None:
        """Waits until the store has a save that the servers have made.

        Args:
            save: The number of the save.

        Raises:
            OSError: If the save cannot be uploaded.
            TimeoutError: If the servers' side was silent for `timeout_secs`.
        """
        self._ask("upload", save, f"for save {save} to be in '{self._url}'")

    def _ask(self, action: str, save: int, what: str) -> int:
        request_id = secrets.token_hex(8)
        request = {"action": action, "path": self.path, "save": save}
        names = (
            _request_mailbox.request_name(request_id),
            _request_mailbox.answer_name(request_id),
        )
        _request_mailbox.write_json(self._store, names[0], request)
        try:
            return self._wait(names[1], what)
        finally:
            self._store.remove(names)

    def _wait(self, name: str, what: str) -> int:
        begin = heard = time.monotonic()
        poll = _POLL_SECS
        has_said = False
        last: dict[str, Any] | None = None
        while True:
            answer = _request_mailbox.read_json(self._store, name)
            now = time.monotonic()
            if answer is not None and answer != last:
                last, heard = answer, now
                if answer.get("state") == "done":
                    return int(answer["save"])
                if answer.get("state") == "failed":
                    raise OSError(f"waiting {what} failed: {answer['error']}")
            if now - heard >= self._timeout_secs:
                raise TimeoutError(self._silence(what, last))
            if not has_said and now - begin >= _SAY_AFTER_SECS:
                has_said = True
                print(f"tfswitch: waiting {what}", file=sys.stderr, flush=True)
            # The wait ends in time to print the line above, or to raise the
            # TimeoutError.
            due = heard + self._timeout_secs
            if not has_said:
                due = min(due, begin + _SAY_AFTER_SECS)
            time.sleep(min(poll, max(due - now, 0.0)))
            poll = min(2 * poll, _LONGEST_POLL_SECS)

    def _silence(self, what: str, last: dict[str, Any] | None) -> str:
        if last is None:
            return (
                f"waited {self._timeout_secs:g} s {what}, and nobody answered. "
                "Is server 0 running, with `tfswitch serve --remote="
                f"{self._store.url}`?"
            )
        note = last.get("note")
        return (
            f"waited {what}, and nothing has moved for {self._timeout_secs:g} s"
            + (f"; the last error was: {note}" if note else "")
            + ". The servers' side goes on with it"
        )
