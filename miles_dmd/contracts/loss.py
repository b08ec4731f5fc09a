"""Loss type contract: who trains, in which order, and what each of them minimises. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from miles_dmd.observe.alarms import Alarm
from miles_dmd.observe.pictures import Panel
from miles_dmd.validators import Check, a, each, string, table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from miles_dmd.config.args import Args
    from miles_dmd.plan import DistillationPlan


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss`` is a scalar fp32 with a graph: the mean over the micro-batch's units, of which its ``weight`` has the
    number (samples, or valid tokens).

    ``metrics`` are detached scalars, each such a mean: units weigh alike when micro-batches and ranks are put together.
    ``nonfinite`` counts entries that were not finite: one of them makes every rank skip.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    nonfinite: Tensor


class Objective(Protocol):
    """``models`` by logical role, ``batch`` of the loss type's modality, ``external`` by producing group as ``needs``
    promises it."""

    def __call__(
        self,
        models: Mapping[str, Any],
        batch: Any,
        external: Mapping[str, Mapping[str, Tensor]],
        options: Any,
    ) -> LossOutput: ...


class Scorer(Protocol):
    """Scores of a batch by one group, without gradient: tensors with a leading sample axis, as ``tells`` names them."""

    def __call__(self, models: Mapping[str, Any], batch: Any, options: Any) -> Mapping[str, Tensor]: ...


class BuildModule(Protocol):
    """A fresh module on the CPU in fp32; ``models`` are those of its group that pipeline directories hold."""

    def __call__(self, models: Mapping[str, Any], options: Any) -> nn.Module: ...


@dataclass(frozen=True, slots=True)
class NestedSetting:
    """A setting of the nested configuration: an argument of all trainers, or of ``role``'s alone; or else one of the
    ``choices``, each with the arguments that say the same."""

    argument: str = ""
    role: str = ""
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossType:
    """A value made of functions. Objectives and scorers are dotted names ``package.module:attribute``, imported by
    trainers only, so that the command line can read a loss type's flags without torch."""

    options: type
    """A frozen dataclass of the knobs that only this loss type has; they become flags."""
    modality: str = "diffusion"
    """A plug-in of miles_dmd/modalities: what its samples are made of."""
    roles: tuple[str, ...]
    """Trainer groups, producers before consumers. The plan's layout names the same ones."""
    plan: Callable[[Args], DistillationPlan]
    """``plan(args)``: who trains when."""
    objectives: Mapping[str, str]
    """logical role -> dotted name of the ``Objective`` that it minimises. A role without one never trains. Roles that
    name the same one are trained by one call of it."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """logical role -> dotted name of a ``BuildModule``, for a role that no pipeline directory holds."""
    capabilities: frozenset[str] = frozenset()
    """Items of its plan's ``required_capabilities`` that its objectives bring, such as ``distribution_matching``."""
    scorers: Mapping[str, str] = field(default_factory=dict)
    """group -> dotted name of the ``Scorer`` by which it tells later groups about a batch."""
    tells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """group -> keys of what its scorer gives, no more and no less."""
    needs: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """logical role -> producing group -> keys of external data that the role's objective reads."""
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """logical role -> names in its objective's LossOutput.metrics, beside ``loss``. --keep-best takes those only."""
    run_wide: frozenset[str] = frozenset()
    """Options that the plan or the export reads: no trainer can have one of its own."""
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """option -> the groups that read it, for those that not every group reads."""
    teacher_sampling: Callable[[Args], Mapping[str, Any]] = lambda args: {}
    """Settings of the teacher's own samples, which the student learns to draw, for the modality that shows them."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms of its metrics; the option ``alarm_<name>`` holds the threshold of each."""
    panels: tuple[Panel, ...] = ()
    """Curves of its metrics."""
    headline: tuple[str, ...] = ()
    """Names of the metrics that the progress line shows; every group's loss where it names none."""
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """flag, without dashes in front -> its names in other trainers, for hints."""
    other_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """group -> its names in other trainers: --student-lr is --actor-lr."""
    not_built: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Message -> flags of other trainers for which none stands here."""
    nested: Mapping[str, NestedSetting] = field(default_factory=dict)
    """Settings of the nested way to write a preset."""
    check: Callable[[Args], None] = lambda args: None
    """Cross-field rules of its own options; raises ConfigError."""
    preflight: str | None = None
    """Dotted name of a ``Preflight``, for a loss type that may need something outside of the run."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a part of another shape, which would show only when a trainer reads it."""
        for name, check in _PARTS.items():
            check(f"LossType.{name}", getattr(self, name))

    def objectives_of(self, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Objectives of a phase that trains ``roles`` -> the roles that one call of it trains."""
        served: dict[str, tuple[str, ...]] = {}
        for role in roles:
            name = self.objectives[role]
            served[name] = (*served.get(name, ()), role)
        return served

    def trainers_of(self, option: str) -> tuple[str, ...]:
        """Groups that may read a value of their own of an option: none for what the plan, the export or an alarm
        reads."""
        if option in self.run_wide or option in {alarm.option for alarm in self.alarms}:
            return ()
        return self.readers.get(option, self.roles)

    @staticmethod
    def metric_prefix(served: Sequence[str], roles: Sequence[str]) -> str:
        """Prefix of an objective's metrics that trains ``served``: none where these are all ``roles`` of a phase."""
        return "" if len(served) == len(roles) else f"{'+'.join(served)}/"

    def needs_of(self, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """producing group -> keys of external data that the objectives of ``roles`` read."""
        keys: dict[str, dict[str, None]] = {}
        for role in roles:
            for producer, read in self.needs.get(role, {}).items():
                keys.setdefault(producer, {}).update(dict.fromkeys(read))
        return {producer: tuple(read) for producer, read in keys.items()}


_NAMES = each(string, tuple, list, set, frozenset)
_FUNCTION = a(Callable)  # type: ignore[arg-type]
_PARTS: Mapping[str, Check] = {
    "modality": string,
    "roles": each(string, tuple),
    **dict.fromkeys(("objectives", "modules", "scorers"), table(string)),
    **dict.fromkeys(("tells", "metrics", "readers"), table(_NAMES)),
    "needs": table(table(_NAMES)),
    **dict.fromkeys(("capabilities", "run_wide"), _NAMES),
    "alarms": each(a(Alarm), tuple),
    "panels": each(a(Panel), tuple),
    "headline": each(string, tuple),
    **dict.fromkeys(("plan", "teacher_sampling", "check"), _FUNCTION),
}
