"""A peer that speaks HTTP/2 frame by frame, which libraries do not allow."""

import contextlib
import itertools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_HEADER = 9  # Bytes of a frame before its payload.
END_STREAM, ACKNOWLEDGES, END_HEADERS = 0x1, 0x1, 0x4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    header = struct.pack(">IBI", len(payload) << 8 | kind, flags, stream)
    return header + payload


def headers_of(path: str) -> bytes:
    """The header block of a gRPC call, in HPACK without its tables."""

    def literal(name: bytes, value: str) -> bytes:
        return name + bytes([len(value)]) + value.encode()

    return (
        b"\x83\x86"  # :method POST, :scheme http
        + literal(b"\x04", path)
        + literal(b"\x01", "edge")  # :authority
        + literal(b"\x0f\x10", "application/grpc")  # content-type
        + literal(b"\x00\x02te", "trailers")
    )


class Peer:
    """A connection which acknowledges nothing by itself.

    Args:
        address: "host:port" or "unix:/path".
        tls: Whether to speak TLS, and believe any certificate.
        source: The address that it comes from.
    """

    def __init__(
        self, address: str, *, tls: bool = False, source: str = "127.0.0.2"
    ) -> None:
        if address.startswith("unix:"):
            self.socket: socket.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(20)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, port = address.rsplit(":", 1)
            self.socket = socket.create_connection(
                (host, int(port)), 20, (source, 0)
            )
        if tls:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def acknowledge_settings(self) -> None:
        assert self.socket.recv(1 << 16)  # A server begins with its own.
        self.socket.sendall(frame(SETTINGS, ACKNOWLEDGES, 0))

    def answer_pings(self, secs: float) -> None:
        """Only answers pings until the server ends the connection."""
        end = time.monotonic() + secs
        received = b""
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                self.socket.settimeout(end - time.monotonic())
                more = self.socket.recv(1 << 16)
                if not more:
                    return
                received += more
                while len(received) >= _HEADER:
                    size = _HEADER + int.from_bytes(received[:3], "big")
                    if len(received) < size:
                        break
                    if received[3] == PING and not received[4] & ACKNOWLEDGES:
                        self.socket.sendall(
                            frame(PING, ACKNOWLEDGES, 0, received[_HEADER:size])
                        )
                    received = received[size:]

    def flood(self, chunks: Iterator[bytes], secs: float = 10) -> bool:
        """Sends until the server ends the connection, or reads no more.

        Returns:
            Whether it has done so in this time.
        """
        end = time.monotonic() + secs
        self.socket.settimeout(min(secs, 5))
        try:
            for chunk in chunks:
                self.socket.sendall(chunk)
                if time.monotonic() > end:
                    return False
        except OSError:
            return True
        # The chunks have ended, and the connection may be about to.
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


def on_streams(
    make: Callable[[int], bytes], per_chunk: int = 50
) -> Iterator[bytes]:
    for first in itertools.count(1, 2 * per_chunk):
        yield b"".join(make(first + 2 * place) for place in range(per_chunk))


# The frames that each flood sends, made from a header block.
FLOODS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "rapid reset": lambda block: on_streams(
        lambda stream: (
            frame(HEADERS, END_HEADERS | END_STREAM, stream, block)
            + frame(RESET, 0, stream, struct.pack(">I", 8))
        )
    ),
    "open streams": lambda block: on_streams(
        lambda stream: frame(HEADERS, END_HEADERS, stream, block)
    ),
    "streams that the server resets": lambda block: on_streams(
        lambda stream: (
            frame(HEADERS, END_HEADERS, stream, block)
            + frame(WINDOW, 0, stream, struct.pack(">I", 0))
        )
    ),
    "continuations": lambda block: itertools.chain(
        [frame(HEADERS, 0, 1, block)],
        # A header "a" with a value of 16,000 bytes.
        itertools.repeat(
            frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f\x81\x7c" + 16000 * b"x")
        ),
    ),
    "pings": lambda block: itertools.repeat(100 * frame(PING, 0, 0, bytes(8))),
    "settings": lambda block: itertools.repeat(100 * frame(SETTINGS, 0, 0)),
}
