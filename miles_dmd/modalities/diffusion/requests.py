"""Requests of few-step rollouts: the prompts of a batch, each with its noise and the step at which it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_dmd import seeds
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.sampling.stopping import stop_steps

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.prompts import Prompt


@dataclass(frozen=True, slots=True)
class DenoisingRequest(RolloutRequest):
    """A few-step rollout. Its generator draws the initial latents, then one tensor per re-noised step, in order."""

    stop_step: int
    """k in [0, N-1]: k+1 forwards, of which the last is the one that is trained."""


def requests(args: Args, prompts: Sequence[Prompt]) -> list[DenoisingRequest]:
    """A batch's requests: the stop steps are drawn over the whole batch, from its first sample's id."""
    first = prompts[0].sample_id
    stops = stop_steps(
        diffusion_options(args).stop_step_policy,
        len(prompts),
        diffusion_options(args).num_inference_steps,
        seed=seeds.derive(args.seed, "stop steps", first),
        first=first,
    )
    return [
        DenoisingRequest(prompt.sample_id, prompt.prompt_id, seeds.derive(args.seed, "rollout", prompt.sample_id), stop)
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
