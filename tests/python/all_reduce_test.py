"""all_reduce over servers; uneven_batches and weighted_all_reduce.

These have a collective among threads here, and in
tests/integration/all_reduce_test.py the real one.
"""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfswitch as tsw
from tests.python.worker_threads import (
    HANG_SECS,
    in_threads,
    join_workers,
    running_clients,
)
from tfswitch.train._exchange import Exchange

uneven_batches = tsw.train.uneven_batches
weighted_all_reduce = tsw.train.weighted_all_reduce


class Collective:
    """Sums over threads, each of which calls it as often as the others."""

    def __init__(self, num_workers):
        self._num_workers = num_workers
        self._given = {}
        self._barrier = threading.Barrier(num_workers, timeout=HANG_SECS)
        self.calls = 0

    def of(self, worker):
        def sum_over_workers(values):
            self._given[worker] = values
            self._barrier.wait()
            self.calls += worker == 0
            given = [self._given[i] for i in range(self._num_workers)]
            sums = [self._sum(parts) for parts in zip(*given, strict=True)]
            self._barrier.wait()
            return sums

        return sum_over_workers

    @staticmethod
    def _sum(parts):
        if not isinstance(parts[0], tf.IndexedSlices):
            return tf.add_n(list(parts))
        return tf.IndexedSlices(
            tf.concat([p.values for p in parts], 0),
            tf.concat([p.indices for p in parts], 0),
            parts[0].dense_shape,
        )


# --- uneven_batches ---------------------------------------------------------


def take(count, batches):
    return [batch for batch, _ in zip(batches, range(count), strict=False)]


def test_empty_batches_follow_the_data_without_end():
    batches = [np.ones((2, 3), np.int64), np.ones((1, 3), np.int64)]

    taken = take(5, uneven_batches(batches))

    assert [len(batch) for batch in taken] == [2, 1, 0, 0, 0]
    for empty in taken[2:]:
        assert empty.shape == (0, 3)
        assert empty.dtype == np.int64


def test_structures_stay():
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"ids": np.ones((3, 4), np.int64)}, np.ones(3, np.float32))
    ).batch(2)

    *_, (features, labels) = take(3, uneven_batches(dataset))

    assert features["ids"].shape == (0, 4)
    assert features["ids"].dtype == tf.int64
    assert labels.shape == (0,)


def test_ragged_and_sparse_batches_lose_their_rows():
    ragged = tf.ragged.constant([[1, 2], [3]])
    sparse = tf.sparse.from_dense([[1, 0], [2, 3]])

    _, empty = take(2, uneven_batches([(ragged, sparse)]))

    assert empty[0].nrows() == 0
    assert empty[1].dense_shape.numpy().tolist() == [0, 2]
    assert empty[1].values.shape == (0,)


@pytest.mark.parametrize(
    "like",
    [
        np.ones((5, 3), np.float32),
        tf.TensorSpec([None, 3], tf.float32),
        tf.TensorSpec([7, 3], tf.float32),
    ],
    ids=["batch", "spec", "sized spec"],
)
def test_a_worker_without_data_is_told_what_it_looks_like(like):
    (empty,) = take(1, uneven_batches([], like=like))

    assert empty.shape == (0, 3)
    assert empty.dtype == like.dtype


def test_an_empty_dataset_tells_it_itself():
    dataset = tf.data.Dataset.from_tensor_slices(np.ones((4, 2))).batch(2)

    (empty,) = take(1, uneven_batches(dataset.take(0)))

    assert empty.shape == (0, 2)


def test_a_worker_without_data_and_without_a_hint_is_an_error():
    with pytest.raises(ValueError, match=r"no batch.*like="):
        next(uneven_batches([]))


@pytest.mark.parametrize(
    "like",
    [
        tf.TensorSpec(None, tf.float32),
        tf.TensorSpec([], tf.float32),
        tf.RaggedTensorSpec([None, None], tf.int64),
    ],
    ids=["rank", "scalar", "ragged"],
)
def test_a_hint_that_is_not_enough_is_named(like):
    with pytest.raises(ValueError, match=r"Received: .*Spec"):
        next(uneven_batches([], like=like))


