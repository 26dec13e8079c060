"""Who may ask tfswitch-serving. access_table_test.py has the rules of calls."""

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    prediction_service_pb2_grpc,
)

import tfswitch as tsw
from tests.certificates import Authority
from tests.integration.predictor_test import (
    COMMAND,
    HANG_SECS,
    MODEL,
    PredictionServer,
    request,
    save,
)
from tests.python.worker_threads import wait_until
from tests.support import PACKAGE, ServerProcess
from tests.tokens import TokenFile

METHOD = "/tensorflow.serving.PredictionService/Predict"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def tls_flags(authority: Authority) -> tuple[str, str]:
    tls = authority.sign("server")
    return f"--tls_cert={tls.cert}", f"--tls_key={tls.key}"


@pytest.fixture(scope="module")
def token_file(folder: Path) -> TokenFile:
    return TokenFile(folder / "tokens.json")


@pytest.fixture(scope="module")
def tokens(token_file: TokenFile) -> dict[str, str | None]:
    """Tokens by what is said of them."""
    pattern, size = f"{MODEL[:4]}*", request().ByteSize()
    good = token_file.create("read", pattern)
    expired = token_file.create("read", pattern)
    token_file.expire(expired)
    return {
        "good": good,
        "expired": expired,
        "of another model": token_file.create("admin", f"not_{MODEL}"),
        "for short requests": token_file.create(
            "read", pattern, max_request_bytes=size - 1
        ),
        "for short answers": token_file.create(
            "read", pattern, max_bytes_in_flight=size + 8
        ),
        "none": None,
        "unknown": good[:-64] + 64 * "0",
    }


Credentials = Callable[[str], grpc.ChannelCredentials]


@pytest.fixture(scope="module")
def credentials(
    authority: Authority, tokens: dict[str, str | None]
) -> Credentials:
    """Makes the credentials of a client, with the token of a name."""

    def make(name: str) -> grpc.ChannelCredentials:
        tls = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        token = tokens[name]
        if token is None:
            return tls
        call = grpc.access_token_call_credentials(token)
        return grpc.composite_channel_credentials(tls, call)

    return make


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    models = folder / "models"
    models.mkdir()
    save(1, models)
    return models


@pytest.fixture(scope="module")
def server(
    folder: Path,
    models: Path,
    tls_flags: tuple[str, str],
    token_file: TokenFile,
    credentials: Credentials,
) -> Iterator[PredictionServer]:
    """A server with TLS and tokens; its client has a good one."""
    with PredictionServer(
        folder,
        models,
        *tls_flags,
        f"--token_file={token_file.path}",
        credentials=credentials("good"),
    ) as server:
        yield server


def predict(channel: grpc.Channel) -> object:
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    return stub.Predict(request(), timeout=HANG_SECS)


def get_metadata(channel: grpc.Channel) -> object:
    asked = get_model_metadata_pb2.GetModelMetadataRequest()
    asked.model_spec.name = MODEL
    asked.metadata_field.append("signature_def")
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    return stub.GetModelMetadata(asked, timeout=HANG_SECS)


def get_status(channel: grpc.Channel) -> object:
    asked = get_model_status_pb2.GetModelStatusRequest()
    asked.model_spec.name = MODEL
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    return stub.GetModelStatus(asked, timeout=HANG_SECS)


CALLS = {
    "Predict": predict,
    "GetModelMetadata": get_metadata,
    "GetModelStatus": get_status,
}


@pytest.mark.parametrize("method", CALLS)
def test_a_token_to_read_the_model_lets_a_caller_in(
    method: str, server: PredictionServer
) -> None:
    assert CALLS[method](server.channel)


@pytest.mark.parametrize(
    ("method", "token", "code", "why"),
    [
        ("Predict", "none", "UNAUTHENTICATED", "the call has none"),
        (
            *("GetModelMetadata", "unknown", "UNAUTHENTICATED"),
            "does not know this token",
        ),
        (
            *("GetModelStatus", "expired", "UNAUTHENTICATED"),
            "has expired at 2020-01-31",
        ),
        (
            *("Predict", "of another model", "PERMISSION_DENIED"),
            f"is for the tables 'not_{MODEL}', and not for '{MODEL}'",
        ),
    ],
)
def test_other_callers_are_refused_and_written_down(
    method: str,
    token: str,
    code: str,
    why: str,
    server: PredictionServer,
    credentials: Credentials,
) -> None:
    with grpc.secure_channel(server.address, credentials(token)) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            CALLS[method](channel)

    assert refused.value.code().name == code
    assert why in refused.value.details()
    line = f" caller_refused call={method} .* result={code} why=.*"
    wait_until(lambda: re.search(line + re.escape(why), server.log()))


