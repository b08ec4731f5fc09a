"""Names of DMD2's options and groups elsewhere: in other trainers, and in the nested configuration of an RL stack."""

from __future__ import annotations

from miles_dmd.contracts.loss import NestedSetting
from miles_dmd.sampling.strategies import FEW_STEP

OTHER_NAMES = {
    "teacher-guidance": ("guidance-scale", "cfg", "cfg-scale", "real-guidance-scale", "guidance"),
    "fake-update-ratio": ("dfake-gen-update-ratio", "generator-update-interval", "critic-steps", "fake-steps"),
    "dm-sigma-min": ("min-step-percent", "min-timestep-ratio"),
    "dm-sigma-max": ("max-step-percent", "max-timestep-ratio"),
    "critic-hf-checkpoint": ("fake-score", "critic", "critic-checkpoint", "fake-score-checkpoint"),
}
OTHER_GROUPS = {
    "actor": ("student", "generator"),
    "critic": ("fake", "fake-score", "fake-score-model"),
}
NOT_BUILT = {"DMD2's GAN is not built": ("gan-weight", "gan-loss-weight", "discriminator-lr", "gan")}
NESTED = {
    "fake_update_ratio": NestedSetting("fake_update_ratio"),
    "fake_warmup_cycles": NestedSetting("fake_warmup_cycles"),
    "ema_decay": NestedSetting("ema_decay"),
    "ema_start_step": NestedSetting("ema_start_step"),
    "student_micro_batch_size": NestedSetting("micro_batch_size", "actor"),
    "actor_model_path": NestedSetting("hf_checkpoint", "actor"),
    "critic_model_path": NestedSetting("hf_checkpoint", "critic"),
    "fake_micro_batch_size": NestedSetting("micro_batch_size", "critic"),
    "fake_lr": NestedSetting("lr", "critic"),
    "fake_weight_decay": NestedSetting("weight_decay", "critic"),
    "fake_clip_grad": NestedSetting("clip_grad", "critic"),
    "fake_lr_scheduler": NestedSetting("lr_scheduler", "critic"),
    "profile": NestedSetting(choices={"distribution_only": {}}),
    "data_mode": NestedSetting(choices={"prompts": {}}),
    "export_role": NestedSetting(choices={"student_ema": {}}),
    "role_storage": NestedSetting(choices={"actor_critic": {}}),
    "rollout_strategy": NestedSetting(
        choices={name: arguments for name, arguments in FEW_STEP.items() if "solver" in arguments}
    ),
}
"""Other settings belong to recipes that cannot run."""
