"""tsw.data.WorkQueue: items for all workers, each sample once an epoch."""

import contextlib
import random
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python.worker_threads import (
    Call,
    in_threads,
    join_workers,
    leave_group,
    running_clients,
    wait_for_stderr,
    wait_until,
)
from tfswitch.keras._backend import keras

Worker = tsw.train.Worker
WorkItemLost = tsw.data.WorkItemLost
WorkQueue = tsw.data.WorkQueue

SUM = tsw.train.Consistency.bsp(reduction="sum")

FILES = ["a", "b", "c", "d", "e"]
SAMPLES = 10  # In each.


def make_queue(worker, items=("a", "b", "c"), **kwargs):
    return WorkQueue(items, worker=worker, **kwargs)


def make_counts(cluster, consistency=SUM):
    """A table that counts how often each sample has been trained."""
    return tsw.EmbeddingTable(
        "counts",
        1,
        initializer="zeros",
        optimizer=tsw.optimizers.SGD(1.0),
        consistency=consistency,
        cluster=cluster,
    )


def id_of(value, sample):
    return 1000 * FILES.index(value) + sample


def counts_of(table, items=FILES):
    """How often each sample of each item has been trained."""
    ids = [[id_of(value, i) for i in range(SAMPLES)] for value in items]
    return -table.lookup(ids).numpy()[..., 0]


def train(queue, table, draw, before_step=lambda: None):
    """Trains what this worker gets of all epochs, in steps of some samples."""
    for epoch in queue.epochs():
        for item in epoch:
            while item.offset < SAMPLES and not item.is_lost:
                before_step()
                begin = item.offset
                end = min(SAMPLES, begin + draw.randint(1, 4))
                with contextlib.suppress(WorkItemLost):
                    item.advance(end - begin)
                    ids = [id_of(item.value, i) for i in range(begin, end)]
                    table.push(ids, np.ones((len(ids), 1)))
                    queue.worker.end_step(weight=end - begin)


# --- Arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"items": []}, r"'train': `items` must not be empty"),
        ({"items": "abc"}, "items='abc'"),
        ({"items": 3}, "items=3"),
        ({"items": ["a", 3]}, r"items\[1\]=3"),
        ({"items": [b"a"]}, r"items\[0\]=b'a'"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.0}, "epochs=1.0"),
        ({"epochs": True}, "epochs=True"),
        ({"name": ""}, "name=''"),
        ({"name": None}, "name=None"),
        ({"worker": None}, "worker=None"),
        ({"shuffle": "yes"}, "shuffle='yes'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"timeout_secs": 0}, "timeout_secs=0"),
    ],
)
def test_bad_arguments_are_named(local, arguments, message):
    worker = Worker(0, 1, cluster=local(0))

    with pytest.raises(ValueError, match=message):
        WorkQueue(**{"items": ["a"], "worker": worker, **arguments})


def test_text_that_is_no_unicode_is_refused(local):
    worker = Worker(0, 1, cluster=local(0))

    with pytest.raises(ValueError, match="valid Unicode"):
        make_queue(worker, ["\udc80"])


def test_a_queue_that_is_there_with_other_settings_is_refused(client):
    one, two = join_workers(client, 2)
    make_queue(one, epochs=2)
    make_queue(two, epochs=2)

    with pytest.raises(
        ValueError, match=r"'train' of .*shuffle: false here, true asked.*name"
    ):
        make_queue(two, epochs=2, shuffle=True)
    make_queue(two, ["x"], name="other")


@pytest.mark.parametrize("count", [-1, 0.5, "1", True, None])
def test_an_item_advances_by_a_count(local, count):
    queue = make_queue(Worker(0, 1, cluster=local(0)))
    item = queue.take()

    with pytest.raises(ValueError, match=r"item 0 \('a'\).*num_samples="):
        item.advance(count)

    item.advance(np.int64(2))
    assert item.offset == 2


# --- Items -------------------------------------------------------------------


