"""SyncReplicasOptimizer with tfswitch's and with TensorFlow's servers."""

import contextlib
import functools
import json
import re
import socket
import threading
import zlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfswitch as tsw
from tests.programs import PythonProgram
from tests.python.worker_threads import (
    Call,
    in_threads,
    running_clients,
    wait_until,
)
from tests.support import examples, free_ports

v1 = tf.compat.v1

# Made one after the other: TensorFlow's name scopes are not thread-safe
# everywhere, and a process has one graph as a rule.
_building = threading.Lock()


@pytest.fixture(scope="module")
def client():
    with running_clients(2) as client:
        yield client


class TableServers:
    """tfswitch's: each worker is a client of its own."""

    def __init__(self, client):
        self._client = client

    def options(self, index):
        return {"cluster": self._client(index)}

    def scope(self, name, index):
        return contextlib.nullcontext()

    def session_args(self, index):
        return {}


class VariableServers:
    """TensorFlow's: some keep the variables, and each worker has one."""

    def __init__(self, num_servers, num_workers):
        self._num_servers = num_servers
        ports = free_ports(num_servers + num_workers)
        hosts = [f"127.0.0.1:{port}" for port in ports]
        cluster = {"ps": hosts[:num_servers], "worker": hosts[num_servers:]}
        self._servers = [
            v1.train.Server(cluster, job_name=job, task_index=index)
            for job in ("ps", "worker")
            for index in range(len(cluster[job]))
        ]

    def options(self, index):
        return {}

    @contextlib.contextmanager
    def scope(self, name, index):
        place = v1.train.replica_device_setter(
            ps_tasks=self._num_servers,
            worker_device=f"/job:worker/task:{index}",
        )
        # Servers keep variables by name, for as long as they live.
        with (
            v1.device(place),
            v1.get_default_graph().container(f"c{zlib.crc32(name.encode())}"),
        ):
            yield

    def session_args(self, index):
        config = v1.ConfigProto(
            device_filters=["/job:ps", f"/job:worker/task:{index}"]
        )
        server = self._servers[self._num_servers + index]
        return {"master": server.target, "config": config}


@pytest.fixture(scope="module")
def variable_servers():
    return VariableServers(2, 5)


@pytest.fixture(scope="module", params=["tables", "variables"])
def servers(request):
    """Both engines."""
    if request.param == "variables":
        return request.getfixturevalue("variable_servers")
    return TableServers(request.getfixturevalue("client"))


@pytest.fixture
def name(request):
    """The optimizer's name, different in each test."""
    return re.sub(r"[^A-Za-z0-9_]", "_", request.node.name)


class Script:
    """A worker's program: a graph, an optimizer, and its loop."""

    def __init__(
        self,
        servers,
        name,
        index,
        num_workers,
        *,
        num_rows=64,
        inner=None,
        aggregate=None,
        model=None,
        weighted=True,
        tables=(),
        dtype=tf.float32,
        container=None,
        **options,
    ):
        self.index = index
        self.is_chief = index == 0
        self.servers = servers
        self.graph = tf.Graph()
        with (
            _building,
            self.graph.as_default(),
            servers.scope(container or name, index),
        ):
            self.ids = v1.placeholder(tf.int64, [None], "ids")
            self.step = v1.train.get_or_create_global_step()
            if model is None:
                self.variable = v1.get_variable(
                    "w",
                    [num_rows],
                    dtype,
                    initializer=v1.zeros_initializer(),
                )
                loss = -tf.reduce_mean(tf.gather(self.variable, self.ids))
            else:
                loss = model(self.ids)
            lookups = [
                (table, self.ids, table.lookup_or_create(self.ids))
                for table in tables
            ]
            for _, _, embeddings in lookups:
                loss -= tf.reduce_mean(embeddings)
            if weighted:
                options["batch_weight"] = tf.size(self.ids)
            elif callable(options.get("batch_weight")):
                options["batch_weight"] = options["batch_weight"](self.ids)
            self.optimizer = tsw.train.SyncReplicasOptimizer(
                inner() if inner else v1.train.GradientDescentOptimizer(1.0),
                num_workers if aggregate is None else aggregate,
                num_workers,
                name=name,
                task_index=index,
                **servers.options(index),
                **options,
            )
            self.train_op = self.optimizer.minimize(
                loss, self.step, table_lookups=lookups
            )
            self.hook = self.optimizer.make_session_run_hook(self.is_chief)

    def session(self, path=None, **kwargs):
        return tsw.train.MonitoredTrainingSession(
            is_chief=self.is_chief,
            checkpoint_dir=str(path) if path and self.is_chief else None,
            hooks=[self.hook],
            log_step_count_steps=None,
            **self.servers.session_args(self.index),
            **kwargs,
        )

    @contextlib.contextmanager
    def training(self, path=None):
        """A session; yields it, and a function that takes a step in it."""
        with self.graph.as_default(), self.session(path) as session:
            yield (
                session,
                lambda batch: session.run(self.train_op, {self.ids: batch}),
            )

    def run(self, batches, path=None):
        """Trains with the batches; returns the hook's last numbers."""
        with self.training(path) as (session, step):
            for batch in batches:
                step(batch)
            self.hook.finish_epoch()
            during = self.hook.stats
            self.values = session.run(
                {v.op.name: v for v in self.graph.get_collection("variables")}
            )
        self.stats = self.hook.stats
        assert self.stats["rounds"] == during["rounds"]
        return self.stats


