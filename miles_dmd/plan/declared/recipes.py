"""Recipes that can be declared and inspected: their data modes and initialization stages are not built."""

from typing import ClassVar

from miles_dmd.plan.recipe import ONE_MODEL, SCORES, STUDENTS, Partition, Profile, Recipe

TWO_MODELS: Partition = {"shared_base_adapters": {"bidirectional_base": SCORES, "causal_base": STUDENTS}}


class DMDRecipe(Recipe):
    name = "dmd"
    objective = "dmd"
    profiles: ClassVar = {"paper": Profile("regression_pairs")}
    rollouts = ("one_step",)
    partitions: ClassVar[Partition] = ONE_MODEL
    default_ratio = 1


class CausVidRecipe(Recipe):
    name = "causvid"
    objective = "dmd"
    profiles: ClassVar = {"distribution_only": Profile("prompt_and_real_latent")}
    rollouts = ("teacher_forced_causal",)
    partitions: ClassVar[Partition] = TWO_MODELS
    stage = "ode_regression"
    capabilities = frozenset({"distribution_matching", "autoregressive"})


class SelfForcingRecipe(CausVidRecipe):
    name = "self_forcing"
    profiles: ClassVar = {"distribution_only": Profile("prompts")}
    rollouts = ("self_forced",)
