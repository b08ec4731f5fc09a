"""Single values are taken or refused in one line, whatever they are."""

import pytest

from miles_dmd.errors import ConfigError, PlanError
from miles_dmd.validators import choice, count, flag, instance, repeated, sequence, text

HUGE = 10**6000


CHECKS = {"count": count, "flag": flag, "text": text, "choice": lambda n, value: choice(n, value, ["a", "b"])}
CHECKS |= {
    "instance": lambda n, value: instance(n, value, float),
    "sequence": lambda n, value: sequence(n, [value], float),
}
WRONG = {"huge": -HUGE, "list of huge": [HUGE], "bytes": b"\0" * 1000, "null": None, "object": object()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_a_value_of_any_size_is_refused_in_one_short_line(check, value):
    with pytest.raises(PlanError, match=r"^n(\[0\])? must be") as refusal:
        check("n", value)

    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()
    assert isinstance(refusal.value, ConfigError)


def test_what_is_right_is_given_back():
    assert (count("n", 3), flag("n", False), text("n", "a"), choice("n", "a", ["a"])) == (3, False, "a", "a")
    assert sequence("n", ["a", "b"], str) == ("a", "b")
    assert repeated(["b", "a", "b"]) == ["b"]
