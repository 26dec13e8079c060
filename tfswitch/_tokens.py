"""Where a client has its token from, and the form of tokens."""

import os
import re

from tfswitch._ranges import bad_argument, checked_text

# The begin of those of tfswitch/_token_file.py; the rest may be cut.
_TOKEN = re.compile(r"tfswitch_([0-9a-f]{12})_[^\s'\"]*", re.IGNORECASE)


def has_token(text: object) -> bool:
    """Returns whether a token, or the begin of one, is in the text of it."""
    return _TOKEN.search(str(text)) is not None


def without_secrets(text: str) -> str:
    """Returns the text with the ids of its tokens in place of the tokens."""
    return _TOKEN.sub(lambda match: match[1], text)


def texts(token: str | os.PathLike[str] | None) -> tuple[str, str]:
    """Returns the token and the path of its file for the core, "" for none.

    Raises:
        ValueError: If it is something else. The message has no token.
    """
    if token is None:
        return "", ""
    if isinstance(token, os.PathLike):
        return "", checked_text("token", token)
    if not (isinstance(token, str) and token):
        # Whatever it is, it may hold a secret.
        raise bad_argument(
            "token",
            type(token),
            "None, a token as a str, or a pathlib.Path of a file with one",
        )
    return checked_text("token", token), ""
