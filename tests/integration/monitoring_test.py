"""deploy/monitoring, with a real Prometheus that scrapes a running cluster."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import ssl
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
import yaml
from tensorflow_serving.apis import predict_pb2

import tfswitch as tsw
from tests.certificates import Authority
from tests.faults.failing_disk import FailingDisk
from tests.integration.predictor_test import MODEL, PredictionServer
from tests.programs import ROOT, PythonProgram, environment
from tests.python.worker_threads import wait_until
from tests.support import ServerProcess, free_ports, make_table
from tests.tokens import TokenFile

FOLDER = ROOT / "deploy/monitoring"
RULES = FOLDER / "tfswitch_rules.yaml"
DASHBOARD = json.loads((FOLDER / "tfswitch_dashboard.json").read_text())
PAGE = (ROOT / "docs/dashboards.md").read_text()
REFERENCE = (ROOT / "docs/metrics_reference.md").read_text()
# Prometheus has it for each target.
OF_PROMETHEUS = {"up"}
# The disk and the memory of this machine may be nearly full.
OF_THE_MACHINE = {"TfswitchDiskNearlyFull", "TfswitchMemoryNearLimit"}
IDS = np.arange(2000)
STUCK_WORKER = """
import sys
import tfswitch as tsw
tsw.connect(sys.argv[2])
worker = tsw.train.Worker(int(sys.argv[1]), 2, group="stuck", lease_secs=5)
for _ in range(3):
    worker.end_step()
