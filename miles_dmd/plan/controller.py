"""Training loop over cycles: play the phases of a cycle, then commit counters and metrics, or roll them back.

Knows no tensor, no Ray, no model, no recipe.

    request --> batch_provider.next --> executor.execute_phase --> exactly one step of each requested role
       (student once, then K times the fake score; in the warm-up the fake score only)
    all phases done --> counters and metrics committed --> hooks, with copies --> observer
    anything raised --> counters and metrics of the last whole cycle, and a terminal driver
       (by a hook or the observer --> rescue, which may save the cycle that was committed)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from miles_dmd.errors import PhaseError, PhaseReportError, PlanError, PlanTypeError
from miles_dmd.plan.plan import DistillationPlan
from miles_dmd.plan.schedule import PhaseRequest, PhaseResult, TrainerCounters, UpdateCycle
from miles_dmd.plan.skips import Skips
from miles_dmd.validators import count, fields, instance, table

Metrics = dict[str, tuple[dict[str, float], ...]]
"""phase kind -> the metrics of each of its steps, in order: K fake-score phases keep K losses."""


@runtime_checkable
class BatchProvider(Protocol):
    def next(self, request: PhaseRequest) -> Any:
        """The batch of one phase, or a handle on it: the controller only passes it on."""


@runtime_checkable
class DistillationPhaseExecutor(Protocol):
    def execute_phase(self, request: PhaseRequest, batch: Any) -> PhaseResult:
        """One optimizer step of each of ``request.trainable_roles``; no steps at all when every rank skipped."""


@runtime_checkable
class DistillationTrainerHooks(Protocol):
    def after_completed_step(self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: Any) -> None:
        """After every committed student step: checkpoint, evaluate, export. Arguments are copies."""


class DistillationTrainerController:
    """Counters and metrics are those of the last whole cycle, always; a failed driver does nothing more.

    ``batch_provider`` and ``executor`` may come in either order, and are told apart by their methods. ``hooks`` is one
    object or several, called in their order after committed student steps; ``observer`` hears of every committed
    cycle, warm-up included. Where one of them raises, the cycle is whole all the same: ``rescue`` hears of the error
    and that cycle, and may save it (True). Then it stays committed.

    ``max_consecutive_skipped_cycles``: so many cycles in a row may be given up because a phase skipped its step on all
    ranks; such a cycle is not committed (``skips`` counts them). Uncommitted is not undone: a fake score that stepped
    in such a cycle stays stepped.
    """

    def __init__(
        self,
        plan: DistillationPlan,
        batch_provider: BatchProvider | Any,
        executor: DistillationPhaseExecutor | Any,
        hooks: DistillationTrainerHooks | Sequence[DistillationTrainerHooks] | None = None,
        counters: TrainerCounters | None = None,
        *,
        observer: Callable[[TrainerCounters, Mapping[str, Any]], None] | None = None,
        rescue: Callable[[BaseException, TrainerCounters, Mapping[str, Any]], bool] | None = None,
        max_consecutive_skipped_cycles: int = 0,
    ) -> None:
        if hasattr(batch_provider, "execute_phase") and hasattr(executor, "next"):
            batch_provider, executor = executor, batch_provider  # both orders are in use
        self.plan = instance("plan", plan, DistillationPlan)
        self.batch_provider: BatchProvider = _part("batch_provider", batch_provider, "next")
        self.executor: DistillationPhaseExecutor = _part("executor", executor, "execute_phase")
        hooks = () if hooks is None else hooks if isinstance(hooks, Sequence) else (hooks,)
        self.hooks = tuple(_part("a hook", hook, "after_completed_step") for hook in hooks)
        self.observer, self.rescue = observer, rescue
        self.skips = Skips(max_consecutive_skipped_cycles)
        self._failure = ""
        self._counters = self._checked(TrainerCounters() if counters is None else counters)
        self._metrics: Metrics = {}

    @property
    def counters(self) -> TrainerCounters:
        """A copy of the committed counters."""
        return self._counters.copy()

    @property
    def phase_metrics(self) -> Metrics:
        """A copy of the metrics of the last committed cycle."""
        return {kind: tuple(dict(step) for step in steps) for kind, steps in self._metrics.items()}

    @property
    def skipped_cycles(self) -> int:
        return self.skips.total

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def run(self, num_cycles: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Commit ``num_cycles`` more cycles, those of the warm-up included.

        ``stop`` is asked before every cycle and may end it sooner.
        """
        self._refuse_if_failed()
        target = self._counters.completed_cycles + count("num_cycles", num_cycles)
        while self._counters.completed_cycles < target and not stop():
            self.run_cycle()

    def run_until(self, global_step: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Run until so many student steps are committed in all, warm-up on top, or until ``stop``; see ``run``."""
        self._refuse_if_failed()
        count("global_step", global_step)
        while self._counters.global_step < global_step and not stop():
            self.run_cycle()

    def run_cycle(self) -> UpdateCycle:
        """One cycle, committed as a whole or not at all."""
        self._refuse_if_failed()
        before = self._counters, self._metrics
        try:
            cycle = self.plan.update_schedule.next_cycle(self.counters)
            if self._play(cycle):
                self._notify(cycle)
        except BaseException as error:  # an interrupt, too, leaves a half-played cycle behind
            committed = self._counters.completed_cycles > before[0].completed_cycles
            self._fail(error, in_hook=committed, saved=committed and self._rescued(error), before=before)
            raise
        return cycle

    def _play(self, cycle: UpdateCycle) -> bool:
        """True if the cycle was committed, False if it was given up within the bound on skips."""
        counters, metrics = self.counters, dict[str, list[dict[str, float]]]()
        for request in cycle.requests:
            result = self.executor.execute_phase(request, self.batch_provider.next(request))
            if not _steps(result, request):
                self.skips.add(request, student_stepped="student" in metrics)
                return False
            for role in request.trainable_roles:
                counters.record_step(role)
            metrics.setdefault(request.kind, []).append(dict(result.metrics))
        if cycle.requires_student_update:
            counters.increment_global()
        counters.completed_cycles += 1
        self.skips.committed()
        self._counters, self._metrics = counters, {kind: tuple(steps) for kind, steps in metrics.items()}
        return True

    def _notify(self, cycle: UpdateCycle) -> None:
        if cycle.requires_student_update:
            for hook in self.hooks:
                hook.after_completed_step(self.counters, self.phase_metrics, self.executor)
        if self.observer is not None:
            self.observer(self.counters, self.phase_metrics)

    def _rescued(self, error: BaseException) -> bool:
        if self.rescue is None:
            return False
        try:
            return self.rescue(error, self.counters, self.phase_metrics)
        except Exception as second:  # noqa: BLE001 - the first one is why the run ends
            error.add_note(f"the cycle could not be saved either: {second}")
            return False

    def _fail(
        self, error: BaseException, *, in_hook: bool, saved: bool, before: tuple[TrainerCounters, Metrics]
    ) -> None:
        self._failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        step = self._counters.global_step
        if not saved:
            self._counters, self._metrics = before
        if in_hook:
            where = f"in a hook or observer of step {step}, of which an artefact may exist"
            now = f"back at step {self._counters.global_step}"
            error.add_note(f"raised {where}; {'the cycle is saved' if saved else f'the counters are {now}'}")
            self._failure += f", {where}"

    def _refuse_if_failed(self) -> None:
        if self.failed:
            raise PhaseError(
                f"this driver failed after step {self._counters.global_step} ({self._failure}); models may have moved "
                "since, so it cannot go on: restore the last completed-cycle checkpoint into a new driver"
            )

    def reset(self) -> None:
        """Reset counters and metrics to the start."""
        self._refuse_if_failed()
        self._counters, self._metrics = TrainerCounters(), {}
        self.skips.reset()

    def state_dict(self) -> dict[str, Any]:
        self._refuse_if_failed()
        return asdict(self._counters)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters, if they are those that this plan reaches, to the step; else PlanError."""
        self._refuse_if_failed()
        fields({"global_step": count, "optimizer_steps": table(count), "completed_cycles": count})("state", state)
        self._counters, self._metrics = self._checked(TrainerCounters(**state)), {}
        self.skips.committed()

    def _checked(self, counters: TrainerCounters) -> TrainerCounters:
        counters = instance("counters", counters, TrainerCounters).copy()
        expected = self.plan.update_schedule.counters_after(counters.completed_cycles)
        if unknown := sorted(set(counters.optimizer_steps) - set(self.plan.role_layout.trainable_roles)):
            raise PlanError(f"optimizer_steps names {unknown}, which plan {self.plan.name!r} does not train")
        if counters.global_step != expected.global_step:
            raise PlanError(
                f"global_step {counters.global_step} does not follow from completed_cycles {counters.completed_cycles} "
                f"with {self.plan.update_schedule.warmup_cycles} warm-up cycles, which makes {expected.global_step}"
            )
        for role in {**expected.optimizer_steps, **counters.optimizer_steps}:
            steps, due = counters.optimizer_steps.get(role, 0), expected.optimizer_steps.get(role, 0)
            if steps != due:
                raise PlanError(
                    f"optimizer_steps of {role!r} is {steps}, but {counters.completed_cycles} cycles of plan "
                    f"{self.plan.name!r} make {due}; the checkpoint belongs to another schedule"
                )
        return counters


def _part(name: str, value: Any, method: str) -> Any:
    if not callable(getattr(value, method, None)):
        raise PlanTypeError(f"{name} must have a method {method}, got {type(value).__name__}")
    return value


def _steps(result: Any, request: PhaseRequest) -> bool:
    """True for exactly one step of each requested role and no other, False for a skip; anything else is refused."""
    if not isinstance(result, PhaseResult):
        raise TypeError(f"execute_phase must return a PhaseResult, got {type(result).__name__}")
    if not isinstance(result.optimizer_steps, Mapping) or not isinstance(result.metrics, Mapping):
        raise TypeError(f"metrics and optimizer_steps of a PhaseResult must be mappings, got {result}")
    if not result.optimizer_steps:
        return False
    steps = dict(result.optimizer_steps)
    if set(steps) != set(request.trainable_roles):
        raise PhaseReportError(
            f"the {request.kind} phase must report optimizer steps of exactly {sorted(request.trainable_roles)}, "
            f"got {sorted(map(str, steps))}"
        )
    if wrong := {role: n for role, n in steps.items() if type(n) is not int or n != 1}:
        raise PhaseReportError(f"every role of the {request.kind} phase takes exactly one optimizer step, got {wrong}")
    return True