def test_a_worker_has_one_item_until_it_is_finished(client):
    worker = Worker(0, 1, consistency="bsp", cluster=client(0))
    queue = make_queue(worker)
    item = queue.take()

    assert (item.epoch, item.index, item.value, item.offset) == (0, 0, "a", 0)
    item.advance(4)
    assert queue.take() is item
    with pytest.raises(RuntimeError, match="end the step first"):
        item.finish()
    worker.end_step()
    item.finish()
    item.finish()

    assert item.is_finished
    assert not item.is_lost
    with pytest.raises(RuntimeError, match="finished and cannot be advanced"):
        item.advance(1)
    assert queue.take().value == "b"
    assert queue.stats() == {
        "epoch": 0,
        "epochs": 1,
        "items": 3,
        "finished": 1,
        "leased": 1,
        "returned": 0,
        "reissued": 0,
    }


def test_an_item_of_one_that_was_given_up_is_lost(client, capfd):
    worker = Worker(0, 1, consistency=SUM, cluster=client(0))
    queue = make_queue(worker)
    table = make_counts(client(0))
    item = queue.take()
    item.advance(3)
    table.push([1], [[1.0]])
    give_up(client(1), worker)

    worker.end_step()  # It does not count.

    wait_for_stderr(capfd, "joining again")
    assert table.lookup([1]).numpy() == 0.0
    assert item.is_lost
    for call in (lambda: item.advance(1), item.finish):
        with pytest.raises(WorkItemLost, match=r"item 0 \('a'\).*take another"):
            call()
    again = queue.take()
    assert (again.value, again.offset) == ("a", 0)
    assert item.is_lost  # That it is here again changes nothing.
    again.advance(1)


def test_a_worker_that_has_left_comes_back_for_an_item(client):
    worker = Worker(0, 1, cluster=client(0))
    queue = make_queue(worker)
    item = queue.take()
    worker.leave()

    assert item.is_lost
    assert queue.take().value == "a"


def give_up(cluster, worker):
    """Has the group forget a worker, which does not know."""
    Worker(
        worker.worker_id,
        worker.num_workers,
        consistency=worker.consistency,
        cluster=cluster,
    ).leave()


def test_a_queue_of_a_worker_that_is_over_says_so(local):
    queue = make_queue(Worker(0, 1, cluster=local(0)))
    item = queue.take()
    worker = Worker(0, 1, cluster=local(0))

    for call in (queue.take, queue.stats, lambda: item.advance(1)):
        with pytest.raises(RuntimeError, match="another Worker"):
            call()
    assert make_queue(worker).take().value == "a"


def test_a_server_that_was_started_again_knows_no_queue():
    with (
        tsw.Server() as server,
        tsw.Cluster(f"grpc://{server.address}", timeout_secs=20.0) as cluster,
    ):
        address = server.address
        queue = make_queue(Worker(0, 1, cluster=cluster))
        server.stop()
        with tsw.Server(address):
            for call in (
                lambda: next(queue.epochs()),
                queue.stats,
                queue.finish_epoch,
                queue.take,
            ):
                with pytest.raises(
                    RuntimeError, match=r"no work queue 'train'.*restore"
                ):
                    call()
            cluster.close()  # While there is a server to hear it.


# --- Epochs ------------------------------------------------------------------


def test_one_worker_gets_everything_in_each_epoch(client):
    worker = Worker(0, 1, cluster=client(0))
    queue = make_queue(worker, FILES, epochs=3, shuffle=True, seed=4)

    orders = [[item.value for item in epoch] for epoch in queue.epochs()]

    assert [sorted(order) for order in orders] == [FILES] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert list(queue.epochs()) == []
    assert queue.finish_epoch()
    assert queue.take() is None
    # One that is started again late gets nothing, and hears of that.
    with pytest.warns(UserWarning, match=r"'train' .*give it another name"):
        late = make_queue(worker, FILES, epochs=3, shuffle=True, seed=4)
    assert list(late.epochs()) == []


