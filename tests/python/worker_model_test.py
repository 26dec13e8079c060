"""Workers against a model of their group, over random orders of events.

The service, its clock and its threads are real; workers are clients of one
process. What each step pushes is a row of its own, of which each application
takes 1 away: so the rows tell which steps have been applied, and how often.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

import tfswitch as tsw
from tests.python.worker_threads import (
    Call,
    arrivals,
    running_clients,
    wait_until,
)
from tests.support import examples

Consistency = tsw.train.Consistency

NUM_WORKERS = 3
IDS = st.integers(0, NUM_WORKERS - 1)

# What one hears whose place another process has taken, perhaps at the barrier.
TAKEN = "give each its own|waits at barrier 'b', where a wait has failed"


@dataclasses.dataclass
class Member:
    """A worker as the group knows it."""

    process: "Process"
    clock: int
    last_round: int  # The latest that does not miss it.
    waits: bool = False  # At the barrier.
    # It has left this run before: these have not ended a step since.
    missing: set[str] = dataclasses.field(default_factory=set)


class Group:
    """What cc/sync/worker_group.h says, without leases."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.seen: set[int] = set()
        self.left: set[int] = set()
        self.num_awaited = NUM_WORKERS
        self.waits_for_joins = True
        self.has_begun = False
        self.first_clock = 0
        self.last_clock = 0
        self.arrivals = 0
        self.open_round = 0
        self.open: list[tuple[int, list[int]]] = []  # Worker, rows.
        self.closed: list[list[int]] = []  # Rows of each round.

    def slowest(self) -> int:
        return min(
            (m.clock for m in self.members.values() if not m.waits),
            default=2**62,
        )

    def join(self, process: "Process") -> None:
        if not self.members and self.seen:
            self.seen.clear()
            self.left.clear()
            self.open = []
            self.last_clock = self.first_clock = 0
            self.num_awaited = NUM_WORKERS
            self.waits_for_joins = True
            self.has_begun = False
        clock = min(self.slowest(), self.last_clock)
        if self.waits_for_joins:
            clock = self.first_clock
        worker = process.worker_id
        missing: set[str] = set()
        if worker in self.members:
            missing = self.members[worker].missing
        elif worker in self.left:
            self.left.remove(worker)
            if not self.waits_for_joins:
                missing = {"own", "theirs"}
        self.seen.add(worker)
        # What the worker has contributed before it was started again, and has
        # not seen applied, is withdrawn.
        self.open = [each for each in self.open if each[0] != worker]
        self.members[worker] = Member(
            process, clock, self.open_round - 1, missing=missing
        )
        if len(self.seen) >= self.num_awaited:
            self.waits_for_joins = False
        self._settle()
        process.round = self.open_round

    def arrive(self, process: "Process", contributes: bool) -> None:
        """A step ends; late contributions are dropped."""
        member = self.members[process.worker_id]
        member.clock += 1
        self.last_clock = max(self.last_clock, member.clock)
        self.arrivals += 1
        if not member.missing:
            for other in self.members.values():
                other.missing.discard("theirs")
        member.missing.discard("own")
        if contributes and process.round == self.open_round:
            self.open.append((process.worker_id, process.pushed))
            member.last_round = self.open_round
        self._settle()

    def enter(self, process: "Process") -> None:
        """A worker comes to the barrier."""
        self.members[process.worker_id].waits = True
        self._settle()

    def leave(self, process: "Process") -> None:
        if self.has(process):
            del self.members[process.worker_id]
            self.left.add(process.worker_id)
            self._settle()

    def has(self, process: "Process") -> bool:
        member = self.members.get(process.worker_id)
        return member is not None and member.process is process

    def _settle(self) -> None:
        members = self.members.values()
        if members and all(m.missing for m in members):
            # Of one that has contributed already, the step before.
            open_of = [worker for worker, _ in self.open]
            self.first_clock = min(
                [
                    member.clock - open_of.count(worker)
                    for worker, member in self.members.items()
                    if not member.waits
                ],
                default=self.last_clock,
            )
            for member in members:
                member.missing = set()
            self.seen = set(self.members)
            self.num_awaited = len(self.seen | self.left)
            self.waits_for_joins = bool(self.left)
            self.has_begun = True
            self.left.clear()
        self._close_if_complete()
        if self.waits_for_joins or not all(m.waits for m in members):
            return
        is_of_this_run = not all(m.missing for m in members)
        for member in members:  # The barrier opens.
            member.waits = False
            if is_of_this_run:
                member.missing = set()
            member.clock = max(m.clock for m in members)
            member.last_round = self.open_round - 1

    def _close_if_complete(self) -> None:
        have_all_gone = self.has_begun and not self.members
        if not self.open or (self.waits_for_joins and not have_all_gone):
            return
        if any(
            m.last_round < self.open_round and not m.waits
            for m in self.members.values()
        ):
            return
        self.closed.append([row for _, rows in self.open for row in rows])
        self.open = []
        self.open_round += 1