def batches_of(counts, sizes):
    """Ids that no other batch has, by worker."""
    found, row = [], 0
    for worker, count in enumerate(counts):
        mine = []
        for i in range(count):
            size = sizes[(worker + i) % len(sizes)]
            mine.append(list(range(row, row + size)))
            row += size
        found.append(mine)
    return found, row


def expected_weights(batches, num_rows, epochs=1):
    """The weight of each sample in one process: 1 / samples of its step."""
    weights = np.zeros(num_rows)
    for step in range(max(map(len, batches), default=0)):
        ids = [i for mine in batches if step < len(mine) for i in mine[step]]
        weights[ids] += 1 / len(ids)
    return weights * epochs


def each_runs(function, scripts, *arguments):
    """Calls it at once for all scripts, with what is of each; the results."""
    return in_threads(
        *map(
            lambda *mine: functools.partial(function, *mine),
            scripts,
            *arguments,
        )
    )


def make_scripts(servers, name, count, **kwargs):
    """Makes the scripts of all workers of a job."""
    return [Script(servers, name, i, count, **kwargs) for i in range(count)]


def train(servers, name, batches, **kwargs):
    """Trains with the batches of each worker; returns the scripts."""
    scripts = make_scripts(servers, name, len(batches), **kwargs)
    each_runs(Script.run, scripts, batches)
    return scripts


def train_alone(model, inner, batches, change=lambda pairs: pairs):
    """Returns what one process makes of all batches of each step."""
    with tf.Graph().as_default():
        ids = v1.placeholder(tf.int64, [None])
        optimizer = inner()
        pairs = optimizer.compute_gradients(model(ids))
        train_op = optimizer.apply_gradients(change(pairs))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for step in range(max(map(len, batches))):
                union = [b[step] for b in batches if step < len(b)]
                session.run(train_op, {ids: np.concatenate(union)})
            return session.run({v.op.name: v for _, v in pairs})


