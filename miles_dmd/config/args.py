"""Arguments of a run as frozen dataclasses. A field is a flag; the words under it are its ``--help``."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_dmd import registry
from miles_dmd.config.trainers import TrainerConfig, named_trainers
from miles_dmd.config.values import (
    NOT_ASKED,
    Batch,
    Count,
    Decay,
    Natural,
    NonNegative,
    OwnPath,
    Positive,
    Ranks,
    ReadPath,
    Seed,
    Threads,
    flag_name,
    kinds,
    normalized,
)
from miles_dmd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    hf_checkpoint: ReadPath | None = None
    """Model directory that a trainer starts from, a diffusers pipeline or a transformers model: the student's, and the
    fake score's. Required."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward and backward. Master weights, gradient reduction, EMA and losses are always fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True, kw_only=True)
class OptimArgs:
    lr: Positive = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's two decay rates. (0, 0.999) is the other published choice."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 1e-4
    """AdamW's decoupled weight decay."""
    clip_grad: Positive = 1.0
    """Gradient norm over all ranks above which gradients are scaled down."""
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """Learning-rate schedule over a trainer's own optimizer steps (names of diffusers' get_scheduler)."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps over which the learning rate rises from zero."""
    micro_batch_size: Count = 4
    """Samples in one forward and backward, per rank. Changes memory and speed, never the result."""
    num_trainer_ranks: Ranks = 1
    """Processes, one device each, over which FSDP2 shards the group; one alone, in fp32, shards nothing."""


@dataclass(frozen=True, kw_only=True)
class TeacherArgs:
    model_family: str = ""
    """Model family: a plug-in of miles_dmd/models, or an import path; by default sd3 for images and causal_lm for
    text."""
    teacher_checkpoint: ReadPath | None = None
    """Model directory of the frozen teacher. DMD2's is by default that of --hf-checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    loss_type: str = "dmd2"
    """Objective: a plug-in of miles_dmd/losses, or an import path. It brings trainer groups and flags of its own."""


@dataclass(frozen=True, kw_only=True)
class AverageArgs:
    ema_decay: Decay = 0.99
    """Decay of the student's moving average, which is what gets exported."""
    ema_start_step: Natural = 0
    """Student steps after which the average begins to move; until then it is a copy of the student."""


@dataclass(frozen=True, kw_only=True)
class RolloutArgs:
    rollout_engine: str = "inprocess"
    """Sampler of the student: a plug-in of miles_dmd/engines, or an import path."""
    prompt_data: ReadPath | None = None
    """Prompt file: one prompt a line (.txt), or one JSON object a line (.jsonl). Required."""
    rollout_batch_size: Batch = 32
    """Samples in one phase, over all ranks of a group (the global batch)."""
    rollout_micro_batch_size: Count = 32
    """Samples in one forward of the in-process rollout engine."""
    num_rollout: Count = field(default=1000, metadata={"alias": "num_student_steps"})
    """Optimizer steps of the student; warm-up cycles come on top."""


@dataclass(frozen=True, kw_only=True)
class CheckpointArgs:
    save: OwnPath | None = None
    """Directory of everything that the run leaves; by default a fresh runs/<preset>-<n>."""
    overwrite: bool = False
    """Replace the run that --save holds."""
    load: OwnPath | None = None
    """Checkpoint to go on from: a run's directory (its newest), one checkpoint, or latest: the newest of --save."""
    allow_changed: tuple[str, ...] = ()
    """Arguments that may differ from the checkpoint's though they alter training, by name: lr, or critic-lr alone."""
    save_interval: Natural = 100
    """Cycles between two checkpoints in the folder checkpoints of --save; the last is after the last cycle. 0: none."""
    keep_checkpoints: Natural = 2
    """Newest checkpoints to keep; older whole ones are removed. 0: all."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """Action when a checkpoint cannot be written (a full disk): end the run, or say so and go on."""


@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    sample_interval: Count = 50
    """Student steps after which samples are shown again."""
    sample_prompts: Natural = 10
    """Prompts whose samples are shown; 0 for none."""
    keep_best: str | None = None
    """Also keep the student with the best metric, in student_best: min:NAME or max:NAME of metrics.jsonl, for instance
    max:samples/diversity. Judged every --sample-interval student steps, on the mean since the last time."""
    export_dtype: Literal["auto", "stored", "bf16", "fp32"] = "auto"
    """Precision of the student's files: stored is that of --hf-checkpoint, and auto takes it only where it keeps at
    least 99 % of what was learned, else fp32. The share is printed, and stands in the model card."""


@dataclass(frozen=True, kw_only=True)
class WatchArgs:
    on_alarm: Literal["warn", "stop"] = "warn"
    """Effect of an alarm: a line in the log and 1 in the metrics, or also the end of the run, student exported."""
    alarm_window: Count = 100
    """Cycles over which alarms average; what is early is the first so many."""
    max_consecutive_skipped_cycles: Natural = 0
    """Cycles in a row that may be given up because a loss or gradient was not finite; 0: the first ends the run. Such a
    number in a phase after the student's step of a cycle ends it always: that step cannot be taken back."""


