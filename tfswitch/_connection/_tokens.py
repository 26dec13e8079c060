"""The source of a client's token, and the form of tokens."""

import os
import re

from tfswitch._settings._ranges import bad_argument, checked_text

# How tokens begin (_token_file.py); the rest may be cut off.
_TOKEN = re.compile(r"tfswitch_([0-9a-f]{12})_[^\s'\"]*", re.IGNORECASE)


def has_token(text: object) -> bool:
    """Returns whether the text contains a token, or the beginning of one."""
    return _TOKEN.search(str(text)) is not None


def without_secrets(text: str) -> str:
    """Returns the text with each token replaced by its id."""
    return _TOKEN.sub(lambda match: match[1], text)


def texts(token: str | os.PathLike[str] | None) -> tuple[str, str]:
    """Returns the token, and the path of its file; "" for what is not given.

    Raises:
        ValueError: If `token` is of another type. The message has no token.
    """
    if token is None:
        return "", ""
    if isinstance(token, os.PathLike):
        return "", checked_text("token", token)
    if not (isinstance(token, str) and token):
        # The message has only the type, because any value may contain a secret.
        raise bad_argument(
            "token",
            type(token),
            "None, a token as a str, or a pathlib.Path of a file with one",
        )
    return checked_text("token", token), ""