def test_an_epoch_has_to_be_gone_through(local):
    queue = make_queue(Worker(0, 1, cluster=local(0)), epochs=2)

    with pytest.raises(RuntimeError, match="epoch 0 of work queue 'train'"):
        for _ in queue.epochs():
            pass


def test_an_end_of_epoch_that_takes_too_long_names_who_is_missing(client):
    one, two = join_workers(client, 2)
    queue = make_queue(one, ["a"], timeout_secs=0.05)
    make_queue(two, ["a"]).take()

    with pytest.raises(
        TimeoutError, match=r"barrier 'work queue 'train'' waits for worker 1"
    ):
        queue.finish_epoch()


# --- Checkpoints -------------------------------------------------------------


def test_a_restored_queue_goes_on_in_the_midst_of_an_epoch(client, tmp_path):
    workers = join_workers(client, 2, consistency=SUM)
    table = make_counts(client(0))
    queues = [make_queue(w, FILES, epochs=2, seed=1) for w in workers]
    tables = [make_counts(client(i)) for i in range(2)]

    def step(number, item, samples):
        begin = item.offset
        item.advance(samples)
        ids = [id_of(item.value, i) for i in range(begin, begin + samples)]
        tables[number].push(ids, np.ones((samples, 1)))
        workers[number].end_step(weight=samples)

    items = [queue.take() for queue in queues]
    in_threads(*(lambda n=n: step(n, items[n], 4) for n in range(2)))
    # One has arrived at the next step, and nothing of that is applied yet.
    early = Call(step, 1, items[1], 5)
    wait_until(lambda: sum(workers[0].stats()["workers"]["staleness"]) == 3)
    client(0).save(tmp_path / "checkpoint")
    saved = counts_of(table).sum()
    step(0, items[0], 1)
    early.result()
    for worker in workers:
        worker.leave()

    with running_clients(2) as other:
        other(0).restore(tmp_path / "checkpoint")
        worker = Worker(0, 1, consistency=SUM, cluster=other(0))
        with pytest.raises(ValueError, match=r"checkpoint: epochs: 2 here, 1"):
            make_queue(worker, FILES, epochs=1, seed=1)
        queue = make_queue(worker, FILES, epochs=2, seed=1)
        assert saved == 8.0
        assert [queue.take().offset, queue.stats()["returned"]] == [4, 1]
        restored = make_counts(other(0))
        train(queue, restored, random.Random(0))
        np.testing.assert_array_equal(counts_of(restored), 2.0)


# --- Datasets for fit --------------------------------------------------------


def read(value, offset):
    """Batches of at most 4 samples: ids and targets."""
    for begin in range(offset, SAMPLES, 4):
        end = min(SAMPLES, begin + 4)
        ids = [[id_of(value, i)] for i in range(begin, end)]
        yield np.array(ids, np.int64), np.zeros((end - begin, 1), np.float32)


SIGNATURE = (
    tf.TensorSpec((None, 1), tf.int64),
    tf.TensorSpec((None, 1), tf.float32),
)


