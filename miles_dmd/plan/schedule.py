"""Update schedule: phases of a cycle, warm-up, counters, and the arithmetic that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from miles_dmd.errors import PlanError
from miles_dmd.plan.frozen import assign, immutable
from miles_dmd.validators import choice, count, flag, repeated, sequence, table

PHASE_KINDS = ("student", "fake_score")
BATCH_POLICIES = ("fresh", "reuse_student")


@immutable
class UpdatePhaseSpec:
    """``repeats`` optimizer steps of each of ``trainable_roles``, each on a fresh batch or on the student's."""

    kind: str
    repeats: int = 1
    batch_policy: str = "fresh"
    trainable_roles: tuple[str, ...] = ()
    update_ema: bool = False

    def __post_init__(self) -> None:
        choice("phase kind", self.kind, PHASE_KINDS)
        count(f"repeats of the {self.kind} phase", self.repeats, 1)
        choice(f"batch_policy of the {self.kind} phase", self.batch_policy, BATCH_POLICIES)
        flag(f"update_ema of the {self.kind} phase", self.update_ema)
        roles = sequence(f"trainable_roles of the {self.kind} phase", self.trainable_roles, str)
        assign(self, trainable_roles=roles)
        if not roles:
            raise PlanError(f"a {self.kind} phase needs at least one of trainable_roles")
        if twice := repeated(roles):
            raise PlanError(f"duplicate trainable_roles {twice} in the {self.kind} phase")
        if self.kind == "student" and roles != ("student",):
            raise PlanError(f"a student phase trains exactly the role 'student', got {roles}")
        if self.kind != "student" and "student" in roles:
            raise PlanError(f"a {self.kind} phase must not train the student, got {roles}")
        if self.kind != "student" and self.update_ema:
            raise PlanError(f"update_ema belongs to a student phase, not to a {self.kind} phase")
        if self.kind == "student" and self.batch_policy != "fresh":
            raise PlanError("a student phase takes a fresh batch: it comes first, there is none to reuse")


@immutable
class PhaseRequest:
    """One optimizer step to take. ``global_step`` is that of the start of the cycle."""

    kind: str
    global_step: int
    repeat_index: int
    batch_policy: str
    trainable_roles: tuple[str, ...]
    update_ema: bool = False


