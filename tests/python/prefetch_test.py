"""Rows that are read ahead: training does not change, to the bit."""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python.worker_threads import join_workers, wait_until
from tests.support import ServerProcess, make_table, running_servers
from tfswitch import _table_summary
from tfswitch._connection._control_calls import call
from tfswitch.data import prefetch_embeddings
from tfswitch.keras import DynamicEmbedding, DynamicEmbeddings

Model = Callable[[], Any]


def counts(cluster: tsw.Cluster) -> dict[str, int]:
    """The counts of all tables together."""
    tables = call(cluster._native, "Prefetches")["tables"]
    keys = ("hits", "misses", "unused", "held")
    return {key: sum(int(table[key]) for table in tables) for key in keys}


def ids_input(name: str | None = None, dtype: str = "int64") -> Any:
    return keras.Input((3,), dtype=dtype, name=name)


def of_one(**options: Any) -> Model:
    def model() -> Any:
        ids = ids_input()
        rows = DynamicEmbedding(4, name="rows", seed=2, **options)(ids)
        return keras.Model(ids, _head([rows]))

    return model


def _head(rows: list[Any]) -> Any:
    flat = [keras.layers.Flatten()(each) for each in rows]
    both = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    return keras.layers.Dense(1)(both)


def of_two_that_share() -> Any:
    """Two layers of one table, one of which sees ids of a lookup layer."""
    table = tsw.EmbeddingTable("both", 4, optimizer="adagrad", seed=1)
    a, b = ids_input("a"), ids_input("b", "string")
    words = keras.layers.StringLookup(vocabulary=[str(i) for i in range(30)])
    rows = [
        DynamicEmbedding(4, table=table)(a),
        DynamicEmbedding(4, table=table)(keras.layers.Reshape((3,))(words(b))),
    ]
    return keras.Model([a, b], _head(rows))


def of_many() -> Any:
    """Features of two tables, and one that does not train, in a model."""
    names = ("a", "b", "c")
    inputs = {name: ids_input(name) for name in names}
    layer = DynamicEmbeddings(
        {
            "a": {"output_dim": 4, "table": "x", "optimizer": "sgd", "seed": 1},
            "b": {"output_dim": 4, "table": "x", "optimizer": "sgd", "seed": 1},
            "c": {"output_dim": 2, "seed": 3, "mask_zero": True},
        },
        name="many",
    )
    inner = keras.Model(inputs, list(layer(inputs).values()))
    return keras.Model(inputs, _head(inner(inputs)))


def of_sampled_classes() -> Any:
    """The ids of the sample are drawn in the step, and not read ahead."""
    table = tsw.EmbeddingTable("items", 4, optimizer="adagrad", seed=1)
    ids, labels = ids_input("a"), ids_input("b")
    users = keras.layers.Flatten()(DynamicEmbedding(4, table=table)(ids))
    users = keras.layers.Dense(4)(users)
    loss = tsw.keras.SampledSoftmax(
        DynamicEmbedding(4, table=table),
        tsw.nn.LogUniformSampler(200),
        num_sampled=5,
    )
    return keras.Model(
        {"a": ids, "b": labels}, _head([loss(users, labels[:, 0])])
    )


