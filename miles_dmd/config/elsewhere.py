"""Synonyms of flags in other trainers, for hints: spelling alone does not lead from --learning-rate to --lr."""

from collections.abc import Collection

from miles_dmd.registry import nearest

OTHER_NAMES = {
    "lr": ("learning-rate", "student-lr", "optimizer-lr"),
    "betas": ("adam-beta1", "adam-beta2", "beta1", "beta2"),
    "clip-grad": ("max-grad-norm", "grad-clip", "gradient-clipping", "clip-grad-norm"),
    "lr-warmup-steps": ("warmup-steps", "lr-warmup"),
    "rollout-batch-size": ("batch-size", "train-batch-size", "global-batch-size", "total-batch-size"),
    "micro-batch-size": ("per-device-train-batch-size", "train-micro-batch-size", "micro-batch"),
    "num-rollout": ("max-train-steps", "max-steps", "num-steps", "steps", "train-steps", "num-train-epochs", "epochs"),
    "num-trainer-ranks": ("num-gpus", "num-processes", "nproc-per-node", "world-size", "gpus", "num-workers"),
    "compute-dtype": ("mixed-precision", "dtype", "precision", "bf16", "fp16"),
    "hf-checkpoint": ("model", "model-path", "pretrained-model-name-or-path", "checkpoint", "pretrained", "student"),
    "teacher-checkpoint": ("teacher", "teacher-model", "teacher-path", "real-score", "teacher-hf-checkpoint"),
    "critic-hf-checkpoint": ("fake-score", "critic", "critic-checkpoint", "fake-score-checkpoint"),
    "prompt-data": ("prompts", "prompt-file", "dataset", "data", "train-data", "data-path", "captions"),
    "save": ("output-dir", "output", "out", "save-dir", "outdir", "logging-dir", "run-dir"),
    "load": ("resume", "resume-from-checkpoint", "restore", "load-checkpoint"),
    "save-interval": ("checkpointing-steps", "save-steps", "save-every", "checkpoint-interval"),
    "keep-checkpoints": ("checkpoints-total-limit", "save-total-limit"),
    "teacher-guidance": ("guidance-scale", "cfg", "cfg-scale", "real-guidance-scale", "guidance"),
    "fake-update-ratio": ("dfake-gen-update-ratio", "critic-steps", "ttur", "fake-steps"),
    "num-inference-steps": ("denoising-steps", "sampling-steps", "num-student-steps"),
    "wandb-project": ("wandb", "report-to"),
    "dry-run": ("check", "print-config"),
}
"""our flag -> what it is called elsewhere, all without dashes in front."""
_OURS = {other: ours for ours, others in OTHER_NAMES.items() for other in others}


def nearest_flag(name: str, flags: Collection[str]) -> str:
    """As ``registry.nearest``, and by meaning; ``--critic-learning-rate`` is ``--critic-lr``."""
    word = name.lstrip("-").replace("_", "-").lower()
    for prefix in ("", *(f"{part}-" for part in word.split("-")[:1])):
        ours = f"--{prefix}{_OURS.get(word.removeprefix(prefix), '')}"
        if ours in flags:
            return f" (did you mean {ours}?)"
    return nearest(name, flags)
