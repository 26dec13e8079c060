"""Tokens for tests."""

import json
from pathlib import Path

from tfswitch._connection import _token_file


class TokenFile:
    """A file of tokens, as `tfswitch token` makes it.

    Attributes:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, role: str, *tables: str, **limits: int) -> str:
        """Returns a new token."""
        return _token_file.add(
            self.path, role, tables=tables or ("*",), limits=limits
        )

    def revoke(self, token: str) -> None:
        _token_file.remove(self.path, token)

    def expire(self, token: str) -> None:
        """Sets the token's expiry to a past day."""
        content = json.loads(self.path.read_text())
        (record,) = (
            record
            for record in content["tokens"]
            if record["id"] == id_of(token)
        )
        record["expires"] = "2020-01-31T00:00:00Z"
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.rename(self.path)


def id_of(token: str) -> str:
    return token.split("_")[1]
