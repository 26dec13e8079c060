"""A client without tfswitch: only grpcio and code generated from protos/.

Run as a program by plain_grpc_client_test.py: the address of a server, then
the checks print what they found as JSON.
"""

import json
import sys

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import proto_reflection_descriptor_database
from tfswitch.v1 import (
    parameter_server_pb2,
    parameter_server_pb2_grpc,
    table_config_pb2,
)


def code_of(call, request):
    try:
        call(request, timeout=20)
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    return ["OK", ""]


def main(address):
    pb = parameter_server_pb2
    channel = grpc.insecure_channel(address)
    stub = parameter_server_pb2_grpc.ParameterServerStub(channel)
    found = {}

    config = table_config_pb2.TableConfig(
        name="plain",
        dim=2,
        optimizer=table_config_pb2.OptimizerConfig(
            sgd=table_config_pb2.OptimizerConfig.Sgd()
        ),
        initializer=table_config_pb2.InitializerConfig(
            constant=table_config_pb2.InitializerConfig.Constant(value=1.0)
        ),
    )
    handshake = stub.Handshake(
        pb.HandshakeRequest(protocol_version=1), timeout=20
    )
    found["shard"] = [handshake.shard_index, handshake.num_shards]
    create = pb.CreateTableRequest(protocol_version=1, config=config)
    found["created"] = [
        stub.CreateTable(create, timeout=20).created for _ in range(2)
    ]
    push = pb.PushRequest(
        table="plain",
        keys=[7, -8, 7],
        gradients=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        learning_rate=0.5,
        insert_missing=True,
    )
    found["updated_rows"] = stub.Push(push, timeout=20).updated_rows
    pull = pb.PullRequest(table="plain", keys=[-8, 7, 9])
    found["pulled"] = list(stub.Pull(pull, timeout=20).values)
    found["exported"] = sorted(
        key
        for chunk in stub.Export(pb.ExportRequest(table="plain"), timeout=20)
        for key in chunk.keys
    )
    found["tables"] = [
        [info.config.name, info.num_rows]
        for info in stub.ListTables(pb.ListTablesRequest(), timeout=20).tables
    ]

    # A push with an identity is applied once.
    push.client_id, push.sequence = 42, 1
    found["duplicates"] = [
        stub.Push(push, timeout=20).duplicate for _ in range(2)
    ]

    found["errors"] = {
        "old protocol": code_of(
            stub.Handshake, pb.HandshakeRequest(protocol_version=99)
        ),
        "old protocol of a table": code_of(
            stub.CreateTable,
            pb.CreateTableRequest(protocol_version=99, config=config),
        ),
        "unknown table": code_of(
            stub.Pull, pb.PullRequest(table="gone", keys=[1])
        ),
        "wrong shape": code_of(
            stub.Push,
            pb.PushRequest(
                table="plain", keys=[1], gradients=[1.0], learning_rate=0.5
            ),
        ),
        "not finite": code_of(
            stub.Push,
            pb.PushRequest(
                table="plain",
                keys=[7],
                gradients=[1.0, float("nan")],
                learning_rate=0.5,
            ),
        ),
    }
    create.config.dim = 3
    found["errors"]["another config"] = code_of(stub.CreateTable, create)

    health = health_pb2_grpc.HealthStub(channel)
    found["health"] = [
        health_pb2.HealthCheckResponse.ServingStatus.Name(
            health.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=20
            ).status
        )
        for service in ("", "tfswitch.v1.ParameterServer")
    ]
    reflection = (
        proto_reflection_descriptor_database.ProtoReflectionDescriptorDatabase(
            channel
        )
    )
    found["services"] = list(reflection.get_services())
    service = descriptor_pool.DescriptorPool(reflection).FindServiceByName(
        "tfswitch.v1.ParameterServer"
    )
    found["methods"] = [method.name for method in service.methods]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
