"""Argument values: read by type from text and from data, and refused in one line."""

from typing import Annotated, Literal

import pytest

from miles_dmd.config.values import (
    LARGEST,
    Batch,
    Count,
    Decay,
    IsPath,
    Natural,
    Positive,
    Range,
    ReadPath,
    Seed,
    checked,
    from_text,
    kind_of,
)
from miles_dmd.errors import ConfigError

SOLVER = Literal["renoise", "euler"]


@pytest.mark.parametrize(
    ("hint", "texts", "value"),
    [
        (Count, ["3"], 3),
        (Natural, ["0"], 0),
        (Count | None, ["3"], 3),
        (float, ["-1e-5"], -1e-5),
        (Positive, ["8e-5"], 8e-5),
        (Positive, ["3"], 3.0),
        (tuple[Decay, Decay], ["0", ".999"], (0.0, 0.999)),
        (SOLVER, ["euler"], "euler"),
        (str, ["12"], "12"),
        (str, [""], ""),
    ],
)
def test_text_becomes_a_value_of_the_kind(hint, texts, value):
    found = from_text(kind_of(hint), texts, "--x")

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "texts", "parts"),
    [
        (Count, ["0"], ["--x 0", "at least 1"]),
        (Count, ["-2"], ["--x -2", "at least 1"]),
        (Count, ["1.5"], ["'1.5'", "whole number"]),
        (Count, ["True"], ["'True'", "whole number"]),
        (Count, ["1e3"], ["'1e3'", "write 1000"]),
        (Count, [""], ["''", "whole number"]),
        (Count, ["9" * 40], ["--x 99999", "at most 1,000,000,000"]),
        (Count, ["9" * 5000], ["--x '9999", "...", "whole number"]),
        (Count, ["1e300"], ["'1e300'", "whole number, at least 1"]),
        (Count, ["1_000"], ["'1_000'", "whole number"]),
        (Count, ["\u0663"], ["'\u0663'", "whole number"]),
        (Batch, ["1000000000"], ["--x 1000000000", "[1, 1048576]"]),
        (Seed, [str(2**63)], ["at most 9,223,372,036,854,775,807"]),
        (Natural, ["-1"], ["at least 0"]),
        (Positive, ["1e10"], ["at most 1,000,000,000"]),
        (Positive, ["1_0"], ["'1_0'", "finite number"]),
        (str, ["a\0"], ["'a\\x00'", "NUL"]),
        (str, ["\udcff"], ["'\\udcff'", "UTF-8"]),
        (ReadPath, [""], ["--x ''", "leave it out"]),
        (str | None, [""], ["--x ''", "leave it out"]),
        (Positive, ["0"], ["above 0"]),
        (Positive, ["nan"], ["nan", "finite"]),
        (Positive, ["inf"], ["inf", "finite"]),
        (Positive, ["1e999"], ["'1e999'", "beyond what a float can hold", "finite"]),
        (Decay, ["1"], ["[0, 1)"]),
        (tuple[Decay, Decay], ["0.9", "2"], ["2", "[0, 1)"]),
        (SOLVER, ["eular"], ["'eular'", "renoise, euler", "did you mean euler?"]),
    ],
)
def test_text_of_another_kind_is_refused_in_one_line(hint, texts, parts):
    with pytest.raises(ConfigError) as refused:
        from_text(kind_of(hint), texts, "--x")

    assert all(part in str(refused.value) for part in ["--x", *parts]), str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("hint", "data", "value"),
    [
        (Positive, 1, 1.0),
        (Positive, "8e-5", 8e-5),
        (Count, 3, 3),
        (Count | None, None, None),
        (bool, True, True),
        (tuple[Decay, Decay], [0, 0.9], (0.0, 0.9)),
    ],
)
def test_data_becomes_a_value_of_the_kind(hint, data, value):
    found = checked(kind_of(hint), data, "args.x")

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "data", "part"),
    [
        (Count, True, "True must be a whole number"),
        (Count, 1.5, "1.5 must be a whole number"),
        (Count, 3.0, "write 3"),
        (Count, "3", "write 3"),
        (Count, None, "None must be"),
        (Positive, True, "True must be a finite number"),
        (Positive, "fast", "'fast' must be a finite number"),
        (Positive, float("inf"), "finite"),
        (Positive, 10**400, "finite"),
        (Positive, "1_0", "'1_0' must be"),
        (str, "a\0", "NUL"),
        (bool, 1, "1 must be true or false"),
        (bool, "yes", "true or false"),
        (str, False, "put it in quotes"),
        (str, 12, "put it in quotes"),
        (str, None, "None"),
        (tuple[Decay, Decay], [0.9], "2 values"),
        (tuple[Decay, Decay], "0.9", "2 values"),
        (tuple[Decay, Decay], [0.9, True], "finite number"),
        (SOLVER, 3, "one of renoise, euler"),
        (str, ["x"] * 100, "..."),
    ],
)
def test_data_of_another_kind_is_refused_in_one_line(hint, data, part):
    with pytest.raises(ConfigError) as refused:
        checked(kind_of(hint), data, "args.x")

    assert part in str(refused.value)
    assert str(refused.value).startswith("args.x ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "hint", [Count | None, Annotated[int | None, Range(1, LARGEST)], Annotated[Count | None, IsPath(read=True)]]
)
def test_an_optional_kind_remembers_its_bounds(hint):
    kind = kind_of(hint)

    assert (kind.type, kind.optional, kind.bounds) == (int, True, Range(1, LARGEST))