sys.stdin.read()
"""


def expressions() -> dict[str, list[str]]:
    """The expressions of each panel, by the titles of its row and its own."""
    found: dict[str, list[str]] = {}
    row = ""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            title = f"{row}: {panel['title']}"
            assert title not in found
            found[title] = [target["expr"] for target in panel["targets"]]
    return found


def variables() -> dict[str, str]:
    """The labels of the lists at the top, and where their values come from."""
    return {
        match[2]: match[1]
        for variable in DASHBOARD["templating"]["list"]
        if (
            match := re.match(r"label_values\((.*), (\w+)\)", variable["query"])
        )
    }


def rules() -> dict[str, dict[str, Any]]:
    """The rules by the names of their alerts."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def series_of(text: str) -> set[str]:
    """Names of series in an expression or a page."""
    names = re.findall(r"\b(?:(?:tfswitch|process)_\w+|up)\b", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def installed(name: str) -> str:
    """The path of a program of Debian's package of Prometheus."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not installed; ./scripts/setup --dev brings it")
    return path


class Prometheus:
    """A running Prometheus that scrapes each second.

    Args:
        folder: For its files.
        config: Its `scrape_configs`.
        rules: A file of rules.
    """

    def __init__(
        self, folder: Path, config: list[dict[str, Any]], rules: Path
    ) -> None:
        (port,) = free_ports(1)
        self._address = f"http://127.0.0.1:{port}/api/v1"
        path = folder / "prometheus.yaml"
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        content = {"rule_files": [str(rules)], "scrape_configs": config}
        path.write_text(yaml.safe_dump({"global": every, **content}))
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    installed("prometheus"),
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stderr=log,
            )

    def _get(self, path: str, **parameters: str) -> Any:
        assert self._process.poll() is None, self._log.read_text()
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(
                f"{self._address}/{path}?{query}", timeout=60
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            assert error.code == 503, error.read()
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionRefusedError)
        return {}  # It is starting.

    def values(self, expression: str) -> list[float]:
        """The values of an expression now, without those that are NaN."""
        for name, value in {
            "$__rate_interval": "1m",
            "$job": ".*",
            "$instance": ".*",
            "$table": ".*",
        }.items():
            expression = expression.replace(name, value)
        found = self._get("query", query=expression).get("result", [])
        values = [float(item["value"][1]) for item in found]
        return [value for value in values if not math.isnan(value)]

    def alerts(self) -> dict[str, dict[str, Any]]:
        """One alert of each name that fires."""
        return {
            alert["labels"]["alertname"]: alert
            for alert in self._get("alerts").get("alerts", [])
            if alert["state"] == "firing"
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclasses.dataclass
class Scraped:
    """A cluster that Prometheus scrapes.

    Attributes:
        prometheus: It.
        use: A function that trains, predicts and makes a call that fails.
        start: Starts a server that has ended, by its number.
        cluster: The two servers.
        servers: Their processes.
        targets: Their HTTP addresses.
        disk: The disk of the second one.
        view: Returns the answer of /view.json of a server, by its number.
        worker: Starts a worker of the group "stuck" of two; the first argument
            is its number.
    """

    prometheus: Prometheus
    use: Callable[[], None]
    start: Callable[[int], ServerProcess]
    cluster: tsw.Cluster
    servers: list[ServerProcess]
    targets: list[str]
    disk: FailingDisk
    view: Callable[[int], dict[str, Any]]
    worker: Callable[[int], PythonProgram]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("monitoring")
    authority = Authority(folder)
    tls = authority.sign("server")
    tokens = TokenFile(folder / "tokens")
    admin = tokens.create("admin")
    (folder / "reader").write_text(tokens.create("read"))
    targets = [f"127.0.0.1:{port}" for port in free_ports(3)]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    security = (
        *(f"--tls_cert={tls.cert}", f"--tls_key={tls.key}"),
        f"--token_file={tokens.path}",
    )
    disk = FailingDisk(folder / "1", folder)
    with contextlib.ExitStack() as stack:

        def start(index: int) -> ServerProcess:
            return stack.enter_context(
                ServerProcess(
                    address=addresses[index],
                    shard_index=index,
                    num_shards=2,
                    flags=(
                        *(f"--http_address={targets[index]}", *security),
                        *(f"--data_dir={folder / str(index)}", "--push_log"),
                        *("--checkpoint_every=1s", "--push_log_sync=always"),
                    ),
                    variables=disk.variables if index == 1 else {},
                )
            )

        servers = [start(0), start(1)]
        workers = []
        for number, kind in enumerate(
            ("asp", "bsp", tsw.train.Consistency.ssp(2))
        ):
            # Another timeout makes another client, which can be a worker.
            cluster = stack.enter_context(
                tsw.Cluster(
                    "grpcs://" + ",".join(addresses),
                    timeout_secs=20.0 + number,
                    tls=tsw.Tls(ca=authority.ca),
                    token=admin,
                )
            )
            name = f"t{number}"
            table = make_table(name, consistency=kind, cluster=cluster)
            worker = tsw.train.Worker(
                *(0, 1), consistency=kind, group=name, cluster=cluster
            )
            workers.append((cluster, table, worker))
        models = folder / "models"
        models.mkdir()
        table = workers[0][1]
        table.lookup_or_create(IDS)
        tsw.saved_model.save(
            lambda ids: {"score": tf.reduce_sum(table.lookup(ids), -1)},
            models / "1",
            inputs={"ids": tf.TensorSpec([None], tf.int64)},
        )
        serving = stack.enter_context(
            PredictionServer(
                *(folder, models, f"--http_address={targets[2]}", *security),
                credentials=grpc.ssl_channel_credentials(
                    authority.ca.read_bytes()
                ),
            )
        )
        request = predict_pb2.PredictRequest()
        request.model_spec.name = MODEL
        request.inputs["ids"].CopyFrom(tf.make_tensor_proto(IDS))

        def use() -> None:
            for _, table, worker in workers:
                table.lookup_or_create(IDS)
                table.push(IDS, np.ones((IDS.size, 2), np.float32))
                worker.end_step()
                worker.wait_at_barrier("step")
            serving.stub.Predict(
                request, metadata=[("authorization", f"Bearer {admin}")]
            )
            with pytest.raises(KeyError):
                workers[0][0].table("none")

        of_worker = tsw.metrics.serve(0)
        stack.callback(of_worker.close)
        at_once = folder / "rules.yaml"
        # The rates of a short run are small over minutes.
        text = re.sub(r"\[\d+m\]", "[20s]", RULES.read_text())
        at_once.write_text(re.sub(r"for: \w+", "for: 0s", text))
        secure = {
            "scheme": "https",
            "tls_config": {"ca_file": str(authority.ca)},
            "authorization": {"credentials_file": str(folder / "reader")},
        }
        prometheus = Prometheus(
            folder,
            [
                {
                    "job_name": name,
                    "static_configs": [{"targets": found}],
                    **how,
                }
                for name, found, how in (
                    ("tfswitch", targets[:2], secure),
                    ("tfswitch-serving", targets[2:], secure),
                    ("trainers", [f"127.0.0.1:{of_worker.port}"], {}),
                )
            ],
            at_once,
        )
        stack.callback(prometheus.close)

        def view(index: int) -> dict[str, Any]:
            request = urllib.request.Request(
                f"https://{targets[index]}/view.json",
                headers={"Authorization": f"Bearer {admin}"},
            )
            context = ssl.create_default_context(cafile=authority.ca)
            with urllib.request.urlopen(request, context=context) as answer:
                return json.load(answer)

        def worker(number: int) -> PythonProgram:
            return stack.enter_context(
                PythonProgram(
                    "-c",
                    STUCK_WORKER,
                    *(str(number), "grpcs://" + ",".join(addresses)),
                    stdin=subprocess.PIPE,
                    env=environment(
                        TFSWITCH_TLS_CA=str(authority.ca), TFSWITCH_TOKEN=admin
                    ),
                )
            )

        yield Scraped(
            *(prometheus, use, start, workers[0][0], servers, targets),
            *(disk, view, worker),
        )


def test_promtool_finds_no_fault_in_the_rules_and_their_tests() -> None:
    for command, file in (
        ("check", RULES),
        ("test", FOLDER / "tfswitch_rules_test.yaml"),
    ):
        result = subprocess.run(
            [installed("promtool"), command, "rules", file],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    for name in rules():
        assert f'"{name}"' in file.read_text()


def test_panels_and_alerts_use_documented_series() -> None:
    used = {
        expression: series_of(expression)
        for expression in (
            *(e for found in expressions().values() for e in found),
            *(rule["expr"] for rule in rules().values()),
            *variables().values(),
        )
    }
    for expression, names in used.items():
        assert names, expression
        assert names <= series_of(REFERENCE) | OF_PROMETHEUS


def test_the_page_has_the_series_of_panels_and_expressions_of_alerts() -> None:
    panels = {
        f"{row}: {panel}": series_of(series)
        for row, panel, series in re.findall(
            r"^\| ([A-Z][\w, ]+) \| ([A-Z][\w, ]+) \| (`.*) \|$", PAGE, re.M
        )
    }
    assert panels == {
        title: series_of(" ".join(found))
        for title, found in expressions().items()
    }
    alerts = re.findall(r"^\| `(Tfswitch\w+)` \| `(.*?)`, (\S+) \|", PAGE, re.M)
    assert [
        (name, expression.replace("\\|", "|"), after)
        for name, expression, after in alerts
    ] == [
        (name, rule["expr"], rule.get("for", "0m"))
        for name, rule in rules().items()
    ]


@pytest.mark.slow
def test_each_expression_of_the_dashboard_returns_data(
    scraped: Scraped,
) -> None:
    left = [f"count by ({label}) ({e})" for label, e in variables().items()]
    left += [
        expression for found in expressions().values() for expression in found
    ]

    def have_all_returned_data() -> bool:
        scraped.use()
        while left and scraped.prometheus.values(left[0]):
            left.pop(0)
        return not left

    try:
        wait_until(have_all_returned_data)
    finally:
        assert left == []


@pytest.mark.slow
def test_alerts_fire_when_a_server_ends_and_until_it_is_back(
    scraped: Scraped,
) -> None:
    def firing() -> set[str]:
        return set(scraped.prometheus.alerts()) - OF_THE_MACHINE

    wait_until(
        lambda: (
            scraped.prometheus.values("sum(up)") == [4.0]
            # The certificates of tests are valid for two days.
            and firing() == {"TfswitchCertificateExpires"}
        )
    )

    scraped.servers[1].kill()

    def names_the_server() -> bool:
        # If a scrape is late, another server counts as down for a moment.
        alerts = scraped.prometheus.alerts()
        return (
            alerts.keys() - OF_THE_MACHINE
            == {"TfswitchCertificateExpires", "TfswitchServerDown"}
            and alerts["TfswitchServerDown"]["annotations"]["summary"]
            == f"{scraped.targets[1]} of tfswitch does not answer"
        )

    wait_until(names_the_server)

    scraped.servers[1] = scraped.start(1)
    wait_until(lambda: firing() == {"TfswitchCertificateExpires"})


@pytest.mark.slow
def test_a_full_disk_a_stuck_worker_and_a_hot_id_are_seen(
    scraped: Scraped,
) -> None:
    """The metric moves, the alert fires, and the page has it."""

    def alert(name: str) -> dict[str, str]:
        wait_until(lambda: name in scraped.prometheus.alerts())
        return scraped.prometheus.alerts()[name]["labels"]

    def events(index: int) -> set[str]:
        found = scraped.view(index)["events"]
        return {json.loads(event)["event"] for event in found}

    # A worker hangs.
    workers = [scraped.worker(number) for number in range(2)]
    steps = 'tfswitch_worker_steps_total{group="stuck"}'
    wait_until(lambda: len(scraped.prometheus.values(f"{steps} == 3")) == 2)
    os.kill(workers[1].pid, signal.SIGSTOP)
    assert alert("TfswitchWorkersLost")["group"] == "stuck"
    lost = 'tfswitch_group_workers{group="stuck",state="lost"}'
    wait_until(lambda: scraped.prometheus.values(lost) == [1.0])
    assert "worker_lost" in events(0)

    # An id becomes hot.
    table = make_table("hot", cluster=scraped.cluster)
    table.lookup_or_create(np.arange(30_000))
    random = np.random.default_rng(0)

    def is_hot() -> bool:
        for others in random.integers(30_000, size=(500, 7)):
            table.lookup([7, *others])
        return "TfswitchHotId" in scraped.prometheus.alerts()

    wait_until(is_hot)
    (heat,) = (
        heat
        for index in range(2)
        for heat in scraped.view(index)["heats"]
        if heat["table"] == "hot" and heat["hot_keys"][0]["share"] > 0.1
    )
    assert heat["hot_keys"][0]["key"] == "7"
    assert alert("TfswitchHotId")["table"] == "hot"

    # A disk is full.
    scraped.disk.fail(1, errno.ENOSPC, forever=True)
    with pytest.raises(RuntimeError, match="the push log cannot be written"):
        table.push(np.arange(100), np.ones((100, 2), np.float32))
    failed = alert("TfswitchLogFailed")
    assert failed["instance"] == scraped.targets[1]
    has_failed = "tfswitch_log_has_failed == 1"
    wait_until(lambda: scraped.prometheus.values(has_failed) == [1.0])
    assert "disk_full" in events(1)