_cases = iter(range(1_000_000))


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
@settings(
    max_examples=examples(3),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_sample_counts_once_whatever_workers_have(servers, counts, sizes):
    batches, num_rows = batches_of(counts, sizes)
    name = f"every_sample_{next(_cases)}"
    scripts = train(servers, name, batches, num_rows=max(num_rows, 1))

    wanted = expected_weights(batches, max(num_rows, 1))
    for script in scripts:
        np.testing.assert_allclose(script.values["w"], wanted, atol=1e-6)
        assert script.values["global_step"] == max(counts)
    assert scripts[0].stats["rounds"] == max(counts)
    assert scripts[0].stats["samples"] == num_rows
    assert scripts[0].stats["dropped"] == 0


def _model(ids, is_sparse=True):
    table = v1.get_variable(
        "embedding", initializer=tf.constant(np.linspace(-1, 1, 64), tf.float32)
    )
    if not is_sparse:
        table = table * 1.0
        rows = tf.linalg.matvec(tf.one_hot(ids, 64), table)
    else:
        rows = tf.gather(table, ids)
    kernel = v1.get_variable("kernel", initializer=tf.ones([1, 3]))
    bias = v1.get_variable("bias", initializer=tf.zeros([3]))
    # Ids come in any order and repeatedly: gradients are IndexedSlices.
    hidden = tf.tanh(rows[:, None] @ kernel + bias)
    return tf.reduce_mean(tf.reduce_sum(hidden**2, axis=1))


@pytest.mark.parametrize(
    ("inner", "tolerance"),
    [
        (lambda: v1.train.MomentumOptimizer(0.5, 0.9, use_nesterov=True), 1e-6),
        (lambda: v1.train.AdagradOptimizer(0.5), 1e-6),
        (lambda: v1.train.AdamOptimizer(0.05), 5e-6),
    ],
    ids=["nesterov", "adagrad", "adam"],
)
def test_uneven_workers_equal_one_process(client, name, inner, tolerance):
    is_sparse = not isinstance(inner(), v1.train.MomentumOptimizer)
    random = np.random.default_rng(7)
    batches = [
        [
            random.integers(0, 64, random.integers(1, 9)).tolist()
            for _ in range(n)
        ]
        for n in (5, 0, 8)
    ]

    def model(ids):
        return _model(ids, is_sparse)

    scripts = train(
        TableServers(client), name, batches, inner=inner, model=model
    )

    wanted = train_alone(model, inner, batches)
    for script in scripts:
        for key, value in wanted.items():
            np.testing.assert_allclose(
                script.values[key], value, atol=tolerance
            )


def test_tables_are_trained_in_the_same_steps(client, name):
    tables = [
        tsw.EmbeddingTable(
            name,
            1,
            initializer="zeros",
            optimizer=tsw.optimizers.SGD(1.0),
            consistency="bsp",
            cluster=client(i),
        )
        for i in range(2)
    ]
    batches = [[[1, 2], [3], [4]], [[5, 6]]]
    scripts = [
        Script(TableServers(client), name, i, 2, tables=[tables[i]])
        for i in range(2)
    ]

    each_runs(Script.run, scripts, batches)

    wanted = expected_weights(batches, 64)
    np.testing.assert_allclose(scripts[1].values["w"], wanted, atol=1e-6)
    np.testing.assert_allclose(
        tables[0].lookup(range(64))[:, 0], wanted, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "batches", "wanted"),
    [
        ({"weighted": False}, [[[0, 1, 2]], [[3]]], [1 / 6] * 3 + [1 / 2]),
        (
            {"normalize": "replicas"},
            [[[0, 1, 2], [4, 5]], [[3]]],
            [1 / 6] * 3 + [1 / 2] * 3,
        ),
        ({"normalize": "initial"}, [[[0, 1], [4, 5]], [[2, 3]]], [1 / 4] * 6),
    ],
    ids=["without_weight", "replicas", "initial"],
)
def test_a_step_may_be_divided_by_replicas_or_as_at_first(
    servers, name, options, batches, wanted
):
    scripts = train(servers, name, batches, **options)
    np.testing.assert_allclose(
        scripts[0].values["w"][: len(wanted)], wanted, atol=1e-6
    )


@pytest.mark.parametrize(
    ("servers", "late"),
    [("tables", "drop"), ("variables", "carry")],
    indirect=["servers"],
)
def test_backup_workers_use_or_count_every_gradient(servers, name, late):
    counts = [10, 4, 6]
    batches, num_rows = batches_of(counts, [2])

    scripts = train(servers, name, batches, aggregate=2, late=late)

    stats = scripts[0].stats
    assert stats["contributions"] + stats["dropped"] == sum(counts)
    if late == "carry":
        assert stats["dropped"] == 0
        assert stats["samples"] == num_rows
    else:
        assert stats["carried"] == 0
    # Each step's weights sum to 1.
    np.testing.assert_allclose(
        scripts[0].values["w"].sum(), stats["rounds"], rtol=1e-5
    )
    for script in scripts:
        assert script.values["global_step"] == stats["rounds"]


def test_the_end_of_a_dataset_ends_the_loop_when_all_have_ended(
    servers, name, tmp_path
):
    def program(index, batches):
        graph = tf.Graph()
        with graph.as_default():
            with _building, servers.scope(name, index):
                ids = v1.data.make_one_shot_iterator(
                    tf.data.Dataset.from_tensor_slices(np.array(batches))
                ).get_next()
                weights = v1.get_variable(
                    "w", [8], initializer=v1.zeros_initializer()
                )
                step = v1.train.get_or_create_global_step()
                optimizer = tsw.train.SyncReplicasOptimizer(
                    v1.train.GradientDescentOptimizer(1.0),
                    2,
                    name=name,
                    task_index=index,
                    batch_weight=tf.size(ids),
                    **servers.options(index),
                )
                train_op = optimizer.minimize(
                    -tf.reduce_mean(tf.gather(weights, ids)), step
                )
                hook = optimizer.make_session_run_hook(index == 0)
            with tsw.train.MonitoredTrainingSession(
                is_chief=index == 0,
                checkpoint_dir=str(tmp_path) if index == 0 else None,
                hooks=[hook],
                **servers.session_args(index),
            ) as session:
                while not session.should_stop():
                    session.run(train_op)

    in_threads(
        lambda: program(0, [[0, 1]]),
        lambda: program(1, [[2, 3], [4, 5], [6, 7]]),
    )

    saved = v1.train.load_checkpoint(str(tmp_path))
    np.testing.assert_allclose(
        saved.get_tensor("w"), [0.25] * 4 + [0.5] * 4, atol=1e-6
    )
    assert saved.get_tensor("global_step") == 3


