"""Which arguments cannot stand together, and which files they need: one small rule each."""

from miles_dmd import registry
from miles_dmd.config.args import Args


def check_args(args: Args) -> None:
    """Raises ConfigError for the first rule that is broken."""


def matches_distributions(loss_name: str) -> bool:
    """Whether the loss type's plan is one of distribution matching."""
    plan = registry.load("losses", loss_name).plan(Args(loss_type=loss_name, hf_checkpoint="unnamed"))
    return "distribution_matching" in plan.required_capabilities