@dataclass(frozen=True, kw_only=True)
class LoggingArgs:
    tensorboard: bool = False
    """Also write metrics for TensorBoard (needs the tensorboard extra)."""
    wandb_project: str | None = None
    """Also send metrics to this Weights & Biases project (needs the wandb extra)."""
    hook: tuple[str, ...] = ()
    """User hooks, each a package.module:factory: called after every student step, after the sample grids; what they
    report stands in the metrics as hook/NAME. docs/hooks.md has one."""


@dataclass(frozen=True, kw_only=True)
class DeviceArgs:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainers; auto takes a GPU where there is one."""
    cpu_threads: Threads = 1
    """Torch threads of a rank that computes on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    local: bool = False
    """Run everything in this process, without Ray: for debugging, and the reference that the Ray run equals."""
    ray_address: str | None = None
    """Ray cluster to join; by default one is started on this machine. Where the cluster wants a token, it is the one in
    RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token."""
    ray_auth_mode: Literal["token", "disabled"] = "token"
    """token: processes of the Ray that a run starts show each other a secret of that run; disabled: every user of this
    machine can run code as you while the run lasts. As RAY_AUTH_MODE says it to Ray."""
    placement_timeout: Positive = 120.0
    """Seconds to wait for Ray to place all trainer groups, and for their processes to start, before saying what is
    missing."""
    remote_timeout: Positive = 1800.0
    """Seconds that one call of a trainer rank or of the rollout worker may take; longer, and the run is ended."""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    config: OwnPath | None = None
    """Preset: a name of trainer_configs/ or a YAML file. Flags win over it, and it wins over defaults."""
    dry_run: bool = False
    """Print the resolved run (trainers, schedule, batches, memory) and stop."""
    seed: Seed = 0
    """Root of all randomness: the same seed gives the same run, on any number of ranks. Seeds the global generators of
    Python, numpy and torch in every process, too."""
    cache_dir: OwnPath = "~/.cache/miles_dmd"
    """Cache of encoded prompts, kept from one run to the next."""


@dataclass(frozen=True, kw_only=True)
class Args(
    RunArgs, ClusterArgs, DeviceArgs, LoggingArgs, WatchArgs, SampleArgs, CheckpointArgs, RolloutArgs, AverageArgs,
    LossArgs, TeacherArgs, OptimArgs, ModelArgs,
):  # fmt: skip
    """One run. Flat to read (``args.lr``), grouped to write. What follows from other arguments is a property."""

    loss_options: Any = field(default=None, metadata=NOT_ASKED)
    """The loss type's own arguments, an instance of its ``options``; None stands for their defaults."""
    engine_options: Any = field(default=None, metadata=NOT_ASKED)
    """The rollout engine's own arguments, likewise."""
    modality_options: Any = field(default=None, metadata=NOT_ASKED)
    """The arguments of the loss type's modality, likewise."""
    trainers: tuple[TrainerConfig, ...] = field(default=(), metadata=NOT_ASKED)
    """Arguments of single trainers, from the preset and flags like ``--critic-lr``; those left out read the same."""

    @property
    def teacher_path(self) -> str | None:
        """Path of the teacher's directory, as it was given."""
        return self.teacher_checkpoint or self.hf_checkpoint

    @property
    def teacher_directory(self) -> Path:
        """Pipeline directory of the teacher; the door has seen to it that there is one."""
        return Path(self.teacher_path or "")

    @property
    def pipeline_directory(self) -> Path:
        """Pipeline directory that the networks start from, likewise."""
        return Path(self.hf_checkpoint or "")

    def __post_init__(self) -> None:
        """Whoever made them, a program or a command line, values are of their kinds, and paths written in full. Raises
        ConfigError."""
        loss_type, engine = registry.load("losses", self.loss_type), registry.load("engines", self.rollout_engine)
        modality = registry.load("modalities", loss_type.modality)
        values = {
            "model_family": self.model_family or modality.family,
            "trainers": named_trainers(self.trainers, {**kinds(loss_type.options), **kinds(Args)}),
            "loss_options": self._own_options("loss_options", f"--loss-type {self.loss_type}", loss_type),
            "engine_options": self._own_options("engine_options", f"--rollout-engine {self.rollout_engine}", engine),
            "modality_options": self._own_options("modality_options", f"--loss-type {self.loss_type}", modality),
            **normalized(self, flag_name),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _own_options(self, name: str, asked: str, plugin: Any) -> Any:
        """A plug-in's options are its own: defaults where none are given."""
        found, options = getattr(self, name), plugin.options
        if found is None:
            found = options()
        if not isinstance(found, options):
            raise ConfigError(
                f"{asked} reads {options.__module__}.{options.__qualname__}, not a "
                f"{type(found).__qualname__}; pass {name} of its own, or None for their defaults"
            )
        values = normalized(found, flag_name)
        return dataclasses.replace(found, **values) if values else found


GROUPS = {
    "Model": ModelArgs,
    "Optimizer": OptimArgs,
    "Teacher": TeacherArgs,
    "Loss": LossArgs,
    "Moving average": AverageArgs,
    "Rollout": RolloutArgs,
    "Checkpoints": CheckpointArgs,
    "Samples and students": SampleArgs,
    "Alarms and faults": WatchArgs,
    "Logging": LoggingArgs,
    "Device": DeviceArgs,
    "Ray cluster": ClusterArgs,
    "Run": RunArgs,
}
"""Title in ``--help`` -> arguments."""
PER_TRAINER = ("Model", "Optimizer")
"""Groups of which every trainer may read its own: ``--critic-lr``."""
