"""Who may make which call, for each method of each service in protos/."""

import contextlib
import dataclasses
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import (
    descriptor,
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import (
    proto_reflection_descriptor_database as reflection,
)
from grpc_reflection.v1alpha import reflection_pb2

import tfswitch as tsw
from tests.certificates import Authority
from tests.integration.predictor_test import PredictionServer, save
from tests.programs import ROOT
from tests.python.worker_threads import wait_for_stderr, wait_until
from tests.support import ServerProcess
from tests.tokens import TokenFile, id_of

# The packages of the two servers.
PARAMETERS = "tfswitch.v1"
PREDICTIONS = "tensorflow.serving"

# The table, beside what the .proto files say. A method that is missing here
# fails the test.
ROLES = ("read", "train", "admin")
LEAST_ROLES = {
    "tfswitch.v1.ParameterServer": {
        "read": (
            "Handshake ListTables Pull PullMany ReadUsage ReadRows Export "
            "GetProgress GetMetrics"
        ),
        # CreateTable: of a table that is not there, as here.
        "train": (
            "CreateTable Push PushMany CommitRound Assign Erase ExportChanges "
            "CommitExport"
        ),
        "admin": (
            "DropTable Shrink PauseRounds ChooseSnapshotRound SaveShard "
            "CommitCheckpoint AbortSave StageRestore CommitRestore"
        ),
    },
    "tfswitch.v1.Coordination": {
        "read": "GetGroupStats GetWorkQueueStats",
        "train": (
            "CreateGroup Join Heartbeat Arrive Leave WaitForRound "
            "WaitForTurn WaitAtBarrier TakeWorkItem FinishWorkItem"
        ),
        # The work queue does not exist.
        "admin": "CreateWorkQueue",
    },
    "tensorflow.serving.PredictionService": {
        "read": "Predict GetModelMetadata",
    },
    "tensorflow.serving.ModelService": {"read": "GetModelStatus"},
}
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
OPEN = {"grpc.health.v1.Health", REFLECTION}
# About all tables, whatever they name.
NEED_ALL_TABLES = set(
    "CommitRound PauseRounds ChooseSnapshotRound SaveShard CommitCheckpoint "
    "AbortSave StageRestore CommitRestore".split()
)
# The fields of requests with names of tables and models that a rule covers.
FIELDS_OF_RULES = {"table", "table_incarnation", "model_spec"}

LIST_TABLES = "/tfswitch.v1.ParameterServer/ListTables"
DROP_TABLE = "/tfswitch.v1.ParameterServer/DropTable"

NO_CONNECTION = "UNAVAILABLE"
NO_TOKEN = "UNAUTHENTICATED"
NO_RIGHT = "PERMISSION_DENIED"
NOT_THERE = "UNIMPLEMENTED"
PASSED = "passed"


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> dict[str, Any]:
    """The services of protos/ by name, and gRPC's reflection."""
    file = tmp_path_factory.mktemp("protos") / "all.bin"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"-I{ROOT / 'protos'}",
            *("--include_imports", f"--descriptor_set_out={file}"),
            *sorted(map(str, (ROOT / "protos").rglob("*.proto"))),
        ],
        check=True,
    )
    files = descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    for each in files:
        pool.Add(each)
    found = [*map(pool.FindFileByName, (each.name for each in files))]
    return {
        service.full_name: service
        for file in (*found, reflection_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    }


@dataclasses.dataclass(frozen=True)
class Place:
    """A server and how a client connects to it."""

    name: str
    address: str
    credentials: grpc.ChannelCredentials | None
    connects: bool = True
    takes_tokens: bool = True
    reflects: bool = False


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenFile:
    return TokenFile(tmp_path_factory.mktemp("tokens") / "tokens")


@pytest.fixture(scope="module")
def shown(tokens) -> dict[str, str | None]:
    """The tokens that callers show, by their names in the table."""
    values = {role: tokens.create(role) for role in ROLES}
    expired = tokens.create("admin")
    tokens.expire(expired)
    id_and_secret = values["admin"].rsplit("_", 1)
    wrong = f"{id_and_secret[0]}_{'0' * len(id_and_secret[1])}"
    return {
        "none": None,
        "wrong": wrong,
        "no token": "x" * len(wrong),
        "expired": expired,
        **values,
    }


@pytest.fixture(scope="module", params=[PARAMETERS, PREDICTIONS])
def package(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def places(
    package, tmp_path_factory, tokens, shown
) -> Iterator[dict[str, Place]]:
    folder = tmp_path_factory.mktemp("servers")
    if package == PREDICTIONS:
        save(1, folder)
    authority, stranger = Authority(folder), Authority(folder, "stranger")

    def credentials(
        tls: tsw.Tls | None = None, trusted: Authority = authority
    ) -> grpc.ChannelCredentials:
        def read(path: Any) -> bytes | None:
            return None if path is None else Path(path).read_bytes()

        return grpc.ssl_channel_credentials(
            trusted.ca.read_bytes(),
            tls and read(tls.key),
            tls and read(tls.cert),
        )

    anybody = credentials()
    known = credentials(authority.sign("client"))
    foreign = credentials(stranger.sign("foreign"))
    of_another = credentials(trusted=stranger)
    own = authority.sign("server")
    with_tokens = [f"--token_file={tokens.path}"]
    with_tls = [f"--tls_cert={own.cert}", f"--tls_key={own.key}"]
    with_ca = [*with_tls, f"--tls_ca={authority.ca}"]
    with contextlib.ExitStack() as stack:

        def start(
            flags: list[str], credentials: grpc.ChannelCredentials | None
        ) -> str:
            server = (
                ServerProcess(flags=(f"--checkpoint_root={folder}", *flags))
                if package == PARAMETERS
                else PredictionServer(
                    folder, folder, *flags, credentials=credentials
                )
            )
            return stack.enter_context(server).address

        plain = start(with_tokens, None)
        tls = start([*with_tokens, *with_tls, "--reflection"], anybody)
        both = start([*with_tokens, *with_ca], known)
        only_ca = start(with_ca, known)
        all_places = [
            Place("plaintext", plain, None),
            Place("TLS to plaintext", plain, anybody, connects=False),
            Place("TLS", tls, anybody, reflects=True),
            Place("TLS, foreign", tls, foreign, reflects=True),
            Place("TLS, of another", tls, of_another, connects=False),
            Place("plaintext to TLS", tls, None, connects=False),
            Place("mTLS", both, known),
            Place("mTLS, foreign", both, foreign, connects=False),
            Place("mTLS, none", both, anybody, connects=False),
            Place("plaintext to mTLS", both, None, connects=False),
            Place("only mTLS", only_ca, known, takes_tokens=False),
            Place("only mTLS, foreign", only_ca, foreign, connects=False),
            Place("only mTLS, none", only_ca, anybody, connects=False),
            Place("plaintext to only mTLS", only_ca, None, connects=False),
        ]
        yield {place.name: place for place in all_places}


def channel_to(place: Place) -> grpc.Channel:
    if place.credentials is None:
        return grpc.insecure_channel(place.address)
    return grpc.secure_channel(place.address, place.credentials)


def request_for(method: Any, table: str = "") -> Any:
    """A request that names the table, where it can name one."""
    request = message_factory.GetMessageClass(method.input_type)()
    fields = method.input_type.fields_by_name
    if table and "table" in fields:
        request.table = table
    elif table and "model_spec" in fields:
        request.model_spec.name = table
    elif table and "config" in fields:
        request.config.name = table
    elif table and method.name in ("PullMany", "PushMany"):
        request.requests.add(table=table)
    return request


def result_of(
    channel: grpc.Channel, method: Any, request: Any, token: str | None
) -> str:
    """PASSED, or the code with which the call was refused."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        start, request = channel.stream_stream, iter([request])
    elif method.server_streaming:
        start = channel.unary_stream
    else:
        start = channel.unary_unary
    call = start(path, lambda message: message.SerializeToString(), None)
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    try:
        answer = call(request, metadata=metadata, timeout=30)
        if method.server_streaming:
            next(iter(answer), None)
            answer.cancel()
    except grpc.RpcError as error:
        code = error.code().name
        # Another error is one of the call itself: it came so far.
        if code in (NO_CONNECTION, NO_TOKEN, NO_RIGHT, NOT_THERE):
            return code
    return PASSED


def least_roles() -> dict[tuple[str, str], str]:
    return {
        (service, method): role
        for service, by_role in LEAST_ROLES.items()
        for role, methods in by_role.items()
        for method in methods.split()
    }


def expected(place: Place, shown_as: str, method: Any, role: str | None) -> str:
    if not place.connects:
        return NO_CONNECTION
    if method.containing_service.full_name == REFLECTION and not place.reflects:
        return NOT_THERE
    if role is None or not place.takes_tokens:
        return PASSED
    if shown_as not in ROLES:
        return NO_TOKEN
    if ROLES.index(shown_as) < ROLES.index(role):
        return NO_RIGHT
    return PASSED


def methods_of(
    services: dict[str, Any], package: str = ""
) -> Iterator[tuple[Any, str | None]]:
    """The methods of a server, or of both, with the roles that they need."""
    roles = least_roles()
    for name, service in services.items():
        for method in service.methods:
            if name in OPEN:
                yield method, None
            elif name.startswith(package):
                yield method, roles[name, method.name]


def test_the_table_has_each_method_of_each_service(services):
    of_protos = {
        (name, method.name)
        for name, service in services.items()
        for method in service.methods
        if name not in OPEN
    }

    assert of_protos == set(least_roles())
    assert set(LEAST_ROLES) | OPEN == set(services)
    assert {name for _, name in of_protos} >= NEED_ALL_TABLES


def test_a_server_has_no_service_beside_those_of_the_table(
    services, package, places
):
    with channel_to(places["TLS"]) as channel:
        database = reflection.ProtoReflectionDescriptorDatabase(channel)
        served = set(database.get_services())

    assert served == {
        method.containing_service.full_name
        for method, _ in methods_of(services, package)
    }


def test_a_call_is_taken_from_those_that_may_make_it(
    services, package, places, shown
):
    wrong = {}
    for place in places.values():
        with channel_to(place) as channel:
            # Without a connection no token comes so far.
            callers = (
                shown.items() if place.connects else [("admin", shown["admin"])]
            )
            for (method, role), (shown_as, token) in itertools.product(
                methods_of(services, package), callers
            ):
                result = result_of(channel, method, request_for(method), token)
                if result != expected(place, shown_as, method, role):
                    wrong[place.name, method.full_name, shown_as] = result

    assert wrong == {}


def test_a_token_for_some_tables_is_for_no_other(
    services, package, places, tokens
):
    token = tokens.create("admin", "user*", "i?em")
    with channel_to(places["plaintext"]) as channel:

        def results(table: str) -> dict[str, str]:
            return {
                method.name: result_of(
                    channel, method, request_for(method, table), token
                )
                for method, role in methods_of(services, package)
                if role is not None and names_table(method)
            }

        def names_table(method: Any) -> bool:
            return request_for(method, "x") != request_for(method)

        others = results("other")
        own = [*results("user_7").values(), *results("item").values()]
        about_all = [
            result_of(channel, method, request_for(method), token)
            for method, _ in methods_of(services, package)
            if method.name in NEED_ALL_TABLES
        ]

    assert set(others.values()) == {NO_RIGHT}
    assert set(own) == {PASSED}
    assert len(others) >= {PARAMETERS: 13, PREDICTIONS: 3}[package]
    assert set(about_all) <= {NO_RIGHT}


def test_all_fields_with_names_of_tables_have_a_rule(services):
    """A new request that names tables in another field must get one, too."""

    def is_name(field: descriptor.FieldDescriptor) -> bool:
        return "table" in field.name or "model" in field.name

    unknown = {
        (method.full_name, field.name)
        for method, _ in methods_of(services)
        for field in method.input_type.fields
        if is_name(field)
        and method.name not in NEED_ALL_TABLES
        and field.name not in FIELDS_OF_RULES
    }

    assert unknown == set()


def test_who_reads_leaves_no_trace_of_what_it_opens(services, tokens, shown):
    """A write is remembered although a reader has made many calls since."""
    service = services["tfswitch.v1.ParameterServer"]

    def message(name: str, **fields: Any) -> Any:
        method = service.methods_by_name[name]
        return message_factory.GetMessageClass(method.input_type)(**fields)

    config = {"name": "of_readers", "dim": 1, "num_virtual_shards": 1}
    create = message("CreateTable", protocol_version=1, config=config)
    write = message(
        "Assign", table="of_readers", keys=[1], values=[1.0], client_id=7
    )
    write.sequence = 1
    with (
        ServerProcess(flags=(f"--token_file={tokens.path}",)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):

        def call(name: str, request: Any, role: str) -> Any:
            method = service.methods_by_name[name]
            return channel.unary_unary(
                f"/{service.full_name}/{name}",
                lambda request: request.SerializeToString(),
                message_factory.GetMessageClass(method.output_type).FromString,
            )(request, metadata=[("authorization", f"Bearer {shown[role]}")])

        created = call("CreateTable", create, "train")
        assert not call("Assign", write, "train").duplicate
        for client in range(1000, 1000 + 4200):
            create.client_id, create.sequence = client, 1
            opened = call("CreateTable", create, "read")
            assert not opened.created
        assert opened.table_incarnation == created.table_incarnation
        assert call("Assign", write, "train").duplicate


def test_messages_of_strangers_are_not_parsed(services, tokens, tmp_path):
    """Parsed, this one would take a gigabyte."""
    tokens.create("admin")
    empty_contributions = 32 << 20
    (contributions,) = (
        field
        for field in services["tfswitch.v1.ParameterServer"]
        .methods_by_name["CommitRound"]
        .input_type.fields_by_name["round"]
        .message_type.fields
        if field.name == "contributions"
    )
    tag = bytes([contributions.number << 3 | 2, 0])
    body = tag * (empty_contributions // 2)
    length = len(body)
    header = b"\x12"
    while length > 0x7F:
        header += bytes([length & 0x7F | 0x80])
        length >>= 7
    request = header + bytes([length]) + body
    with (
        ServerProcess(flags=(f"--token_file={tokens.path}",)) as server,
        grpc.insecure_channel(
            server.address,
            options=[("grpc.max_send_message_length", -1)],
        ) as channel,
    ):
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(
                "/tfswitch.v1.ParameterServer/CommitRound", None, None
            )(request, timeout=60)
        status = Path(f"/proc/{server._process.pid}/status").read_text()
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    assert peak < 400 << 10


def test_calls_without_a_message_take_only_their_slots(tokens, services):
    """A message that does not come holds a thread of the server."""
    token = tokens.create("read")
    metadata = [("authorization", f"Bearer {token}")]
    ends = threading.Event()
    flags = (f"--token_file={tokens.path}", "--max_control_calls=4")
    path = "/tfswitch.v1.ParameterServer/ListTables"
    with (
        ServerProcess(flags=flags) as server,
        grpc.insecure_channel(server.address) as channel,
    ):

        def never() -> Iterator[bytes]:
            ends.wait()
            yield b""

        def refusal() -> str:
            try:
                channel.unary_unary(path)(b"", metadata=metadata, timeout=30)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return error.details()
            return ""

        try:
            # More than there are threads; they end when they are forgotten.
            held = [
                channel.stream_unary(path).future(never(), metadata=metadata)
                for _ in range(70)
            ]
            wait_until(lambda: "--max_control_calls allows" in refusal())
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest()
            assert health.Check(asked, timeout=30).status == 1
            wait_until(lambda: sum(not call.done() for call in held) == 4)
        finally:
            ends.set()
        wait_until(lambda: refusal() == "")


@contextlib.contextmanager
def held_call(channel: grpc.Channel, token: str) -> Iterator[grpc.Future]:
    """A call without its message, which takes the one place of a token."""
    metadata = [("authorization", f"Bearer {token}")]
    start = channel.stream_unary(LIST_TABLES).future
    ends = threading.Event()

    def never() -> Iterator[bytes]:
        ends.wait()
        yield b""

    held: list[grpc.Future] = []

    def is_full() -> bool:
        # Another call may have been there first.
        if not held or held[-1].done():
            held.append(start(never(), metadata=metadata))
        return refusal_of(channel, LIST_TABLES, token) is not None

    try:
        wait_until(is_full)
        yield held[-1]
    finally:
        ends.set()


def refusal_of(
    channel: grpc.Channel, path: str, token: str
) -> grpc.RpcError | None:
    metadata = [("authorization", f"Bearer {token}")]
    try:
        channel.unary_unary(path)(b"", metadata=metadata, timeout=30)
    except grpc.RpcError as error:
        return error
    return None


def test_a_call_too_many_of_a_token_is_told_to_come_again(tokens, services):
    token = tokens.create("read", max_calls_in_flight=1)
    with (
        ServerProcess(flags=(f"--token_file={tokens.path}",)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        with held_call(channel, token) as held:
            error = refusal_of(channel, LIST_TABLES, token)
            assert error is not None
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(error.trailing_metadata())
            assert int(trailers["grpc-retry-pushback-ms"]) > 0
            assert not held.done()
        wait_until(lambda: refusal_of(channel, LIST_TABLES, token) is None)


@pytest.mark.parametrize(
    ("role", "code"),
    [("read", NO_RIGHT), ("admin", "RESOURCE_EXHAUSTED")],
)
def test_calls_too_many_hide_none_of_an_administrator(
    role, code, tokens, capfd
):
    token = tokens.create(role, max_calls_in_flight=1)
    admin = tokens.create("admin")
    with (
        ServerProcess(flags=(f"--token_file={tokens.path}",)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        with held_call(channel, token):
            codes = {
                refusal_of(channel, DROP_TABLE, token).code().name
                for _ in range(300)
            }
        refusal_of(channel, DROP_TABLE, admin)
        lines = wait_for_stderr(
            capfd, f"call=DropTable token={id_of(admin)} .*\n"
        )

    assert codes == {code}
    assert lines.count(f"call=DropTable token={id_of(token)} ") >= 20
