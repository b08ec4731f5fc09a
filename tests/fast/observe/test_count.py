"""Work that takes long says how far it is; work that does not stays silent."""

import logging

import pytest

from miles_dmd.observe.count import Count


@pytest.fixture
def counted(caplog):
    """``counted([(second, done), ...])``: the lines that are logged."""

    def count(steps, total=100, **options):
        now = [0.0]
        caplog.clear()
        with caplog.at_level(logging.INFO, "miles_dmd"):
            progress = Count("encoding prompts", total, clock=lambda: now[0], **options)
            for now[0], done in steps:
                progress.at(done)
        return caplog.messages

    return count


def test_a_line_has_what_is_done_and_the_time_left(counted):
    assert counted([(10.0, 20), (20.0, 50), (31.0, 100)]) == [
        "encoding prompts: 20 of 100, 0:40 left",
        "encoding prompts: 50 of 100, 0:20 left",
        "encoding prompts: 100 of 100",
    ]


def test_lines_are_limited_in_rate(counted):
    assert len(counted([(second, second) for second in range(101)])) == 20


def test_what_is_done_soon_is_not_spoken_of(counted):
    assert counted([(second / 30, second) for second in range(101)]) == []


def test_what_was_there_before_says_nothing_of_the_pace(counted):
    assert counted([(10.0, 60)], done=50) == ["encoding prompts: 60 of 100, 0:40 left"]
