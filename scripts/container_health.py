"""Asks a server of this container for its health; exits with 0 if it serves.

    python container_health.py PORT

This is gRPC's health check without a package for gRPC, which the image of the
parameter server does not have. The server's certificate is not checked: the
server is in this container, and nothing secret is sent. A server with --tls_ca
asks its clients for a certificate; the file CERTIFICATE has one for this
program, with its key.
"""

import os
import socket
import ssl
import sys
from collections.abc import Iterator

CERTIFICATE = "/run/secrets/health.pem"
TIMEOUT_SECS = 5.0
# Frames of HTTP/2: https://www.rfc-editor.org/rfc/rfc9113#section-6
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def field(name: bytes, value: bytes) -> bytes:
    """Returns the bytes of a header, without compression."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def request() -> bytes:
    headers = (
        field(b":method", b"POST")
        + field(b":scheme", b"http")
        + field(b":path", b"/grpc.health.v1.Health/Check")
        + field(b":authority", b"localhost")
        + field(b"content-type", b"application/grpc")
        + field(b"te", b"trailers")
    )
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, headers)
        # An empty message asks for the health of all services.
        + frame(DATA, END_STREAM, 1, bytes(5))
    )


def frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Yields the kind and the content of frames, until the server hangs up."""
    with connection.makefile("rb") as file:
        while len(head := file.read(9)) == 9:
            yield head[3], file.read(int.from_bytes(head[:3], "big"))


def is_serving(port: int, tls: bool) -> bool:
    with socket.create_connection(
        ("127.0.0.1", port), TIMEOUT_SECS
    ) as connection:
        if tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            if os.path.exists(CERTIFICATE):
                context.load_cert_chain(CERTIFICATE)
            connection = context.wrap_socket(connection)
        connection.sendall(request())
        # A message of two bytes: status (field 1) is SERVING (1).
        return any(
            kind == DATA and content == b"\0\0\0\0\2\x08\1"
            for kind, content in frames(connection)
        )


def main(port: int) -> None:
    """Tries TLS first: a server with TLS would log a connection without."""
    try:
        try:
            serving = is_serving(port, tls=True)
        except ssl.SSLError:
            serving = is_serving(port, tls=False)
    except OSError as error:
        sys.exit(f"no server on port {port} of this container: {error}")
    if not serving:
        sys.exit(
            f"the server on port {port} does not serve. It may be restoring its"
            f" rows, or, with --tls_ca, refuse the certificate in {CERTIFICATE}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
