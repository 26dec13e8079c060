"""`tfswitch token` creates, revokes and lists tokens (docs/access.md)."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from absl import app

from tfswitch._connection import _token_file
from tfswitch._connection._tokens import has_token
from tfswitch.cli._arguments import Parser, at_least, duration

_LIMITS = dict(
    zip(
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
)


def run(words: Sequence[str]) -> int:
    """Does `create`, `revoke` or `list`; returns the exit code."""
    options = _parser().parse_intermixed_args(words)
    act = {"create": _create, "revoke": _revoke, "list": _list}[options.action]
    if (options.action == "revoke") != (options.id is not None):
        raise app.UsageError(
            "expected `tfswitch token create --role=ROLE`, `token revoke ID` "
            "or `token list`, with --token_file=FILE. Received: "
            f"{' '.join(words)!r}"
        )
    file = options.token_file
    if not file or has_token(file):
        raise app.UsageError(
            "--token_file must be given: the file that the server has, which "
            "is no token"
        )
    try:
        act(Path(file), options)
    except (OSError, ValueError) as error:
        print(f"tfswitch token: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser("token", "Says who may do what on servers.")
    parser.add_argument("action", choices=("create", "revoke", "list"))
    parser.add_argument("id", nargs="?", help="of the token to revoke.")
    parser.add_argument(
        "--token_file",
        metavar="FILE",
        help="a file with the hashes of tokens, which the server has, too.",
    )
    parser.add_argument(
        "--role",
        choices=("read", "train", "admin"),
        help="what the new token is for; each role may do what those before it "
        "may.",
    )
    parser.add_argument(
        "--tables",
        action="append",
        metavar="PATTERN",
        help="names of the tables that the new token is for, with * for any "
        "text and ? for any character. May be repeated. Default: *.",
    )
    parser.add_argument(
        "--expires_in",
        type=duration,
        metavar="DURATION",
        help="how long the new token is valid, such as 90d. Default: always.",
    )
    parser.add_argument(
        "--note", help="a text for the list, such as who has the new token."
    )
    for name, about in _LIMITS.items():
        parser.add_argument(
            f"--{name}",
            type=at_least(1),
            metavar="N",
            help=f"{about} Default: no limit.",
        )
    return parser


def _create(path: Path, options: Namespace) -> None:
    if options.role is None:
        raise app.UsageError("--role must be given: read, train or admin")
    if sys.stdout is None:
        raise OSError("there is no standard output for the token")
    token = _token_file.add(
        path,
        options.role,
        tables=options.tables or ["*"],
        valid_secs=options.expires_in,
        note=options.note,
        limits={
            name: limit
            for name in _LIMITS
            if (limit := getattr(options, name)) is not None
        },
    )
    try:
        print(token, flush=True)
    except OSError:
        # Nobody has seen the token, so its record is removed.
        _token_file.remove(path, token)
        raise


def _revoke(path: Path, options: Namespace) -> None:
    _token_file.remove(path, options.id)


def _list(path: Path, options: Namespace) -> None:
    for record in _token_file.read(path):
        print(_token_file.describe(record))
