"""Single values are taken or refused in one line, whatever they are."""

import pytest

from miles_dmd.errors import ConfigError, PlanError
from miles_dmd.validators import (
    a,
    choice,
    count,
    each,
    fields,
    flag,
    instance,
    mapping,
    number,
    optional,
    positive,
    repeated,
    sequence,
    string,
    table,
    text,
)

HUGE = 10**6000


CHECKS = {"count": count, "flag": flag, "text": text, "choice": lambda n, value: choice(n, value, ["a", "b"])}
CHECKS |= {
    "number": number,
    "string": string,
    "mapping": mapping,
    "each": each(flag),
    "table": table(flag),
    "fields": fields({}),
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


BATCHES = fields({"of": string, "sizes": each(positive), "ranks": table(count), "best": optional(number)})
SOUND = {"of": "", "sizes": [1, 2], "ranks": {"a": 0}, "best": None}


def test_a_document_of_its_fields_is_taken():
    BATCHES("", SOUND)
    BATCHES("", {**SOUND, "best": 1.5, "sizes": [], "ranks": {}})
    fields({"of": string}, open_ended=True)("", SOUND)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": None}, "of must be a string, got None of type NoneType"),
        ({"sizes": (1,)}, r"sizes must be a list, got \(1,\) of type tuple"),
        ({"sizes": [1, 0]}, r"sizes\[1\] must be a whole number of at least 1, got 0"),
        ({"ranks": {"a": True}}, r"ranks\.a must be a whole number of at least 0, got True of type bool"),
        ({"ranks": {3: 1}}, "a key of ranks must be a string, got 3"),
        ({"best": float("nan")}, "best must be a finite number, got nan"),
        ({"more": 1}, "it has an unknown 'more'"),
    ],
)
def test_a_refusal_names_the_place_and_the_value(change, message):
    with pytest.raises(PlanError, match=f"^{message}"):
        BATCHES("", SOUND | change)


def test_a_field_that_is_lacking_is_named():
    with pytest.raises(PlanError, match=r"^pending lacks 'of'$"):
        BATCHES("pending", {})


def test_a_list_may_be_of_other_types_where_they_are_named():
    each(a(str), tuple, set)("names", ("a",))

    with pytest.raises(PlanError, match=r"^names must be a tuple or set, got 'a' of type str"):
        each(a(str), tuple, set)("names", "a")
