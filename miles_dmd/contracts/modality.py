"""Modality contract: what samples are made of (latents, tokens), how they are asked for, shown and exported.

A declaration without torch, and the code that computes. The shared machinery (driver, trainers, rollout worker,
checkpoints) names no modality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miles_dmd import registry
from miles_dmd.config.idle import Unread
from miles_dmd.observe.alarms import Alarm
from miles_dmd.observe.pictures import Panel

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from miles_dmd.config.args import Args
    from miles_dmd.contracts.batch import Batch
    from miles_dmd.contracts.engine import RolloutRequest
    from miles_dmd.contracts.family import ModelFamily
    from miles_dmd.contracts.reports import ExportReport
    from miles_dmd.contracts.student import StudentRecord
    from miles_dmd.executor import GroupExecutor
    from miles_dmd.plan import TrainerCounters
    from miles_dmd.preflight.resolved import ResolvedRun
    from miles_dmd.prompts import Prompt
    from miles_dmd.training.compute import Compute

Report = Callable[[Mapping[str, float]], None]
"""Hears numbers that belong into the metrics of the cycle."""
Shown = tuple[Any, Any]
"""Finished samples as their modality shows them, images or texts, and numbers about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """A value made of functions."""

    options: type
    """A frozen dataclass of the knobs that only this modality has; they become flags, ``args.modality_options``."""
    family: str
    """--model-family where none is named."""
    strategies: frozenset[str]
    """Rollout strategies of a plan that its samples alone can follow; an engine says which of them it plays."""
    code: str
    """Dotted name of the module that implements ``ModalityCode``."""
    requests: Callable[[Args, Sequence[Prompt]], Sequence[RolloutRequest]]
    """Requests to the engine, one for each prompt that was drawn."""
    samples: Callable[[ResolvedRun, Sequence[str], Path, Report], Samples]
    """The hook that shows samples: for a run, its prompts, the directory that it writes to."""
    describe: Callable[[ResolvedRun, int], StudentRecord]
    """Record of the student of a run after so many updates."""
    read_record: Callable[[Path], StudentRecord]
    """The record in the directory of an exported student. Raises FormatError."""
    usage: Callable[[ResolvedRun, Path, Any], str]
    """For the console: how the student in a directory is called, by its record."""
    rows: Callable[[ResolvedRun], list[tuple[str, str]]]
    """Rows of the table of the rollout that say how samples are made."""
    rules: tuple[Callable[[ResolvedRun], None], ...] = ()
    """Rules about its options and the pipeline directories; each raises ConfigError."""
    idle: tuple[Unread, ...] = ()
    """Options of which something can switch the effect off."""
    metrics: tuple[str, ...] = ()
    """Names of the numbers that ``samples`` reports."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms of these numbers; the option ``alarm_<name>`` holds the threshold of each."""
    panels: tuple[Panel, ...] = ()
    """Curves of these numbers."""
    not_counted: str = ""
    """Memory that the estimate leaves out, beside activations and gathered blocks."""
    harmless: frozenset[str] = frozenset()
    """Options that may differ from a checkpoint's."""

    def torch(self) -> ModalityCode:
        """Its code, which imports torch."""
        code: ModalityCode = registry.resolve(f"{self.code}:CODE")
        return code


class Samples(Protocol):
    """Hook that shows samples of the student, after its steps and at both ends of a run."""

    def after_completed_step(
        self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: GroupExecutor
    ) -> None: ...

    def draw_teacher(self, executor: GroupExecutor) -> None:
        """Show the teacher's samples, where there is one to sample from."""
        ...

    def draw(self, step: int, executor: GroupExecutor) -> None:
        """Show the student's samples as they are after ``step`` updates."""
        ...

    def finish(self, counters: TrainerCounters, executor: GroupExecutor) -> None:
        """Show what is exported, also where a run ended before its last step."""
        ...

    def draw_exported(self, directory: Path, student: Any, step: int, executor: GroupExecutor) -> None:
        """Show what ``directory`` holds, where rounding has made it another student."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Model(Protocol):
    """A network as objectives call it."""

    @property
    def network(self) -> nn.Module: ...


class Studio(Protocol):
    """Part of the rollout worker that shows and exports samples."""

    def show(self, engine: Any, requests: Sequence[RolloutRequest], reference: Any) -> Shown:
        """Finished samples of the student; ``reference`` is what the numbers are relative to."""
        ...

    def show_teacher(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Shown:
        """The same of the teacher, sampled as ``sampling`` says."""
        ...

    def export(self, buckets: Iterable[Mapping[str, Tensor]], directory: Path, record: Any) -> ExportReport:
        """Write a student that opens in the libraries that its users have. Raises SaveError."""
        ...

    def exported(self, directory: Path) -> Iterator[Mapping[str, Tensor]]:
        """Parameters of an exported student in fp32, bucket by bucket."""
        ...


class ModalityCode(Protocol):
    """The part that knows torch."""

    @property
    def batch(self) -> type[Any]:
        """Class of its batches."""
        ...

    def prepare(self, args: Args, texts: Sequence[str], device: torch.device) -> str:
        """Prepare prompts, once for all processes of a run; the path of a file with them, or ""."""
        ...

    def open_prompts(self, prepared: str) -> Any:
        """``prepare``'s result as a process reads it."""
        ...

    def model(self, family: ModelFamily, network: nn.Module, dtype: torch.dtype) -> Model:
        """A network for objectives, which computes in ``dtype``."""
        ...

    def recompute(self, network: nn.Module) -> None:
        """Have ``network`` recompute activations in the backward pass."""
        ...

    def ready(self, batch: Any, prompts: Any, family: ModelFamily, device: torch.device) -> Batch:
        """A batch on ``device`` with all that objectives and scorers read."""
        ...

    def studio(self, args: Args, compute: Compute, prompts: Any, texts: Sequence[str]) -> Studio: ...