class Process:
    """One incarnation of a worker: a client of its own."""

    def __init__(self, worker_id, cluster, consistency):
        self.worker_id = worker_id
        self.worker: tsw.train.Worker | None = None  # Until it has joined.
        self._cluster = cluster
        self._consistency = consistency
        self.table = tsw.EmbeddingTable(
            "t",
            1,
            initializer="zeros",
            optimizer=tsw.optimizers.SGD(1.0),
            consistency=consistency,
            cluster=cluster,
        )
        self.round = 0
        self.pushed: list[int] = []  # Rows of the present step.
        # Under way: the end of a step, or waiting at the barrier.
        self.call: Call | None = None
        self.is_at_barrier = False

    def join(self) -> None:
        self.worker = tsw.train.Worker(
            self.worker_id,
            NUM_WORKERS,
            consistency=self._consistency,
            cluster=self._cluster,
        )

    def push(self, row: int) -> None:
        # The op would do the same, a little slower.
        self.table._native.push(
            np.array([row]), np.ones((1, 1), np.float32), 1.0, True
        )


class WorkersMachine(RuleBasedStateMachine):
    """Workers that join, step, leave and die, in any order."""

    num_servers = 0
    consistency = Consistency.bsp("sum")

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._client = self._stack.enter_context(
            running_clients(self.num_servers)
        )
        self._num_clients = 0
        self._group = Group()
        self._processes: dict[int, Process] = {}  # Also those that have left.
        self._observer: tsw.train.Worker | None = None  # The first.
        self._zombies: list[Process] = []
        self._num_rows = 0
        self._applied: set[int] = set()
        self._committed = 0  # How many rounds servers have applied.

    # --- Events ---------------------------------------------------------------

    @initialize(count=st.integers(0, NUM_WORKERS))
    def start_some(self, count: int) -> None:
        for worker in range(count):
            self.start(worker)

    @rule(worker=IDS)
    def start(self, worker: int) -> None:
        """Starts a process, also where one is: that one has died, then."""
        former = self._processes.get(worker)
        process = Process(
            worker, self._client(self._num_clients), self.consistency
        )
        self._num_clients += 1
        if former is not None and self._group.has(former) and former.worker:
            self._zombies.append(former)
        self._processes[worker] = process
        process.join()
        self._joined(process)
        self._observer = self._observer or process.worker
        if former is not None and former.call is not None:
            # Whoever waited hears of it, and is not left waiting.
            with pytest.raises(RuntimeError, match="give each its own"):
                former.call.result()
            former.call = None
        self._settle()

    @rule(worker=IDS)
    def push(self, worker: int) -> None:
        """Pushes in the midst of a step; one that has left joins again."""
        process = self._idle(worker)
        if process is None:
            return
        self._push(process)
        self._settle()

    @rule(workers=st.lists(IDS, min_size=1, max_size=12))
    def end_steps(self, workers: list[int]) -> None:
        """Each pushes and ends its step, unless it waits already."""
        for worker in workers:
            process = self._idle(worker)
            if process is None:
                continue
            self._push(process)
            process.call = Call(process.worker.end_step)
            self._group.arrive(process, self.is_bsp)
            process.pushed = []
            self._wait_for_arrival(process.worker)
            self._settle()

    @rule(workers=st.lists(IDS, min_size=1, max_size=4))
    def wait_at_barrier(self, workers: list[int]) -> None:
        """Each comes to the barrier, unless it waits already."""
        for worker in workers:
            process = self._idle(worker)
            if process is None:
                continue
            wait = functools.partial(process.worker.wait_at_barrier, "b")
            if not self._group.has(process):  # It has left: joins again.
                self._joined(process)
            elif process.pushed and self.is_bsp:
                with pytest.raises(RuntimeError, match="end the step first"):
                    wait()
                continue
            process.call = Call(wait)
            process.is_at_barrier = True
            self._group.enter(process)
            if self._group.members[worker].waits:
                waiting = sum(m.waits for m in self._group.members.values())
                wait_until(lambda n=waiting: self._stats()["waiting"] == n)
            self._settle()

    @rule(worker=IDS)
    def leave(self, worker: int) -> None:
        process = self._idle(worker)
        if process is None:
            return
        process.worker.leave()
        process.pushed = []  # Of a step that never ends.
        self._group.leave(process)
        self._settle()

    @rule()
    def a_dead_one_goes_on(self) -> None:
        """It hears that another one has its place, and does not count."""
        for zombie in self._zombies[-1:]:
            # Where nobody has its place it would join again.
            if zombie.worker_id not in self._group.members:
                continue
            with pytest.raises(RuntimeError, match=TAKEN):
                # With ssp the push would count, as it does before any step.
                if self.is_bsp:
                    Call(zombie.push, self._new_row()).result()
                Call(zombie.worker.end_step).result()
        self._settle()

    # --- What must hold -------------------------------------------------------

    @invariant()
    def each_step_was_applied_once_or_not_yet(self) -> None:
        if not self._processes:
            return
        table = next(iter(self._processes.values())).table
        rows = np.arange(self._num_rows)
        values = table._native.pull(rows, False).reshape(-1)
        expected = [-1.0 if row in self._applied else 0.0 for row in rows]
        np.testing.assert_array_equal(values, expected)

    @invariant()
    def nobody_is_too_far_ahead(self) -> None:
        group = self._group
        for member in group.members.values():
            if member.process.call is not None:
                continue
            clock = member.process.worker.stats()["clock"]
            assert clock == member.clock
            if not self.is_bsp:
                assert clock - group.slowest() <= self.consistency.staleness

    @invariant()
    def the_group_is_as_the_model_says(self) -> None:
        for process in self._processes.values():
            if process.worker is None:
                continue
            workers = process.worker.stats()["workers"]
            assert workers["active"] == len(self._group.members)
            assert workers["rounds"] == len(self._group.closed)
            assert workers["expired"] == 0

    def teardown(self) -> None:
        try:
            while self._group.members:
                # Others come, so that nobody waits for them, and all leave.
                for worker in range(NUM_WORKERS):
                    if (
                        self._group.waits_for_joins
                        and worker not in self._group.seen
                    ):
                        self.start(worker)
                idle = [
                    m.process
                    for m in self._group.members.values()
                    if m.process.call is None
                ]
                assert idle, "all wait for each other"
                for process in idle:
                    self.leave(process.worker_id)
            for process in self._processes.values():
                assert process.call is None, "a wait was forgotten"
            self.each_step_was_applied_once_or_not_yet()
        finally:
            self._stack.close()

    # --- Helpers --------------------------------------------------------------

    @property
    def is_bsp(self) -> bool:
        return self.consistency.kind == "bsp"

    def _new_row(self) -> int:
        self._num_rows += 1
        return self._num_rows - 1

    def _idle(self, worker: int) -> Process | None:
        """The process that is this worker, unless it waits."""
        process = self._processes.get(worker)
        if process is None or process.call is not None:
            return None
        return process

    def _joined(self, process: Process) -> None:
        self._group.join(process)
        self._commit(len(self._group.closed))

    def _push(self, process: Process) -> None:
        if not self._group.has(process):  # It has left: joins again.
            self._joined(process)
        row = self._new_row()
        process.push(row)
        process.pushed.append(row)
        if not self.is_bsp:
            self._applied.add(row)

    def _stats(self) -> dict[str, Any]:
        return self._observer.stats()["workers"]

    def _wait_for_arrival(self, worker: tsw.train.Worker) -> None:
        wait_until(lambda: arrivals(worker) == self._group.arrivals)

    def _commit(self, rounds: int) -> None:
        if not self.is_bsp:
            return
        for rows in self._group.closed[self._committed : rounds]:
            self._applied.update(rows)
        self._committed = max(self._committed, rounds)

    def _must_wait(self, process: Process) -> bool:
        group = self._group
        if process.is_at_barrier:
            return group.members[process.worker_id].waits
        if self.is_bsp:
            return process.round >= group.open_round
        if group.waits_for_joins:
            return True
        clock = group.members[process.worker_id].clock
        return clock - self.consistency.staleness > group.slowest()

    def _settle(self) -> None:
        """Those who may go on do, and the others wait."""
        for process in self._processes.values():
            if process.call is None:
                continue
            if self._must_wait(process):
                assert not process.call.is_over
                continue
            process.call.result()
            process.call = None
            process.is_at_barrier = False
            process.round = self._group.open_round
            self._commit(process.round)


class ServersMachine(WorkersMachine):
    num_servers = 2


class StaleMachine(WorkersMachine):
    consistency = Consistency.ssp(1)


class StaleServersMachine(StaleMachine):
    num_servers = 1


EMBEDDED = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
SERVERS = settings(
    max_examples=examples(15), stateful_step_count=40, deadline=None
)

TestBspEmbedded = WorkersMachine.TestCase
TestBspEmbedded.settings = EMBEDDED
TestBspOnServers = ServersMachine.TestCase
TestBspOnServers.settings = SERVERS
TestSspEmbedded = StaleMachine.TestCase
TestSspEmbedded.settings = EMBEDDED
TestSspOnServers = StaleServersMachine.TestCase
TestSspOnServers.settings = SERVERS
