"""A network that fails: a proxy between clients and one server.

It passes on the bytes, metadata and errors of gRPC calls unchanged. A plan
decides which fault a call gets. Calls must have one request; the answer may be
a stream.
"""

import collections
import enum
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc

# How long a call waits for another one that is to overtake it.
_OVERTAKE_SECS = 0.2
# The time for a call without a deadline.
_LONGEST_SECS = 3600.0
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that was started again is found at once.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class Fault(enum.Enum):
    """The fate of a call."""

    CUT_BEFORE = "the server never gets it"
    CUT_AFTER = "the server does it, and the answer is lost"
    STRAY = "cut, and the server gets it after another call"
    SWAP = "it waits until another call has overtaken it"
    TWICE = "the server gets it twice at once"
    DELAY = "it comes late"


Plan = Callable[[str], Fault | None]


def random_plan(seed: int, share: float = 0.3) -> Plan:
    """Gives this share of all calls a fault; all faults are equally likely."""
    rng = random.Random(seed)
    deck: list[Fault | None] = []

    def plan(method: str) -> Fault | None:
        if not deck:
            deck.extend(Fault)
            deck.extend([None] * round(len(Fault) * (1 / share - 1)))
            rng.shuffle(deck)
        return deck.pop()

    return plan


class _Answer:
    """A server's complete answer to a call."""

    def __init__(self, call: grpc.Call) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.messages: list[bytes] = []
        try:
            self.messages.extend(call)
        except grpc.RpcError:
            self.code = call.code()
            self.details = call.details() or ""
        self.metadata = call.initial_metadata()
        self.trailing_metadata = call.trailing_metadata()


class FaultyProxy:
    """Listens at `address` in place of the server at `target`.

    Args:
        target: "HOST:PORT" of the server, which need not be there yet.
        plan: Called with the name of each method, such as "PushMany", in the
            order in which calls come; returns the fault of the call.
        address: Where to listen.

    Attributes:
        address: Where it listens.
        faults: How often a fault was given, by method and fault.
        plan: The plan, which may be replaced.
    """

    def __init__(
        self,
        target: str,
        plan: Plan = lambda method: None,
        address: str = "127.0.0.1:0",
    ) -> None:
        self.plan = plan
        self.faults: collections.Counter[tuple[str, Fault]] = (
            collections.Counter()
        )
        self._mutex = threading.Lock()
        self._num_ended = 0
        self._ends = threading.Condition(self._mutex)
        self._channel = grpc.insecure_channel(target, _CHANNEL_OPTIONS)
        # Workers wait in calls of theirs, for a long time.
        self._threads = futures.ThreadPoolExecutor(64)
        self._strays = futures.ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, options=_CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers([_Handlers(self._handle)])
        port = self._server.add_insecure_port(address)
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    @property
    def num_faults(self) -> int:
        """How many calls have got a fault."""
        return sum(self.faults.values())

    def _handle(
        self, method: str, request: bytes, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        name = method.rpartition("/")[2]
        with self._mutex:
            fault = self.plan(name)
            if fault is not None:
                self.faults[name, fault] += 1
            num_ended = self._num_ended

        def send() -> _Answer:
            call = self._channel.unary_stream(method)(
                request,
                timeout=min(context.time_remaining(), _LONGEST_SECS),
                metadata=[
                    (key, value)
                    for key, value in context.invocation_metadata()
                    if key != "user-agent"  # gRPC adds its own.
                ],
            )
            context.add_callback(call.cancel)
            return _Answer(call)

        def cut() -> None:
            context.abort(
                grpc.StatusCode.UNAVAILABLE, f"the proxy has cut {name}"
            )

        if fault in (Fault.CUT_BEFORE, Fault.STRAY):
            if fault is Fault.STRAY:
                self._strays.submit(self._send_late, method, request, num_ended)
            cut()
        if fault is Fault.SWAP:
            self._wait_to_be_overtaken(num_ended)
        elif fault is Fault.DELAY:
            threading.Event().wait(_OVERTAKE_SECS / 4)
        other = self._strays.submit(send) if fault is Fault.TWICE else None
        answer = send()
        if other is not None:
            answer = other.result()
        with self._mutex:
            self._num_ended += 1
            self._ends.notify_all()
        if fault is Fault.CUT_AFTER:
            cut()
        context.send_initial_metadata(answer.metadata)
        context.set_trailing_metadata(answer.trailing_metadata)
        yield from answer.messages
        if answer.code != grpc.StatusCode.OK:
            context.abort(answer.code, answer.details)

    def _wait_to_be_overtaken(self, num_ended: int) -> None:
        with self._mutex:
            self._ends.wait_for(
                lambda: self._num_ended > num_ended, _OVERTAKE_SECS
            )

    def _send_late(self, method: str, request: bytes, num_ended: int) -> None:
        self._wait_to_be_overtaken(num_ended)
        _Answer(self._channel.unary_stream(method)(request, timeout=10.0))

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(None).wait()
        self._strays.shutdown()
        self._channel.close()
        self._threads.shutdown()


class _Handlers(grpc.GenericRpcHandler):
    """Hands all methods to one function."""

    def __init__(
        self,
        handle: Callable[[str, bytes, grpc.ServicerContext], Iterator[bytes]],
    ) -> None:
        self._handle = handle

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(
            lambda request, context: self._handle(
                details.method, request, context
            )
        )
