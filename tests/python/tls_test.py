"""TLS between clients and servers."""

import contextlib
import dataclasses
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.certificates import Authority
from tests.programs import environment, run_python
from tests.python.worker_threads import wait_for_stderr, wait_until
from tests.support import SERVER, ServerProcess

IDS = np.arange(20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def stranger(folder) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def server_tls(authority) -> tsw.Tls:
    return authority.sign("server")


@pytest.fixture(scope="module")
def client_tls(authority) -> tsw.Tls:
    return authority.sign("client", trusts=True)


def environment_of(tls: tsw.Tls) -> dict[str, str]:
    return environment(
        TFSWITCH_TLS_CA=str(tls.ca),
        TFSWITCH_TLS_CERT=str(tls.cert),
        TFSWITCH_TLS_KEY=str(tls.key),
    )


def requires_certificate(server: tsw.Tls, ca: os.PathLike) -> tsw.Tls:
    return dataclasses.replace(server, ca=ca)


@contextlib.contextmanager
def servers(tls: tsw.Tls | None) -> Iterator[str]:
    """Two servers, and their address."""
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(
                tsw.Server(shard_index=i, num_shards=2, tls=tls)
            ).address
            for i in range(2)
        ]
        yield f"grpc{'' if tls is None else 's'}://{','.join(addresses)}"


def rows_of_training(address: str, tls: tsw.Tls | None) -> list[np.ndarray]:
    with tsw.connect(address, tls=tls) as cluster:
        table = tsw.EmbeddingTable(
            "t", 16, optimizer=tsw.optimizers.Adam(0.1), cluster=cluster
        )
        layer = tsw.keras.DynamicEmbedding(4, cluster=cluster, name="layer")
        results = [table.lookup_or_create(IDS)]
        rng = np.random.default_rng(1)
        for _ in range(3):
            table.push(IDS, rng.normal(size=(IDS.size, 16)).astype(np.float32))
            results.append(table.lookup(IDS))
        # Operations of a graph know the address alone.
        results.append(tf.function(layer)(IDS[:100], training=True))
        return [np.asarray(result) for result in results]


@pytest.mark.parametrize("is_mutual", [False, True])
def test_rows_are_those_of_plaintext(
    is_mutual, authority, server_tls, client_tls
):
    tls = tsw.Tls(ca=authority.ca)
    if is_mutual:
        tls = client_tls
        server_tls = requires_certificate(server_tls, authority.ca)
    with servers(None) as plain, servers(server_tls) as encrypted:
        expected = rows_of_training(plain, None)
        rows = rows_of_training(encrypted, tls)

    for one, other in zip(expected, rows, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("foreign authority", "TLS handshake failed .*no authority of `ca`"),
        ("system authorities", "TLS handshake failed .*no authority of `ca`"),
        ("other name", "TLS handshake failed .*`server_name` of tfswitch.Tls"),
        ("no certificate", "TLS handshake failed, .*client certificate"),
        ("foreign certificate", "TLS handshake failed, .*client certificate"),
        ("plaintext client", "TLS handshake failed: connect to grpcs://"),
        ("plaintext server", "TLS handshake failed .*speaks plaintext"),
    ],
)
def test_a_failed_handshake_names_address_and_remedy(
    case, message, authority, stranger, server_tls, client_tls
):
    tls: tsw.Tls | None = tsw.Tls(ca=authority.ca)
    at_server: tsw.Tls | None = server_tls
    if case == "foreign authority":
        tls = tsw.Tls(ca=stranger.ca)
    elif case == "system authorities":
        tls = tsw.Tls()
    elif case == "other name":
        tls = tsw.Tls(ca=authority.ca, server_name="ps0.example")
    elif case == "plaintext client":
        tls = None
    elif case == "plaintext server":
        at_server = None
    else:
        at_server = requires_certificate(server_tls, authority.ca)
        if case == "foreign certificate":
            foreign = stranger.sign("foreign")
            tls = dataclasses.replace(foreign, ca=authority.ca)
    with tsw.Server(tls=at_server) as server:
        scheme = "grpc" if tls is None else "grpcs"
        with pytest.raises(ConnectionError, match=message) as error:
            tsw.connect(
                f"{scheme}://{server.address}", tls=tls, timeout_secs=2.0
            )
        assert server.address in str(error.value)


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_versions_of_tls_before_1_2_are_refused(
    server_tls, version, is_taken, capfd
):
    client = ssl.create_default_context(cafile=server_tls.ca)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.set_alpn_protocols(["h2"])
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = client.maximum_version = version
    flags = (f"--tls_cert={server_tls.cert}", f"--tls_key={server_tls.key}")
    # Not this process, whose gRPC may have said it often enough.
    with ServerProcess(flags=flags) as server:
        with (
            socket.create_connection(server.address.rsplit(":", 1)) as socket_,
            contextlib.nullcontext() if is_taken else pytest.raises(OSError),
            client.wrap_socket(socket_) as wrapped,
        ):
            assert wrapped.version()
        if is_taken:
            assert "unsupported protocol" not in capfd.readouterr().err
        else:
            wait_for_stderr(capfd, "unsupported protocol")


