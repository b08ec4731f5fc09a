"""Requests of on-policy rollouts: the prompts of a batch, each with the seed of its response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_dmd import seeds
from miles_dmd.contracts.engine import RolloutRequest

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.prompts import Prompt


def requests(args: Args, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
    """One response to each prompt that was drawn."""
    return [
        RolloutRequest(prompt.sample_id, prompt.prompt_id, seeds.derive(args.seed, "rollout", prompt.sample_id))
        for prompt in prompts
    ]
