"""Checks the form of server addresses, where no connection is made yet.

The rules are those of cc/capi/cluster.cc and cc/rpc/address.cc, which check an
address when a client connects. Here, a token in an address is an error as well.
"""

import re

from tfswitch._connection._tokens import has_token

SERVERS = (
    '"grpc://host:port,host:port", "grpcs://host:port,host:port" or '
    '"grpc+unix:///path", the servers in shard order'
)

# The kernel's limit: sockaddr_un.sun_path, less the byte that ends it.
_MAX_UNIX_PATH = 107
_MAX_PORT = 65535


def check_has_no_token(name: str, address: object) -> None:
    """Raises ValueError if an address has a token: addresses are in logs.

    Args:
        name: The name of the argument.
        address: The address as it was given.

    Raises:
        ValueError: If the address has a token, or a host with an "@". The
            message does not contain the address.
    """
    text = str(address)
    # Paths, and the names after "ray://" and "local://", may have an "@".
    has_user = not text.startswith(
        ("local://", "ray://", "grpc+unix://")
    ) and any("@" in server.split("unix:/")[0] for server in text.split(","))
    if has_user or has_token(text):
        raise ValueError(
            f"`{name}` must have no token, and no host with an '@'; give a "
            "token as `token`, or in the file that TFSWITCH_TOKEN_FILE names. "
            "The address is left out here, as it may have a secret"
        )


def why_no_servers(address: object) -> str | None:
    """Returns the fault in the address of a cluster of servers.

    Args:
        address: As for `tfswitch.connect`, but neither "local://" nor "ray://".

    Returns:
        The fault, or None if the address is valid.
    """
    if not isinstance(address, str):
        return "it is no string"
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("grpc", "grpcs", "grpc+unix"):
        return "it has another scheme"
    if "://" in rest:
        return "it has more than one scheme"
    for server in map(str.strip, rest.split(",")):
        is_unix = scheme == "grpc+unix"
        why = _why_no_path(server) if is_unix else _why_no_server(server)
        if why is not None:
            return f"{why} in {server!r}"
    return None


def _why_no_server(server: str) -> str | None:
    if server.startswith("unix:"):
        return _why_no_path(server.removeprefix("unix:"))
    host, _, port = server.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host:
        return "the host or the port is missing"
    if ":" in host and not is_bracketed:
        return "an IPv6 host needs brackets"
    if re.search(r"[\s/]", host):
        return "the host has a blank or a slash"
    if not re.fullmatch(r"[0-9]+", port) or not 0 < int(port) <= _MAX_PORT:
        return f"{port!r} is no port"
    return None


def _why_no_path(path: str) -> str | None:
    if not path.startswith("/"):
        return "there is no absolute path"
    if len(path.encode(errors="surrogateescape")) > _MAX_UNIX_PATH:
        return f"the path is longer than {_MAX_UNIX_PATH} bytes"
    return None
