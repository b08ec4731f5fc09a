"""Resolved run: arguments, plan, plug-ins and prompts of one run, each looked up once at the door."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd.config.alarms import alarm_thresholds
from miles_dmd.config.args import Args
from miles_dmd.config.values import flag_name, kinds
from miles_dmd.prompts import read_prompts

if TYPE_CHECKING:
    from miles_dmd.contracts.engine import EngineType
    from miles_dmd.contracts.family import ModelFamily
    from miles_dmd.contracts.loss import LossType
    from miles_dmd.contracts.modality import Modality
    from miles_dmd.contracts.role import Role
    from miles_dmd.observe.alarms import Alarm
    from miles_dmd.plan import DistillationPlan
    from miles_dmd.preflight.resume import Resume


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that follows from the arguments of a run. ``miles_dmd.preflight.rules.resolve`` makes one."""

    args: Args
    trainers: Mapping[str, Args]
    """group -> its own arguments, producers before consumers."""
    loss_type: LossType
    modality: Modality
    family: ModelFamily
    engine: EngineType
    roles: Mapping[str, Role]
    """group -> the role that it plays."""
    plan: DistillationPlan
    resume: Resume | None = None
    """The checkpoint that --load names, as it was when the run was resolved."""

    @property
    def student(self) -> Args:
        """Arguments of the group that trains the student; the engine samples from it, so they are the engine's, too."""
        return self.trainers[self.plan.group_of("student")]

    @property
    def horizons(self) -> Mapping[str, int]:
        """Optimizer steps of each trained role over the whole run."""
        return self.plan.optimizer_steps(self.args.num_rollout)

    @functools.cached_property
    def prompts(self) -> tuple[str, ...]:
        """Every prompt of --prompt-data, in the file's order. Raises ConfigError."""
        return read_prompts(self.args.prompt_data or "")

    @functools.cached_property
    def teacher_sampling(self) -> Mapping[str, Any]:
        """Number of steps and guidance scale at which the teacher is sampled; empty without a teacher to sample."""
        return self.loss_type.teacher_sampling(self.args)

    @property
    def alarms(self) -> dict[Alarm, float]:
        """Each alarm of the run -> its threshold; 0 is off."""
        return alarm_thresholds(self.args)

    @functools.cached_property
    def directories(self) -> Mapping[Path, str]:
        """Every pipeline directory that some trainer starts from -> the flag that named it first."""
        found: dict[Path, str] = {}
        for group, own in self.trainers.items():
            for argument in self.roles[group].pipelines.values():
                flag = self.flag(group, argument) if argument in kinds(Args) else self.flag_of_teacher
                if (directory := getattr(own, argument)) is not None:  # else a server holds the model
                    found.setdefault(Path(directory), flag)
        return found

    def flag(self, group: str, argument: str) -> str:
        """The flag that gave a group's trainer its value."""
        own = {trainer.role: trainer.overrides for trainer in self.args.trainers}.get(group, {})
        return flag_name(argument, group if argument in own else "")

    @property
    def flag_of_teacher(self) -> str:
        """The flag that named the teacher."""
        return flag_name("teacher_checkpoint" if self.args.teacher_checkpoint else "hf_checkpoint")
