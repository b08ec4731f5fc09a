"""A terminal shows a bar; a log file gets a line now and then."""

import io

import pytest

from miles_dmd.observe.progress import Progress, clock_time, number

ROW = {"cycle": 1, "actor/loss": 0.12345, "critic/loss": 2.0, "actor/lr": 1e-5}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _played(cycles, seconds_each, **options):
    stream, clock = io.StringIO(), FakeClock()
    with Progress(cycles, stream=stream, clock=clock, shown=("actor/loss", "critic/loss"), **options) as progress:
        for _ in range(cycles):
            clock.now += seconds_each
            progress.advance(ROW, seconds_each)
    return stream.getvalue().splitlines()


def test_outside_a_terminal_a_line_has_cycle_metrics_pace_and_time_left():
    first, second = _played(2, 30.0)

    assert first == "cycle 1/2  actor/loss 0.1235  critic/loss 2.000  30.00 s/cycle  0:30 left"
    assert second == "cycle 2/2  actor/loss 0.1235  critic/loss 2.000  30.00 s/cycle  0:00 left"


def test_lines_are_limited_in_rate_and_the_first_and_the_last_are_always_there():
    lines = _played(25, 1.0, min_seconds=10.0)

    assert [line.split()[1] for line in lines] == ["1/25", "11/25", "21/25", "25/25"]


def test_a_resumed_run_counts_on_and_estimates_from_its_own_pace():
    stream, clock = io.StringIO(), FakeClock()
    progress = Progress(100, done=90, stream=stream, clock=clock)
    clock.now = 180.0  # of which the first grid of samples took all but three seconds

    progress.advance(ROW, 3.0)

    assert "cycle 91/100" in stream.getvalue()
    assert "0:27 left" in stream.getvalue()


def test_time_left_follows_the_last_cycles():
    progress = Progress(100, stream=io.StringIO())
    for seconds in [100.0] * 10 + [1.0] * 20:
        progress.advance(ROW, seconds)

    assert progress.seconds_left == pytest.approx(70.0)


def test_a_terminal_shows_count_metrics_and_no_lines_of_its_own(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()

    with Progress(3, stream=stream, shown=("actor/loss", "critic/loss")) as progress:
        for _ in range(3):
            progress.advance(ROW, 1.0)

    assert "3/3" in stream.getvalue()
    assert "actor/loss 0.1235" in stream.getvalue()
    assert "s/cycle" not in stream.getvalue()


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (75, "1:15"), (59.7, "1:00"), (3675, "1:01:15")])
def test_times_read_like_a_clock(seconds, shown):
    assert clock_time(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (12345.6, "12346"),
        (999.96, "1000."),
        (1e7, "1.0e+07"),
        (1.2e-5, "1.2e-05"),
        (-2.0, "-2.000"),
        (float("nan"), "nan"),
        (3, "3.000"),
    ],
)
def test_numbers_have_four_digits(value, shown):
    assert number(value) == shown
