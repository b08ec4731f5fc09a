"""Refusals of on-policy distillation at the door: options at odds, and models that would bias the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import is_file
from miles_dmd.pipelines.causal import vocabulary_size

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.losses.resopd import Options

SAMPLES_NOTHING = "forward_kl_topk_tail"


def check_options(options: Options, overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for an option that would do nothing, or that is not what it seems."""
    for url in options.opd_teacher_url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--opd-teacher-url {url} is no address; write it as http://HOST:PORT")
    if options.opd_residual_baseline != "none" and options.opd_loss != "resopd":
        raise ConfigError(
            f"--opd-residual-baseline {options.opd_residual_baseline} is of the residual of --opd-loss resopd, and "
            f"{options.opd_loss} has none; drop it"
        )
    if options.opd_importance_cap is not None and options.opd_loss == SAMPLES_NOTHING:
        raise ConfigError(
            f"--opd-importance-cap {options.opd_importance_cap:g} weighs what is sampled, and --opd-loss "
            f"{options.opd_loss} samples nothing; drop it"
        )
    if (own := overrides.get("teacher", {}).get("hf_checkpoint")) is not None:
        raise ConfigError(
            f"--teacher-hf-checkpoint {own}: a run has one teacher, and --teacher-checkpoint names it; pass that"
        )


def check_top_k(args: Args, top_k: int) -> None:
    """Raises ConfigError for a head that is larger than a vocabulary; missing directories are refused later."""
    for flag, directory in (("--hf-checkpoint", args.hf_checkpoint), ("--teacher-checkpoint", args.teacher_checkpoint)):
        if directory is None or not is_file(Path(directory) / "config.json"):
            continue
        if top_k > (size := vocabulary_size(Path(directory))):
            raise ConfigError(
                f"--opd-top-k {top_k} is more than the vocabulary of {flag} {directory} has, {size}; name at most "
                "that, and usually 4 to 64"
            )