def test_epochs_in_one_session_and_sessions_one_after_the_other(
    servers, name, tmp_path
):
    """Those without a batch are waited for, too."""
    batches, _ = batches_of([0, 3, 1], [2])

    def run(script, mine):
        seen = []
        for _ in range(2):
            with script.training(tmp_path) as (session, step):
                for _ in range(3):
                    script.hook.start_epoch()
                    for batch in mine:
                        step(batch)
                    script.hook.finish_epoch()
                    seen.append(int(session.run(script.step)))
        return seen

    found = each_runs(run, make_scripts(servers, name, 3), batches)

    assert found == [[3, 6, 9, 12, 15, 18]] * 3
    saved = v1.train.load_checkpoint(str(tmp_path))
    np.testing.assert_allclose(
        saved.get_tensor("w"), expected_weights(batches, 64, 6), atol=1e-5
    )
    assert saved.get_tensor("global_step") == 18


def test_variables_that_nobody_trains_are_those_of_the_chief(servers, name):
    def model(ids):
        frozen = v1.get_variable(
            "frozen",
            [3],
            initializer=v1.random_normal_initializer(),
            trainable=False,
        )
        weights = v1.get_variable("w", initializer=tf.zeros([3]))
        return tf.reduce_sum(frozen * weights) + 0.0 * tf.cast(
            tf.reduce_sum(ids), tf.float32
        )

    scripts = train(servers, name, [[[0]], [[0], [0]]], model=model)

    one, other = (script.values for script in scripts)
    np.testing.assert_array_equal(one["frozen"], other["frozen"])
    np.testing.assert_allclose(one["w"], -2.0 * one["frozen"], rtol=1e-6)


def test_a_lost_server_ends_the_script_and_repeats_nothing(name):
    with (
        tsw.Server() as server,
        tsw.Cluster(f"grpc://{server.address}", timeout_secs=3.0) as cluster,
    ):
        script = Script(TableServers(lambda _: cluster), name, 0, 1)
        with (
            pytest.raises(ConnectionError, match="Start the worker again"),
            script.training() as (_, step),
        ):
            step([0])
            server.stop()
            step([1])


def test_a_restored_chief_brings_its_values_and_steps_to_new_servers(
    servers, name, tmp_path
):
    for job, batches in [
        ("1", [[[0]] * 3, [[1]]]),
        ("2", [[[2]], [[3]] * 2]),
    ]:
        scripts = make_scripts(servers, f"{name}_{job}", 2)
        each_runs(Script.run, scripts, batches, [tmp_path, None])

    for script in scripts:
        assert script.values["global_step"] == 5
        np.testing.assert_allclose(
            script.values["w"][:4], [2.5, 0.5, 0.5, 1.5], atol=1e-6
        )


def test_one_that_fails_is_not_waited_for(servers, name):
    scripts = make_scripts(servers, name, 2)
    other = Call(scripts[0].run, [[0]] * 4)

    with (
        pytest.raises(KeyError, match="of the user"),
        scripts[1].training() as (_, step),
    ):
        step([1])
        raise KeyError("of the user")
    other.result()

    np.testing.assert_allclose(
        scripts[0].values["w"][:2], [3.5, 0.5], atol=1e-6
    )


@pytest.mark.parametrize("num_of_other", [3, 1])
def test_a_loop_that_skips_a_bad_batch_loses_no_other(
    servers, name, num_of_other
):
    """Also while the other waits at the end of the epoch."""
    scripts = make_scripts(servers, name, 2)
    other = Call(scripts[0].run, [[0]] * num_of_other)

    script = scripts[1]
    with script.training() as (session, step):
        step([1])
        if num_of_other == 1:
            wait_until(lambda: script.hook.engine.stats()["waiting"] == 1)
        with pytest.raises(tf.errors.InvalidArgumentError):
            step([999])
        step([2])
        step([3])
        script.hook.finish_epoch()
        stats = script.hook.stats
        values = session.run(script.variable)
    other.result()

    wanted = {3: [1.5, 0.5, 0.5, 0.5], 1: [0.5, 0.5, 1.0, 1.0]}[num_of_other]
    np.testing.assert_array_equal(values[:4], wanted)
    assert stats["rounds"] == 3
    assert stats["contributions"] == 3 + num_of_other
    assert stats["dropped"] == 0


