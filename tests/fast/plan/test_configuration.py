"""The nested configuration becomes the plan that the flat one makes, or is refused."""

from types import SimpleNamespace

import pytest

from miles_dmd.errors import PlanError
from miles_dmd.plan import build_plan, build_plan_from_config

PLAIN = build_plan("dmd2", {"model_path": "/m", "fake_update_ratio": 3}, {"distribution_matching"})


def nested(algorithm=None, enabled=False, path="/m", **block):
    return {
        "algorithm": algorithm or {},
        "actor_rollout_ref": {"model": {"path": path}},
        "distillation": {"enabled": enabled, "distribution_matching": {"fake_update_ratio": 3} | block},
    }


def test_the_nested_form_makes_the_plan_of_the_flat_one_and_dmd2_by_default():
    assert build_plan_from_config(nested()) == PLAIN
    assert build_plan_from_config(nested({"trainer_type": "distillation"})) == PLAIN
    assert build_plan_from_config(nested({"trainer_type": None}, enabled=None, recipe=None, profile=None)) == PLAIN


def test_every_level_may_have_attributes():
    block = SimpleNamespace(recipe="dmd2", fake_update_ratio=3, unrelated=1)
    model = SimpleNamespace(model=SimpleNamespace(path="/m"))
    distillation = SimpleNamespace(enabled=False, distribution_matching=block)

    assert build_plan_from_config(SimpleNamespace(distillation=distillation, actor_rollout_ref=model)) == PLAIN


def test_a_model_path_in_the_block_goes_first():
    plan = build_plan_from_config(nested(path="/m", model_path="/block"))

    assert plan.role_layout.groups[0].model_ref == "/block"


def test_a_causal_plan_can_be_declared():
    plan = build_plan_from_config(nested(recipe="self_forcing", causal_model_path="/c"))

    assert (plan.name, plan.role_layout.groups[1].model_ref) == ("self_forcing", "/c")


def test_settings_of_the_trainers_are_left_to_them():
    assert build_plan_from_config(nested(fake_lr=2e-5, ema_decay=0.999, student_micro_batch_size=1)) == PLAIN


def on_policy(**settings):
    ref = {"model": {"path": "/m", "use_fused_kernels": False}, "actor": {"use_torch_compile": False}}
    return {"actor_rollout_ref": ref, "distillation": {"enabled": True, "distillation_loss": settings}}


def test_the_switch_of_on_policy_distillation_makes_its_plan():
    four, default = build_plan_from_config(on_policy(topk=4)), build_plan_from_config(on_policy(topk=None))

    assert (four.name, four.objective["opd_top_k"], "opd_top_k" in default.objective) == ("opd", 4, False)
    assert four == build_plan("opd", {"model_path": "/m", "opd_top_k": 4}, {"token_matching"})
    assert four.fingerprint != default.fingerprint != build_plan_from_config(on_policy(topk=5)).fingerprint


REFUSALS = {
    "no block": ({"distillation": {"enabled": False}}, "distillation.distribution_matching is required"),
    "settings that are a list": (
        {"distillation": {"distribution_matching": ["dmd2"]}},
        "distillation.distribution_matching must hold names and values .*, not list",
    ),
    "a level that is text": (nested() | {"algorithm": "distillation"}, "algorithm must hold names .*, not str"),
    "nothing": ({}, "distillation.distribution_matching is required"),
    "a clamp of the on-policy loss": (on_policy(loss_max_clamp=10), "loss_max_clamp 10 must be unset .*: .* biases"),
    "a head of nothing": (on_policy(topk=0), "distillation_loss.topk must be a whole number of at least 1, got 0"),
    "no model": (nested(path=None), "model_ref"),
    "unknown trainer": (
        nested({"trainer_type": "ppo"}),
        "algorithm.trainer_type 'ppo' is not among distillation",
    ),
    "trainer that is no name": (nested({"trainer_type": 3}), "algorithm.trainer_type 3 is not among distillation"),
    "trainer at odds with the recipe": (
        nested({"trainer_type": "distillation"}, recipe="opd", fake_update_ratio=None),
        "recipe 'opd' disagrees with algorithm.trainer_type 'distillation'",
    ),
    "typo": (nested(fake_warmup_cycle=1), "unknown key 'fake_warmup_cycle'; .*did you mean fake_warmup_cycles"),
    "unknown key": (
        nested(zzz=1),
        "distribution_matching: unknown key 'zzz'; there are recipe, model_path",
    ),
    "no updates": (nested(fake_update_ratio=0), "fake_update_ratio must be a whole number of at least 1, got 0"),
    "false for a number": (nested(fake_warmup_cycles=False), "fake_warmup_cycles must be a whole number"),
}


@pytest.mark.parametrize(("config", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_nested_form_that_says_nothing_runnable_is_refused(config, message):
    with pytest.raises(PlanError, match=message) as refusal:
        build_plan_from_config(config)

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("trainer_type", [None, "distillation"])
def test_invariant_11_distribution_matching_keeps_on_policy_distillation_off(trainer_type):
    with pytest.raises(PlanError, match="must keep the OPD off"):
        build_plan_from_config(nested({"trainer_type": trainer_type}, enabled=True))


@pytest.mark.parametrize("enabled", ["true", 1, "no", [True]])
def test_invariant_11_the_switch_is_true_or_false(enabled):
    with pytest.raises(PlanError, match=r"distillation\.enabled must be true or false"):
        build_plan_from_config(nested(enabled=enabled))


def test_declared_capabilities_bound_what_the_nested_form_may_ask_for():
    with pytest.raises(PlanError, match="autoregressive is missing"):
        build_plan_from_config(nested(recipe="causvid"), {"distribution_matching"})
