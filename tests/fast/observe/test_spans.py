"""Each second of a run counts once, for the innermost of what was going on."""

import json
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.observe import spans
from miles_dmd.observe.spans import Span, SpanLog, attributed, chrome_trace, time_metrics

PHASES = ("rollout", "critic train", "score", "actor train", "weight sync", "save")


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return FakeClock()


def test_totals_come_in_the_order_of_a_cycle_and_add_up_to_wall_time(clock):
    log = SpanLog(PHASES, clock)
    for name, seconds in [("rollout", 2.0), ("critic train", 3.0), ("own", 0.5), ("rollout", 1.0)]:
        with log.span(name, group="driver"):
            clock.pass_by(seconds)
    clock.pass_by(0.25)

    totals = log.totals()

    names = ["rollout", "critic train", "score", "actor train", "weight sync", "save", "own", "other"]
    assert list(totals) == names
    assert totals == dict(zip(names, [3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.25], strict=True))


def test_what_is_nested_takes_its_time_out_of_what_it_is_nested_in(clock):
    log = SpanLog(PHASES, clock)
    with log.span("save"):
        clock.pass_by(1.0)
        with log.span("rollout"):
            clock.pass_by(2.0)
        clock.pass_by(4.0)

    totals = log.totals()

    assert (totals["save"], totals["rollout"], totals["other"]) == (5.0, 2.0, 0.0)


def test_a_nested_span_that_begins_at_the_same_instant_wins(clock):
    log = SpanLog(PHASES, clock)
    with log.span("save"), log.span("rollout"):
        clock.pass_by(2.0)

    assert log.totals()["rollout"] == 2.0


def test_ranks_that_work_at_once_count_once(clock):
    log = SpanLog(PHASES, clock)
    for rank in range(4):
        log.add("score", "critic", start=100.0 + 0.1 * rank, duration=1.0, rank=rank)
    clock.pass_by(2.0)

    totals = log.totals()

    assert totals["score"] == pytest.approx(1.3)
    assert totals["other"] == pytest.approx(0.7)


def test_totals_since_a_mark_are_those_of_one_cycle(clock):
    log = SpanLog(PHASES, clock)
    with log.span("rollout"):
        clock.pass_by(5.0)
    mark = log.mark()
    clock.pass_by(0.5)
    with log.span("score"):
        clock.pass_by(1.0)

    totals = log.totals(mark)

    assert (totals["rollout"], totals["score"], totals["other"]) == (0.0, 1.0, 0.5)


def test_a_span_is_kept_when_its_block_raises(clock):
    log = SpanLog(PHASES, clock)

    def rollout():
        with log.span("rollout"):
            clock.pass_by(1.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        rollout()

    assert log.totals()["rollout"] == 1.0


SPANS = st.lists(
    st.builds(Span, st.sampled_from("abc"), st.just("g"), st.integers(-5, 15).map(float), st.integers(0, 9).map(float)),
    max_size=8,
)


@given(SPANS)
def test_whatever_overlaps_the_seconds_add_up(spans):
    seconds = attributed(spans, 0.0, 10.0)

    assert sum(seconds.values()) == pytest.approx(10.0)
    for tick in range(10):
        covered = any(span.start <= tick and tick + 1 <= span.end for span in spans)
        assert covered or seconds.get("other", 0) >= 1


def test_the_trace_has_a_process_a_group_a_thread_a_rank_and_microseconds(tmp_path, clock):
    log = SpanLog(PHASES, clock)
    log.add("score", "critic", start=100.5, duration=0.25, rank=1)
    log.add("rollout", "engine", start=101.0, duration=1.0)
    path = tmp_path / "run" / "trace.json"

    log.write(path)

    events = json.loads(path.read_text())["traceEvents"]
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    assert names == {
        ("process_name", 1, 0): "critic",
        ("process_name", 2, 0): "engine",
        ("thread_name", 1, 1): "critic rank 1",
        ("thread_name", 2, 0): "engine rank 0",
    }
    assert [e for e in events if e["ph"] == "X"] == [
        {"ph": "X", "name": "score", "cat": "critic", "pid": 1, "tid": 1, "ts": 500_000.0, "dur": 250_000.0},
        {"ph": "X", "name": "rollout", "cat": "engine", "pid": 2, "tid": 0, "ts": 1_000_000.0, "dur": 1_000_000.0},
    ]


def test_a_trace_of_nothing_is_a_trace():
    assert chrome_trace([], 0.0)["traceEvents"] == []


def test_a_cycles_totals_become_metrics():
    assert time_metrics({"critic train": 1.5, "other": 0.0}) == {"time/critic_train": 1.5, "time/other": 0.0}


def test_a_long_run_adds_up_and_keeps_the_last_spans_alone(clock, monkeypatch):
    monkeypatch.setattr(spans, "SUMMED", 5)
    log = SpanLog(PHASES, clock)
    log.traced = deque(maxlen=7)

    for _ in range(100):
        mark = log.mark()
        with log.span("rollout", "rollout"):
            clock.pass_by(1.0)
        with log.span("score", "critic"):
            clock.pass_by(2.0)
        clock.pass_by(0.5)
        assert log.totals(mark)["score"] == 2.0

    totals = log.totals()
    assert (totals["rollout"], totals["score"], totals["other"]) == (100.0, 200.0, 50.0)
    assert len(log.traced) == 7
    assert len(log._since_then) < 10
    with pytest.raises(ValueError, match="have been summed up"):
        log.totals(log.start)