def _log_model(ids):
    """The gradient of a negative id is NaN."""
    return tf.reduce_mean(
        v1.get_variable("v", initializer=tf.ones([2]))
        * tf.math.log(tf.cast(ids, tf.float32))
    )


def test_nan_gradients_name_the_variable_and_change_nothing(client, name):
    script = Script(TableServers(client), name, 0, 1, model=_log_model)
    with script.training() as (_, step):
        step([1, 1])
        stored = script.hook.engine._dense._table
        before = np.sort(stored.export_rows()[1])
        with pytest.raises(tf.errors.InvalidArgumentError, match="'v'"):
            step([-1, -1])
        np.testing.assert_array_equal(np.sort(stored.export_rows()[1]), before)


def test_averages_follow_the_steps(servers, name):
    averages = v1.train.ExponentialMovingAverage(0.5)
    graph = tf.Graph()
    with graph.as_default():
        with servers.scope(name, 0):
            v = v1.get_variable("v", initializer=0.0)
            optimizer = tsw.train.SyncReplicasOptimizer(
                v1.train.GradientDescentOptimizer(1.0),
                1,
                variable_averages=averages,
                variables_to_average=[v],
                name=name,
                **servers.options(0),
            )
            train_op = optimizer.minimize(
                -v, v1.train.get_or_create_global_step()
            )
            hook = optimizer.make_session_run_hook(True)
        with tsw.train.MonitoredTrainingSession(
            hooks=[hook], **servers.session_args(0)
        ) as session:
            for _ in range(2):
                session.run(train_op)
            assert session.run([v, averages.average(v)]) == [2.0, 1.25]


def test_sessions_without_hooks_call_them_themselves(servers, name):
    def run(script, batches):
        args = servers.session_args(script.index)
        with script.graph.as_default():
            script.hook.begin()
            creator = v1.train.ChiefSessionCreator(**args)
            if isinstance(servers, VariableServers) and not script.is_chief:
                creator = v1.train.WorkerSessionCreator(**args)
            session = creator.create_session()
            script.hook.after_create_session(session, None)
            for batch in batches:
                session.run(script.train_op, {script.ids: batch})
            script.hook.finish_epoch()
            values = session.run(script.variable)
            script.hook.end(session)
            session.close()
            return values

    scripts = make_scripts(servers, name, 2)
    if isinstance(servers, VariableServers):  # Or it looks every 30 s.
        with scripts[0].graph.as_default():
            v1.train.ChiefSessionCreator(
                **servers.session_args(0)
            ).create_session().close()

    for values in each_runs(run, scripts, [[[0]], [[1], [2]]]):
        np.testing.assert_allclose(values[:3], [0.5, 0.5, 1.0], atol=1e-6)


# --- TensorFlow's parameter servers ------------------------------------------


def _many_kinds(ids):
    """Dense, sparse, sparse on one side, partitioned; float64."""
    rows = [
        v1.get_variable(
            f"rows{i}",
            initializer=tf.constant(np.linspace(-1, 1, 64)[:, None]),
        )
        for i in range(2)
    ]
    with v1.variable_scope(
        "", partitioner=tf.compat.v1.fixed_size_partitioner(3)
    ):
        parts = v1.get_variable(
            "parts", [64, 2], tf.float64, v1.ones_initializer()
        )
    kernel = v1.get_variable("kernel", initializer=tf.ones([1, 3], tf.float64))
    # Workers with small ids have no rows of the second.
    large = tf.boolean_mask(ids, ids >= 32)
    hidden = tf.tanh(tf.gather(rows[0], ids) @ kernel)
    count = tf.cast(tf.size(ids), tf.float64)
    return (
        tf.reduce_sum(hidden**2)
        + tf.reduce_sum(tf.gather(rows[1], large) ** 2)
        + tf.reduce_sum(tf.nn.embedding_lookup(parts, ids) ** 2)
    ) / count


