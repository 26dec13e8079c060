"""Calls of sessions whose servers fall silent, by a clock of the tests' own."""

import threading
import types

import pytest
import tensorflow as tf

from tests.python.worker_threads import HANG_SECS, Call, wait_until
from tfswitch.train import _server_sessions
from tfswitch.train._server_sessions import ServerWatch, repeat_lost

# How often the watch looks, and what each look at the clock takes.
WATCH_SECS = 0.002
PATIENCE_SECS = 10 * WATCH_SECS


class Clock:
    """Time passes when somebody looks, and all have answered since."""

    def __init__(self):
        self.now = 0.0
        self.looks = 0
        self._heartbeats = threading.Condition()
        self._missing = set()
        self._servers = set()

    def heartbeat_of(self, server):
        """Returns what a server calls at each heartbeat."""
        self._servers.add(server)

        def heartbeat():
            with self._heartbeats:
                self._missing.discard(server)
                self._heartbeats.notify_all()

        return heartbeat

    def jump(self, secs):
        with self._heartbeats:
            self.now += secs

    def monotonic(self):
        with self._heartbeats:
            self._heartbeats.wait_for(lambda: not self._missing, HANG_SECS)
            self._missing |= self._servers
            self.now += WATCH_SECS
            self.looks += 1
            return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_server_sessions, "_WATCH_SECS", WATCH_SECS)
    monkeypatch.setattr(
        _server_sessions,
        "time",
        types.SimpleNamespace(monotonic=clock.monotonic),
    )
    return clock


@pytest.fixture
def forever():
    """An event that comes only at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def watch(request, clock, forever):
    """Watches a server "good", and one that raises an error, or hangs."""
    other = forever.wait
    if request.param is not None:
        heartbeat = clock.heartbeat_of("other")

        def other():
            heartbeat()
            raise request.param(None, None, "of the server")

    watch = ServerWatch(
        {"good": clock.heartbeat_of("good"), "other": other},
        pause_secs=0.001,
        patience_secs=PATIENCE_SECS,
    )
    watch.start()
    yield watch
    watch.stop()


hangs = pytest.mark.parametrize("watch", [None], ids=["hangs"], indirect=True)
answers = pytest.mark.parametrize(
    "watch", [tf.errors.NotFoundError], indirect=True
)


@pytest.mark.parametrize(
    "watch",
    [None, tf.errors.UnavailableError, tf.errors.CancelledError],
    ids=["hangs", "is_away", "is_cancelled"],
    indirect=True,
)
def test_a_call_ends_when_a_server_is_silent(watch, forever):
    with pytest.raises(ConnectionError, match="parameter servers other were"):
        Call(watch.call, forever.wait).result()


@answers
def test_an_error_of_a_server_is_an_answer(watch, clock):
    while clock.now < 10 * PATIENCE_SECS:
        assert watch.call(lambda x, y=0: x + y, 1, y=2) == 3
    assert watch.failure is None


@answers
def test_a_call_raises_what_the_function_raises(watch):
    def fail():
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        watch.call(fail)
    with pytest.raises(TimeoutError, match="its own"):
        watch.call(lambda: (_ for _ in ()).throw(TimeoutError("its own")))


@hangs
def test_a_session_that_does_not_close_is_left_behind(watch, forever):
    watch.close(forever.wait)
    assert "other" in watch.failure


def test_trying_gives_up_quietly(forever):
    def fail():
        raise tf.errors.UnavailableError(None, None, "away")

    watch = ServerWatch({}, pause_secs=1.0, patience_secs=1.0)
    watch.try_for(HANG_SECS, fail)
    watch.try_for(0.1, forever.wait)


def test_a_process_that_was_stopped_blames_no_server(clock):
    """Time that passes at once, as for one that was stopped."""
    watch = ServerWatch(
        {"good": clock.heartbeat_of("good")}, 0.001, PATIENCE_SECS
    )
    watch.start()
    for _ in range(2):
        before = clock.looks
        wait_until(lambda before=before: clock.looks > before + 2)
        clock.jump(1000.0)
    before = clock.looks
    wait_until(lambda: clock.looks > before + 2)
    watch.stop()
    assert watch.failure is None


def answers(*errors):
    """A call that raises these first, as TensorFlow does."""
    left = [tf.errors.AbortedError(None, None, each) for each in errors]

    def call():
        if left:
            raise left.pop(0)
        return "answer"

    return call


def test_a_request_that_tensorflow_sent_twice_is_made_again():
    twice = "The same RunGraph (Worker) request was received twice. ..."

    assert repeat_lost(answers(twice, twice)) == "answer"
    with pytest.raises(tf.errors.AbortedError, match="twice"):
        repeat_lost(answers(*[twice] * 10))
    with pytest.raises(tf.errors.AbortedError, match="restarted"):
        repeat_lost(answers("the server was restarted"))
