"""Diffusion models: flow-matching networks that turn noise into latents of images in a few steps."""

from miles_dmd.config.idle import Unread
from miles_dmd.contracts.modality import Modality
from miles_dmd.modalities.diffusion.described import called, describe, rows
from miles_dmd.modalities.diffusion.distillation import read_distillation
from miles_dmd.modalities.diffusion.grids import sample_grids
from miles_dmd.modalities.diffusion.options import DiffusionOptions, diffusion_options
from miles_dmd.modalities.diffusion.requests import requests
from miles_dmd.modalities.diffusion.rules import RULES
from miles_dmd.modalities.diffusion.watched import ALARMS, METRICS, PANELS
from miles_dmd.sampling.strategies import FEW_STEP

IDLE = (
    Unread(
        ("stop_step_policy",),
        lambda args: diffusion_options(args).num_inference_steps == 1,
        "says at which step a rollout stops, and --num-inference-steps 1 leaves one; drop it",
    ),
    Unread(
        ("alarm_diversity", "alarm_saturation"),
        lambda args: args.sample_prompts == 0,
        "is measured on the grids of samples, and --sample-prompts 0 asks for none; drop one of the two",
    ),
)

modality = Modality(
    options=DiffusionOptions,
    family="sd3",
    strategies=frozenset(FEW_STEP),
    code="miles_dmd.modalities.diffusion.code",
    requests=requests,
    samples=sample_grids,
    describe=describe,
    read_record=read_distillation,
    usage=called,
    rows=rows,
    rules=RULES,
    idle=IDLE,
    metrics=METRICS,
    not_counted="text encoders and VAE",
    alarms=ALARMS,
    panels=PANELS,
    harmless=frozenset(alarm.option for alarm in ALARMS),
)
