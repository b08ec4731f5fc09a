"""Names of flags in other trainers: spelling alone does not lead from --learning-rate to --lr."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_dmd import registry
from miles_dmd.registry import nearest

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import LossType

OTHER_NAMES = {
    "lr": ("learning-rate", "optimizer-lr"),
    "betas": ("adam-beta1", "adam-beta2", "beta1", "beta2", "adam-betas"),
    "adam-eps": ("adam-epsilon", "epsilon", "eps"),
    "weight-decay": ("adam-weight-decay", "wd"),
    "clip-grad": ("max-grad-norm", "grad-clip", "gradient-clipping", "clip-grad-norm", "gradient-clip-val"),
    "lr-scheduler": ("lr-scheduler-type", "scheduler", "lr-schedule"),
    "lr-warmup-steps": ("warmup-steps", "warmup-step", "lr-warmup", "num-warmup-steps"),
    "ema-decay": ("ema-rate", "ema-weight", "ema-beta"),
    "rollout-batch-size": ("batch-size", "train-batch-size", "global-batch-size", "total-batch-size"),
    "micro-batch-size": ("per-device-train-batch-size", "train-micro-batch-size", "micro-batch"),
    "num-rollout": ("max-train-steps", "max-steps", "num-steps", "steps", "train-steps", "train-iters", "max-iters"),
    "num-trainer-ranks": ("num-gpus", "num-processes", "nproc-per-node", "world-size", "gpus"),
    "compute-dtype": ("mixed-precision", "dtype", "precision", "bf16"),
    "hf-checkpoint": ("model", "model-path", "model-id", "pretrained-model-name-or-path", "pretrained", "student"),
    "teacher-checkpoint": ("teacher", "teacher-model", "teacher-path", "real-score", "teacher-hf-checkpoint"),
    "prompt-data": ("prompts", "prompt-file", "dataset", "data", "train-data", "data-path", "captions", "prompt-path"),
    "save": ("output-dir", "output-path", "output", "out", "save-dir", "outdir", "logging-dir", "logdir", "run-dir"),
    "load": ("resume", "resume-from-checkpoint", "restore", "load-checkpoint"),
    "save-interval": ("checkpointing-steps", "save-steps", "save-every", "checkpoint-interval"),
    "keep-checkpoints": ("checkpoints-total-limit", "save-total-limit"),
    "sample-interval": ("validation-steps", "eval-steps", "sample-every"),
    "num-inference-steps": ("denoising-steps", "num-denoising-step", "sampling-steps"),
    "shift": ("flow-shift", "timestep-shift"),
    "dry-run": ("check", "print-config"),
}
"""our flag -> what it is called elsewhere, all without dashes in front."""
NOT_HERE = {
    "there are no adapters here, all weights train": ("lora", "lora-rank", "lora-alpha", "use-lora", "lora-r", "rank"),
    "micro-batches follow from --rollout-batch-size and --micro-batch-size": ("gradient-accumulation-steps",),
    "a run is counted in student steps, --num-rollout": ("num-train-epochs", "epochs", "num-epochs"),
    "a warm-up is counted in steps, --lr-warmup-steps": ("warmup-ratio",),
    "a phase is one optimizer step, since scores hold for one student": ("num-steps-per-rollout",),
    "every cycle is a row of metrics.jsonl": ("log-interval", "logging-steps", "log-every", "log-iters", "log-freq"),
    "an average is always kept, see --ema-decay": ("use-ema", "ema"),
    "the optimizer is AdamW": ("optimizer", "optim", "use-8bit-adam"),
    "pass --compute-dtype bf16": ("fp16",),
    "pass --height and --width": ("resolution", "image-size", "size"),
    "pass --tensorboard, or --wandb-project NAME": ("report-to", "wandb", "logger", "tracker"),
    "pass --hf-checkpoint to start from a pipeline, or --load to go on with a run": ("checkpoint", "ckpt"),
    "grids have the first prompts of --prompt-data": ("validation-prompt", "validation-prompts", "sample-prompt-file"),
}
"""Hints for names for which no one flag stands."""


@functools.cache
def _loss_types() -> tuple[LossType, ...]:
    """The shipped ones, whose names are hinted at whichever is chosen."""
    return tuple(registry.load("losses", name) for name in registry.names("losses"))


@functools.cache
def _ours() -> dict[str, str]:
    """Name elsewhere -> our flag, without dashes in front."""
    tables = (OTHER_NAMES, *(loss_type.other_names for loss_type in _loss_types()))
    return {other: ours for table in tables for ours, others in table.items() for other in others}


@functools.cache
def _hints() -> dict[str, str]:
    """Name elsewhere -> what to say of it."""
    tables = (NOT_HERE, *(loss_type.not_built for loss_type in _loss_types()))
    return {name: hint for table in tables for hint, names in table.items() for name in names}


@functools.cache
def _groups() -> tuple[tuple[str, str], ...]:
    """(group, a name of it here or elsewhere)."""
    own = {(role, role) for loss_type in _loss_types() for role in loss_type.roles}
    tables = (loss_type.other_groups for loss_type in _loss_types())
    others = {(group, name) for table in tables for group, names in table.items() for name in names}
    return tuple(sorted(own | others))


def nearest_flag(name: str, flags: Collection[str]) -> str:
    """Hint of a near flag, like ``registry.nearest``, and by meaning; ``--critic-learning-rate`` is ``--critic-lr``."""
    word = name.lstrip("-").replace("_", "-").lower()
    for group, rest in [("", word), *_of_groups(word)]:
        ours = f"--{group}{_ours().get(rest, rest)}"
        if ours in flags:
            return f" (did you mean {ours}?)"
    if (hint := _hints().get(word)) is not None:
        return f" ({hint})"
    return nearest(name, flags)


def nearest_argument(name: str, known: Mapping[str, object], roles: Sequence[str]) -> str:
    """``nearest_flag`` of a name in a preset's ``args``: there a trainer's own are written elsewhere."""
    flags = {f"--{argument.replace('_', '-')}": argument for argument in known}
    own = {f"--{role}-{flag[2:]}": (role, argument) for role in roles for flag, argument in flags.items()}
    hint = nearest_flag(name, {**own, **flags})
    for flag, (role, argument) in own.items():
        if hint == f" (did you mean {flag}?)":
            return f"; write it as trainers: [{{role: {role}, overrides: {{{argument}: ...}}}}]"
    for flag, argument in flags.items():
        hint = hint.replace(f"mean {flag}?", f"mean {argument}?")
    return hint


def _of_groups(word: str) -> list[tuple[str, str]]:
    """(trainer and a dash, the rest), for each group that ``word`` may begin with; the longest beginning first."""
    rests = [(group, other, word.removeprefix(f"{other}-")) for group, other in _groups()]
    rests += [(group, other, word.removesuffix(f"-{other}")) for group, other in _groups()]
    found = sorted((row for row in rests if row[2] != word), key=lambda row: -len(row[1]))
    return [(f"{group}-", rest) for group, _, rest in found]