def of_a_sequence() -> Any:
    return keras.Sequential(
        [
            keras.layers.Hashing(20),
            DynamicEmbedding(4, name="rows", seed=2, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )


MODELS: dict[str, Model] = {
    "adagrad": of_one(),
    "adam": of_one(optimizer="adam"),
    "ftrl": of_one(optimizer="ftrl"),
    "bfloat16": of_one(storage_dtype="bfloat16", optimizer="sgd"),
    "MinCount": of_one(
        optimizer="sgd",
        admission=tsw.admission.MinCount(3, not_admitted=0.5),
        eviction=tsw.eviction.Ttl(3),
    ),
    "dense": of_one(optimizer="adam", update="dense"),
    "dense with decay": of_one(
        optimizer=tsw.optimizers.AdamW(weight_decay=0.1), update="dense"
    ),
    "two that share": of_two_that_share,
    "many": of_many,
    "sequence": of_a_sequence,
    "wire_dtype": of_one(wire_dtype="bfloat16"),
    "sampled": of_sampled_classes,
    "max_rows": of_one(eviction=tsw.eviction.MaxRows(90, order="lfu")),
    "max_rows on servers": of_one(eviction=tsw.eviction.MaxRows(90)),
}


def batches(model: Any) -> tf.data.Dataset:
    """Batches of frequent and of new ids, for the inputs of a model."""
    random = np.random.default_rng(3)
    ids = random.zipf(1.3, (320, 3)) % 200
    inputs = getattr(model, "input", None) if model.built else None
    if isinstance(inputs, list):
        x: Any = (ids, (ids % 30).astype(str))
    elif isinstance(inputs, dict):
        x = {name: (ids + i) % 150 for i, name in enumerate(inputs)}
    else:
        x = ids
    y = random.normal(size=(320, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(64, seed=1).batch(16)


def train(
    cluster: tsw.Cluster, make: Model, depth: int, is_repeated: bool
) -> list[Any]:
    """Returns all that training gives, and the rows."""
    keras.utils.set_random_seed(1)
    cluster.day = 7  # Not the clock's, which goes on between two trainings.
    model = make()
    model.compile("adagrad", "mse", steps_per_execution=2)
    data = batches(model)
    if is_repeated:
        data = data.repeat()
    data = prefetch_embeddings(data, model, depth)
    steps = 20 if is_repeated else None
    losses: list[float] = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(logs["loss"])
    )
    model.fit(
        data, epochs=2, verbose=0, callbacks=[keep], steps_per_epoch=steps
    )
    evaluated = model.evaluate(data, verbose=0, steps=steps)
    result: list[Any] = [losses, evaluated]
    for name in cluster.tables():
        table = cluster.table(name)
        ids, rows, slots = table._export_with_slots()
        order = np.argsort(ids)
        result += [ids[order], rows[order], slots[order], table.size()]
        if table.statistics is not None:
            result += table.usage(ids[order]).values()
    return result


@pytest.mark.parametrize("name", MODELS)
def test_training_is_equal_to_the_bit(name: str) -> None:
    # Half of the cases on servers, with pushes in flight and `repeat`.
    is_remote = list(MODELS).index(name) % 2
    results = []
    for depth in (0, 2):
        with (
            running_servers(2 * is_remote) as address,
            tsw.connect(
                address, push_depth=is_remote if depth else 0
            ) as cluster,
        ):
            results.append(train(cluster, MODELS[name], depth, is_remote == 1))
            found = counts(cluster)
    for without, with_prefetch in zip(*results, strict=True):
        np.testing.assert_array_equal(without, with_prefetch)
    # The optimizer of the first batches may not be chosen yet.
    # The lookups of samples have no rows that were read ahead.
    # After an eviction, the rows that were read ahead are read again.
    samples = found["hits"] if name == "sampled" else 0
    if name.startswith("max_rows"):
        assert found["hits"] > 5
        return
    assert found["hits"] > 5 * (found["misses"] - samples)


class Subclassed(keras.Model):
    """A model whose way from inputs to layers is not known."""

    def __init__(self) -> None:
        super().__init__(name="sub")
        self.rows = DynamicEmbedding(2, name="rows", optimizer="sgd", seed=1)
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(keras.ops.sum(self.rows(inputs["user"]), axis=1))


def users(count: int = 40) -> tf.data.Dataset:
    ids = np.arange(count * 2).reshape(count, 2)
    return tf.data.Dataset.from_tensor_slices(
        ({"user": ids}, ids[:, :1])
    ).batch(4)


def test_columns_are_named_for_models_that_are_not_functional(
    embedded: tsw.Cluster,
) -> None:
    model = Subclassed()
    model.compile("sgd", "mse")
    data = prefetch_embeddings(users(), model, features={"user": model.rows})

    model.fit(data, verbose=0)

    assert counts(embedded) == {"hits": 10, "misses": 0, "unused": 0, "held": 0}
    stats = model.rows.table.stats()
    assert (stats["prefetch_hits"], stats["pushes_in_flight"]) == (10, 0)
    text = _table_summary.describe(model.rows.table, 10)
    assert "prefetch    10 hits, " in text


def test_a_lookup_of_other_ids_reads_its_own_rows(
    embedded: tsw.Cluster,
) -> None:
    table = make_table(optimizer=tsw.optimizers.SGD(1.0))
    layer = DynamicEmbedding(2, table=table)
    ids = tf.data.Dataset.from_tensor_slices(np.arange(40)).batch(4)
    # The order changes after the rows were read.
    data = prefetch_embeddings(ids, layer, 4).shuffle(5, seed=1)

    for batch in data:
        table.push(batch, -tf.ones([4, 2]))
        rows = layer(batch, training=False).numpy()
        np.testing.assert_array_equal(rows, 1)

    assert counts(embedded)["hits"] > 0


def test_other_writes_of_the_program_are_seen(embedded: tsw.Cluster) -> None:
    table = make_table()
    layer = DynamicEmbedding(2, table=table)
    ids = tf.data.Dataset.from_tensors([1, 2]).repeat(6).batch(1)
    values = iter(range(1, 7))

    for batch in prefetch_embeddings(ids, layer, 2):
        value = next(values)
        table.assign([1, 2], np.full((2, 2), value))
        np.testing.assert_array_equal(layer(batch), np.full((1, 2, 2), value))


@pytest.mark.parametrize("push_depth", [0, 1])
def test_pushes_of_another_connection_are_seen(push_depth: int) -> None:
    with ServerProcess() as server:
        address = f"grpc://{server.address}"
        with (
            tsw.connect(address) as reads,
            tsw.connect(
                address, timeout_secs=50, push_depth=push_depth
            ) as writes,
        ):
            layer = DynamicEmbedding(2, table=make_table(cluster=reads))
            table = make_table(cluster=writes)
            ids = tf.data.Dataset.from_tensors([1, 2]).repeat(20).batch(1)
            data = prefetch_embeddings(ids, layer, 2)
            for step, batch in enumerate(data):
                rows = layer(batch, training=False)
                np.testing.assert_array_equal(rows, np.full((1, 2, 2), step))
                table.push(batch[0], -tf.ones([2, 2]))


def train_with_another_worker(
    own: tsw.Cluster, other: tsw.Cluster, depth: int
) -> list[Any]:
    """Trains by bsp; another worker pushes to the rows of the next batches."""
    workers = join_workers([own, other].__getitem__, 2, consistency="bsp")
    tables = [
        make_table(cluster=each, consistency="bsp", initializer="ones")
        for each in (own, other)
    ]
    layer = DynamicEmbedding(2, table=tables[0])

    @tf.function(reduce_retracing=True)
    def step(batch: Any) -> Any:
        rows = layer(batch, training=True)
        tables[0].push(batch[0], tf.ones([3, 2]))
        return rows

    def push_others() -> None:
        for i in range(40):
            tables[1].push([i % 7], [[i + 1, -i]])
            workers[1].end_step()

    ids = np.arange(60).reshape(20, 3) // 2 % 7
    data = tf.data.Dataset.from_tensor_slices(ids).batch(1)
    thread = threading.Thread(target=push_others)
    thread.start()
    rows = []
    for batch in prefetch_embeddings(data, layer, depth):
        if depth and not rows:
            wait_until(lambda: tables[1].stats()["num_pulls"] > 0)
        # The other worker's push of this round changes rows that were read.
        workers[0].end_step()
        rows.append(step(batch).numpy())
        workers[0].end_step()
    thread.join()
    return [*rows, tables[0].lookup(range(8)).numpy()]


def test_rounds_of_all_workers_are_seen() -> None:
    results = []
    for depth in (0, 2):
        with ServerProcess() as server:
            port = server.address.rpartition(":")[2]
            with (
                # By two addresses, so that they are not known to be the same.
                tsw.connect(f"grpc://localhost:{port}") as other,
                tsw.connect(f"grpc://127.0.0.1:{port}", push_depth=1) as own,
            ):
                results.append(train_with_another_worker(own, other, depth))
                found = counts(own)
    assert found["hits"] == 20
    for without, with_prefetch in zip(*results, strict=True):
        np.testing.assert_array_equal(without, with_prefetch)


def test_rows_that_another_connection_used_are_made_before_a_push() -> None:
    decays = tsw.optimizers.AdamW(weight_decay=0.1)
    options = {"optimizer": decays, "update": "dense", "initializer": "ones"}
    rows = []
    for depth in (0, 1):
        with ServerProcess() as server:
            address = f"grpc://{server.address}"
            with (
                tsw.connect(address) as one,
                tsw.connect(address, timeout_secs=50) as other,
            ):
                table = make_table(cluster=one, **options)
                pushes = make_table(cluster=other, **options)
                push = tf.function(
                    functools.partial(pushes.push, [6], [[1.0, 1.0]])
                )
                push()
                layer = DynamicEmbedding(2, table=table)
                ids = tf.data.Dataset.from_tensors([5]).batch(1)
                for batch in prefetch_embeddings(ids, layer, depth):
                    layer(batch, training=True)
                push()
                rows.append(table.lookup([5, 6]).numpy())
    np.testing.assert_array_equal(*rows)
    assert rows[0][0, 0] < 1


def test_a_table_made_again_is_not_read_as_the_former_one(
    embedded: tsw.Cluster,
) -> None:
    ids = tf.data.Dataset.from_tensor_slices([1, 2] * 4).batch(1)
    for optimizer, update in (("adagrad", "sparse"), ("adam", "dense")):
        table = make_table(optimizer=optimizer, update=update)
        layer = DynamicEmbedding(2, table=table)
        table.push([1, 2], tf.ones([2, 2]))
        for batch in prefetch_embeddings(ids, layer, 1):
            rows = layer(batch, training=True)
            np.testing.assert_array_equal(rows, table.lookup(batch))
            table.push(batch, tf.ones([1, 2]))  # Adam moves both rows.
        del table, layer, batch, rows
        gc.collect()


def test_evaluation_makes_no_row_and_an_early_end_leaves_nothing(
    cluster: tsw.Cluster,
) -> None:
    model = of_one(optimizer="sgd")()
    model.compile("sgd", "mse")
    data = prefetch_embeddings(batches(model), model, 3)
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    assert cluster.table("rows").size() == 0

    def stop(batch: int, logs: Any) -> None:
        if batch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(
            data,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
        )
    assert counts(cluster)["held"] <= 3 + 2
    del data
    gc.collect()
    assert counts(cluster)["held"] == 0


@pytest.mark.parametrize("push_depth", [0, 1])
def test_a_lost_server_is_the_error_of_a_step(push_depth: int) -> None:
    with ServerProcess() as server:
        cluster = tsw.connect(
            f"grpc://{server.address}", timeout_secs=0.5, push_depth=push_depth
        )
        layer = DynamicEmbedding(2, table=make_table(cluster=cluster))
        ids = tf.data.Dataset.from_tensor_slices(np.arange(400)).batch(2)
        steps = 0
        with pytest.raises(tf.errors.OpError, match="shard 0"):
            for batch in prefetch_embeddings(ids, layer, 2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(batch, training=True))
                layer.apply_gradients(tape.gradient(loss, layer.weights))
                steps += 1
                if steps == 5:
                    server.kill()
        assert 5 <= steps <= 9
        # No later test may get the error of a push that was still in flight.
        with contextlib.suppress(OSError):
            cluster.flush()


def scalars() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(np.arange(4))


def after(layer: Any) -> Any:
    ids = ids_input()
    return keras.Model(ids, DynamicEmbedding(2)(layer(ids)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (np.arange(4), of_one()()), "a tf.data.Dataset. Received"),
        (lambda: (scalars().batch(2), of_one()(), 65), "0 to 64.*depth=65"),
        (lambda: (scalars(), of_one()()), "no batches"),
        (
            lambda: (
                scalars().batch(2),
                keras.Sequential([keras.layers.Dense(1)]),
            ),
            "has no DynamicEmbedding",
        ),
        (lambda: (users(), Subclassed()), "'sub' is not functional.*features"),
        (
            lambda: (
                scalars().batch(2),
                after(keras.layers.Dropout(0.5, name="d")),
            ),
            "layer 'd', which makes the ids of .* draws random numbers",
        ),
        (
            lambda: (
                scalars().batch(2),
                after(keras.layers.Dense(3, name="d")),
            ),
            "layer 'd'.* has variables",
        ),
        (lambda: (scalars().batch(2), "model"), "a Keras model, or"),
    ],
)
def test_what_cannot_work_is_named(
    embedded: tsw.Cluster, arguments: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prefetch_embeddings(*arguments())


def test_unknown_columns_and_layers_are_named(embedded: tsw.Cluster) -> None:
    model = Subclassed()
    for features, message in [
        ({"usr": model.rows}, r"column 'usr'.* \['user'\]"),
        ({"user": model.out}, "a DynamicEmbedding"),
    ]:
        with pytest.raises(ValueError, match=message):
            prefetch_embeddings(users(), model, features=features)


def test_several_replicas_are_refused(
    embedded: tsw.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.distribute.Strategy, "num_replicas_in_sync", 2)

    with pytest.raises(ValueError, match="several replicas"):
        prefetch_embeddings(scalars().batch(2), of_one()())


def test_step_shares_measure_the_parts_of_steps(
    embedded: tsw.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    model = of_one()()
    model.compile("adagrad", "mse")
    data = batches(model)

    shares = tsw.data.step_shares(model, data, steps=10)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shares)
    assert model.optimizer.iterations == 11
    assert min(shares.values()) > 0
    with pytest.raises(ValueError, match="has 20 batches, and steps=20 needs"):
        tsw.data.step_shares(model, data, steps=20)