# --- weighted_all_reduce ----------------------------------------------------


def test_averages_weigh_by_samples():
    collective = Collective(2)

    def work(worker, gradient, weight):
        return weighted_all_reduce(
            [tf.constant(gradient), None],
            weight,
            backend=collective.of(worker),
        )

    results = in_threads(
        lambda: work(0, [1.0, 2.0], 4), lambda: work(1, [6.0, 2.0], 1)
    )

    for (average, nothing), total in results:
        np.testing.assert_allclose(average, [2.0, 2.0])
        assert nothing is None
        assert total == 5.0
    assert collective.calls == 1  # The weight goes along.


def test_a_batch_without_rows_counts_for_nothing_even_if_it_is_nan():
    collective = Collective(2)

    def work(worker, gradient, weight):
        return weighted_all_reduce(
            [tf.constant(gradient)], weight, backend=collective.of(worker)
        )

    for (average,), total in in_threads(
        lambda: work(0, [3.0], 2), lambda: work(1, [np.nan], 0)
    ):
        np.testing.assert_allclose(average, [3.0])
        assert total == 2.0


def test_the_end_is_weight_zero_and_zeros():
    (average,), total = weighted_all_reduce(
        [tf.constant([np.nan])], 0, backend=lambda values: values
    )

    assert total == 0.0
    np.testing.assert_array_equal(average, [0.0])


def test_sparse_gradients_stay_sparse():
    collective = Collective(2)

    def work(worker, rows, weight):
        gradient = tf.IndexedSlices(
            tf.ones([len(rows), 1]), tf.constant(rows, tf.int32), [4, 1]
        )
        (average,), _ = weighted_all_reduce(
            [gradient], weight, backend=collective.of(worker)
        )
        assert isinstance(average, tf.IndexedSlices)
        return tf.convert_to_tensor(average).numpy().reshape(-1)

    for average in in_threads(
        lambda: work(0, [3, 1, 1], 3), lambda: work(1, [], 0)
    ):
        np.testing.assert_allclose(average, [0.0, 2.0, 0.0, 1.0])


@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_trained_once_with_its_weight(seed):
    """A weight per sample, mean loss, rate 1: it tells how much one counted."""
    random = np.random.default_rng(seed)
    counts = [
        list(random.integers(1, 5, size=random.integers(0, 6)))
        for _ in range(random.integers(1, 5))
    ]
    names = iter(range(sum(map(sum, counts))))
    data = [
        [[next(names) for _ in range(n)] for n in sizes] for sizes in counts
    ]
    num_samples = sum(map(sum, counts))
    collective = Collective(len(counts))

    def train(worker):
        weights = np.zeros(num_samples)
        batches = [np.array(ids, np.int64) for ids in data[worker]]
        spec = tf.TensorSpec([None], tf.int64)
        for ids in uneven_batches(batches, like=spec):
            gradient = np.zeros(num_samples)
            with np.errstate(invalid="ignore"):
                gradient[np.asarray(ids)] = np.ones(len(ids)) / np.float64(
                    max(len(ids), 1)
                )
            (average,), total = weighted_all_reduce(
                [tf.constant(gradient)],
                len(ids),
                backend=collective.of(worker),
            )
            if total == 0.0:
                return weights
            weights -= average.numpy()

    expected = np.zeros(num_samples)
    for step in range(max(map(len, data))):
        ids = [i for b in data if step < len(b) for i in b[step]]
        expected[ids] = -1.0 / len(ids)
    for weights in in_threads(
        *(lambda w=w: train(w) for w in range(len(counts)))
    ):
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_replicas_of_one_process_are_averaged():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")

    @tf.function
    def step():
        return strategy.run(
            lambda: weighted_all_reduce([tf.constant([4.0])], tf.constant(3))
        )

    (average,), total = step()
    np.testing.assert_allclose(average, [4.0])
    assert total == 3.0


@pytest.mark.parametrize("backend", ["mpi", None, 3])
def test_an_unknown_backend_is_named(backend):
    with pytest.raises(ValueError, match=f"Received: backend={backend!r}"):
        weighted_all_reduce([tf.constant([1.0])], 1, backend=backend)


