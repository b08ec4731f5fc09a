"""Whatever is changed in a checkpoint's records, with checksums that vouch for it: refused by file, in one line."""

import copy
import json
import re

import pytest

from miles_dmd.checkpoint.records import DRIVER
from miles_dmd.errors import ConfigError
from miles_dmd.preflight.resume import open_resume

VALUES = (None, True, -1, 1.5, "../x", [0], {"x": 0})
"""One of each kind that JSON has; -1 is of another kind than the whole numbers of these files."""


def places(value, path=()):
    """Every key and index of a document, with the way there."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in rows:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


def changes(document):
    """(what was done, the document with it): each key deleted, each value replaced by one of another kind."""
    for path in places(document):
        *way, last = path
        name = ".".join(map(str, path))
        if isinstance(last, str):
            deleted = copy.deepcopy(document)
            del at(deleted, way)[last]
            yield f"{name} deleted", deleted
        for value in VALUES:
            if are_unlike(value, at(document, path)):
                changed = copy.deepcopy(document)
                at(changed, way)[last] = value
                yield f"{name} = {json.dumps(value)}", changed


def are_unlike(value, old):
    if value == -1:
        return type(old) is not float
    return type(value) is not type(old)


def refusal(run, saved):
    """One line, or nothing where the checkpoint is taken. Another exception is none."""
    try:
        open_resume(run)
    except ConfigError as error:
        said = str(error)
    else:
        return ""
    assert said.startswith(f"--load {saved}: ")
    assert "\n" not in said
    return said


@pytest.fixture
def run(resolved, saved):
    """A run that goes on from ``saved``."""
    return resolved("--load", str(saved))


@pytest.fixture
def taken(saved, run, rewrite, forge):
    """Changes of a file after which the checkpoint is still taken, and refusals that do not name what is wrong."""

    def change_all(path, names):
        odd = {}
        for what, document in changes(json.loads((saved / path).read_text())):

            def write(content, document=document):
                content.clear()
                content.update(document)

            if path == "manifest.json":
                rewrite(saved, write)
            else:
                forge(saved, path, write)
            said = refusal(run, saved)
            if not any(name in said for name in names):
                odd[what] = said
        return odd

    return change_all


def test_manifest(taken):
    """Other versions of packages load, and its own checksum was written again."""
    odd = taken(
        "manifest.json", ("manifest.json", "checkpoint format", "is not of this checkpoint", "has no driver.json")
    )

    assert {what for what in odd if not re.fullmatch(r"(versions\..*|sha256) .*", what)} == set()


def test_driver(taken):
    """A number that was not finite is null, and so one among the best student's values may be."""
    odd = taken("driver.json", ("driver.json", "belongs to another plan"))

    assert set(odd) == {"observers.best.values.0 = null"}


@pytest.mark.parametrize("change", [lambda c: c.pop("sources"), lambda c: c.update(arguments=[]), lambda c: c.clear(),
                                    lambda c: c["sources"]["hf_checkpoint"].update(sha256=1),
                                    lambda c: c["sources"].update(hf_checkpoint=None)])  # fmt: skip
def test_arguments_of_a_trainer(saved, run, forge, change):
    forge(saved, "actor/args.json", change)

    assert "actor/args.json" in refusal(run, saved)


def test_waiting_batches_are_all_of_the_student_of_the_checkpoint(saved, run, forge):
    forge(saved, "driver.json", lambda driver: driver["pending"][0].update(policy_version=0))

    assert "driver.json lists waiting samples that are not those of the checkpoint" in refusal(run, saved)


@pytest.mark.parametrize("change", [lambda pending: pending.clear(), lambda pending: pending.append(pending[0])])
def test_as_many_batches_wait_as_there_are_files(saved, run, forge, change):
    forge(saved, "driver.json", lambda driver: change(driver["pending"]))

    assert "driver.json lists waiting samples that are not those of the checkpoint" in refusal(run, saved)


def test_fields_that_no_format_has_are_refused(saved, run, forge):
    forge(saved, "driver.json", lambda driver: driver["prompts"].update(more=1))

    assert "driver.json does not have the fields of its format: prompts has an unknown 'more'" in refusal(run, saved)


def test_every_field_of_the_drivers_file_is_described(saved):
    assert json.loads((saved / "driver.json").read_text()).keys() == DRIVER.keys()
