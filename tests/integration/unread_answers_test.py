"""A peer that leaves answers unread, in HTTP/2 by hand: libraries read on."""

import contextlib
import selectors
import socket
import struct

import numpy as np

import tfswitch as tsw
from tests.faults.frames import (
    ACKNOWLEDGES,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RESET,
    SETTINGS,
    WINDOW,
    frame,
    headers_of,
)
from tests.python.worker_threads import Call, wait_until
from tests.support import ServerProcess

NUM_PEERS, CALLS_PER_PEER = 24, 350
# docs/server.md
MAX_UNREAD = 8192

NUM_IDS = 15
# A pull of the first ids of table "t".
PULL = b"\x0a\x01t\x12" + struct.pack(
    f"<B{NUM_IDS}q", 8 * NUM_IDS, *range(NUM_IDS)
)
MAX_WINDOW = 2**31 - 1


PULL_HEADERS = headers_of("/tfswitch.v1.ParameterServer/Pull")


def pull(stream: int) -> bytes:
    message = b"\0" + struct.pack(">I", len(PULL)) + PULL
    return frame(HEADERS, END_HEADERS, stream, PULL_HEADERS) + frame(
        DATA, END_STREAM, stream, message
    )


class Peer:
    """Counts calls that the server ends.

    Args:
        address: The server's.
        window: Bytes that the server may send of each answer.
    """

    def __init__(self, address: str, window: int) -> None:
        is_unix = address.startswith("unix:")
        family = socket.AF_UNIX if is_unix else socket.AF_INET
        host, port = address.split(":")
        self.socket = socket.socket(family)
        self.socket.settimeout(60)
        self.socket.connect(port if is_unix else (host, int(port)))
        self.num_ended = 0
        self._bytes = b""
        self.socket.sendall(
            PREFACE
            + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window))
            + frame(
                SETTINGS, ACKNOWLEDGES, 0
            )  # Before the server's own SETTINGS.
            + frame(WINDOW, 0, 0, struct.pack(">I", MAX_WINDOW - 65_535))
        )

    def read(self) -> None:
        self._bytes += self.socket.recv(1 << 20)
        while len(self._bytes) >= 9:
            end = 9 + int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < end:
                break
            self.num_ended += self._bytes[3] == RESET
            self._bytes = self._bytes[end:]


def test_the_oldest_of_too_many_unread_answers_end_and_others_are_served():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(flags=("--num_threads=1",)))
        cluster = stack.enter_context(
            tsw.Cluster(f"grpc://{server.address}", timeout_secs=20.0)
        )
        table = tsw.EmbeddingTable("t", 4, cluster=cluster)
        rows = table.lookup_or_create(np.arange(10))
        selector = stack.enter_context(selectors.DefaultSelector())
        peers = [Peer(server.address, window=0) for _ in range(NUM_PEERS)]
        for peer in peers:
            stack.enter_context(peer.socket)
            selector.register(peer.socket, selectors.EVENT_READ, peer)
            for i in range(CALLS_PER_PEER):
                peer.socket.sendall(pull(2 * i + 1))

        def has_ended() -> bool:
            for key, _ in selector.select(timeout=0.1):
                key.data.read()
            ended = sum(peer.num_ended for peer in peers)
            return ended == len(peers) * CALLS_PER_PEER - MAX_UNREAD

        wait_until(has_ended)
        np.testing.assert_array_equal(table.lookup(np.arange(10)), rows)

        assert peers[0].num_ended > 0 == peers[-1].num_ended


def test_a_peer_that_reads_nothing_does_not_hold_a_server_that_stops(tmp_path):
    with (
        tsw.Server(f"unix:{tmp_path}/socket") as server,
        tsw.Cluster(f"grpc://{server.address}") as cluster,
    ):
        tsw.EmbeddingTable("t", 4096, cluster=cluster)
        peer = Peer(server.address, window=MAX_WINDOW)
        with peer.socket:
            # More than the kernel takes.
            for i in range(50):
                peer.socket.sendall(pull(2 * i + 1))
            wait_until(
                lambda: len(peer.socket.recv(1 << 20, socket.MSG_PEEK)) > 50_000
            )
            Call(server.stop, 0.1).result()
