"""Rules about the options of language models, and what they need of the model directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd.errors import ConfigError
from miles_dmd.modalities.language.family import language_family
from miles_dmd.modalities.language.options import language_options

if TYPE_CHECKING:
    from miles_dmd.preflight.resolved import ResolvedRun


def check_lengths(run: ResolvedRun) -> None:
    """Raises ConfigError where a prompt and its response could be longer than a model has positions for."""
    own, family = language_options(run.args), language_family(run.args)
    whole = own.max_prompt_tokens + own.max_new_tokens
    for directory, flag in run.directories.items():
        longest = family.max_positions(directory)
        if longest is not None and whole > longest:
            raise ConfigError(
                f"--max-prompt-tokens {own.max_prompt_tokens} and --max-new-tokens {own.max_new_tokens} are {whole} "
                f"tokens together, and {flag} {directory} has {longest} positions; name fewer"
            )


RULES = (check_lengths,)


def rows(run: ResolvedRun) -> list[tuple[str, str]]:
    """Rows of the table of the rollout."""
    own = language_options(run.args)
    return [
        ("sampler", f"temperature 1, full support, at most {own.max_new_tokens} new tokens"),
        ("lengths", f"prompts of at most {own.max_prompt_tokens} tokens"),
    ]
