"""The file in which servers find the hashes of tokens (docs/access.md).

cc/access/tokens.cc reads it.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfswitch._connection._tokens import has_token, without_secrets

# The same limits as in cc/access/tokens.cc.
_MAX_TOKENS = 10_000
_MAX_PATTERNS = 1_000
_MAX_FILE_BYTES = 4 << 20
# The limits that the record of a token may set.
LIMITS = (
    "max_rows",
    "max_tables",
    "max_bytes_in_flight",
    "max_calls_in_flight",
    "max_request_bytes",
)


def add(
    path: Path,
    role: str,
    *,
    tables: Sequence[str] = ("*",),
    valid_secs: float | None = None,
    note: str | None = None,
    limits: Mapping[str, int] | None = None,
) -> str:
    """Adds the record of a new token, and returns the token.

    Args:
        path: The file; it is made if it does not exist.
        role: "read", "train" or "admin".
        tables: Patterns of the names of tables.
        valid_secs: How long the token is valid; None: without end.
        note: A text for people.
        limits: Values for some of LIMITS.

    Raises:
        ValueError: If servers would refuse the changed file.
        OSError: If the file cannot be written.
    """
    for text in (*tables, note or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r} is not valid Unicode") from error
        # `tfswitch token list` prints each text on a line of a terminal.
        kinds = {unicodedata.category(character) for character in text}
        if kinds & {"Cc", "Zl", "Zp"} or has_token(text):
            raise ValueError(
                f"{without_secrets(text)!r} must have neither control "
                "characters nor a token"
            )
    if "" in tables:
        raise ValueError(
            "a pattern of tables is empty, which no name matches; '*' is for "
            "all tables"
        )
    for name, value in (limits or {}).items():
        if not 1 <= value < 2**63:
            raise ValueError(f"{name} must be 1 to 2^63 - 1, got {value}")
    token_id = secrets.token_hex(6)
    token = f"tfswitch_{token_id}_{secrets.token_hex(32)}"
    now = datetime.datetime.now(datetime.timezone.utc)
    record: dict[str, Any] = {
        "id": token_id,
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
        "role": role,
        "tables": list(tables),
        "created": _text(now),
        **(limits or {}),
    }
    if valid_secs is not None:
        record["expires"] = _text(now + datetime.timedelta(seconds=valid_secs))
    if note is not None:
        record["note"] = note
    path = path.resolve()
    with _locked(path):
        tokens = [*(read(path) if path.exists() else []), record]
        if len(tokens) > _MAX_TOKENS or len(tables) > _MAX_PATTERNS:
            raise ValueError(
                f"{str(path)!r} would have more than {_MAX_TOKENS} tokens, or "
                f"one of them more than {_MAX_PATTERNS} patterns of tables; "
                "revoke some"
            )
        _write(path, tokens)
    return token


def remove(path: Path, token_id: str) -> None:
    """Removes the record of a token.

    Args:
        path: The file.
        token_id: The id, or the whole token.

    Raises:
        ValueError: If the file has no such record.
    """
    token_id = without_secrets(token_id)
    path = path.resolve()
    with _locked(path):
        tokens = read(path)
        left = [record for record in tokens if record["id"] != token_id]
        if len(left) == len(tokens):
            raise ValueError(
                f"{str(path)!r} has no token {token_id!r}; `tfswitch token "
                "list` prints those that it has"
            )
        _write(path, left)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records.

    Raises:
        ValueError: If the file has no valid records.
    """
    try:
        tokens = json.loads(path.read_text())["tokens"]
        for record in tokens:
            describe(record)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is no file of tokens; give another --token_file"
        ) from error
    return tokens


def describe(record: Mapping[str, Any]) -> str:
    """Returns a line that describes the token."""
    words = [record["id"], record["role"], ",".join(record["tables"])]
    names = ("expires", *LIMITS, "note")
    words += [f"{name}={record[name]}" for name in names if name in record]
    return "  ".join(words)


def _text(time: datetime.datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other commands from replacing the file at the same time."""
    lock = os.open(
        path.with_name(f".{path.name}.lock"),
        os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, tokens: list[dict[str, Any]]) -> None:
    """Replaces the file at once: servers read either the old or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    text = json.dumps({"tokens": tokens}, indent=1) + "\n"
    try:
        if len(text) > _MAX_FILE_BYTES:
            raise ValueError(
                f"{str(path)!r} would have {len(text)} bytes, over "
                f"{_MAX_FILE_BYTES}; revoke some tokens, or shorten a note"
            )
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            # Servers that can read the old file must be able to read the new
            # file.
            former = path.stat()
            os.chown(name, former.st_uid, former.st_gid)
            os.chmod(name, former.st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    # Flushes the folder: a power loss must not bring back a revoked token.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