@pytest.mark.parametrize(
    ("inner", "clips"),
    [
        (
            lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
            False,
        ),
        (lambda: v1.train.FtrlOptimizer(0.1), True),
    ],
    ids=["nesterov", "ftrl-clips"],
)
def test_any_optimizer_equals_one_process_in_float64(
    variable_servers, name, inner, clips
):
    def clip(grads_and_vars):
        gradients, variables = zip(*grads_and_vars, strict=True)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.5)
        return zip(clipped, variables, strict=True)

    random = np.random.default_rng(7)
    batches = [
        [
            random.integers(0, 32 + 32 * w, random.integers(1, 9)).tolist()
            for _ in range(n)
        ]
        for w, n in enumerate((5, 8))
    ]
    options = {"post_aggregate": clip} if clips else {}
    scripts = train(
        *(variable_servers, name, batches),
        inner=inner,
        model=_many_kinds,
        **options,
    )

    wanted = train_alone(_many_kinds, inner, batches, *options.values())
    assert len(wanted) == 6
    for key, value in wanted.items():
        np.testing.assert_allclose(
            scripts[0].values[key], value, rtol=0, atol=1e-12, err_msg=key
        )


def test_two_runs_are_bitwise_equal(variable_servers, name):
    batches = [[[3, 1, 3], [2]], [[1], [5, 3]], [[3, 2, 1]]]

    one, other = (
        train(
            *(variable_servers, f"{name}{run}", batches),
            model=_model,
            inner=lambda: v1.train.AdamOptimizer(0.1),
        )[0].values
        for run in range(2)
    )
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key])


def test_rows_are_averaged_over_the_gradients_that_have_them(
    variable_servers, name
):
    batches = [[[3, 1, 5, 5]], [[1, 3, 3, 7]]]
    scripts = train(
        *(variable_servers, name, batches),
        sparse_average="rows",
        weighted=False,
    )
    # The gradient of the mean of each batch: 1 and 3 are in both.
    np.testing.assert_allclose(
        scripts[0].values["w"][[1, 3, 5, 7]], [0.25, 0.375, 0.5, 0.25]
    )


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_variables_of_all_float_types_are_trained(
    variable_servers, name, dtype
):
    batches = [[[0, 1], [4, 5]], [[2, 3]]]
    scripts = train(variable_servers, name, batches, num_rows=8, dtype=dtype)
    np.testing.assert_allclose(
        scripts[0].values["w"].astype(np.float32),
        [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0, 0],
    )


def test_the_session_of_tensorflow_saves_when_all_have_ended(
    variable_servers, name, tmp_path
):
    def run(script, batches):
        with (
            script.graph.as_default(),
            v1.train.MonitoredTrainingSession(
                is_chief=script.is_chief,
                checkpoint_dir=str(tmp_path) if script.is_chief else None,
                hooks=[script.hook],
                **variable_servers.session_args(script.index),
            ) as session,
        ):
            for batch in batches:
                session.run(script.train_op, {script.ids: batch})
            script.hook.finish_epoch()

    scripts = make_scripts(variable_servers, name, 2)
    with (
        scripts[0].graph.as_default(),
        v1.Session(**_target(variable_servers, 0)) as session,
    ):
        session.run(v1.global_variables_initializer())

    each_runs(run, scripts, [[[0]], [[1], [2], [3]]])

    saved = v1.train.load_checkpoint(str(tmp_path))
    np.testing.assert_allclose(
        saved.get_tensor("w")[:4], [0.5, 0.5, 1.0, 1.0], atol=1e-6
    )
    assert saved.get_tensor("global_step") == 3


def _target(servers, index):
    args = servers.session_args(index)
    return {"target": args["master"], "config": args["config"]}


def test_nothing_is_left_staged_after_many_epochs(variable_servers, name):
    counts = [4, 1, 0]
    batches, _ = batches_of(counts, [2])

    def run(script, mine):
        with script.training() as (session, step):
            for _ in range(3):
                for batch in mine:
                    step(batch)
                script.hook.finish_epoch()
            if script.is_chief:
                return session.run(script.hook.engine._clear)
        return None

    left = each_runs(run, make_scripts(variable_servers, name, 3), batches)

    assert left[0] == [0]


def test_a_failed_step_of_the_chief_ends_all_with_the_reason(
    variable_servers, name
):
    def check(grads_and_vars):
        return [
            (tf.debugging.check_numerics(tf.convert_to_tensor(g), "bad"), v)
            for g, v in grads_and_vars
        ]

    scripts = make_scripts(
        *(variable_servers, name, 2), model=_log_model, post_aggregate=check
    )
    calls = [Call(script.run, [[1, 1], [-1, -1]]) for script in scripts]
    for call in calls:
        with pytest.raises(tf.errors.OpError, match="could not be taken: bad"):
            call.result()


