"""Nothing that a plan holds can change, and its fingerprint is that of its content in every process."""

import copy
import dataclasses
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import miles_dmd
from miles_dmd.errors import PlanError
from miles_dmd.plan import FrozenDict, RoleGroupSpec, TrainerCounters, UpdateSchedule, build_plan, freeze

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


class Unsettled:
    """A leaf that no plan can hold."""

    def __repr__(self):
        return "tensor(1.)"


def _change_attribute(plan):
    plan.name = "other"


def _delete_attribute(plan):
    del plan.name


def _add_attribute(plan):
    plan.extra = 1


def _change_part(plan):
    plan.update_schedule.phases[0].repeats = 9


def _change_group(plan):
    plan.role_layout.groups[0].model_ref = "/elsewhere"


def _change_item(plan):
    plan.objective["name"] = "other"


def _delete_item(plan):
    del plan.objective["name"]


def _change_nested_item(plan):
    plan.rollout["nested"]["deep"] = 1


def _change_through_the_view(plan):
    plan.objective.data["name"] = "other"


def _replace_the_view(plan):
    plan.objective.data = {}


def _delete_the_view(plan):
    del plan.objective.data


def _initialise_the_plan_again(plan):
    plan.__init__(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)} | {"name": "other"})


def _initialise_a_part_again(plan):
    plan.role_layout.groups[0].__init__("other")


def _initialise_a_mapping_again(plan):
    plan.objective.__init__({"name": "other"})


def _merge_in_place(plan):
    plan.objective |= {"name": "other"}


def _merge_a_mapping_in_place(plan):
    objective = plan.objective
    objective |= {"name": "other"}


def _merge_the_view_in_place(plan):
    view = plan.objective.data
    view |= {"name": "other"}


def _restore_state(plan):
    plan.__setstate__(["other"])


def _change_through_vars(plan):
    vars(plan)["name"] = "other"


CHANGES = [change for name, change in list(globals().items()) if name.startswith("_") and callable(change)]


@pytest.fixture
def plan(make_plan):
    return dataclasses.replace(make_plan(), rollout={"strategy": "ode_euler", "nested": {"deep": [1, {"er": {2, 3}}]}})


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_invariant_1_a_plan_is_immutable_down_to_its_leaves(plan, change):
    before = plan.fingerprint

    with pytest.raises((AttributeError, TypeError)):  # FrozenInstanceError is an AttributeError
        change(plan)

    assert plan.fingerprint == before
    assert plan.name == "dmd2"


def test_invariant_1_assigning_an_attribute_says_that_the_plan_is_frozen(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.version = 2


def test_invariant_1_a_plan_hashes_pickles_and_copies_as_its_content(plan):
    twins = [pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan), dataclasses.replace(plan)]

    assert {plan, *twins} == {plan}
    assert {twin.fingerprint for twin in twins} == {plan.fingerprint}
    assert {type(twin.rollout) for twin in twins} == {FrozenDict}


def test_invariant_1_every_container_is_copied_so_that_its_source_may_change(make_plan):
    source = {"strategy": "ode_euler", "steps": [1, 2]}
    plan = dataclasses.replace(make_plan(), rollout=source)

    source["steps"].append(3)

    assert plan.rollout["steps"] == (1, 2)


def test_invariant_1_different_plans_have_different_fingerprints(make_plan):
    plans = [make_plan(), make_plan(fake_update_ratio=3), make_plan(fake_warmup_cycles=1), make_plan(model_path="/m")]

    assert len({plan.fingerprint for plan in plans}) == 4


def test_invariant_1_the_fingerprint_is_the_same_under_every_hash_seed_and_insertion_order(make_plan):
    here = make_plan("causvid", data_mode=None).fingerprint
    code = (
        "from miles_dmd.plan import build_plan\n"
        "config = {'fake_update_ratio': 2, 'data_mode': None, 'model_path': '/models/teacher'}\n"
        "print(build_plan('causvid', config, {'autoregressive', 'distribution_matching'}).fingerprint)"
    )
    environment = {"PYTHONPATH": str(Path(miles_dmd.__file__).parents[1])}

    elsewhere = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | environment | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }

    assert elsewhere == {here}


def test_invariant_1_the_fingerprint_does_not_depend_on_insertion_order(plan):
    turned = dict(reversed(list(plan.rollout.items())))

    assert dataclasses.replace(plan, rollout=turned).fingerprint == plan.fingerprint


def test_the_fingerprint_tells_a_set_from_a_sequence(plan):
    one, other = (dataclasses.replace(plan, rollout={"strategy": "s", "x": x}) for x in (("a",), {"a"}))

    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("objective", "path"),
    [
        ({"name": "dmd2", "weights": Unsettled()}, "objective.weights"),
        ({"name": "dmd2", "a": {"b": [0, (1, Unsettled())]}}, r"objective.a.b\[1\]\[1\]"),
        ({"name": "dmd2", "a": {Unsettled()}}, r"objective.a\{tensor\(1.\)\}"),
        ({"name": "dmd2", "f": open}, "objective.f"),
        ({"name": "dmd2", "b": b"bytes"}, "objective.b"),
        ({"name": "dmd2", "n": math.nan}, "objective.n"),
        ({"name": "dmd2", "n": -math.inf}, "objective.n"),
        ({"name": "dmd2", 3: "three"}, "a key of objective must be a string, got 3"),
        ({"name": "dmd2", "a": {("x",): 1}}, "a key of objective.a must be a string"),
    ],
)
def test_invariant_1_a_leaf_of_another_kind_is_refused_with_its_path(make_plan, objective, path):
    with pytest.raises(PlanError, match=path) as refusal:
        dataclasses.replace(make_plan(), objective=objective)

    assert isinstance(refusal.value, TypeError)
    assert "\n" not in str(refusal.value)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_frozen_content_is_hashable_equal_and_picklable_whatever_it_holds(content):
    frozen = FrozenDict(content)

    assert frozen == FrozenDict(dict(reversed(content.items()))) == pickle.loads(pickle.dumps(frozen))
    assert hash(frozen) == hash(FrozenDict(dict(reversed(content.items()))))
    assert freeze(frozen) == frozen
    assert len(frozen) == len(content)


def test_a_frozen_mapping_equals_the_mapping_that_it_was_made_of():
    assert FrozenDict({"a": 1, "b": (1, 2)}) == {"a": 1, "b": (1, 2)}
    assert repr(FrozenDict({"a": 1})) == "FrozenDict({'a': 1})"


def test_the_parts_of_a_plan_pickle_through_their_constructor():
    group = RoleGroupSpec("actor", "/m", "independent_module")

    assert group.__reduce__() == (RoleGroupSpec, ("actor", "/m", "independent_module", "colocated"))


def test_counters_are_a_value_of_the_caller_and_no_part_of_a_plan():
    counters = TrainerCounters(optimizer_steps={"student": 1})
    copied = counters.copy()

    copied.record_step("student")

    assert counters.optimizer_steps == {"student": 1}


def test_a_list_of_phases_becomes_a_tuple():
    phases = list(build_plan("dmd2", {"model_path": "/m"}, {"distribution_matching"}).update_schedule.phases)

    assert UpdateSchedule(phases).phases == tuple(phases)