def test_a_request_is_not_read_for_a_caller_that_is_refused(
    server: PredictionServer, credentials: Credentials
) -> None:
    codes = []
    for token in ("good", "none"):
        with grpc.secure_channel(server.address, credentials(token)) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(METHOD)(b"\xff\xff", timeout=HANG_SECS)
        codes.append(refused.value.code().name)

    assert codes == ["INVALID_ARGUMENT", "UNAUTHENTICATED"]


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("for short requests", "is over its max_request_bytes of"),
        ("for short answers", "over its max_bytes_in_flight"),
    ],
)
def test_the_quota_of_a_token_holds(
    token: str,
    text: str,
    server: PredictionServer,
    credentials: Credentials,
) -> None:
    with grpc.secure_channel(server.address, credentials(token)) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            predict(channel)

        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text in refused.value.details()
        assert get_status(channel)


@pytest.mark.parametrize(
    "body",
    [
        # Merged, it is short; and it cannot be parsed.
        get_model_status_pb2.GetModelStatusRequest(
            model_spec={"name": MODEL}
        ).SerializeToString()
        * 1000,
        b"\xff" * 10000,
    ],
)
def test_the_length_of_a_request_counts_before_it_is_parsed(
    body: bytes, server: PredictionServer, credentials: Credentials
) -> None:
    path = "/tensorflow.serving.ModelService/GetModelStatus"
    token = credentials("for short requests")
    with grpc.secure_channel(server.address, token) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(path)(body, timeout=HANG_SECS)

    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"a message of {len(body)} bytes" in refused.value.details()