def test_what_the_step_lacks_is_told(variable_servers, name):
    def multiply(grads_and_vars):
        factor = v1.get_variable("factor", [], collections=["of_nobody"])
        return [
            (tf.convert_to_tensor(g) * factor, v) for g, v in grads_and_vars
        ]

    script = Script(variable_servers, name, 0, 1, post_aggregate=multiply)
    with pytest.raises(tf.errors.OpError, match=r"not be taken.*factor"):
        script.run([[0]])


@pytest.mark.parametrize(
    ("normalize", "sparse_average"), [("step", "rows"), ("initial", "batch")]
)
def test_a_batch_that_is_masked_away_does_no_harm(
    variable_servers, name, normalize, sparse_average
):
    def model(ids):
        # Two parts, for gradients of rows and of all; id 63 is masked.
        parts = [
            v1.get_variable(n, [64], initializer=v1.zeros_initializer())
            for n in ("w", "u")
        ]
        kept = tf.cast(ids < 63, tf.float32)
        rows = tf.gather(parts[0], ids) + tf.linalg.matvec(
            tf.one_hot(ids, 64), parts[1]
        )
        return -tf.reduce_sum(rows * kept) / tf.reduce_sum(kept)

    scripts = train(
        *(variable_servers, name, [[[0], [1]], [[2], [63]]]),
        model=model,
        normalize=normalize,
        sparse_average=sparse_average,
        weighted=False,
        batch_weight=lambda ids: tf.reduce_sum(tf.cast(ids < 63, tf.int32)),
    )

    of_last = 1.0 if normalize == "step" else 0.5
    np.testing.assert_allclose(
        scripts[0].values["u"][:3], [0.5, of_last, 0.5], atol=1e-6
    )
    # A row that one batch alone has is that one's.
    by_row = (
        [1.0, 1.0, 1.0] if sparse_average == "rows" else [0.5, of_last, 0.5]
    )
    np.testing.assert_allclose(scripts[0].values["w"][:3], by_row, atol=1e-6)
    for key in ("w", "u"):
        assert np.isfinite(scripts[0].values[key]).all()


class PlainServers(VariableServers):
    """Servers whose parameter server has only TensorFlow."""

    def __init__(self, stack):
        self._num_servers = 1
        ports = free_ports(2)
        cluster = {
            job: [f"127.0.0.1:{port}"]
            for job, port in zip(("ps", "worker"), ports, strict=True)
        }
        program = (
            "import tensorflow as tf; "
            f"tf.compat.v1.train.Server({cluster!r}, 'ps', 0).join()"
        )
        stack.enter_context(PythonProgram("-c", program))
        self._servers = [None, v1.train.Server(cluster, "worker", 0)]


def test_a_server_without_tfswitch_is_told_to_import_it(name):
    with contextlib.ExitStack() as stack:
        script = Script(PlainServers(stack), name, 0, 1)
        with pytest.raises(
            RuntimeError, match="import tfswitch in the program"
        ):
            script.run([[0]])


def test_servers_that_are_away_are_named_in_time(name):
    # The port is taken, so no server can be there.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{taken.getsockname()[1]}"
        here = f"127.0.0.1:{free_ports(1)[0]}"
        worker = v1.train.Server(
            {"ps": [away], "worker": [here]}, job_name="worker", task_index=0
        )
        with tf.Graph().as_default():
            with v1.device(
                v1.train.replica_device_setter(
                    ps_tasks=1, worker_device="/job:worker/task:0"
                )
            ):
                v = v1.get_variable("v", initializer=0.0)
                optimizer = tsw.train.SyncReplicasOptimizer(
                    v1.train.GradientDescentOptimizer(1.0),
                    1,
                    name=name,
                    join_secs=0.5,
                )
                optimizer.minimize(-v, v1.train.get_or_create_global_step())
                hook = optimizer.make_session_run_hook(True)
            with pytest.raises(ConnectionError, match="/job:ps/task:0"):
                tsw.train.MonitoredTrainingSession(worker.target, hooks=[hook])


