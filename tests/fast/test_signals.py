"""The first signal asks, the second one ends."""

import contextlib
import os
import signal
import threading

import pytest

from miles_dmd import signals
from miles_dmd.early import SIGNALS
from miles_dmd.signals import Stopped, StopRequest, listening


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_raised_where_the_run_stands(number):
    request = StopRequest()

    with pytest.raises(Stopped, match=number.name) as stopped, listening(request):
        os.kill(os.getpid(), number)

    assert stopped.value.signal == number
    assert request.requested


def test_run_that_can_save_is_only_asked(capfd):
    request = StopRequest()

    with listening(request), request.finishing_cycles():
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        request.raise_if_requested()
    assert capfd.readouterr().err == (
        "SIGTERM: finishing the running cycle to save it; a second signal leaves at once\n"
    )


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_leaves_at_once(monkeypatch, second):
    class Left(Exception):
        pass

    def leave(code):
        raise Left(code)

    monkeypatch.setattr(signals.os, "_exit", leave)
    request = StopRequest()
    request.signal = signal.SIGTERM

    with pytest.raises(Left, match=str(128 + second)), listening(request):
        os.kill(os.getpid(), second)


@pytest.mark.parametrize("first", SIGNALS)
def test_terminal_that_closes_is_never_the_second_signal(first):
    """The kernel sends SIGHUP, and so does the shell as it ends."""
    request = StopRequest()

    with listening(request), request.finishing_cycles():
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)

    assert request.signal == first


def test_handler_that_is_not_pythons_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(signals.signal, "signal", lambda number, handler: None)

    with listening(StopRequest()):
        pass


def test_signal_that_nobody_heard_still_counts_before_the_first_cycle():
    """Raised within a callback of a library, an exception may be lost."""
    request = StopRequest()
    with listening(request), contextlib.suppress(Stopped):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped), request.finishing_cycles():
        pytest.fail("a cycle began")


def test_handlers_of_before_are_back_after():
    before = [signal.getsignal(number) for number in SIGNALS]

    with listening(StopRequest()):
        within = [signal.getsignal(number) for number in SIGNALS]

    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert within != before


def test_other_threads_are_left_alone():
    failures = []

    def run():
        try:
            with listening(StopRequest()):
                pass
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert failures == []
