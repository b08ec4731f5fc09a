"""A call that does not end in time is given up, and nothing more is asked."""

import os
import signal
import subprocess
import threading
import time

import pytest

from miles_dmd.cluster.supervision.timed_calls import TimedCalls
from miles_dmd.errors import ClusterError


def test_answers_and_errors_come_through():
    calls = TimedCalls()

    assert calls.run("counting", 10, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="its own"):
        calls.run("counting", 10, lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    assert calls.stuck == ""


def test_all_calls_are_made_by_one_thread_that_goes_on_living():
    """Linux ends Ray's servers with the thread that started them."""
    calls = TimedCalls()

    first, second = (calls.run("looking", 10, threading.current_thread) for _ in range(2))

    assert first is second
    assert first is not threading.main_thread()
    assert first.is_alive()


def test_call_that_does_not_end_is_told_with_its_limit_and_nothing_is_asked_after_it(caplog):
    calls, never = TimedCalls(), threading.Event()

    with pytest.raises(ClusterError) as told:
        calls.run("starting", 0.01, never.wait, "--placement-timeout 0.01")
    with pytest.raises(ClusterError, match="Ray has not answered while starting, and is not asked any more while"):
        calls.run("ending its actors", 10, lambda: pytest.fail("it was asked"))
    left = calls.try_run("leaving", lambda: pytest.fail("it was asked"))
    never.set()

    assert str(told.value) == "no answer from Ray within 0.01 s while starting; --placement-timeout 0.01 is the limit"
    assert left is False
    assert "not asked any more while leaving" in caplog.text


def test_who_waits_for_ray_gives_up_when_ray_dies(caplog):
    calls, never, seen = TimedCalls(), threading.Event(), []
    calls.died = lambda: seen.append(1) or ("Ray's gcs_server on this machine died" if len(seen) > 1 else "")

    answered = calls.run("looking", 60, lambda: 1)
    left = calls.try_run("ending its actors", never.wait, 3600)
    never.set()

    assert (answered, left, calls.answers) == (1, False, False)
    assert "Ray's gcs_server on this machine died while ending its actors" in caplog.text


def test_signal_ends_the_wait():
    calls, never = TimedCalls(), threading.Event()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls.run("starting", 60, lambda: (os.kill(os.getpid(), signal.SIGUSR1), never.wait()))
    finally:
        signal.signal(signal.SIGUSR1, before)
        never.set()

    assert calls.stuck == "starting"


def test_looking_for_rays_servers_survives_what_comes_and_goes():
    """Children that end, and threads that end, while it looks at them."""
    from miles_dmd.cluster.supervision.session import _servers

    stop, before = threading.Event(), _servers()  # of a cluster that an earlier test has left to later ones

    def spawn():
        while not stop.is_set():
            subprocess.run(["true"], check=True)
            threading.Thread(target=time.sleep, args=(0,)).start()

    spawners = [threading.Thread(target=spawn) for _ in range(3)]
    for spawner in spawners:
        spawner.start()
    try:
        found = [_servers() for _ in range(2000)]
    finally:
        stop.set()
        for spawner in spawners:
            spawner.join()

    assert found == [before] * 2000
