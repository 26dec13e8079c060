"""Calls of sessions whose servers fall silent."""

import threading
import time

import pytest
import tensorflow as tf

from tfswitch.train._server_sessions import ServerWatch

# A hang fails after this.
HANG_SECS = 60.0


@pytest.fixture
def forever():
    """An event that comes only at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def watch(request, forever):
    """Watches a server "good", and one that answers as the parameter says."""
    watch = ServerWatch(
        {"good": lambda: None, "other": lambda: request.param(forever)},
        pause_secs=0.01,
        patience_secs=1.0,
    )
    watch.start()
    yield watch
    watch.stop()


def _hang(forever):
    forever.wait()


def _is_away(forever):
    raise tf.errors.UnavailableError(None, None, "away")


def _answers(forever):
    raise tf.errors.NotFoundError(None, None, "no such worker")


def _is_cancelled(forever):
    raise tf.errors.CancelledError(None, None, "of the session")


@pytest.mark.parametrize(
    "watch", [_hang, _is_away, _is_cancelled], indirect=True
)
def test_a_call_ends_when_a_server_is_silent(watch, forever):
    with pytest.raises(ConnectionError, match="parameter servers other were"):
        watch.call(forever.wait)


@pytest.mark.parametrize("watch", [_answers], indirect=True)
def test_an_error_of_a_server_is_an_answer(watch):
    give_up = time.monotonic() + 3.0  # Three times the patience.
    while time.monotonic() < give_up:
        assert watch.call(lambda x, y=0: x + y, 1, y=2) == 3
    assert watch.failure is None


@pytest.mark.parametrize("watch", [_answers], indirect=True)
def test_a_call_raises_what_the_function_raises(watch):
    def fail():
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        watch.call(fail)
    with pytest.raises(TimeoutError, match="its own"):
        watch.call(lambda: (_ for _ in ()).throw(TimeoutError("its own")))


@pytest.mark.parametrize("watch", [_hang], indirect=True)
def test_a_session_that_does_not_close_is_left_behind(watch, forever):
    watch.close(forever.wait)
    assert "other" in watch.failure


@pytest.mark.parametrize("watch", [_answers], indirect=True)
def test_trying_gives_up_quietly(watch, forever):
    def fail():
        raise tf.errors.UnavailableError(None, None, "away")

    begun = time.monotonic()
    watch.try_for(HANG_SECS, fail)
    watch.try_for(0.1, forever.wait)
    assert time.monotonic() - begun < HANG_SECS


def test_a_process_that_was_stopped_blames_no_server(monkeypatch):
    """Time that passes at once, as for one that was stopped."""
    now = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(
        "tfswitch.train._server_sessions.time.monotonic",
        lambda: clock() + now[0],
    )
    watch = ServerWatch({"good": lambda: None}, 0.01, 2.0)
    watch.start()
    watch.call(time.sleep, 0.3)
    now[0] = 1000.0
    watch.call(time.sleep, 0.6)
    watch.stop()
    assert watch.failure is None