OPEN = "--address=0.0.0.0:0"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([OPEN], "other machines can reach the address '0.0.0.0:0'"),
        ([OPEN, "{cert}", "{key}"], "Give --token_file (tokens) or --tls_ca"),
        ([OPEN, "{tokens}"], "tokens never go over plaintext"),
        (["{cert}"], "needs --tls_key; give both"),
        (["--token_file=no.json"], "'{here}/no.json'"),
        (["--token_file="], "flag --token_file is empty; give a file"),
        (["--address=7"], "address '7': the port is missing"),
    ],
)
def test_a_server_that_would_let_others_in_does_not_start(
    flags: list[str],
    text: str,
    models: Path,
    tls_flags: tuple[str, str],
    token_file: TokenFile,
    tokens: dict[str, str | None],
    tmp_path: Path,
) -> None:
    cert, key = tls_flags
    values = {
        "cert": cert,
        "key": key,
        "tokens": f"--token_file={token_file.path}",
        "here": tmp_path,
    }
    ended = subprocess.run(
        [
            *COMMAND,
            f"--model_dir={models}",
            "--address=127.0.0.1:0",
            *(flag.format(**values) for flag in flags),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )

    assert ended.returncode == 2
    # Beside those that TensorFlow writes when it is loaded.
    (line,) = re.findall("^tfswitch.*", ended.stderr, re.M)
    assert text.format(**values) in line


def test_an_address_that_another_server_has_is_no_bad_flag(
    server: PredictionServer, models: Path
) -> None:
    ended = subprocess.run(
        [*COMMAND, f"--model_dir={models}", f"--address={server.address}"],
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
    )

    assert ended.returncode == 1
    assert f"cannot listen on {server.address}" in ended.stderr


@pytest.mark.parametrize("how", ["tokens", "certificates", "insecure"])
def test_other_machines_may_reach_a_server_that_keeps_others_out_or_says_so(
    how: str,
    models: Path,
    authority: Authority,
    tls_flags: tuple[str, str],
    token_file: TokenFile,
    tokens: dict[str, str | None],
    tmp_path: Path,
) -> None:
    flags = {
        "tokens": [*tls_flags, f"--token_file={token_file.path}"],
        "certificates": [*tls_flags, f"--tls_ca={authority.ca}"],
        "insecure": ["--insecure"],
    }[how]
    with PredictionServer(tmp_path, models, OPEN, *flags, wait=False) as server:
        warning = ' insecure message="--insecure: 0.0.0.0:0 is open to all'
        assert (warning in server.log()) == (how == "insecure")


def test_rows_come_over_tls_with_a_token_of_the_servers_own(
    authority: Authority,
    tls_flags: tuple[str, str],
    credentials: Credentials,
    token_file: TokenFile,
    tmp_path: Path,
) -> None:
    """Beside TensorFlow, which exports the functions of another OpenSSL."""
    at_shard, secret = TokenFile(tmp_path / "shard.json"), tmp_path / "token"
    admin = at_shard.create("admin")
    secret.write_text(at_shard.create("read", "user"))
    with ServerProcess(
        flags=(*tls_flags, f"--token_file={at_shard.path}")
    ) as shard:
        with tsw.connect(
            f"grpcs://{shard.address}",
            tls=tsw.Tls(ca=authority.ca),
            token=admin,
        ):
            table = tsw.EmbeddingTable("user", 2)
            table.assign([1, 2], [[1.0, 2.0], [4.0, 8.0]])
            tsw.saved_model.save(
                lambda ids: {"score": tf.reduce_sum(table.lookup(ids), -1)},
                tmp_path / "models/1",
                mode="remote",
                inputs={"ids": tf.TensorSpec([None], tf.int64)},
            )
        with PredictionServer(
            tmp_path,
            tmp_path / "models",
            *tls_flags,
            f"--token_file={token_file.path}",
            credentials=credentials("good"),
            variables={
                "TFSWITCH_TLS_CA": str(authority.ca),
                "TFSWITCH_TOKEN_FILE": str(secret),
            },
        ) as server:
            answer = server.predict(request(ids=np.array([2, 1])))

            assert list(answer.outputs["score"].float_val) == [12, 3]

            # It is not the caller's token that is good no more.
            at_shard.revoke(secret.read_text())

            def is_refused() -> bool:
                try:
                    server.predict(request(ids=np.array([3])))
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
                    assert "TFSWITCH_TOKEN_FILE" in error.details()
                    return True
                return False

            wait_until(is_refused)


def test_the_library_with_grpc_shares_nothing_with_the_core() -> None:
    library = PACKAGE / "bin/libtfswitch_serving_rpc.so"
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", library],
        capture_output=True,
        text=True,
        check=True,
    )

    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    # cc/rpc/edge/edge_calls.cc puts these before the functions of gRPC.
    calls = ["SSL_read", "SSL_write", "close", "recvmsg", "sendmsg"]
    assert sorted(names) == sorted(["ServingRpc_GetApi", *calls])
    # One libprotobuf would have these files of both, and end the process.
    contract = rb"\n.tfswitch/v1/\w+\.proto"
    assert not re.search(contract, library.read_bytes())
    core = PACKAGE / "libtfswitch_core.so"
    assert re.search(contract, core.read_bytes())


def test_a_compressed_request_is_refused(server: PredictionServer) -> None:
    stub = prediction_service_pb2_grpc.PredictionServiceStub(server.channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Predict(
            request(), timeout=HANG_SECS, compression=grpc.Compression.Gzip
        )
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_request_that_does_not_arrive_takes_no_more_than_its_slot(
    folder: Path,
    models: Path,
    tls_flags: tuple[str, str],
    token_file: TokenFile,
    credentials: Credentials,
) -> None:
    arrives = threading.Event()

    def late() -> Iterator[bytes]:
        arrives.wait()
        yield request().SerializeToString()

    with PredictionServer(
        folder,
        models,
        *tls_flags,
        f"--token_file={token_file.path}",
        "--max_requests=1",
        credentials=credentials("good"),
    ) as server:
        pending: list[grpc.Future] = []

        def is_full() -> bool:
            # Another request may have been there first.
            if not pending or pending[-1].done():
                start = server.channel.stream_unary(METHOD).future
                pending.append(start(late()))
            try:
                predict(server.channel)
            except grpc.RpcError as error:
                return "1 requests are under way" in error.details()
            return False

        try:
            wait_until(is_full)
        finally:
            arrives.set()
        assert pending[-1].result(timeout=HANG_SECS)
        predict(server.channel)
