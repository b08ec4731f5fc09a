"""Names of on-policy distillation's options elsewhere, and of what there deliberately is none of here."""

from __future__ import annotations

from miles_dmd.contracts.loss import NestedSetting

OTHER_NAMES = {
    "opd-top-k": ("opd-log-prob-top-k", "opd-topk", "topk", "distillation-topk", "loss-top-k", "log-prob-top-k"),
    "opd-loss": ("opd-type", "opd-loss-type", "distillation-loss", "distillation-loss-mode", "loss-mode"),
    "opd-teacher-url": ("teacher-url", "teacher-server-url", "teacher-model-server-url", "rm-url"),
    "opd-importance-cap": ("tis-clip", "tis-cap", "tis-imp-ratio-cap", "importance-sampling-cap"),
    "teacher-checkpoint": ("opd-teacher-checkpoint", "opd-teacher-load", "teacher-model-path"),
}
NOT_BUILT = {
    "a response is sampled at temperature 1 from the full vocabulary: anything else biases the estimator; drop it": (
        *("temperature", "rollout-temperature", "sampling-temperature", "top-p", "rollout-top-p", "top-k"),
        *("rollout-top-k", "min-p", "rollout-min-p", "repetition-penalty", "frequency-penalty", "presence-penalty"),
        *("logit-bias", "bad-words", "typical-p"),
    ),
    "a clamp biases the estimator, so there is none": (
        *("loss-max-clamp", "log-prob-min-clamp", "loss-clamp", "opd-loss-clamp"),
        "logprob-clamp",
    ),
    "the score gradient is built into the loss, so that there is neither a policy gradient nor a coefficient of one": (
        *(
            "use-policy-gradient",
            "use-opd",
            "opd-kl-coef",
            "kl-penalty-coef",
            "use-task-rewards",
            "advantage-estimator",
        ),
        "eps-clip",
    ),
    "a rollout takes one optimizer step and is never stale; a second step would be off-policy, which "
    "--opd-importance-cap is for, and is not built": (
        *("ppo-epochs", "ppo-mini-batch-size", "steps-per-rollout", "num-policy-steps", "partial-rollout"),
        *("async-rollout", "rollout-staleness", "max-staleness"),
    ),
    "dropout is off: the student that trains must be the one that sampled": ("dropout", "student-dropout"),
    "the loss reads logits, and a fused head has none to show": (
        *("use-fused-kernels", "fused-linear-loss", "use-liger", "use-liger-kernel", "use-chunked-topk"),
    ),
}
NESTED = {
    "loss_mode": NestedSetting(
        choices={name: {"opd_loss": name} for name in ("resopd", "forward_kl_topk_tail", "sampled_k2")}
    ),
    "topk": NestedSetting("opd_top_k"),
}
"""The others have one value each, whatever the loss (plan/configuration.py)."""
