"""The log of a server: one form, stable names, all of them documented."""

import datetime
import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

import tfswitch as tsw
from tests.integration.predictor_test import COMMAND as SERVING
from tests.python.worker_threads import wait_for_stderr
from tests.support import PACKAGE, SERVER, ServerProcess
from tests.tokens import TokenFile, id_of

ROOT = PACKAGE.parent

# Lines that are not of the server, but of this process.
_OF_THIS_PROCESS = re.compile("cuda_platform|^tfswitch: waiting for shard")
_LINE = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (info|warning|error) "
    r'([a-z_]+)((?: [a-z_]+=(?:[^\s"=]+|"(?:[^"\\]|\\.)*"))*)'
)
# Where the name of an event stands in the sources.
_NAMES = re.compile(
    r"(?:LogServerEvent|MessageLine|EventLine)\([^,]*,\s*\"([a-z_]+)\"|"
    r"(?:Tell|Warn)\(\s*\"([a-z_]+)\"|"
    r"(?:LogMessage(?:InOrder)?\([^{]*|LogKind)\{\"([a-z_]+)\""
)


def documented() -> set[str]:
    text = (ROOT / "docs/server_log.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([a-z_]+)` \|", text, re.M))


def test_each_event_of_the_sources_is_documented():
    named = {
        "".join(names)
        for kind in ("cc", "h")
        for file in (ROOT / "cc").rglob(f"*.{kind}")
        for names in _NAMES.findall(file.read_text(encoding="utf-8"))
    }

    assert named == documented()


def test_a_server_says_what_happens_to_it(tmp_path: Path, capfd):
    tokens = TokenFile(tmp_path / "tokens")
    admin, reader = tokens.create("admin"), tokens.create("read")
    data = tmp_path / "the data"

    def start() -> ServerProcess:
        return ServerProcess(
            flags=(
                f"--data_dir={data}",
                f"--token_file={tokens.path}",
                "--push_log",
                "--checkpoint_every=inf",
            ),
            variables={"TZ": "Asia/Kathmandu"},
        )

    begin = datetime.datetime.now(datetime.timezone.utc)
    with start() as server:
        with tsw.connect(f"grpc://{server.address}", token=admin) as cluster:
            table = tsw.EmbeddingTable(
                "user", 4, statistics=tsw.statistics.Usage(), cluster=cluster
            )
            table.lookup_or_create([1, 2, 3, 4, 5])
            table.shrink(policy=tsw.eviction.MaxRows(3))
            tsw.export.base(tmp_path / "export", cluster=cluster)
            table.push([1], [[1.0] * 4])
            table.push([6], [[1.0] * 4])
            tsw.export.delta(tmp_path / "export", cluster=cluster)
            cluster.save("save")
            cluster.restore("save")
            tsw.EmbeddingTable("item", 2, cluster=cluster)
            cluster.drop("item")
            with pytest.raises(PermissionError):
                cluster.save("/a folder")
        with (
            tsw.connect(f"grpc://{server.address}", token=reader) as cluster,
            pytest.raises(PermissionError, match=r"drop`: .* DropTable needs"),
        ):
            cluster.drop("user")
        said = wait_for_stderr(capfd, f"caller_refused .*{id_of(reader)}.*\n")
        server.kill()
    with start() as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    said += capfd.readouterr().err
    end = datetime.datetime.now(datetime.timezone.utc)

    lines = [
        _LINE.fullmatch(line)
        for line in said.splitlines()
        if not _OF_THIS_PROCESS.search(line)
    ]
    assert all(lines), said
    events: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        time, level, event, fields = line.groups()
        # Written with milliseconds.
        at = datetime.datetime.fromisoformat(f"{time}+00:00")
        assert begin - datetime.timedelta(seconds=1) <= at <= end, line[0]
        events.setdefault(event, []).append((level, fields))
    assert set(events) == {
        "started",
        "table_made",
        "table_dropped",
        "evicted",
        "exported",
        "saved",
        "save_published",
        "restored",
        "caller_refused",
        "admin_called",
        "recovered",
        "stopped",
    }
    assert set(events) <= documented()

    def only(event: str, pattern: str) -> None:
        ((level, fields),) = events[event]
        assert level == "info"
        assert re.search(pattern, fields), fields

    assert len(events["started"]) == 2
    assert re.search(
        rf" version={tsw.__version__} shard=0 num_shards=1 address=127\.0\.0\.1"
        rf':\d+ data_dir="{data}" flags="--address=.* --push_log=true '
        r'--checkpoint_every=inf"',
        events["started"][0][1],
    )
    only("evicted", "table=user rows=2 rules=max_rows:2 rows_left=3 seconds=")
    kinds = [
        re.search(r"kind=(\w+) rows=(\d+)", f) for _, f in events["exported"]
    ]
    assert [kind.groups() for kind in kinds if kind] == [
        ("base", "3"),
        ("delta", "2"),
    ]
    only("restored", r"/save\" tables=1 rows=4 bytes=[1-9]\d* seconds=\d")
    only("save_published", "number=1")
    only("table_dropped", "table=item rows=0")
    # The request of a caller with another role is not read.
    for event, token, result in (
        ("admin_called", admin, "tables=item result=OK"),
        ("caller_refused", reader, 'result=PERMISSION_DENIED why=".*"'),
    ):
        assert re.search(
            rf"call=DropTable token={id_of(token)} from=ipv4:127\.0\.0\.1:\d+ "
            rf"{result}(\n|$)",
            "\n".join(fields for _, fields in events[event]),
        )
    assert ' path="/a folder" result=PERMISSION_DENIED' in said
    assert {level for level, _ in events["caller_refused"]} == {"warning"}
    only(
        "recovered",
        r"tables=1 rows=4 saved=.*Z log_records=[1-9]\d* lost_writes=0 "
        r"lost_writes_are=exact seconds=",
    )
    only("stopped", "why=Terminated seconds=")


