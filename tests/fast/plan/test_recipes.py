"""Each recipe builds the plan that the table says, and refuses every setting that is none of its own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from miles_dmd.errors import ConfigError, NotFound, PlanError
from miles_dmd.plan import (
    CausVidRecipe,
    DMD2Recipe,
    DMDRecipe,
    OnPolicyDistillationRecipe,
    Recipe,
    Registry,
    SelfForcingRecipe,
    build_plan,
    initialization_registry,
    objective_registry,
    recipe_registry,
    rollout_registry,
)

EVERY = {"distribution_matching", "autoregressive", "adversarial", "token_matching"}
SHARED, TWO = ("base",), ("bidirectional_base", "causal_base")

TABLE = [
    ("dmd", "paper", "regression_pairs", "one_step", "base", {"distribution_matching"}, SHARED, 1),
    ("dmd2", "distribution_only", "prompts", "ode_euler", "base", {"distribution_matching"}, SHARED, 5),
    (
        *("causvid", "distribution_only", "prompt_and_real_latent", "teacher_forced_causal", "ode_regression"),
        *({"distribution_matching", "autoregressive"}, TWO, 5),
    ),
    (
        *("self_forcing", "distribution_only", "prompts", "self_forced", "ode_regression"),
        *({"distribution_matching", "autoregressive"}, TWO, 5),
    ),
]


@pytest.mark.parametrize(
    ("recipe", "profile", "mode", "rollout", "stage", "capabilities", "groups", "ratio"),
    TABLE,
    ids=lambda value: str(value),
)
def test_a_recipe_has_the_defaults_of_the_table(recipe, profile, mode, rollout, stage, capabilities, groups, ratio):
    plan = build_plan(recipe, {"model_path": "/m"}, EVERY)
    student, fake = plan.update_schedule.phases

    assert (plan.name, plan.version, plan.objective["profile"]) == (recipe, 1, profile)
    assert plan.objective["name"] == ("dmd2" if recipe == "dmd2" else "dmd")
    assert plan.data_requirements["mode"] == mode
    assert plan.rollout["strategy"] == rollout
    assert plan.initialization == {"stage": stage} | ({"requires_provenance": True} if stage != "base" else {})
    assert plan.required_capabilities == capabilities
    assert plan.groups == groups
    assert (student.kind, student.trainable_roles, student.update_ema) == ("student", ("student",), True)
    assert (fake.kind, fake.trainable_roles, fake.repeats) == ("fake_score", ("fake_score",), ratio)
    assert (plan.update_schedule.warmup_cycles, plan.update_schedule.warmup_phases) == (0, ())
    assert (plan.export.role, plan.export.checkpoint_engine_backend) == ("student_ema", "naive")


def test_the_paper_profile_of_dmd2_adds_a_discriminator_that_trains_with_the_fake_score():
    plan = build_plan("dmd2", {"model_path": "/m", "profile": "paper"}, EVERY)

    assert plan.required_capabilities == {"distribution_matching", "adversarial"}
    assert plan.data_requirements["mode"] == "prompt_and_real_latent"
    assert plan.update_schedule.phases[1].trainable_roles == ("fake_score", "discriminator")
    assert plan.role_layout.binding("discriminator").group == "base"


def test_the_paper_profile_puts_the_discriminator_beside_the_fake_score():
    plan = build_plan("dmd2", {"model_path": "/m", "profile": "paper", "role_storage": "actor_critic"}, EVERY)

    assert plan.roles_of("critic") == ("teacher_score", "fake_score", "discriminator")


def test_on_policy_distillation_is_one_student_phase_before_a_frozen_teacher():
    plan = build_plan("opd", {"model_path": "/student", "teacher_model_path": "/teacher"}, {"token_matching"})

    assert [phase.kind for phase in plan.update_schedule.phases] == ["student"]
    assert plan.groups == ("teacher", "actor")
    assert [group.model_ref for group in plan.role_layout.groups] == ["/teacher", "/student"]
    assert (plan.export.role, plan.update_schedule.phases[0].update_ema) == ("student", False)


@pytest.mark.parametrize("size", [0, True, 2.0, "4"])
def test_the_head_of_on_policy_distillation_is_a_whole_number(size):
    with pytest.raises(PlanError, match="opd_top_k must be a whole number of at least 1"):
        build_plan("opd", {"model_path": "/m", "opd_top_k": size}, EVERY)


def test_settings_of_an_objective_belong_to_their_recipe():
    with pytest.raises(PlanError, match="recipe 'dmd2' has no setting 'opd_top_k'"):
        build_plan("dmd2", {"model_path": "/m", "opd_top_k": 4}, EVERY)


@pytest.mark.parametrize("rollout", ["ode_euler", "consistency_renoise", "backward_simulated"])
def test_dmd2_knows_three_ways_to_roll_out(rollout):
    assert build_plan("dmd2", {"model_path": "/m", "rollout_strategy": rollout}, EVERY).rollout["strategy"] == rollout


def test_the_warmup_is_the_fake_score_phase():
    schedule = build_plan("dmd2", {"model_path": "/m", "fake_warmup_cycles": 3}, EVERY).update_schedule

    assert schedule.warmup_phases == schedule.phases[1:]
    assert schedule.warmup_cycles == 3


def test_models_of_groups_fall_back_to_the_one_model():
    plan = build_plan("causvid", {"model_path": "/m", "causal_model_path": "/c"}, EVERY)

    assert [(group.name, group.model_ref) for group in plan.role_layout.groups] == [
        ("bidirectional_base", "/m"),
        ("causal_base", "/c"),
    ]


@pytest.mark.parametrize("recipe", ["dmd2", "causvid"])
def test_colocated_independent_gives_every_role_its_own_module(recipe):
    plan = build_plan(recipe, {"model_path": "/m", "role_storage": "colocated_independent"}, EVERY)

    assert plan.groups == ("teacher_score_model", "fake_score_model", "student_model", "student_ema_model")
    assert {group.storage for group in plan.role_layout.groups} == {"independent_module"}


def test_a_config_may_have_attributes_and_null_is_the_default():
    settings = {"model_path": "/m", "fake_update_ratio": 3, "profile": None, "fake_warmup_cycles": None}

    assert build_plan("dmd2", SimpleNamespace(**settings), EVERY) == build_plan("dmd2", settings, EVERY)
    assert build_plan("dmd2", settings, EVERY).update_schedule.phases[1].repeats == 3


REFUSALS = {
    "profile": (
        {"profile": "papper"},
        "profile of recipe 'dmd2' must be one of distribution_only, paper; got 'papper'",
    ),
    "rollout": ({"rollout_strategy": "ode_eular"}, "rollout_strategy .* ode_euler, .*; got 'ode_eular'"),
    "data mode": ({"data_mode": "prompt_and_real_latent"}, "profile 'distribution_only' must be one of prompts"),
    "data mode of paper": ({"profile": "paper", "data_mode": "prompts"}, "must be one of prompt_and_real_latent"),
    "storage": (
        {"role_storage": "remote"},
        "role_storage .* shared_base_adapters, actor_critic, colocated_independent",
    ),
    "export": ({"export_role": "teacher_score"}, "export role must be one of student, student_ema"),
    "no model": ({"model_path": None}, "model_ref"),
    "empty model": ({"model_path": ""}, "model_ref"),
    "model of another type": ({"model_path": 7}, "model_ref of role group 'base' must be a string"),
    "typo": ({"fake_update_ration": 2}, r"no setting 'fake_update_ration' \(did you mean fake_update_ratio\?\)"),
    "unknown setting": ({"zzz": 2}, "no setting 'zzz'; there are model_path, fake_update_ratio"),
    "model of a group it lacks": ({"causal_model_path": "/c"}, "no setting 'causal_model_path'"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSALS.values(), ids=REFUSALS)
def test_invariant_2_a_setting_that_the_recipe_lacks_is_refused(settings, message):
    with pytest.raises(PlanError, match=message) as refusal:
        build_plan("dmd2", {"model_path": "/m"} | settings, EVERY)

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [0, -2, 1.5, 2.0, True, "2"])
def test_invariant_4_the_update_ratio_is_a_whole_number(value):
    with pytest.raises(PlanError, match=f"fake_update_ratio must be a whole number of at least 1, got {value!r}"):
        build_plan("dmd2", {"model_path": "/m", "fake_update_ratio": value}, EVERY)


@pytest.mark.parametrize("value", [-1, 1.5, 0.0, False, "1"])
def test_invariant_4_the_number_of_warmup_cycles_is_a_whole_number(value):
    with pytest.raises(PlanError, match=f"fake_warmup_cycles must be a whole number of at least 0, got {value!r}"):
        build_plan("dmd2", {"model_path": "/m", "fake_warmup_cycles": value}, EVERY)


@pytest.mark.parametrize("key", ["fake_update_ratio", "fake_warmup_cycles"])
def test_on_policy_distillation_has_no_fake_score_to_schedule(key):
    with pytest.raises(PlanError, match=f"recipe 'opd' has no fake score; drop {key}=2"):
        build_plan("opd", {"model_path": "/m", key: 2}, EVERY)


@pytest.mark.parametrize("recipe", ["causvid", "self_forcing"])
def test_a_causal_recipe_has_no_actor_critic_storage(recipe):
    with pytest.raises(PlanError, match="must be one of shared_base_adapters, colocated_independent"):
        build_plan(recipe, {"model_path": "/m", "role_storage": "actor_critic"}, EVERY)


def test_a_missing_capability_is_refused_with_both_sides():
    with pytest.raises(PlanError, match=r"requires .*\['autoregressive', 'distribution_matching'\].*\['adversarial'\]"):
        build_plan("causvid", {"model_path": "/m"}, {"adversarial"})


def test_no_capabilities_and_a_string_of_them_are_refused():
    with pytest.raises(PlanError, match="distribution_matching is missing"):
        build_plan("dmd2", {"model_path": "/m"})
    with pytest.raises(PlanError, match="capabilities must be a sequence of str"):
        build_plan("dmd2", {"model_path": "/m"}, "distribution_matching")


def test_an_unknown_recipe_is_refused_with_the_list_and_the_nearest():
    with pytest.raises(KeyError) as refusal:
        build_plan("dmd3", {"model_path": "/m"}, EVERY)

    assert "causvid, dmd, dmd2, opd, self_forcing (did you mean dmd" in str(refusal.value)
    assert isinstance(refusal.value, NotFound)


def test_a_registry_takes_names_directly_and_as_a_decorator():
    registry = Registry("recipe")

    @registry.register("second")
    class Second:
        pass

    assert registry.register("first", int) is int
    assert registry.get("second") is Second
    assert registry.names == ("first", "second")


@pytest.mark.parametrize("name", ["", " ", None, 3])
def test_a_registry_refuses_an_empty_name(name):
    with pytest.raises(ConfigError, match="must be a non-empty string"):
        Registry("recipe").register(name, int)


def test_a_registry_refuses_a_name_twice_with_the_list():
    registry = Registry("recipe")
    registry.register("one", int)

    with pytest.raises(ConfigError, match="recipe 'one' is already registered, among one"):
        registry.register("one")(float)


@pytest.mark.parametrize("name", ["two", None, ["one"]])
def test_a_registry_refuses_an_unknown_name_with_the_list(name):
    registry = Registry("objective")

    with pytest.raises(KeyError, match="is not among none"):
        registry.get(name)


def test_what_ships_is_registered():
    assert recipe_registry.names == ("causvid", "dmd", "dmd2", "opd", "self_forcing")
    assert [recipe_registry.get(name) for name in recipe_registry.names] == [
        CausVidRecipe,
        DMDRecipe,
        DMD2Recipe,
        OnPolicyDistillationRecipe,
        SelfForcingRecipe,
    ]
    assert objective_registry.names == ("dmd", "dmd2", "ode_regression", "token_matching")
    assert initialization_registry.names == ("base", "ode_regression")
    assert set(rollout_registry.names) == {
        *("backward_simulated", "consistency_renoise", "ode_euler", "on_policy_tokens", "one_step"),
        *("self_forced", "teacher_forced_causal"),
    }


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"objective": {"name": "gan"}}, "objective 'gan' is not among"),
        ({"rollout": {"strategy": "guess"}}, "rollout 'guess' is not among"),
        ({"initialization": {"stage": "noise"}}, "initialization 'noise' is not among"),
    ],
)
def test_a_recipe_that_names_what_nobody_registered_is_refused(monkeypatch, part, message):
    class Mine(DMD2Recipe):
        def build(self, config):
            return replace(super().build(config), **part)

    monkeypatch.setitem(recipe_registry._things, "mine", Mine)
    with pytest.raises(KeyError, match=message):
        build_plan("mine", {"model_path": "/m"}, EVERY)


def test_a_recipe_that_builds_no_plan_is_refused(monkeypatch):
    class Mine(Recipe):
        def build(self, config):
            return dict(config)

    monkeypatch.setitem(recipe_registry._things, "mine", Mine)
    with pytest.raises(PlanError, match="what recipe 'mine' builds must be a DistillationPlan"):
        build_plan("mine", {"model_path": "/m"}, EVERY)