def test_the_name_to_check_can_be_given(authority):
    tls = authority.sign("named", "DNS:ps0.example")
    with tsw.Server(tls=tls) as server:
        address = f"grpcs://{server.address}"
        with pytest.raises(ConnectionError, match="another name"):
            tsw.connect(address, tls=tsw.Tls(ca=authority.ca), timeout_secs=2.0)
        tls = tsw.Tls(ca=authority.ca, server_name="ps0.example")
        with tsw.connect(address, tls=tls) as cluster:
            assert cluster.tables() == []


def test_the_environment_fills_in_and_arguments_win(
    monkeypatch, authority, stranger, server_tls, client_tls
):
    at_server = requires_certificate(server_tls, authority.ca)
    monkeypatch.setenv("TFSWITCH_TLS_CA", str(stranger.ca))
    monkeypatch.setenv("TFSWITCH_TLS_CERT", str(client_tls.cert))
    with tsw.Server(tls=at_server) as server:
        address = f"grpcs://{server.address}"
        with pytest.raises(
            ValueError, match=r"TFSWITCH_TLS_CERT.* needs .*KEY"
        ):
            tsw.connect(address)
        monkeypatch.setenv("TFSWITCH_TLS_KEY", str(client_tls.key))
        with pytest.raises(ConnectionError, match="TLS handshake failed"):
            tsw.connect(address, timeout_secs=2.0)
        with tsw.connect(address, tls=tsw.Tls(ca=authority.ca)) as cluster:
            assert cluster.tables() == []
        monkeypatch.setenv("TFSWITCH_TLS_CA", str(authority.ca))
        with tsw.connect(address, timeout_secs=29.0) as cluster:
            assert cluster.tables() == []


def test_a_saved_model_has_the_address_and_no_file_of_tls(
    tmp_path, authority, server_tls, client_tls
):
    at_server = requires_certificate(server_tls, authority.ca)
    with tsw.Server(tls=at_server) as server:
        address = f"grpcs://{server.address}"
        with tsw.connect(address, tls=client_tls):
            table = tsw.EmbeddingTable("t", 2)
            table.assign([1], [[3.0, 4.0]])
            tsw.saved_model.save(
                lambda ids: {"rows": table.lookup(ids)},
                tmp_path / "model",
                mode="remote",
                inputs={"ids": tf.TensorSpec([None], tf.int64)},
            )
        program = (
            "import sys, tensorflow as tf, tfswitch\n"
            "model = tf.saved_model.load(sys.argv[1])\n"
            "serve = model.signatures['serving_default']\n"
            "print(serve(ids=tf.constant([1], tf.int64))['rows'].numpy())\n"
        )
        variables = environment_of(client_tls)
        served = run_python("-c", program, tmp_path / "model", env=variables)
        assert served.stdout == "[[3. 4.]]\n"
    files = [f for f in (tmp_path / "model").rglob("*") if f.is_file()]
    texts = [file.read_bytes() for file in files]
    assert any(address.encode() in text for text in texts)
    for secret in (client_tls.ca, client_tls.cert, client_tls.key):
        assert not any(secret.name.encode() in text for text in texts)


