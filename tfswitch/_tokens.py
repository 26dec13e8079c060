"""Where a client has its token from."""

import os

from tfswitch._ranges import bad_argument, checked_text


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
