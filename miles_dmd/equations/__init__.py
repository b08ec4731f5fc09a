"""Mathematics, one function per equation: torch alone, fp32 in and out, sources in the docstrings."""

from miles_dmd.equations.buckets import bucket_logprobs
from miles_dmd.equations.flow import (
    add_noise,
    consistency_renoise_step,
    epsilon_to_x0,
    ode_euler_step,
    v_prediction_to_x0,
    velocity_to_x0,
)
from miles_dmd.equations.guidance import legacy_cfg, standard_cfg
from miles_dmd.equations.matching import (
    dmd_gradient,
    dmd_surrogate_loss,
    fake_score_loss,
    fake_score_target,
    ode_regression_loss,
)
from miles_dmd.equations.schedule import shift_sigma, timestep_shift, truncated_shifted_sigma, unshift_sigma
from miles_dmd.equations.tokens import resopd_loss, token_loss

__all__ = [
    "add_noise",
    "bucket_logprobs",
    "consistency_renoise_step",
    "dmd_gradient",
    "dmd_surrogate_loss",
    "epsilon_to_x0",
    "fake_score_loss",
    "fake_score_target",
    "legacy_cfg",
    "ode_euler_step",
    "ode_regression_loss",
    "resopd_loss",
    "shift_sigma",
    "standard_cfg",
    "timestep_shift",
    "token_loss",
    "truncated_shifted_sigma",
    "unshift_sigma",
    "v_prediction_to_x0",
    "velocity_to_x0",
]
