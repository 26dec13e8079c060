"""Generates a client from protos/ and calls, as users of other languages do.

The client in docs/wire_protocol.md, which examples_test.py runs, shows that it
works without tfswitch.
"""

import contextlib
import importlib
import subprocess
import sys
from concurrent import futures

import grpc
import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import ROOT
from tests.support import ServerProcess
from tests.tokens import TokenFile


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The modules that protoc makes of protos/, by the ends of their names."""
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            f"-I{ROOT / 'protos'}",
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            *sorted((ROOT / "protos").rglob("*.proto")),
        ],
        check=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        # As tfswitch.v1, beside the modules of the package.
        patch.setattr(
            tsw, "__path__", [*tsw.__path__, str(folder / "tfswitch")]
        )
        yield lambda name: importlib.import_module(f"tfswitch.v1.{name}")


@pytest.fixture(scope="module")
def pb(generated):
    return generated("parameter_server_pb2")


@pytest.fixture(scope="module")
def server():
    with tsw.Server() as server:
        yield server


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(generated, channel):
    services = generated("parameter_server_pb2_grpc")
    return services.ParameterServerStub(channel)


@pytest.fixture
def create(generated, pb):
    """A request for a table."""
    configs = generated("table_config_pb2")
    config = configs.TableConfig(
        name="plain",
        dim=2,
        optimizer=configs.OptimizerConfig(
            segments=[{"sgd": configs.OptimizerConfig.Sgd()}]
        ),
        initializer=configs.InitializerConfig(
            constant=configs.InitializerConfig.Constant(value=1.0)
        ),
    )
    return pb.CreateTableRequest(protocol_version=1, config=config)


def test_a_plain_client_creates_pushes_and_pulls(server, pb, stub, create):
    handshake = stub.Handshake(pb.HandshakeRequest(protocol_version=1))
    assert (handshake.shard_index, handshake.num_shards) == (0, 1)
    assert [stub.CreateTable(create).created for _ in range(2)] == [True, False]
    push = pb.PushRequest(
        table="plain",
        keys=[7, -8, 7],
        gradients=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        learning_rate=0.5,
        insert_missing=True,
    )
    assert stub.Push(push).updated_rows == 2
    pull = pb.PullRequest(table="plain", keys=[-8, 7, 9])
    assert stub.Pull(pull).values == [-0.5, -1.0, -2.0, -3.0, 0.0, 0.0]
    chunks = stub.Export(pb.ExportRequest(table="plain"))
    assert sorted(key for chunk in chunks for key in chunk.keys) == [-8, 7]
    (info,) = stub.ListTables(pb.ListTablesRequest()).tables
    assert (info.config.name, info.num_rows) == ("plain", 2)

    # A push with an identity is applied once, and answered again.
    push.client_id, push.sequence = 42, 1
    assert [stub.Push(push).duplicate for _ in range(2)] == [False, True]
    with tsw.connect(f"grpc://{server.address}"):
        table = tsw.EmbeddingTable(
            "plain",
            2,
            initializer="ones",
            optimizer=tsw.optimizers.SGD(0.5),
            seed=0,
        )
        np.testing.assert_array_equal(
            table.lookup([-8, 7]), [[-2.0, -3.0], [-5.0, -7.0]]
        )


def test_many_clients_of_one_token_do_not_let_a_write_of_another_count_twice(
    generated, pb, create, tmp_path
):
    tokens = TokenFile(tmp_path / "tokens")
    honest, other = (
        [("authorization", f"Bearer {tokens.create('train')}")]
        for _ in range(2)
    )
    push = pb.PushRequest(
        table="plain", keys=[7], gradients=[1.0, 2.0], client_id=42, sequence=1
    )
    many = pb.PushManyRequest()
    services = generated("parameter_server_pb2_grpc")
    with (
        ServerProcess(flags=(f"--token_file={tokens.path}",)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = services.ParameterServerStub(channel)
        stub.CreateTable(create, metadata=honest)
        assert not stub.Push(push, metadata=honest).duplicate

        for message in range(4):
            del many.requests[:]
            for client in range(4000):
                part = many.requests.add()
                part.CopyFrom(push)
                part.client_id = 1000 + 4000 * message + client
            stub.PushMany(many, metadata=other)

        assert stub.Push(push, metadata=honest).duplicate


def test_a_table_that_is_made_or_dropped_again_undoes_nothing_later(
    pb, stub, create
):
    create.config.name = "shared"
    create.client_id, create.sequence = 43, 1
    drop = pb.DropTableRequest(table="shared", client_id=43, sequence=2)
    drop_none = pb.DropTableRequest(table="none", client_id=43, sequence=3)
    create_later = pb.CreateTableRequest(
        protocol_version=1, config=create.config
    )

    def tables():
        answer = stub.ListTables(pb.ListTablesRequest())
        return {table.config.name for table in answer.tables}

    # Each first answer, then what another worker does, then the repetition.
    create.table_incarnation = 77
    assert stub.CreateTable(create) == pb.CreateTableResponse(
        created=True, table_incarnation=77
    )
    stub.DropTable(pb.DropTableRequest(table="shared"))
    assert stub.CreateTable(create) == pb.CreateTableResponse(
        created=True, duplicate=True, table_incarnation=77
    )
    assert "shared" not in tables()

    stub.CreateTable(create_later)
    assert stub.DropTable(drop) == pb.DropTableResponse(dropped=True)
    stub.CreateTable(create_later)
    assert stub.DropTable(drop) == pb.DropTableResponse(
        dropped=True, duplicate=True
    )
    assert "shared" in tables()

    assert stub.DropTable(drop_none) == pb.DropTableResponse()
    create_later.config.name = "none"
    stub.CreateTable(create_later)
    assert stub.DropTable(drop_none) == pb.DropTableResponse(duplicate=True)
    assert "none" in tables()


@pytest.fixture
def servicer(generated, pb):
    """A class of servers that know what a worker asks for first."""
    services = generated("parameter_server_pb2_grpc")

    class Server(services.ParameterServerServicer):
        config = None

        def Handshake(self, request, context):  # noqa: N802 - gRPC's name.
            return pb.HandshakeResponse(
                protocol_version=1,
                num_shards=1,
                instance_id=1,
                max_message_bytes=1 << 20,
            )

        def CreateTable(self, request, context):  # noqa: N802
            self.config = request.config
            return pb.CreateTableResponse(created=True)

        def ListTables(self, request, context):  # noqa: N802
            if self.config is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "none yet")
            return pb.ListTablesResponse(
                tables=[pb.TableInfo(config=self.config)]
            )

    return Server


@contextlib.contextmanager
def connected(generated, servicer):
    """Runs a server of that class, and connects with it."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    services = generated("parameter_server_pb2_grpc")
    services.add_ParameterServerServicer_to_server(servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with tsw.connect(f"grpc://127.0.0.1:{port}"):
            yield
    finally:
        server.stop(None)


def test_a_push_whose_answer_is_lost_comes_again_with_its_identity(
    generated, pb, servicer
):
    pushes = []

    class Server(servicer):
        def PushMany(self, request, context):  # noqa: N802
            (push,) = request.requests
            pushes.append((push.client_id, push.sequence))
            if len(pushes) == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
            return pb.PushManyResponse(
                responses=[pb.PushResponse(updated_rows=1)]
            )

    with connected(generated, Server):
        table = tsw.EmbeddingTable("plain", 1)
        for _ in range(2):
            table.push([7], [[1.0]])

    lost, repeated, later = pushes
    assert lost == repeated
    assert lost[0] == later[0] != 0
    assert lost[1] < later[1]


def test_exported_rows_of_other_sizes_than_the_tables_are_refused(
    generated, pb, servicer
):
    class Server(servicer):
        def Export(self, request, context):  # noqa: N802
            yield pb.ExportResponse(
                keys=range(100), values=[1.0] * 200, slots=[1.0]
            )

    with connected(generated, Server):
        with pytest.raises(ValueError, match=r"'plain'.*100 keys x 4"):
            tsw.EmbeddingTable("plain", 4).export_rows()
        with pytest.raises(ValueError, match=r"'plain'.*expected 0 slot"):
            tsw.EmbeddingTable("plain", 2)._export_with_slots()