def test_each_line_of_a_json_log_is_an_object(tmp_path: Path, capfd):
    data = tmp_path / "dätä"

    def start() -> ServerProcess:
        return ServerProcess(
            flags=(f"--data_dir={data}", "--log_format=json"),
            variables={"TFSWITCH_SIMD": "unheard\tof"},
        )

    with start() as server:
        with tsw.connect(f"grpc://{server.address}") as cluster:
            table = tsw.EmbeddingTable("user", 4, cluster=cluster)
            table.lookup_or_create([1, 2, 3])
            cluster.save("save")
            cluster.drop("user")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with start() as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    lines = [
        json.loads(line)
        for line in capfd.readouterr().err.splitlines()
        if not _OF_THIS_PROCESS.search(line)
    ]

    assert {type(line) for line in lines} == {dict}
    for line in lines:
        assert list(line)[:3] == ["time", "level", "event"]
        assert line["time"].endswith("Z")
    events = {line["event"]: line for line in lines}
    assert {"started", "saved", "recovered", "stopped"} < set(events)
    assert set(events) <= documented()
    assert events["started"]["num_shards"] == 1
    assert events["started"]["data_dir"] == str(data)
    assert events["started"]["version"] == tsw.__version__
    dropped = events["table_dropped"]
    assert (dropped["table"], dropped["rows"]) == ("user", 3)
    assert isinstance(events["stopped"]["seconds"], float)
    assert "'unheard\tof'" in events["unknown_simd"]["message"]


@pytest.mark.parametrize(
    ("program", "command", "bad", "text"),
    [
        (
            "tfswitch-server",
            [SERVER, "--shard_index=0"],
            "--grace_period=-1s",
            "got -1s",
        ),
        (
            "tfswitch-serving",
            [*SERVING, "--model_dir=m"],
            "--max_requests=0",
            "positive",
        ),
    ],
)
def test_a_wrong_flag_is_an_event_of_a_json_log(program, command, bad, text):
    def refusal(*flags: str) -> str:
        ended = subprocess.run(
            [*command, *flags], capture_output=True, text=True
        )
        assert ended.returncode == 2
        return ended.stderr.splitlines()[-1]

    line = json.loads(refusal("--log_format=json", bad))

    assert (line["level"], line["event"]) == ("error", "not_started")
    assert text in line["message"]
    assert refusal("--log_format=xml") == (
        f"{program}: flag --log_format must be text or json, got 'xml'"
    )
