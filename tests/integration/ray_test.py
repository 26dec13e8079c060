"""Servers and workers on a cluster of Ray, all nodes on this machine."""

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import cluster_utils

import tfswitch as tsw
from tests.certificates import Authority
from tests.integration import ray_programs
from tests.integration.work_queue_program import make_counts
from tests.programs import ROOT, environment, run_python
from tests.python.worker_threads import Call, wait_until
from tests.tokens import TokenFile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.submission,
    # Each process of Ray imports TensorFlow.
    pytest.mark.timeout(900),
]

ITEMS = [f"item {i}" for i in range(6)]
ALL_SAMPLES = 2 * len(ITEMS) * ray_programs.NUM_SAMPLES  # In both epochs.


class Machines:
    """Nodes that come and go beside the head, which has "head" and few CPUs."""

    def __init__(self) -> None:
        # Ray's processes would wait for those of other tests.
        os.environ["RAY_worker_niceness"] = "0"
        self._cluster = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "resources": {"head": 10},
                "include_dashboard": False,
            },
        )
        self.nodes: list[Any] = []
        self.address = self._cluster.address
        ray.init(
            address=self.address,
            runtime_env={
                "env_vars": {
                    "PYTHONPATH": str(ROOT),
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                }
            },
        )

    def add(self, **resources: int) -> Any:
        node = self._cluster.add_node(num_cpus=1, resources=resources)
        self.nodes.append(node)
        return node

    def kill(self, node: Any, *pids: int) -> None:
        """The node, and processes that are its own, are gone at once."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def clear(self) -> None:
        for node in self.nodes:
            self._cluster.remove_node(node)
        self.nodes.clear()

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def all_machines() -> Iterator[Machines]:
    found = Machines()
    yield found
    found.end()


@pytest.fixture
def machines(all_machines: Machines) -> Iterator[Machines]:
    yield all_machines
    all_machines.clear()


def start(name: str, num_servers: int, **options: Any) -> tsw.ray.Servers:
    """Starts servers on the head."""
    defaults = {
        "resources_per_server": {"head": 1},
        "host": "127.0.0.1",
        "timeout_secs": 60.0,
    }
    return tsw.ray.start_servers(
        num_servers, name=name, **{**defaults, **options}
    )


def process(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def node_id(actor: Any) -> str:
    return ray.get(
        actor.__ray_call__.remote(
            lambda self: ray.get_runtime_context().get_node_id()
        )
    )


def count_samples(
    folder: Path, num_workers: int, servers: tsw.ray.Servers, **options: Any
) -> tsw.ray.Workers:
    """Starts workers that wait in the first step of each for a file "go"."""
    return tsw.ray.start_workers(
        ray_programs.count_samples,
        num_workers,
        servers=servers,
        args=[ITEMS, folder, True],
        **{"resources_per_worker": {"head": 1}, **options},
    )


def check_counts(servers: tsw.ray.Servers) -> None:
    """Each sample has been trained once in each of 2 epochs."""
    with tsw.Cluster(servers.address) as cluster:
        ids, counts = make_counts(cluster).export_rows()
    assert sorted(ids) == list(range(len(ITEMS) * ray_programs.NUM_SAMPLES))
    # A step of SGD takes the gradient away.
    assert set(counts.reshape(-1)) == {-2.0}


def test_bsp_ends_bit_for_bit_as_if_no_server_had_lost_its_node(
    machines: Machines, tmp_path: Path
) -> None:
    lost = machines.add(server=1)
    machines.add(server=1)  # So each machine has one server.
    results = {}
    for name in ("calm", "lossy"):
        folder = tmp_path / name
        folder.mkdir()
        with start(
            name,
            2,
            data_dir=folder / "data",
            resources_per_server={"server": 1},
        ) as servers:
            training = Call(
                lambda servers=servers, folder=folder: tsw.ray.run_workers(
                    ray_programs.fit,
                    2,
                    servers=servers,
                    args=[folder],
                    resources_per_worker={"head": 1},
                )
            )
            marked = folder / "marked"
            wait_until(
                lambda marked=marked, training=training: (
                    marked.exists() or training.is_over
                )
            )
            before = servers.addresses()
            if name == "lossy":
                (actor,) = (
                    actor
                    for actor in servers._actors
                    if node_id(actor) == lost.node_id
                )
                machines.kill(lost, process(actor))
                machines.add(server=1)
            (folder / "go").touch()
            results[name] = training.result(200.0)
            has_moved = servers.addresses() != before
            assert has_moved == (name == "lossy")

    samples = 2 * sum(8 * (ray_programs.STEPS - 3 * i) - i for i in range(2))
    assert [r["samples"] for r in results["calm"].values()] == [samples] * 2
    assert results["calm"] == results["lossy"]


def test_workers_finish_without_one_that_lost_its_node(
    machines: Machines, tmp_path: Path
) -> None:
    # Ray would start it again, and has no room for it.
    options = {"resources_per_worker": {"worker": 1}, "timeout_secs": 15.0}
    first = machines.add(worker=1)
    machines.add(worker=2)
    with (
        start("finish", 2) as servers,
        count_samples(tmp_path, 3, servers, **options) as workers,
    ):
        for number in range(3):
            ray_programs.wait_for(tmp_path / str(number))
        (lost,) = (
            number
            for number, worker in workers._actors.items()
            if node_id(worker.actor) == first.node_id
        )
        machines.kill(first, int((tmp_path / str(lost)).read_text()))
        (tmp_path / "go").touch()
        with pytest.raises(tsw.ray.WorkersLost, match="`max_lost`") as error:
            Call(workers.wait).result(200.0)

        assert error.value.lost == [lost]
        assert sorted(error.value.results) == sorted({0, 1, 2} - {lost})
        check_counts(servers)


def test_workers_come_and_go_and_die_while_training_goes_on(
    machines: Machines, tmp_path: Path
) -> None:
    with (
        start("elastic", 1) as servers,
        count_samples(tmp_path, 3, servers) as workers,
    ):
        for worker in range(3):
            ray_programs.wait_for(tmp_path / str(worker))
        # It is started again, as the same.
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)
        workers.remove(0)
        assert workers.add() == [3]
        ray_programs.wait_for(tmp_path / "3")
        (tmp_path / "go").touch()
        with pytest.raises(KeyError, match="no worker 0 runs"):
            workers.remove(0)
        results = Call(workers.wait).result(200.0)

        assert sorted(results) == [1, 2, 3]
        assert results[3] > 0
        check_counts(servers)


def test_workers_that_ray_has_no_room_for_are_an_error_that_says_why(
    machines: Machines, capfd: pytest.CaptureFixture[str]
) -> None:
    with start("full", 1) as servers:
        workers = tsw.ray.start_workers(
            ray_programs.fail_or_wait,
            2,
            servers=servers,
            resources_per_worker={"gold": 1},
            timeout_secs=7.0,
        )
        message = r"within 7 s worker\(s\) 0, 1, each with {'gold': 1}"
        with pytest.raises(TimeoutError, match=message):
            workers.wait()

    assert "tfswitch: waiting for worker(s) 0, 1" in capfd.readouterr().err


def test_an_exception_of_a_worker_ends_all_and_is_raised(
    machines: Machines,
) -> None:
    with start("fail", 1) as servers:
        workers = tsw.ray.start_workers(
            ray_programs.fail_or_wait,
            2,
            servers=servers,
            resources_per_worker={"head": 1},
        )
        with pytest.raises(ZeroDivisionError, match="worker 1"):
            Call(workers.wait).result(200.0)

        assert workers.numbers() == []


def test_rows_come_back_from_an_object_store(
    machines: Machines, tmp_path: Path
) -> None:
    for round_ in range(2):
        with (
            start("store", 1, data_dir=f"file://{tmp_path}/run") as servers,
            tsw.Cluster(servers.address) as cluster,
        ):
            table = tsw.EmbeddingTable("t", 2, cluster=cluster, seed=1)
            assert table.size() == 100 * round_
            table.lookup_or_create(np.arange(100))


def test_servers_with_tls_and_tokens_serve_workers_that_have_them(
    machines: Machines, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own = authority.sign("server")
    tokens = TokenFile(tmp_path / "tokens")
    token = tmp_path / "token"
    token.write_text(tokens.create("admin"))
    with start("safe", 1, tls=own, token_file=tokens.path) as servers:
        results = tsw.ray.run_workers(
            ray_programs.count_samples,
            1,
            servers=servers,
            args=[ITEMS, tmp_path, False],
            resources_per_worker={"head": 1},
            tls=tsw.Tls(ca=authority.ca),
            token=token,
        )
        assert results == {0: ALL_SAMPLES}
        with pytest.raises(PermissionError, match="token"):
            tsw.Cluster(servers.address, tls=tsw.Tls(ca=authority.ca))


def test_ray_has_the_rows_of_tables_among_its_metrics(
    machines: Machines,
) -> None:
    with (
        start("measured", 1, metrics_secs=0.2) as servers,
        tsw.Cluster(servers.address) as cluster,
    ):
        tsw.EmbeddingTable("t", 2, cluster=cluster).lookup_or_create([1, 2, 3])

        wait_until(
            lambda: re.search(
                r'tfswitch_rows\{.*Table="t".*\} 3\.0',
                metrics_of_the_head(),
                re.I,
            )
        )


def metrics_of_the_head() -> str:
    (node,) = (node for node in ray.nodes() if node["Alive"])
    address = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return answer.read().decode()


def test_ray_train_has_checkpoints_that_refer_to_the_tables(
    machines: Machines, tmp_path: Path
) -> None:
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    ids, labels = ray_programs.make_data(200, seed=0)
    data = ray.data.from_items(
        [{"ids": i, "label": y} for i, y in zip(ids, labels, strict=True)]
    )
    with start("trainer", 2, data_dir=tmp_path / "data") as servers:
        result = TensorflowTrainer(
            ray_programs.train_loop,
            train_loop_config={"servers": servers.address},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                name="run", storage_path=str(tmp_path / "results")
            ),
            datasets={"train": data},
        ).fit()
        assert result.metrics["samples"] == 400
        with tsw.connect(servers.address) as cluster:
            model = ray_programs.make_model(
                tsw.train.Worker(0, 1, consistency="bsp", group="later")
            )
            model.build((None, 3))
            report = tsw.ray.restore_checkpoint(result.checkpoint, model)
            assert report["tables"] == ["dense_variables", "ids"]
            assert report["save"] == 2
            assert report["num_rows"] > 300
            kernel = model.layers[-1].get_weights()[0]
            assert np.sum(kernel) == pytest.approx(result.metrics["dense"])

            # The next saves take the place of the one that it refers to.
            for _ in range(2):
                cluster.save("run")
            with pytest.raises(KeyError, match="save 2"):
                tsw.ray.restore_checkpoint(result.checkpoint)
    with pytest.raises(ValueError, match="was not made by"):
        tsw.ray.restore_checkpoint(
            ray.train.Checkpoint.from_directory(str(tmp_path))
        )


def test_trials_of_ray_tune_have_servers_of_their_own(
    machines: Machines, tmp_path: Path
) -> None:
    from ray import tune

    results = tune.Tuner(
        ray_programs.trial,
        param_space={"learning_rate": tune.grid_search([0.0001, 0.1])},
        run_config=tune.RunConfig(
            name="run", storage_path=str(tmp_path), verbose=0
        ),
    ).fit()

    assert not results.errors
    assert [r.metrics["tables"] for r in results] == [2, 2]
    best = results.get_best_result(metric="loss", mode="min")
    assert best.config["learning_rate"] == 0.1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_servers": 0}, ValueError, "`num_servers`"),
        ({"name": "a/b"}, ValueError, "`name`"),
        ({"placement": "wide"}, ValueError, "strict_spread"),
        ({"data_dir": "relative"}, ValueError, "an absolute path"),
        ({"push_log": True}, ValueError, "`push_log`"),
        ({"tls": tsw.Tls(ca="ca.pem")}, ValueError, "`cert` and `key`"),
        (
            {"host": "0.0.0.0"},
            RuntimeError,
            r"(?s)`token_file` .*insecure=True",
        ),
        (
            {"server_flags": {"max_tabels": 1}},
            RuntimeError,
            "(?s)server 0 of 'bad' .*max_tabels",
        ),
        ({"server_flags": {"tls_cert": "a"}}, ValueError, "as 'tls_cert'"),
        (
            {"resources_per_server": {"gold": 1}, "timeout_secs": 2.0},
            TimeoutError,
            r"1 times {'gold': 1} .* within 2 s. It has in all",
        ),
    ],
)
def test_servers_that_cannot_start_are_an_error_that_says_why(
    machines: Machines,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    arguments = {"num_servers": 1, "name": "bad", **options}

    with pytest.raises(error, match=message):
        start(arguments.pop("name"), arguments.pop("num_servers"), **arguments)


def test_a_name_is_for_one_group_of_servers(machines: Machines) -> None:
    with start("twice", 1):
        with pytest.raises(ValueError, match="named 'twice' run"):
            start("twice", 1)
    # And free again.
    start("twice", 1).stop()


def test_detached_servers_are_found_and_stopped_by_others(
    machines: Machines,
) -> None:
    start("detached", 2, detached=True)
    found = tsw.ray.get_servers("detached")
    assert found.num_servers == len(found.addresses()) == 2

    found.stop()

    with pytest.raises(ConnectionError, match="no servers 'detached'"):
        tsw.ray.get_servers("detached")


def test_servers_that_are_not_there_are_named(machines: Machines) -> None:
    with pytest.raises(
        ConnectionError, match=r"no servers 'nobody'.*start_serv"
    ):
        tsw.connect("ray://nobody")


def test_a_process_without_ray_is_told_to_connect_to_it() -> None:
    result = run_python(
        "-c",
        "import tfswitch as tsw\n"
        "try:\n    tsw.connect('ray://name')\n"
        "except RuntimeError as error:\n    print(error)\n",
    )
    assert "call ray.init(address='auto') first" in result.stdout


def test_the_loss_of_the_head_is_said() -> None:
    result = run_python(
        "-c",
        """
import ray
from ray.cluster_utils import Cluster
import tfswitch as tsw
from tests.integration import ray_programs

cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 2, "include_dashboard": False},
)
ray.init(address=cluster.address)
with tsw.ray.start_servers(1, name="head", host="127.0.0.1") as servers:
    workers = tsw.ray.start_workers(
        ray_programs.fail_or_wait, 1, servers=servers, timeout_secs=60.0
    )
    cluster.head_node.kill_gcs_server(check_alive=False)
    workers.wait()
""",
        check=False,
        env=environment(RAY_gcs_rpc_server_reconnect_timeout_s="10"),
    )
    assert "head has not answered for" in result.stderr
    assert result.returncode != 0
