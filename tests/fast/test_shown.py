"""Short representations in messages: printable, on one line, and never made from something large first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.errors import ConfigError, PlanError, UnknownName
from miles_dmd.shown import LONGEST_MESSAGE, aligned, byte_size, printable, short_repr


@given(st.text(max_size=3000))
def test_a_message_is_one_printable_line(text):
    message = str(ConfigError(text))

    assert message.isprintable()
    assert len(message) <= 10 * LONGEST_MESSAGE  # an escape is up to ten characters


@pytest.mark.parametrize("error", [ConfigError, PlanError, UnknownName])
def test_every_refusal_is_one(error):
    assert str(error("a\nb\x1b[31m\ud800")) == "a b\\x1b[31m\\ud800"


def test_a_long_message_keeps_its_flag_and_its_cure():
    message = printable(f"--save {'x' * 5000}: is a file; name a directory")

    assert message.startswith("--save xxx")
    assert message.endswith("x: is a file; name a directory")
    assert len(message) < 1.1 * LONGEST_MESSAGE


def nested(depth):
    value = ["x" * 1000]
    for _ in range(depth):
        value = [value] * 10  # 10 ** depth leaves, were they written out
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\n", "'a\\n'"),
        (3, "3"),
        (-1.5, "-1.5"),
        ({"a": [1]}, "{'a': [1]}"),
    ],
)
def test_a_value_is_shown_as_one_would_write_it(value, text):
    assert short_repr(value) == text


def test_a_number_that_python_does_not_write_out_is_counted():
    assert short_repr({"a": 10**6000}) == "{'a': <a number of 6001 digits>}"


def test_what_is_large_is_cut():
    for value in [nested(60), "x" * 10**6, {"a" * 10**6: 1}, [[[[[[[]]]]]]], b"\xff" * 1000]:
        assert len(short_repr(value)) <= 80


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_have_binary_units(count, words):
    assert byte_size(count) == words


def test_rows_are_set_in_columns():
    assert aligned([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc  d"]
