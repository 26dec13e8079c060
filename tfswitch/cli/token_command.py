"""`tfswitch token` creates, revokes and lists tokens (docs/access.md)."""

import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from tfswitch import _token_file
from tfswitch._tokens import has_token
from tfswitch.cli import _durations

_ROLE = flags.DEFINE_enum(
    "role",
    None,
    ["read", "train", "admin"],
    "token: what the new token is for; each role may do what those before it "
    "may.",
)
_TABLES = flags.DEFINE_multi_string(
    "tables",
    ["*"],
    "token: names of the tables that the new token is for, with * for any text "
    "and ? for any character. May be repeated.",
)
_EXPIRES_IN = _durations.define(
    "expires_in", None, "token: how long the new token is good, such as 90d."
)
_NOTE = flags.DEFINE_string(
    "note", None, "token: a text for the list, such as who has the new token."
)
_LIMITS = {
    name: flags.DEFINE_integer(
        name, None, f"token: {text} Default: no limit.", lower_bound=1
    )
    for name, text in zip(
        _token_file.LIMITS,
        (
            "rows of all its tables on one server.",
            "tables that it may use, on one server.",
            "bytes of requests and answers at a time, on one server.",
            "calls at a time, on one server.",
            "bytes of one request.",
        ),
        strict=True,
    )
}


def run(action: str, token_id: str | None = None) -> int:
    """Does `create`, `revoke` or `list`; returns the exit code."""
    actions: dict[tuple[str, bool], Callable[[Path], None]] = {
        ("create", False): _create,
        ("list", False): _list,
        ("revoke", True): lambda path: _token_file.remove(path, token_id or ""),
    }
    act = actions.get((action, token_id is not None))
    if act is None:
        raise app.UsageError(
            "expected `tfswitch token create --role=ROLE`, `token revoke ID` "
            "or `token list`, with --token_file=FILE. Received: "
            f"{' '.join(['token', action, token_id or ''])!r}"
        )
    file = flags.FLAGS["token_file"].value
    if not file or has_token(file):
        raise app.UsageError(
            "--token_file must be given: the file that the server has, which "
            "is no token"
        )
    try:
        act(Path(file))
    except (OSError, ValueError) as error:
        print(f"tfswitch token: {error}", file=sys.stderr)
        return 1
    return 0


def _create(path: Path) -> None:
    if _ROLE.value is None:
        raise app.UsageError("--role must be given: read, train or admin")
    if sys.stdout is None:
        raise OSError("there is no standard output for the token")
    token = _token_file.add(
        path,
        _ROLE.value,
        tables=_TABLES.value,
        seconds=_EXPIRES_IN.value,
        note=_NOTE.value,
        limits={
            name: flag.value
            for name, flag in _LIMITS.items()
            if flag.value is not None
        },
    )
    try:
        print(token, flush=True)
    except OSError:
        # Nobody would ever have the secret.
        _token_file.remove(path, token)
        raise


def _list(path: Path) -> None:
    for record in _token_file.read(path):
        print(_token_file.describe(record))
