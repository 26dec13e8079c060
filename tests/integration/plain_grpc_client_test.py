"""What users in other languages do: generate a client from protos/, call."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tfswitch as tsw
from tests.programs import ROOT

pytest.importorskip("grpc_tools")
pytest.importorskip("grpc_health")
pytest.importorskip("grpc_reflection")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A folder with the code that protoc makes of protos/."""
    folder = tmp_path_factory.mktemp("generated")
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'protos'}",
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            *map(str, protos),
        ],
        check=True,
    )
    # Goes before the installed package of the same name.
    for package in (folder / "tfswitch", folder / "tfswitch" / "v1"):
        (package / "__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def found(generated):
    """What the client printed, and the table as tfswitch sees it after."""
    client = pathlib.Path(__file__).parent / "plain_grpc_client.py"
    with tsw.Server() as server:
        result = subprocess.run(
            [sys.executable, str(client), server.address],
            env={**os.environ, "PYTHONPATH": str(generated)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        with tsw.connect(f"grpc://{server.address}"):
            table = tsw.EmbeddingTable(
                "plain",
                2,
                initializer="ones",
                optimizer=tsw.optimizers.SGD(0.5),
            )
            found["rows"] = table.lookup([-8, 7]).numpy()
    return found


def test_a_plain_client_creates_pushes_and_pulls(found):
    assert found["shard"] == [0, 1]
    assert found["created"] == [True, False]
    assert found["updated_rows"] == 2
    assert found["pulled"] == [-0.5, -1.0, -2.0, -3.0, 0.0, 0.0]
    assert found["exported"] == [-8, 7]
    assert found["tables"] == [["plain", 2]]


def test_a_repeated_push_is_answered_and_not_applied(found):
    assert found["duplicates"] == [False, True]
    np.testing.assert_array_equal(found["rows"], [[-2.0, -3.0], [-5.0, -7.0]])


@pytest.mark.parametrize(
    ("what", "code", "parts"),
    [
        ("old protocol", "FAILED_PRECONDITION", ["99", "1"]),
        ("old protocol of a table", "FAILED_PRECONDITION", ["99", "1"]),
        ("unknown table", "NOT_FOUND", ["gone", "plain"]),
        ("wrong shape", "INVALID_ARGUMENT", ["plain", "1", "2"]),
        ("not finite", "INVALID_ARGUMENT", ["plain", "7", "NaN"]),
        ("another config", "ALREADY_EXISTS", ["plain", "2", "3"]),
    ],
)
def test_errors_have_a_code_and_name_the_thing(found, what, code, parts):
    actual_code, message = found["errors"][what]

    assert actual_code == code
    for part in parts:
        assert part in message


def test_the_health_service_says_serving(found):
    assert found["health"] == ["SERVING", "SERVING"]


def test_the_reflection_service_describes_the_server(found):
    assert "tfswitch.v1.ParameterServer" in found["services"]
    assert "tfswitch.v1.Coordination" in found["services"]
    assert "grpc.health.v1.Health" in found["services"]
    assert {"Handshake", "Pull", "Push", "Export"} <= set(found["methods"])
