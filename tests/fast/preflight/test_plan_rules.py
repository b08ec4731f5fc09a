"""A run whose plug-ins would not obey its plan is refused, in one line, with flag, value and cure."""

import shutil
import sys
import types
from dataclasses import replace

import pytest

from miles_dmd import registry
from miles_dmd.config.cli import parse_args
from miles_dmd.config.trainers import trainer_args
from miles_dmd.contracts.engine import EngineType
from miles_dmd.contracts.role import Role
from miles_dmd.errors import ConfigError
from miles_dmd.plan import build_plan
from miles_dmd.preflight.rules import resolve

DMD2 = registry.load("losses", "dmd2")


@pytest.fixture
def lab(monkeypatch):
    """``lab("loss_type", value)`` is the import path of a plug-in that is ``value``."""

    def make(export, value):
        name = f"odd_{export}.of_tests"
        module = types.ModuleType(name)
        setattr(module, export, value)
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType("odd"))
        monkeypatch.setitem(sys.modules, name, module)
        return name

    return make


def planning(change):
    """DMD2 with another plan."""
    return replace(DMD2, plan=lambda args: change(DMD2.plan(args)))


def with_rollout(**rollout):
    return planning(lambda plan: replace(plan, rollout={**plan.rollout, **rollout}))


def on_policy(args):
    return build_plan("opd", {"model_path": args.hf_checkpoint}, {"token_matching"})


TOKENS = replace(
    DMD2, roles=("teacher", "actor"), plan=on_policy, scorers={}, needs={}, capabilities=frozenset({"token_matching"}),
    objectives={"student": DMD2.objectives["student"]}, readers={},
)  # fmt: skip


def grouped(plan, **changes):
    groups = [replace(group, **changes) if group.name == "actor" else group for group in plan.role_layout.groups]
    return replace(plan, role_layout=replace(plan.role_layout, groups=groups))


def moved(plan):
    """The frozen teacher in the group of the student, which builds none."""
    bindings = [
        replace(binding, group="actor") if binding.role in ("teacher_score", "fake_score") else binding
        for binding in plan.role_layout.bindings
    ]
    bindings += [replace(bindings[0], role="critic_too", group="critic")]
    return replace(plan, role_layout=replace(plan.role_layout, bindings=bindings))


@pytest.mark.parametrize(
    ("loss_type", "parts"),
    [
        (TOKENS, ["'on_policy_tokens'", "the engine plays backward_simulated", "--rollout-engine inprocess"]),
        (replace(DMD2, capabilities=frozenset()), ["['distribution_matching']", "neither loss type"]),
        (
            planning(lambda plan: replace(plan, required_capabilities={"autoregressive", "distribution_matching"})),
            ["the capabilities ['autoregressive']", "--model-family sd3"],
        ),
        (planning(lambda plan: replace(plan, initialization={"stage": "ode_regression"})), ["'ode_regression'"]),
        (planning(lambda plan: grouped(plan, storage="shared_base_adapters", model_ref="x")), ["name an adapter"]),
        (planning(lambda plan: grouped(plan, placement="standalone")), ["standalone placement"]),
        (with_rollout(strategy="ode_euler"), ["--solver 'renoise'", "ode_euler needs 'euler'", "pass --solver euler"]),
        (with_rollout(strategy="one_step"), ["--num-inference-steps 4", "one_step needs 1"]),
        (with_rollout(num_inference_steps=2), ["--num-inference-steps 4", "needs 2", "pass --num-inference-steps 2"]),
        (with_rollout(strategy="self_forced"), ["the rollout strategy 'self_forced'"]),
        (planning(lambda plan: grouped(plan, model_ref="elsewhere")), ["'actor' start from model_ref elsewhere"]),
        (planning(moved), ["its plan trains fake_score", "neither role 'actor' names weights of it"]),
    ],
)
def test_a_plan_that_the_run_would_not_obey_is_refused_at_the_door(refused, lab, monkeypatch, loss_type, parts):
    monkeypatch.setitem(registry.WINGS["roles"]._things, "teacher", Role({"teacher_score": "teacher_path"}))
    name = lab("loss_type", loss_type)

    message = refused("--loss-type", name)

    assert all(part in message for part in (f"--loss-type {name}", *parts)), message


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_weights_of_one_trainer_do_not_move_the_teacher(asked, latest, configuration_only, tmp_path, role):
    other = shutil.copytree(configuration_only, tmp_path / "other")

    args = resolve(parse_args(latest([*asked, f"--{role}-hf-checkpoint", str(other)]))).args
    resolve(args)

    assert {own.teacher_path for own in trainer_args(args).values()} == {str(configuration_only)}


def test_an_engine_that_says_nothing_of_what_it_plays_is_refused(refused, lab):
    name = lab("engine", replace(registry.load("engines", "inprocess"), rollouts={}))

    message = refused("--rollout-engine", name)

    assert f"--rollout-engine {name}" in message
    assert "'consistency_renoise' (the engine plays none)" in message


@pytest.mark.parametrize("rollouts", [{"ode_euler"}, "ode_euler", {"ode_euler": "euler"}, None])
def test_rollouts_of_another_shape_are_refused_when_the_engine_is_made(rollouts):
    with pytest.raises(ConfigError, match=r"EngineType: rollouts .* must map strategies to their arguments"):
        EngineType(builds={"diffusion": "lab:build"}, rollouts=rollouts)


def test_what_plug_ins_declare_of_themselves_is_what_runs(asked, latest, lab):
    """A strategy of one's own, and a capability that the engine brings."""
    engine = registry.load("engines", "inprocess")
    engine = replace(engine, rollouts={"in_waves": {"num_inference_steps": 2}}, capabilities=frozenset({"waves"}))
    loss_type = planning(lambda plan: replace(plan, rollout={"strategy": "in_waves"}, required_capabilities={"waves"}))
    words = ["--loss-type", lab("loss_type", loss_type), "--rollout-engine", lab("engine", engine)]

    resolve(parse_args(latest([*asked, *words, "--num-inference-steps", "2"])))


@pytest.mark.parametrize("solver", ["renoise", "euler"])
def test_the_shipped_loss_type_plans_what_the_solver_samples(asked, latest, solver):
    resolve(parse_args(latest([*asked, "--solver", solver])))
