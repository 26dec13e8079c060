"""A table against a dict, over random interleavings of all operations."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import tfswitch as tsw
from tests.conftest import running_cluster
from tests.support import examples

DIM = 2
LEARNING_RATE = 0.5
START = 1.0

INT64 = st.integers(-(2**63), 2**63 - 1)
# Few ids, so that operations meet; extremes and arbitrary ones beside them.
IDS = st.lists(
    st.one_of(
        st.integers(-3, 12),
        st.sampled_from([-(2**63), 2**63 - 1, -(2**63) + 1, 2**32]),
        INT64,
    ),
    max_size=12,
)


def _values(ids: list[int], offset: int) -> np.ndarray:
    # Small integers: sums and steps are exact in float32.
    base = np.arange(len(ids) * DIM, dtype=np.float32) + offset
    return (base % 8 - 4).reshape(len(ids), DIM)


class TableMachine(RuleBasedStateMachine):
    """Does the same to a table and to a dict of its rows."""

    num_servers = 0

    def __init__(self) -> None:
        super().__init__()
        self._running = running_cluster(self.num_servers)
        self._cluster = self._running.__enter__()
        self._table = tsw.EmbeddingTable(
            "model",
            DIM,
            initializer=tsw.initializers.Constant(START),
            optimizer=tsw.optimizers.SGD(LEARNING_RATE),
        )
        self._model: dict[int, np.ndarray] = {}

    def teardown(self) -> None:
        self._running.__exit__(None, None, None)

    def _expected(self, ids: list[int]) -> np.ndarray:
        zeros = np.zeros(DIM, np.float32)
        rows = [self._model.get(i, zeros) for i in ids]
        return np.array(rows, np.float32).reshape(len(ids), DIM)

    def _insert(self, ids: list[int]) -> None:
        for i in ids:
            self._model.setdefault(i, np.full(DIM, START, np.float32))

    @rule(ids=IDS)
    def find(self, ids: list[int]) -> None:
        values = self._table.lookup(np.array(ids, np.int64))
        np.testing.assert_array_equal(values, self._expected(ids))

    @rule(ids=IDS)
    def insert(self, ids: list[int]) -> None:
        self._insert(ids)
        values = self._table.lookup_or_create(np.array(ids, np.int64))
        np.testing.assert_array_equal(values, self._expected(ids))

    @rule(start=INT64, count=st.integers(1, 3000))
    def grow(self, start: int, count: int) -> None:
        ids = [(start + i * 977 + 2**63) % 2**64 - 2**63 for i in range(count)]
        self.insert(ids)

    @rule(ids=IDS, offset=st.integers(0, 7))
    def push(self, ids: list[int], offset: int) -> None:
        gradients = _values(ids, offset)
        self._insert(ids)
        for i, gradient in zip(ids, gradients, strict=True):
            self._model[i] = self._model[i] - LEARNING_RATE * gradient
        updated = self._table.push(np.array(ids, np.int64), gradients)
        assert int(updated) == len(set(ids))

    @rule(ids=IDS, offset=st.integers(0, 7))
    def assign(self, ids: list[int], offset: int) -> None:
        values = _values(ids, offset)
        self._model.update(zip(ids, values, strict=True))
        self._table.assign(np.array(ids, np.int64), values)

    @rule(ids=IDS)
    def erase(self, ids: list[int]) -> None:
        present = [self._model.pop(i) for i in set(ids) if i in self._model]
        assert self._table.remove(np.array(ids, np.int64)) == len(present)

    @rule()
    def export(self) -> None:
        ids, values = self._table.export_rows()
        assert sorted(ids.tolist()) == sorted(self._model)
        np.testing.assert_array_equal(values, self._expected(ids.tolist()))

    @invariant()
    def has_as_many_rows(self) -> None:
        assert self._table.size() == len(self._model)


class ServersMachine(TableMachine):
    num_servers = 3


TestEmbeddedTable = TableMachine.TestCase
TestEmbeddedTable.settings = settings(
    max_examples=examples(40), stateful_step_count=30
)
TestTableOnServers = ServersMachine.TestCase
TestTableOnServers.settings = settings(
    max_examples=examples(10), stateful_step_count=30
)