def test_new_files_are_taken_while_connections_go_on(tmp_path):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = {
        "server": tmp_path / "of_server",
        "client": tmp_path / "of_client",
    }
    for file in trusted.values():
        file.write_bytes(old.ca.read_bytes())
    old_client = old.sign("old_client", trusts=True)
    tls = dataclasses.replace(old.sign("client"), ca=trusted["client"])
    at_server = dataclasses.replace(old.sign("server"), ca=trusted["server"])
    flags = [
        f"--tls_{name}={getattr(at_server, name)}"
        for name in ("ca", "cert", "key")
    ]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(flags=(*flags,)))
        address = f"grpcs://{server.address}"
        cluster = stack.enter_context(
            tsw.connect(address, tls=tls, on_lost_tables="recreate")
        )
        table = tsw.EmbeddingTable("t", 2)
        table.assign([1], [[3.0, 4.0]])

        new.sign("server")
        new.sign("client")
        for file in trusted.values():
            # Renamed when it is whole.
            fresh = file.with_suffix(".new")
            fresh.write_bytes(new.ca.read_bytes())
            fresh.rename(file)
        new_client = new.sign("new_client", trusts=True)

        def takes_the_new_ones() -> bool:
            with contextlib.suppress(ConnectionError, TimeoutError):
                tsw.Cluster(address, tls=new_client, timeout_secs=0.5).close()
                return True
            return False

        wait_until(takes_the_new_ones)
        with pytest.raises(ConnectionError, match="TLS handshake failed"):
            tsw.connect(address, tls=old_client, timeout_secs=2.0)
        np.testing.assert_array_equal(table.lookup([1]), [[3.0, 4.0]])
        # The client's own files have been read again, too.
        server.kill()
        stack.enter_context(
            ServerProcess(address=server.address, flags=(*flags,))
        )
        table.assign([1], [[5.0, 6.0]])
        assert cluster.tables() == ["t"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cert": "a.pem"}, "`cert` and `key` go together"),
        ({"key": "a.key"}, "`cert` and `key` go together"),
        ({"ca": ""}, "Received: ca=''"),
        ({"ca": 1}, "Received: ca=1"),
        ({"server_name": ""}, "Received: server_name=''"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        tsw.Tls(**fields)


def test_tls_is_refused_where_it_has_no_use(authority):
    for address in ("grpc://127.0.0.1:1", "local://"):
        with pytest.raises(ValueError, match=f"'{address}'.*grpcs://"):
            tsw.connect(address, tls=tsw.Tls(ca=authority.ca))
    with pytest.raises(ValueError, match=r"Received: tls='ca\.pem'"):
        tsw.connect("grpcs://127.0.0.1:1", tls="ca.pem")
    with pytest.raises(ValueError, match="one with `cert` and `key`"):
        tsw.Server(tls=tsw.Tls(ca=authority.ca))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls_cert={cert}"], "--tls_cert: '{cert}' needs --tls_key"),
        (["--tls_key={key}"], "--tls_key: '{key}' needs --tls_cert"),
        (["--tls_ca={cert}"], "--tls_ca needs --tls_cert and --tls_key"),
        # As of variables that are not set.
        (["--tls_cert=", "--tls_key="], "--tls_cert is empty; give a file"),
        (
            ["--tls_cert=no.pem", "--tls_key={key}"],
            "--tls_cert: '{here}/no.pem'",
        ),
        (["--tls_cert={here}", "--tls_key={key}"], "--tls_cert: '{here}' "),
        (
            ["--tls_cert={damaged}", "--tls_key={key}"],
            "--tls_cert: '{damaged}' has a damaged certificate",
        ),
        (
            ["--tls_cert={key}", "--tls_key={key}"],
            "--tls_cert: '{key}' has no certificate",
        ),
        (
            ["--tls_cert={cert}", "--tls_key={cert}"],
            "--tls_key: '{cert}' has no private key",
        ),
        (
            ["--tls_cert={cert}", "--tls_key={locked}"],
            "--tls_key: '{locked}' has no private key",
        ),
        (
            ["--tls_cert={cert}", "--tls_key={other}"],
            "--tls_key: '{other}' is not the key of the certificate '{cert}'",
        ),
        (
            ["--tls_cert={cert}", "--tls_key={key}", "--tls_ca={damaged}"],
            "--tls_ca: '{damaged}' has a damaged certificate",
        ),
    ],
)
def test_a_server_does_not_start_with_bad_files(
    flags, message, tmp_path, authority, server_tls, client_tls
):
    files = {
        "cert": server_tls.cert,
        "key": server_tls.key,
        "other": client_tls.key,
        "here": tmp_path,
        "damaged": tmp_path / "damaged.pem",
        "locked": tmp_path / "locked.key",
    }
    # Whole, and then cut.
    chain = authority.ca.read_bytes() + server_tls.cert.read_bytes()
    files["damaged"].write_bytes(chain[:-60])
    subprocess.run(
        [
            *("openssl", "pkey", "-in", server_tls.key, "-aes256"),
            *("-passout", "pass:secret", "-out", files["locked"]),
        ],
        check=True,
    )

    ended = subprocess.run(
        [SERVER, "--address=127.0.0.1:0", *(f.format(**files) for f in flags)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 2
    assert message.format(**files) in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_python_command_serves_tls_and_info_reads_it(
    authority, server_tls, client_tls
):
    # Without the time of importing TensorFlow.
    command = "import tfswitch_command; tfswitch_command.main()"
    flags = (
        f"--tls_cert={server_tls.cert}",
        f"--tls_key={server_tls.key}",
        f"--tls_ca={authority.ca}",
    )
    with ServerProcess(
        command=(sys.executable, "-c", command, "serve"), flags=flags
    ) as server:
        assert server.line.endswith(" with TLS, client certificates\n")
        address = f"grpcs://{server.address}"
        told = run_python(
            *("-m", "tfswitch", "info", address), env=environment_of(client_tls)
        )
    assert f"1 server(s) at {address}" in told.stdout