@immutable
class UpdateCycle:
    requests: tuple[PhaseRequest, ...]
    requires_student_update: bool
    is_warmup: bool = False


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """Report of a phase: metrics by name, and optimizer steps by role; no steps at all says that all ranks skipped."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    optimizer_steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class TrainerCounters:
    """Progress counters of a run. The controller hands out copies: to change one changes no run."""

    global_step: int = 0
    """Committed student updates."""
    optimizer_steps: dict[str, int] = field(default_factory=dict)
    completed_cycles: int = 0
    """Committed cycles, warm-up included."""

    def __post_init__(self) -> None:
        count("global_step", self.global_step)
        count("completed_cycles", self.completed_cycles)
        table(count)("optimizer_steps", self.optimizer_steps)
        self.optimizer_steps = dict(self.optimizer_steps)

    def copy(self) -> TrainerCounters:
        return replace(self)

    def increment_global(self) -> None:
        self.global_step += 1

    def record_step(self, role: str) -> None:
        self.optimizer_steps[role] = self.optimizer_steps.get(role, 0) + 1


@immutable
class UpdateSchedule:
    """``warmup_cycles`` cycles of ``warmup_phases``, then cycles of ``phases`` without end."""

    phases: tuple[UpdatePhaseSpec, ...]
    warmup_phases: tuple[UpdatePhaseSpec, ...] = ()
    warmup_cycles: int = 0

    def __post_init__(self) -> None:
        phases = sequence("UpdateSchedule.phases", self.phases, UpdatePhaseSpec)
        warmup = sequence("UpdateSchedule.warmup_phases", self.warmup_phases, UpdatePhaseSpec)
        assign(self, phases=phases, warmup_phases=warmup)
        count("warmup_cycles", self.warmup_cycles)
        if not phases:
            raise PlanError("an update schedule needs at least one phase in a normal cycle")
        if [i for i, phase in enumerate(phases) if phase.kind == "student"] != [0] or phases[0].repeats != 1:
            raise PlanError(
                "a normal cycle has exactly one student phase, first and with repeats=1; "
                f"got {[(phase.kind, phase.repeats) for phase in phases]}"
            )
        _check_warmup(warmup, self.warmup_cycles)
        for cycle in (phases, warmup):
            # requests of a cycle differ, so that a request tells where in its cycle it stands
            if twins := repeated((phase.kind, phase.batch_policy, phase.trainable_roles) for phase in cycle):
                raise PlanError(f"phases {twins} occur twice in a cycle; make each one phase with more repeats")

    def next_cycle(self, counters: TrainerCounters) -> UpdateCycle:
        """The cycle that follows ``counters``, phases unrolled by their repeats."""
        warmup = counters.completed_cycles < self.warmup_cycles
        requests = tuple(
            PhaseRequest(
                phase.kind, counters.global_step, index, phase.batch_policy, phase.trainable_roles, phase.update_ema
            )
            for phase in (self.warmup_phases if warmup else self.phases)
            for index in range(phase.repeats)
        )
        return UpdateCycle(requests, requires_student_update=not warmup, is_warmup=warmup)

    def counters_after(self, completed_cycles: int) -> TrainerCounters:
        """Exact arithmetic: n student steps and K (W + n) fake-score steps after W warm-up and n normal cycles."""
        warmup = min(completed_cycles, self.warmup_cycles)
        counters = TrainerCounters(completed_cycles - warmup, {}, completed_cycles)
        for phases, cycles in ((self.warmup_phases, warmup), (self.phases, counters.global_step)):
            for phase in phases if cycles else ():
                for role in phase.trainable_roles:
                    steps = counters.optimizer_steps.get(role, 0)
                    counters.optimizer_steps[role] = steps + phase.repeats * cycles
        return counters

    def fresh_batches_after(self, completed_cycles: int) -> int:
        """Number of batches that so many cycles from the start draw."""
        warmup = min(completed_cycles, self.warmup_cycles)
        return fresh_batches(self.warmup_phases) * warmup + fresh_batches(self.phases) * (completed_cycles - warmup)


def fresh_batches(phases: Iterable[UpdatePhaseSpec]) -> int:
    """Number of batches that one cycle of ``phases`` draws."""
    return sum(phase.repeats for phase in phases if phase.batch_policy == "fresh")


def _check_warmup(phases: tuple[UpdatePhaseSpec, ...], cycles: int) -> None:
    if bool(phases) != bool(cycles):
        raise PlanError(
            f"warm-up has {cycles} cycles and {len(phases)} phases; warmup_cycles and warmup_phases come together"
        )
    if any(phase.kind == "student" for phase in phases):
        raise PlanError("the student does not train in the warm-up; drop its phase from warmup_phases")
    if any(phase.batch_policy == "reuse_student" for phase in phases):
        raise PlanError("a warm-up phase has no student batch to reuse; give it batch_policy='fresh'")


def requests_until_student_update(
    schedule: UpdateSchedule, counters: TrainerCounters, request: PhaseRequest, last_step: int | None = None
) -> int:
    """Number of fresh batches that can be drawn at once for ``request``: those used before the student changes.

    Counts from ``request`` on, to the batch of the next student phase and with it, within the present cycle and the
    head of the next; ``counters`` are those at the start of the cycle. A run that ends at ``last_step`` needs no batch
    past its end. 1 in a student phase; in a fake-score phase the rest of its cycle and the next student's batch.
    """
    if request.kind == "student":
        return 1
    cycle = schedule.next_cycle(counters)
    if request not in cycle.requests:
        raise PlanError(f"{request} is none of the cycle that follows {counters}; pass the counters at its start")
    rest = cycle.requests[cycle.requests.index(request) :]
    step = counters.global_step + cycle.requires_student_update
    student_next = counters.completed_cycles + 1 >= schedule.warmup_cycles and (last_step is None or step < last_step)
    return sum(request.batch_policy == "fresh" for request in rest) + student_next
