"""The TLS files of a client or server."""

import dataclasses
import os

from tfswitch._connection._tokens import has_token
from tfswitch._settings._ranges import bad_argument, checked_text


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files for TLS between clients and servers (docs/tls.md).

    Changed files are read again, while connections stay open.

    Args:
        ca: Path of the certificates of the authorities that sign the other
            side's certificates. For clients, None means the authorities of the
            system. For servers, None means that clients need no certificate.
        cert: Path of this side's certificate chain: its own certificate, then
            the intermediate ones. A server must have a certificate. A client
            must have one if the server asks for it.
        key: Path of the private key of `cert`, which must have no password.
        server_name: For clients: the name that the server's certificate must
            have. None: the value of the environment variable
            TFSWITCH_TLS_SERVER_NAME, else the host of the address.

    Raises:
        ValueError: If only one of `cert` and `key` is given, or a value is
            empty or of another type.

    Example:

    >>> tsw.connect("grpcs://ps0:7077", tls=tsw.Tls(ca="ca.pem"))
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, str | os.PathLike) and os.fspath(value)
            ):
                raise bad_argument(name, value, "the path of a PEM file")
        if self.server_name is not None and not (
            isinstance(self.server_name, str) and self.server_name
        ):
            raise bad_argument("server_name", self.server_name, "a host name")
        if has_token(self.server_name):  # TLS sends it as plaintext.
            raise ValueError(
                "`server_name` has a token in it, which is left out here; give "
                "a token as `token`"
            )
        if (self.cert is None) != (self.key is None):
            raise ValueError(
                "`cert` and `key` go together: give both or none. Received: "
                f"cert={self.cert!r}, key={self.key!r}"
            )


def texts(tls: Tls | None) -> tuple[str, str, str, str] | None:
    """Returns all fields as texts; a field that is None becomes "".

    Raises:
        ValueError: If `tls` is of another type, or a field is not Unicode.
    """
    if tls is None:
        return None
    if not isinstance(tls, Tls):
        raise bad_argument("tls", tls, "None or a tfswitch.Tls")
    return (
        checked_text("ca", tls.ca or ""),
        checked_text("cert", tls.cert or ""),
        checked_text("key", tls.key or ""),
        checked_text("server_name", tls.server_name or ""),
    )