def test_a_weight_is_a_scalar():
    with pytest.raises(ValueError, match=r"scalar.*shape \(2,\)"):
        weighted_all_reduce([], [1.0, 2.0], backend=list)


def test_it_belongs_in_the_replica_context():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"replica context.*strategy\.run"),
    ):
        weighted_all_reduce([tf.constant([1.0])], 1)


# --- all_reduce -------------------------------------------------------------


def reduce_all(arrays, op="sum"):
    """Each worker's result for its arrays, by worker."""
    return in_threads(
        *(
            lambda worker=worker, given=given: tsw.train.all_reduce(
                given, op, worker=worker
            )
            for worker, given in arrays.items()
        )
    )


def test_all_have_the_reduced_arrays_bit_by_bit(client):
    workers = join_workers(client, 3)
    rng = np.random.default_rng(3)
    floats = [rng.normal(size=(1500,)).astype(np.float32) for _ in workers]
    arrays = {
        worker: [floats[i], 2**60 + i, np.array([[True], [i == 1]])]
        for i, worker in enumerate(workers)
    }

    sums = reduce_all(arrays)
    means = reduce_all(arrays, "mean")
    least, largest = reduce_all(arrays, "min")[0], reduce_all(arrays, "max")[2]

    exact = np.sum(floats, axis=0, dtype=np.float64).astype(np.float32)
    for of_floats, of_ints, of_booleans in sums:
        np.testing.assert_array_equal(of_floats, exact)
        assert of_floats.dtype == np.float32
        assert of_ints == 3 * 2**60 + 3
        np.testing.assert_array_equal(of_booleans, [[3], [1]])
    np.testing.assert_allclose(means[1][0], exact / 3, rtol=1e-6)
    np.testing.assert_array_equal(least[0], np.min(floats, axis=0))
    assert largest[1] == 2**60 + 2


def test_one_that_has_left_or_was_started_again_confuses_nobody(client):
    workers = join_workers(client, 2, consistency="bsp")
    reduce_all({workers[0]: [1.0], workers[1]: [10.0]})

    workers[1].leave()
    alone = reduce_all({workers[0]: [2.0]})
    again = tsw.train.Worker(1, 2, consistency="bsp", cluster=client(1))
    both = reduce_all({workers[0]: [3.0], again: [30.0]})

    assert alone == [[2.0]]
    assert both == [[33.0], [33.0]]


def test_what_one_has_told_last_stays_until_the_next_run():
    def tell(exchanges):
        return in_threads(
            *(
                functools.partial(
                    exchange.tell,
                    {"x": np.full(3, exchange._worker.worker_id)},
                    with_left=True,
                )
                for exchange in exchanges
            )
        )

    with running_clients(0) as client:
        workers = join_workers(client, 2)
        both = [Exchange("told", worker) for worker in workers]
        told = tell(both)
        workers[1].leave()
        without = tell(both[:1])
        next_run = tell([Exchange("told", workers[0])])

    assert [list(each) for each in told + without] == [[0, 1]] * 3
    np.testing.assert_array_equal(without[0][1]["x"], [1, 1, 1])
    assert list(next_run[0]) == [0]


@pytest.mark.parametrize(
    ("arrays", "op", "message"),
    [
        ([1.0], "product", "op='product'"),
        ([["a"]], "sum", "arrays="),
    ],
)
def test_what_all_reduce_cannot_do_is_named(arrays, op, message):
    with running_clients(0) as client:
        (worker,) = join_workers(client, 1)
        with pytest.raises(ValueError, match=message):
            tsw.train.all_reduce(arrays, op, worker=worker)


def test_arrays_that_differ_are_named_to_all(client):
    def error_of(worker):
        with pytest.raises(ValueError, match="same dtypes") as error:
            tsw.train.all_reduce([np.ones(worker.worker_id)], worker=worker)
        return str(error.value)

    workers = join_workers(client, 2)

    errors = in_threads(*(functools.partial(error_of, w) for w in workers))

    assert errors[0] == errors[1]
    assert "(1,))] from worker 1" in errors[0]
