"""Tokens, their rights and limits, and servers that start only if it is safe.

tests/integration/access_table_test.py has the rule of each call.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
import traceback
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
from tests.tokens import TokenFile, id_of
from tfswitch._connection import _token_file

IDS = np.arange(10)
COMMAND = (sys.executable, "-c", "import tfswitch_command as c; c.main()")


@pytest.fixture
def tokens(tmp_path) -> TokenFile:
    return TokenFile(tmp_path / "tokens")


@pytest.fixture
def server(tokens) -> Iterator[tsw.Server]:
    tokens.create("admin")
    with tsw.Server(token_file=tokens.path) as server:
        yield server


@contextlib.contextmanager
def connected(
    server: tsw.Server | ServerProcess, token: str | Path
) -> Iterator[tsw.Cluster]:
    with tsw.connect(f"grpc://{server.address}", token=token) as cluster:
        yield cluster


def stderr_of_server(*flags: str) -> str:
    """The stderr of a server that does not start."""
    ended = subprocess.run(
        [SERVER, *flags], env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 2
    return ended.stderr


@pytest.mark.parametrize("last", ["train", "read"])
def test_a_table_shows_the_token_of_its_cluster_whichever_came_last(
    server, tokens, last
):
    clusters = {}
    with contextlib.ExitStack() as stack:
        for role in sorted(("train", "read"), key=last.__eq__):
            connection = connected(server, tokens.create(role))
            clusters[role] = stack.enter_context(connection)
        rows, read_rows = (
            tsw.EmbeddingTable("t", 4, cluster=clusters[role])
            for role in ("train", "read")
        )
        expected = rows.lookup_or_create(IDS)

        np.testing.assert_array_equal(read_rows.lookup(IDS), expected)
        with pytest.raises(PermissionError, match="needs train"):
            read_rows.lookup_or_create(IDS)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(rows.lookup_or_create(IDS))
            with pytest.raises(tf.errors.PermissionDeniedError):
                session.run(read_rows.lookup_or_create(IDS))


def test_a_saved_model_has_no_token(server, tokens, tmp_path):
    token = tokens.create("train")
    with connected(server, token) as cluster:
        model = tf.keras.Sequential(
            [tsw.keras.DynamicEmbedding(4, cluster=cluster, name="layer")]
        )
        model(IDS[None])
        tsw.saved_model.save(model, tmp_path / "model", mode="remote")
        assert token not in f"{cluster!r} {cluster.address}"
    secret = token.rsplit("_", 1)[1].encode()
    files = [f for f in (tmp_path / "model").rglob("*") if f.is_file()]
    assert files
    assert not [f for f in files if secret in f.read_bytes()]


def test_tables_of_others_are_not_seen(server, tokens):
    with connected(server, tokens.create("train")) as cluster:
        for name in ("user_a", "user_b", "item"):
            tsw.EmbeddingTable(name, 4, cluster=cluster)
    with connected(server, tokens.create("read", "user*")) as cluster:
        assert cluster.tables() == ["user_a", "user_b"]
        with pytest.raises(PermissionError, match=r"'user\*', .* for 'item'"):
            tsw.EmbeddingTable("item", 4, cluster=cluster)


def test_a_token_that_only_reads_opens_a_table_with_its_settings(
    server, tokens
):
    with connected(server, tokens.create("train")) as cluster:
        made = tsw.EmbeddingTable(
            "t", 4, optimizer="adagrad", initializer="ones", cluster=cluster
        )
        expected = made.lookup_or_create(IDS)
    with connected(server, tokens.create("read", "t")) as cluster:
        opened = cluster.table("t")

        assert opened.initializer == tsw.initializers.Constant(1.0)
        np.testing.assert_array_equal(opened.lookup(IDS), expected)
        with pytest.raises(PermissionError, match="needs train"):
            opened.lookup_or_create(IDS)


@pytest.mark.parametrize("token", ["", "secret word", b"secret", 1])
def test_a_token_of_another_form_is_not_repeated(server, token):
    with pytest.raises(ValueError, match="token") as error:
        tsw.connect(f"grpc://{server.address}", token=token)
    assert "secret" not in str(error.value)


def test_a_token_never_goes_to_other_machines_as_plaintext(tokens, monkeypatch):
    token = tokens.create("admin")
    message = "never goes over plaintext to other machines, such as b.example"
    address = "grpc://127.0.0.1:1,b.example:2"
    with pytest.raises(ValueError, match=message):
        tsw.connect(address, token=token)
    monkeypatch.setenv("TFSWITCH_TOKEN", token)
    with pytest.raises(ValueError, match=message):
        tsw.connect(address)


@pytest.mark.parametrize("name", ["ca", "server_name", "address", "token"])
def test_an_argument_that_is_not_unicode_brings_no_token_into_errors(
    name, tokens
):
    token = tokens.create("read")
    arguments = {"address": "grpcs://127.0.0.1:1", "token": token}
    if name in arguments:
        arguments[name] += "\udc80"
    else:
        arguments["tls"] = tsw.Tls(**{name: "x\udc80"})

    with pytest.raises(ValueError, match=f"`{name}` is not valid") as error:
        tsw.connect(**arguments)

    assert_has_no_secret(error.value, token)


def assert_has_no_secret(error: BaseException, token: str) -> None:
    secret = token.split("_")[2]
    assert secret not in "".join(traceback.format_exception(error))
    # A UnicodeEncodeError would have it in a field that it does not print.
    assert error.__context__ is None


@pytest.mark.parametrize(
    "address",
    [
        "TOKEN",
        "grpc://TOKEN",
        "grpc://TOKEN@127.0.0.1:1",
        "TOKEN@grpc://127.0.0.1:1",
        "grpc://127.0.0.1:1,user:TOKEN@127.0.0.1:2",
        "grpc+unix:///TOKEN",
        "ray://TOKEN",
    ],
)
def test_a_token_in_an_address_is_refused_and_not_printed(address, tokens):
    token = tokens.create("read")
    with pytest.raises(ValueError, match="TFSWITCH_TOKEN_FILE") as error:
        tsw.connect(address.replace("TOKEN", token))
    assert_has_no_secret(error.value, token)


def test_commands_print_no_token_of_their_arguments(tokens):
    token = tokens.create("read")
    for words, remedy in (
        (("info", token), "TFSWITCH_TOKEN_FILE"),
        (
            (
                *("export", "--path=p"),
                f"--cluster=grpc://{token}@127.0.0.1:1",
            ),
            "TFSWITCH_TOKEN_FILE",
        ),
        ((token,), "there is no command"),
        (("serve", token), "give --token_file=FILE"),
        (("repair", "d", f"--tls_key={token}"), "give --token_file=FILE"),
        (("token", "create", f"--role={token}"), "choose from"),
        (("token", "create", "--expires_in", token), "--expires_in"),
        (("token", "list", token), "token list"),
    ):
        ended = subprocess.run(
            [*COMMAND, *words],
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert remedy in ended.stderr
        assert token[-64:] not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "use",
    [
        lambda token: tsw.connect("grpc://127.0.0.1:1", token=Path(token)),
        lambda token: tsw.connect("grpc://127.0.0.1:1"),
        lambda token: tsw.Server(token_file=token).start(),
        lambda token: tsw.connect("grpcs://a:1", tls=tsw.Tls(ca=Path(token))),
        lambda token: tsw.Tls(server_name=token),
        lambda token: tsw.train.Worker(),
        lambda token: _token_file.add(Path("file"), "read", note=token),
    ],
)
def test_a_token_in_place_of_another_text_is_not_printed(
    use, tokens, monkeypatch
):
    token = tokens.create("read")
    monkeypatch.setenv("TFSWITCH_TOKEN_FILE", token)
    monkeypatch.setenv("TF_CONFIG", token)
    with pytest.raises(ValueError, match=r"token|TF_CONFIG") as error:
        use(token)
    assert_has_no_secret(error.value, token)


def test_names_and_paths_may_have_an_at_sign(tmp_path):
    tsw.Cluster("local://me@here").close()
    with (
        tsw.Server(f"unix:{tmp_path}/a@b") as server,
        tsw.Cluster(f"grpc+unix://{tmp_path}/a@b") as cluster,
        tsw.Cluster(f"grpc://{server.address}"),
    ):
        assert cluster.tables() == []


def test_the_token_of_the_environment_is_for_programs(server, tokens, tmp_path):
    file = tmp_path / "token"
    file.write_text(f"a line\n{tokens.create('admin')}\n")
    for variables in (
        {"TFSWITCH_TOKEN": tokens.create("admin")},
        {"TFSWITCH_TOKEN_FILE": str(file)},
    ):
        printed = run_python(
            *("-m", "tfswitch", "info", server.address),
            env=environment(**variables),
        ).stdout
        assert "1 server(s)" in printed


def test_tokens_are_exchanged_while_all_goes_on(
    server, tokens, tmp_path, capfd
):
    file = tmp_path / "token"
    first = tokens.create("train")
    file.write_text(first)
    with connected(server, file) as cluster:
        table = tsw.EmbeddingTable("t", 4, cluster=cluster)
        table.lookup_or_create(IDS)
        second = tokens.create("train")
        new = file.with_suffix(".new")
        new.write_text(second)
        new.rename(file)
        tokens.revoke(first)
        wait_until(lambda: is_refused(server, first))

        table.lookup_or_create(IDS)
        file.unlink()
        written: list[str] = []

        def is_said() -> bool:
            table.lookup(IDS)
            written.append(capfd.readouterr().err)
            return "the token that it had before is shown" in "".join(written)

        wait_until(is_said)


def test_a_worker_whose_token_is_revoked_can_be_closed(server, tokens):
    token = tokens.create("train")
    with connected(server, token) as cluster:
        worker = tsw.train.Worker(0, 1, cluster=cluster)
        tokens.revoke(token)
        wait_until(lambda: is_refused(server, token))
    with pytest.raises(RuntimeError, match="closed"):
        worker.end_step()


def is_refused(server: tsw.Server, token: str) -> bool:
    # By another address: a cluster that is open is not opened again.
    port = server.address.rsplit(":", 1)[1]
    try:
        tsw.connect(f"grpc://localhost:{port}", token=token).close()
    except PermissionError:
        return True
    return False


def test_a_damaged_file_of_tokens_shuts_nobody_out(server, tokens, capfd):
    token = tokens.create("admin")
    written: list[str] = []
    with connected(server, token) as cluster:
        tokens.path.write_text('{"tokens": [{"id"')

        def is_said() -> bool:
            cluster.tables()
            written.append(capfd.readouterr().err)
            return "tokens that it had before count" in "".join(written)

        wait_until(is_said)
        cluster.tables()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "not a JSON object with a list 'tokens'"),
        ('{"tokens": [], "max_rows": 1}', "and with nothing else"),
        ('{"tokens": [{"id": "00"}]}', "'id' must be 12 hexadecimal digits"),
        ('{"tokens": [{"max_row": 1}]}', "entry 1 of 'tokens': 'max_row' is"),
    ],
)
def test_a_server_does_not_start_with_a_bad_file(tmp_path, content, message):
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)
    assert re.search(message, stderr_of_server(f"--token_file={file}"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, ...]:
    tls = Authority(tmp_path_factory.mktemp("certificates")).sign("server")
    return (f"--tls_cert={tls.cert}", f"--tls_key={tls.key}")


def test_an_open_address_needs_tls_and_a_proof_of_who_calls(
    tokens, certificate
):
    tokens.create("admin")
    token_file = f"--token_file={tokens.path}"
    address = "--address=0.0.0.0:0"
    for flags, missing in (
        ((), "Give --tls_cert and --tls_key, and --token_file"),
        (certificate, "Give --token_file"),
        ((token_file,), "tokens never go over plaintext"),
        ((token_file, "--insecure"), "tokens never go over plaintext"),
    ):
        assert missing in stderr_of_server(address, *flags)
    with ServerProcess(
        address="0.0.0.0:0", flags=(*certificate, token_file)
    ) as server:
        assert server.line.endswith(" with TLS, tokens\n")


def test_an_insecure_server_says_so_at_its_start_and_in_stats(capfd):
    with (
        tsw.Server("0.0.0.0:0", insecure=True) as server,
        tsw.connect(
            f"grpc://127.0.0.1:{server.address.rsplit(':')[1]}"
        ) as cluster,
    ):
        stats = cluster.stats()
        assert stats.servers == [
            {
                "has_tls": False,
                "has_client_certificates": False,
                "has_tokens": False,
                "is_insecure": True,
            }
        ]
        assert repr(stats) == "{}, insecure servers: [0]"
    assert wait_for_stderr(capfd, r"--insecure: 0\.0\.0\.0:")
    with pytest.raises(ValueError, match="other machines can reach"):
        tsw.Server("0.0.0.0:0").start()


def test_limits_of_a_token_name_themselves(server, tokens):
    token = tokens.create(
        "train", "t*", max_tables=2, max_rows=25, max_request_bytes=4000
    )
    with connected(server, tokens.create("train")) as cluster:
        # The token may not use this table.
        tsw.EmbeddingTable("other", 4, cluster=cluster).lookup_or_create(
            np.arange(100)
        )
    with connected(server, token) as cluster:
        table = tsw.EmbeddingTable("t0", 4, cluster=cluster)
        admission = tsw.admission.MinCount(3)
        waiting = tsw.EmbeddingTable(
            "t1", 4, admission=admission, cluster=cluster
        )
        with pytest.raises(RuntimeError, match=r"2 tables .*max_tables is 2"):
            tsw.EmbeddingTable("t2", 4, cluster=cluster)
        tsw.EmbeddingTable("t1", 4, admission=admission, cluster=cluster)

        table.lookup_or_create(np.arange(20))
        # Ids that wait for admission count, too.
        waiting.push(np.arange(3), np.ones((3, 4), np.float32))
        for insert in (
            lambda ids: table.lookup_or_create(ids),
            lambda ids: table.push(ids, np.ones((ids.size, 4), np.float32)),
            lambda ids: table.assign(ids, np.ones((ids.size, 4), np.float32)),
            lambda ids: tsw.ops.push_many(
                [
                    tsw.ops.TablePush(
                        waiting.handle,
                        tf.constant(ids),
                        tf.ones((ids.size, 4)),
                        tf.constant(0.1),
                    )
                ],
                insert_missing=False,  # The policy decides.
            ),
        ):
            with pytest.raises(
                (RuntimeError, tf.errors.ResourceExhaustedError),
                match="max_rows is 25",
            ):
                insert(np.arange(10, 26))
        table.lookup_or_create(np.arange(22))
        assert table.stats()["num_rows"] == 22
        # Present rows can still be pushed to.
        table.push(np.arange(22), np.ones((22, 4), np.float32))
        waiting.push(np.arange(3), np.ones((3, 4), np.float32))
        with pytest.raises(RuntimeError, match="max_request_bytes of 4000"):
            table.lookup(np.arange(1000))


@pytest.mark.parametrize(
    "limits",
    # The second: of two answers at a time.
    [{"max_calls_in_flight": 1}, {"max_bytes_in_flight": 8_000_000}],
)
def test_calls_over_a_limit_in_flight_are_made_later(server, tokens, limits):
    token = tokens.create("train", **limits)
    errors = []
    with connected(server, token) as cluster:
        table = tsw.EmbeddingTable("t", 64, cluster=cluster)
        ids = np.arange(20_000)
        table.lookup_or_create(ids)

        def work() -> None:
            try:
                for _ in range(20):
                    table.lookup(ids)
                    table.push(ids[:100], np.ones((100, 64), np.float32))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert table.stats()["num_rows"] == ids.size
    assert errors == []


def test_a_line_of_the_audit_has_nothing_that_a_terminal_obeys(
    server, tokens, capfd
):
    with connected(server, tokens.create("admin")) as cluster:
        with pytest.raises(KeyError):
            cluster.drop("a\x7f\u009b31m\x1bé")

    written = wait_for_stderr(capfd, " admin_called .*\n")
    (line,) = re.findall(".* admin_called .*", written)
    assert r'tables="a\177\302\23331m\033\303\251"' in line
    assert line.isascii()
    assert line.isprintable()


def test_a_file_of_tokens_stays_where_it_is_and_whose_it_is(tmp_path):
    real = tmp_path / "real"
    link = tmp_path / "link"
    link.symlink_to(real)
    tokens = TokenFile(link)
    tokens.create("read")
    owner = 12345 if os.geteuid() == 0 else os.geteuid()
    os.chown(real, owner, -1)
    real.chmod(0o640)
    tokens.create("train")

    assert link.is_symlink()
    assert len(real.read_text().split('"id"')) == 3
    assert real.stat().st_uid == owner
    assert real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"note": "\udcff"}, "not valid Unicode"),
        ({"tables": ["\udcff"]}, "not valid Unicode"),
        ({"limits": {"max_rows": 2**63}}, "max_rows must be"),
        ({"tables": ["a"] * 1001}, "more than 1000 patterns"),
        ({"tables": [""]}, "a pattern of tables is empty"),
        ({"note": "a\nffffffffffff  admin  *"}, "control characters"),
    ],
)
def test_a_file_that_servers_would_refuse_is_not_written(
    tokens, fields, message
):
    tokens.create("read")
    before = tokens.path.read_bytes()
    with pytest.raises(ValueError, match=message):
        _token_file.add(tokens.path, "read", **fields)
    assert tokens.path.read_bytes() == before


def test_who_may_use_some_tables_reads_no_other_names_in_errors(server, tokens):
    calls = [
        lambda cluster, table: table.lookup(IDS),
        lambda cluster, table: table.push(IDS, np.ones((IDS.size, 4))),
        lambda cluster, table: table.assign(IDS, np.ones((IDS.size, 4))),
        lambda cluster, table: table.remove(IDS),
        lambda cluster, table: table.size(),
        lambda cluster, table: table.shrink(),
        lambda cluster, table: table.export_rows(),
        lambda cluster, table: cluster.drop("a_none"),
    ]
    with connected(server, tokens.create("admin")) as admin:
        for name in ("a_kept", "a_dropped", "secret"):
            tsw.EmbeddingTable(name, 4, cluster=admin)
        with connected(server, tokens.create("admin", "a*")) as cluster:
            table = tsw.EmbeddingTable("a_dropped", 4, cluster=cluster)
            admin.drop("a_dropped")
            for call in calls:
                with pytest.raises(Exception, match="no table 'a_") as raised:
                    call(cluster, table)
                assert "secret" not in str(raised.value)
        with pytest.raises(KeyError, match="it has: 'a_kept', 'secret'"):
            admin.drop("a_none")


def test_who_trains_some_tables_takes_no_steps_with_bsp(server, tokens):
    """A step of a group is applied to all tables that have been pushed to."""
    with (
        connected(server, tokens.create("train", "a*")) as cluster,
        tsw.train.Worker(0, 1, cluster=cluster) as worker,
    ):
        table = tsw.EmbeddingTable("a", 4, cluster=cluster)
        table.push(IDS, np.ones((IDS.size, 4), np.float32))
        worker.end_step()
    with (
        connected(server, tokens.create("train", "b*")) as cluster,
        pytest.raises(PermissionError, match="CommitRound is about all"),
        tsw.train.Worker(0, 1, consistency="bsp", cluster=cluster) as worker,
    ):
        worker.end_step()


def run_token(*words: str) -> str:
    return subprocess.run(
        [*COMMAND, "token", *words],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_the_command_creates_lists_and_revokes(tokens):
    file = f"--token_file={tokens.path}"
    kept = run_token(
        *("create", "--role=read", "--tables=a*", "--tables=b"),
        *("--note=for a test", file),
    ).splitlines()[-1]
    revoked = run_token(
        "create", "--role=admin", "--expires_in=90d", "--max_rows=5", file
    ).splitlines()[-1]

    assert re.fullmatch(
        rf"{id_of(kept)}  read  a\*,b  note=for a test\n"
        rf"{id_of(revoked)}  admin  \*  expires=\S+Z  max_rows=5\n",
        run_token("list", file),
    )
    assert kept[-64:] not in tokens.path.read_text()
    assert tokens.path.stat().st_mode & 0o777 == 0o600
    with tsw.Server(token_file=tokens.path) as server:
        assert not is_refused(server, kept)
        assert not is_refused(server, revoked)
    run_token("revoke", file, revoked)
    assert id_of(revoked) not in run_token("list", file)
    with pytest.raises(ValueError, match=f"has no token '{id_of(revoked)}'"):
        tokens.revoke(revoked)


def test_a_token_that_cannot_be_printed_is_not_kept(tokens):
    tokens.create("read")
    before = tokens.path.read_bytes()
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [
                *(*COMMAND, "token", "create", "--role=read"),
                f"--token_file={tokens.path}",
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 1
    assert "tfswitch token: [Errno 28]" in ended.stderr
    assert tokens.path.read_bytes() == before


def test_who_trains_waits_for_a_queue_that_an_administrator_makes(
    server, tokens, capfd
):
    """Workers start in any order; only the first needs the role admin."""
    address = f"grpc://{server.address}"
    items: list[str] = []

    def work(number: int, token: str) -> None:
        with (
            tsw.Cluster(
                address, timeout_secs=30 + number, token=token
            ) as cluster,
            tsw.train.Worker(number, 2, cluster=cluster) as worker,
        ):
            queue = tsw.data.WorkQueue(list("abcd"), worker=worker)
            for epoch in queue.epochs():
                for item in epoch:
                    items.append(item.value)
                    item.finish()

    errors: list[BaseException] = []

    def start(number: int, role: str) -> threading.Thread:
        def guarded(token: str) -> None:
            try:
                work(number, token)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded, args=[tokens.create(role)])
        thread.start()
        return thread

    waiting = start(1, "train")
    seen: list[str] = []

    def is_said() -> bool:
        seen.append(capfd.readouterr().err)
        return "waiting for work queue 'train'" in "".join(seen)

    wait_until(is_said)
    for thread in (start(0, "admin"), waiting):
        thread.join()

    assert errors == []
    assert sorted(items) == list("abcd")


def test_a_quota_of_rows_counts_all_parts_of_a_message(server, tokens):
    token = tokens.create("train", max_rows=100)
    with connected(server, token) as cluster:
        layer = tsw.keras.DynamicEmbeddings(
            {f"f{i}": {"output_dim": 4} for i in range(10)},
            cluster=cluster,
            name="layer",
        )
        ids = np.array([[1, 2, 2, 1]])
        layer({f"f{i}": ids for i in range(10)}, training=True)
        many = np.arange(100)[None]
        with pytest.raises(tf.errors.ResourceExhaustedError, match="max_rows"):
            layer({f"f{i}": many for i in range(10)}, training=True)
        assert sum(s["num_rows"] for s in cluster.stats().values()) == 20
