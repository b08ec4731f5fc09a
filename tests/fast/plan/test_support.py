"""A plan that a run would not obey is declared, inspected and refused."""

from dataclasses import replace

import pytest

from miles_dmd import registry
from miles_dmd.errors import PlanError
from miles_dmd.plan import (
    ExportSpec,
    RoleGroupSpec,
    ScoreTransportSpec,
    Support,
    require_runnable,
    rollout_registry,
    unsupported,
)
from miles_dmd.plan.support import SHIPPED


def _with(plan, **changes):
    return replace(plan, role_layout=replace(plan.role_layout, **changes))


def _scheduled(plan, index, **changes):
    phases = list(plan.update_schedule.phases)
    phases[index] = replace(phases[index], **changes)
    return replace(plan, update_schedule=replace(plan.update_schedule, phases=phases))


MISSING = {
    "the capabilities ['autoregressive']": lambda make: make("self_forcing"),
    "the rollout strategy 'self_forced'": lambda make: make("self_forcing"),
    "the rollout strategy 'on_policy_tokens'": lambda make: make("opd", fake_update_ratio=None),
    "the initialization stage 'ode_regression'": lambda make: make("causvid"),
    "the data mode 'regression_pairs'": lambda make: make("dmd"),
    "a discriminator": lambda make: make(profile="paper"),
    "adapters on the base of ['base']": lambda make: make(),
    "in separate groups": lambda make: make(role_storage="colocated_independent"),
    "the score transport 'ray'": lambda make: _with(
        make(role_storage="actor_critic"), score_transport=ScoreTransportSpec("ray", "mooncake")
    ),
    "the checkpoint engine 'nccl'": lambda make: replace(
        make(role_storage="actor_critic"), export=ExportSpec(checkpoint_engine_backend="nccl")
    ),
    "adapters on the base of ['actor']": lambda make: _with(
        make(role_storage="actor_critic"),
        bindings=[
            replace(binding, adapter="lora" if binding.role == "student" else None)
            for binding in make(role_storage="actor_critic").role_layout.bindings
        ],
    ),
    "a batch that is used twice": lambda make: _scheduled(
        make(role_storage="actor_critic"), 1, batch_policy="reuse_student"
    ),
    "without its moving average": lambda make: _scheduled(make(role_storage="actor_critic"), 0, update_ema=False),
    "standalone placement": lambda make: _with(
        make(role_storage="actor_critic"),
        groups=[
            RoleGroupSpec("critic", "/m", "independent_module", "standalone"),
            RoleGroupSpec("actor", "/m", "independent_module"),
        ],
    ),
}


@pytest.mark.parametrize(("missing", "build"), MISSING.items(), ids=MISSING)
def test_a_plan_that_cannot_run_is_declared_inspected_and_refused_at_the_door(make_plan, missing, build):
    plan = build(make_plan)

    assert any(missing in reason for reason in unsupported(plan))
    with pytest.raises(NotImplementedError, match="can be declared but not run") as refusal:
        require_runnable(plan)
    assert missing in str(refusal.value)
    assert isinstance(refusal.value, PlanError)


def test_the_plan_of_the_shipped_loss_type_runs(make_plan):
    plan = make_plan(role_storage="actor_critic")

    require_runnable(plan)

    assert unsupported(plan) == ()


def test_what_plug_ins_declare_makes_a_plan_runnable_or_not(make_plan):
    tokens = make_plan("opd", fake_update_ratio=None)
    language = Support(frozenset({"token_matching"}), frozenset({"on_policy_tokens"}))

    require_runnable(tokens, language)

    assert unsupported(make_plan(role_storage="actor_critic"), language) == (
        "the capabilities ['distribution_matching'], which neither loss type, model family nor engine declares",
        "the rollout strategy 'ode_euler' (the engine plays on_policy_tokens)",
    )
    assert "(the engine plays none)" in unsupported(tokens, Support())[1]


def test_what_is_said_to_ship_is_what_the_plug_ins_declare():
    plug_ins = {wing: [registry.load(wing, name) for name in registry.names(wing)] for wing in registry.WINGS}
    engines = plug_ins["engines"]
    declaring = [*plug_ins["losses"], *plug_ins["models"], *engines]

    assert {capability for plug_in in declaring for capability in plug_in.capabilities} == SHIPPED.capabilities
    assert {strategy for engine in engines for strategy in engine.rollouts} == SHIPPED.rollouts
    assert {*rollout_registry.names} >= SHIPPED.rollouts