class Count(keras.callbacks.Callback):
    """Records what a worker has trained, and its queue's epoch at the ends."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue
        self.epochs = []
        self.iterations = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.queue.stats()["epoch"])
        self.iterations.append(int(self.model.optimizer.iterations.numpy()))


def make_model(worker):
    # The loss's gradient is 1 for each sample's row.
    table = make_counts(worker.cluster, worker.consistency)
    ids = keras.Input((1,), dtype="int64")
    rows = keras.layers.Flatten()(
        tsw.keras.DynamicEmbedding(1, table=table)(ids)
    )
    dense = keras.layers.Dense(1)(keras.layers.Rescaling(0.0)(rows))
    model = keras.Model(ids, keras.layers.Add()([rows, dense]))
    model.compile(
        tsw.keras.ParameterServerOptimizer(
            tsw.optimizers.SGD(1.0),
            consistency=worker.consistency,
            worker=worker,
        ),
        lambda _, y: y * tf.cast(tf.shape(y)[0], tf.float32),
    )
    return model


def fit_epoch(model, epoch, *callbacks):
    model.fit(
        epoch.dataset(read, SIGNATURE),
        initial_epoch=epoch.number,
        epochs=epoch.number + 1,
        callbacks=[tsw.keras.SyncEpochs(), *callbacks],
        verbose=0,
    )


def fit(queue):
    model = make_model(queue.worker)
    count = Count(queue)
    for epoch in queue.epochs():
        fit_epoch(model, epoch, count)
    return count


def test_fit_trains_every_sample_once_an_epoch(client):
    workers = join_workers(client, 2, consistency=SUM)
    queues = [make_queue(w, FILES, epochs=2) for w in workers]

    ends = in_threads(*(lambda n=n: fit(queues[n]) for n in range(2)))

    assert [each.epochs for each in ends] == [[1, 2]] * 2
    np.testing.assert_allclose(
        counts_of(make_counts(client(0))), 2.0, rtol=1e-5
    )


@pytest.mark.skipif(
    keras.__version__.startswith("2."), reason="It refuses empty epochs."
)
def test_fit_takes_an_epoch_without_a_batch(local):
    """There are two workers and one file."""
    workers = join_workers(local, 2, consistency=SUM)
    queues = [make_queue(w, ["a"], epochs=3) for w in workers]

    ends = in_threads(*(lambda n=n: fit(queues[n]) for n in range(2)))

    assert [each.epochs for each in ends] == [[1, 2, 3]] * 2
    np.testing.assert_allclose(
        counts_of(make_counts(local(0)), ["a"]), 3.0, rtol=1e-5
    )
    # Schedules go on in one that has had no batch. (The file has 3.)
    assert [each.iterations for each in ends] == [[3, 6, 9]] * 2


@pytest.mark.parametrize("consistency", ["asp", SUM], ids=["asp", "bsp"])
def test_fit_stays_in_the_group_between_epochs(local, consistency):
    """One that comes back would wait for those who are given up once more."""
    worker, dead = join_workers(local, 2, consistency=consistency)
    leave_group(dead)  # The lease as if it had ended.
    queue = make_queue(worker, ["a"], epochs=3)
    model = make_model(worker)
    actives = []

    def train_all():
        for epoch in queue.epochs():
            fit_epoch(model, epoch)
            actives.append(worker.stats()["workers"]["active"])

    Call(train_all).result()

    assert actives == [1, 1, 0]
    assert worker.stats()["workers"]["rejoined"] == 0


def test_a_loop_over_epochs_that_is_left_early_leaves_the_group(local):
    worker = Worker(0, 1, consistency=SUM, cluster=local(0))
    model = make_model(worker)
    for epoch in make_queue(worker, ["a"], epochs=3).epochs():
        fit_epoch(model, epoch)
        break

    assert worker.stats()["workers"]["active"] == 0


def test_a_dataset_reads_nothing_ahead(local):
    """A batch is advanced over when it is asked for, not before."""
    worker = Worker(0, 1, consistency="bsp", cluster=local(0))
    queue = make_queue(worker, ["a"])
    for number, (ids, _) in enumerate(
        next(queue.epochs()).dataset(read, SIGNATURE)
    ):
        assert queue.take().offset == min(4 * (number + 1), SAMPLES)
        worker.end_step(weight=len(ids))
    assert number == 2
    assert queue.stats()["epoch"] == 1


def test_a_step_that_was_skipped_does_not_stop_a_dataset(local):
    """As loss scaling skips one, at the end of an item."""
    worker = Worker(0, 1, consistency="bsp", cluster=local(0))
    queue = make_queue(worker, ["a", "b"])

    num_batches = sum(1 for _ in next(queue.epochs()).dataset(read, SIGNATURE))

    assert num_batches == 6
    assert queue.stats()["epoch"] == 1


def test_a_dataset_goes_on_when_an_item_is_lost(local):
    worker = Worker(0, 1, consistency=SUM, cluster=local(0))
    queue = make_queue(worker, ["a"])
    seen = []
    for number, (ids, _) in enumerate(
        next(queue.epochs()).dataset(read, SIGNATURE)
    ):
        seen.append(ids.numpy()[:, 0].tolist())
        if number == 1:
            give_up(local(1), worker)
        worker.end_step(weight=len(ids))
    # The second step did not count, and is trained once more.
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_batch_that_was_not_trained_comes_again(local, is_made_anew):
    """After an error in a step, or Ctrl-C."""
    worker = Worker(0, 1, consistency="bsp", cluster=local(0))
    queue = make_queue(worker, ["a"])
    seen = []
    for count in (2, 99):
        for number, (ids, _) in enumerate(
            next(queue.epochs()).dataset(read, SIGNATURE), 1
        ):
            seen.append(ids.numpy()[:, 0].tolist())
            if number == count:
                break
            worker.end_step(weight=len(ids))
        if is_made_anew and count == 2:
            queue = make_queue(worker, ["a"])

    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("consistency", [SUM, "asp"], ids=["bsp", "asp"])
def test_a_batch_that_was_pushed_does_not_come_again(local, consistency):
    """It counts with the next end of a step."""
    worker = Worker(0, 1, consistency=consistency, cluster=local(0))
    table = make_counts(local(0), consistency)
    queue = make_queue(worker, ["a"])
    for ids, _ in next(queue.epochs()).dataset(read, SIGNATURE):
        table.push(ids, np.ones((len(ids), 1, 1)))
        break
    for ids, _ in next(queue.epochs()).dataset(read, SIGNATURE):
        table.push(ids, np.ones((len(ids), 1, 1)))
        worker.end_step(weight=len(ids))

    np.testing.assert_array_equal(counts_of(table, ["a"]), 1.0)


def test_an_epoch_is_gone_through_once(local):
    """Keras would have a second one in the same `fit` be as long as this."""
    queue = make_queue(Worker(0, 1, cluster=local(0)), ["a"], epochs=2)
    epoch = next(queue.epochs())
    dataset = epoch.dataset(read, SIGNATURE)
    for ids, _ in dataset:
        queue.worker.end_step(weight=len(ids))

    with pytest.raises(tf.errors.OpError, match="one call for each epoch"):
        list(dataset)
    with pytest.raises(RuntimeError, match="is over, and can be gone through"):
        list(epoch)


def test_a_batch_has_samples(local):
    queue = make_queue(Worker(0, 1, cluster=local(0)), ["a"])
    dataset = next(queue.epochs()).dataset(
        lambda value, offset: [np.float32(1.0)], tf.TensorSpec((), tf.float32)
    )

    with pytest.raises(tf.errors.InvalidArgumentError, match="dimension of"):
        list(dataset)


# --- Epochs of own data ------------------------------------------------------


def test_epochs_of_own_data_end_together(client):
    workers = join_workers(client, 3, consistency=SUM)
    num_batches = [4, 0, 7]
    ends = [0]
    lock = threading.Lock()

    def run(number):
        table = make_counts(client(number))
        for epoch in tsw.train.epochs(3, workers[number]):
            # Nobody begins it before all have ended the one before.
            assert ends[0] >= 3 * epoch
            for _ in range(num_batches[number]):
                table.push([number], [[1.0]])
                workers[number].end_step()
            with lock:
                ends[0] += 1
        return (-table.lookup([0, 1, 2]).numpy()[:, 0]).tolist()

    results = in_threads(*(lambda n=n: run(n) for n in range(3)))

    assert results == [[12.0, 0.0, 21.0]] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None), "num_epochs=0"),
        ((1, None), "worker=None"),
        ((1.5, None), "num_epochs=1.5"),
    ],
)
def test_bad_arguments_of_epochs_are_named_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.train.epochs(*arguments)
