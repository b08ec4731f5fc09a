"""build_plan: a plan by the name of its recipe, and the names that a plan may hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from miles_dmd.errors import PlanError
from miles_dmd.plan.declared.recipes import CausVidRecipe, DMDRecipe, SelfForcingRecipe
from miles_dmd.plan.plan import DistillationPlan
from miles_dmd.plan.recipe import ONE_MODEL, Partition, Profile, Recipe
from miles_dmd.registry import Registry
from miles_dmd.validators import instance, positive, sequence


class DMD2Recipe(Recipe):
    name = "dmd2"
    objective = "dmd2"
    profiles: ClassVar = {
        "distribution_only": Profile("prompts"),
        "paper": Profile("prompt_and_real_latent", ("fake_score", "discriminator"), frozenset({"adversarial"})),
    }
    rollouts = ("ode_euler", "consistency_renoise", "backward_simulated")
    partitions: ClassVar[Partition] = ONE_MODEL


class OnPolicyDistillationRecipe(Recipe):
    """A frozen teacher scores what the student sampled; nothing else trains, so a cycle is the student phase."""

    name = "opd"
    objective = "token_matching"
    objective_roles = ("student", "teacher_score")
    profiles: ClassVar = {"on_policy": Profile("prompts", fake_roles=())}
    rollouts = ("on_policy_tokens",)
    partitions: ClassVar[Partition] = {"actor_teacher": {"teacher": ("teacher_score",), "actor": ("student",)}}
    capabilities = frozenset({"token_matching"})
    default_export = "student"
    objective_settings: ClassVar = {"opd_top_k": positive}


objective_registry = Registry(
    "objective",
    {
        "dmd": "distribution matching with a regression loss on pairs (arXiv 2311.18828)",
        "dmd2": "distribution matching without pairs (arXiv 2405.14867)",
        "ode_regression": "the student follows the teacher's ODE trajectories (arXiv 2412.07772)",
        "token_matching": "per-token divergence to the teacher on the student's own samples",
    },
)
rollout_registry = Registry(
    "rollout",
    {
        "one_step": "noise to sample in one call",
        "ode_euler": "few steps, the next point by the probability-flow ODE",
        "consistency_renoise": "few steps, the next point by noising the clean prediction afresh",
        "backward_simulated": "few steps as at inference, stopped at a drawn step",
        "teacher_forced_causal": "frame after frame, on clean frames of the data",
        "self_forced": "frame after frame, on the student's own frames",
        "on_policy_tokens": "the student completes prompts, token by token",
    },
)
initialization_registry = Registry(
    "initialization",
    {
        "base": "the student starts as the pretrained model",
        "ode_regression": "the student comes out of an ODE regression stage",
    },
)
recipe_registry = Registry[type[Recipe]](
    "recipe",
    {
        recipe.name: recipe
        for recipe in (DMDRecipe, DMD2Recipe, CausVidRecipe, SelfForcingRecipe, OnPolicyDistillationRecipe)
    },
)


def build_plan(name: str, config: Any, capabilities: Collection[str] = frozenset()) -> DistillationPlan:
    """The plan of recipe ``name``; refused unless ``capabilities`` cover what it requires."""
    plan = instance(f"what recipe {name!r} builds", recipe_registry.get(name)().build(config), DistillationPlan)
    objective_registry.get(plan.objective["name"])
    rollout_registry.get(plan.rollout["strategy"])
    initialization_registry.get(plan.initialization["stage"])
    declared = frozenset(sequence("capabilities", capabilities, str))
    if missing := plan.required_capabilities - declared:
        raise PlanError(
            f"recipe {name!r} requires the capabilities {sorted(plan.required_capabilities)}, declared are "
            f"{sorted(declared)}: {', '.join(sorted(missing))} is missing"
        )
    return plan