# --- Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aggregate": 3}, "at most `total_num_replicas`"),
        ({"aggregate": 0}, "replicas_to_aggregate=0"),
        ({"normalize": "mean"}, "normalize='mean'"),
        ({"sparse_average": "columns"}, "sparse_average='columns'"),
        ({"sparse_average": "rows"}, 'sparse_average="batch"'),
        ({"late": "never"}, "late='never'"),
        ({"on_evict": "stop"}, "on_evict='stop'"),
        ({"lease_secs": 0}, "lease_secs=0"),
        ({"join_secs": -1.0}, "join_secs=-1.0"),
        ({"wait_secs": "long"}, "wait_secs='long'"),
        ({"post_aggregate": print}, "post_aggregate"),
        ({"variables_to_average": []}, "belong together"),
        ({"inner": lambda: v1.train.FtrlOptimizer(1.0)}, "FtrlOptimizer"),
        (
            {
                "inner": lambda: v1.train.MomentumOptimizer(
                    tf.constant(1.0), 0.9
                )
            },
            "constant learning rate",
        ),
    ],
)
def test_senseless_arguments_are_refused(client, name, arguments, message):
    with pytest.raises(ValueError, match=message):
        Script(TableServers(client), name, 1, 2, **arguments)


def test_a_task_index_beyond_the_workers_is_refused(client, name):
    with pytest.raises(ValueError, match="task_index=2, total_num_replicas=2"):
        Script(TableServers(client), name, 2, 2)


def test_more_gradients_than_known_workers_are_refused(client, monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:1"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="TF_CONFIG has 2 workers, and 4"):
        tsw.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(1.0), 4, cluster=client(0)
        )


def test_the_device_scope_says_which_worker_it_is(client, name):
    with tf.Graph().as_default(), tf.device("/job:worker/task:1"):
        optimizer = tsw.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(1.0), 2, cluster=client(0)
        )
    assert optimizer.task_index == 1


def test_one_of_several_workers_must_say_which_it_is(client):
    # Or all would be worker 0.
    with pytest.raises(ValueError, match="`task_index` is needed"):
        tsw.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(1.0), 2, cluster=client(0)
        )


@pytest.mark.parametrize(
    ("first", "second", "cluster", "message"),
    [
        ("/job:ps/task:0", "/job:ps/task:1", True, "replica_device_setter"),
        ("/job:ps/task:0", None, False, "parameter servers, or none"),
        ("/job:ps/task:0", "/job:other/task:0", False, "servers, or none"),
    ],
)
def test_variables_elsewhere_than_they_can_be_trained_are_refused(
    client, name, first, second, cluster, message
):
    with tf.Graph().as_default():
        with tf.device(first):
            v = v1.get_variable("v", initializer=0.0)
        with tf.device(second):
            w = v1.get_variable("w", initializer=0.0)
        optimizer = tsw.train.SyncReplicasOptimizer(
            v1.train.GradientDescentOptimizer(1.0),
            1,
            name=name,
            cluster=client(0) if cluster else None,
        )
        with pytest.raises(ValueError, match=message):
            optimizer.minimize(-v - w, v1.train.get_or_create_global_step())


def test_several_workers_need_servers(name):
    with (
        running_clients(0) as local,
        pytest.raises(ValueError, match=r"tfswitch\.connect"),
    ):
        Script(TableServers(local), name, 0, 2)


def test_a_chief_that_never_comes_is_named_in_time(servers, name):
    script = Script(servers, name, 1, 2, join_secs=3)
    with (
        script.graph.as_default(),
        pytest.raises(TimeoutError, match=r"has not come|has not initialised"),
    ):
        script.session()


def test_a_worker_of_another_job_is_refused(client, name):
    first = Script(TableServers(client), name, 0, 1)
    first.run([[0]])
    with pytest.raises(ValueError, match=f"{name}/variables"):
        Script(TableServers(client), name, 0, 1, num_rows=32)


def test_the_session_must_have_the_hook(client, name):
    with pytest.raises(ValueError, match="make_session_run_hook"):
        tsw.train.MonitoredTrainingSession(hooks=[])
    script = Script(TableServers(client), name, 0, 1)
    with pytest.raises(ValueError, match="agree on who is chief"):
        tsw.train.MonitoredTrainingSession(is_chief=False, hooks=[script.hook])


def test_what_comes_in_the_wrong_order_is_refused(client, name):
    optimizer = tsw.train.SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(1.0), 1, name=name, cluster=client(0)
    )
    with pytest.raises(ValueError, match="no train operation yet"):
        optimizer.make_session_run_hook(True)
    with pytest.raises(RuntimeError, match="no session yet"):
        Script(TableServers(client), name, 0, 1).hook.finish_epoch()
    with tf.Graph().as_default():
        v = v1.get_variable("v", initializer=0.0)
        with pytest.raises(ValueError, match="global_step"):
            optimizer.minimize(-v)
        with pytest.raises(ValueError, match="no variable has a gradient"):
            optimizer.apply_gradients(
                [(None, v)], v1.train.get_or_create_global_step()
            )
