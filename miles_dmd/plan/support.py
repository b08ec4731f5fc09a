"""Refusal of plans that a run would not obey."""

from __future__ import annotations

from miles_dmd.errors import NotBuilt
from miles_dmd.plan.frozen import immutable
from miles_dmd.plan.plan import DistillationPlan
from miles_dmd.sampling.strategies import FEW_STEP

_TOGETHER = (("student", "student_ema"), ("teacher_score", "fake_score"))
"""Roles that one trainer group computes in one pass."""


@immutable
class Support:
    """Declarations of a run's plug-ins: capabilities (loss type, model family, engine), rollout strategies (engine)."""

    capabilities: frozenset[str] = frozenset()
    rollouts: frozenset[str] = frozenset()


SHIPPED = Support(frozenset({"distribution_matching", "token_matching"}), frozenset(FEW_STEP))
"""Declarations of the plug-ins that come with the package."""


def unsupported(plan: DistillationPlan, support: Support = SHIPPED) -> tuple[str, ...]:
    """List the parts of ``plan`` that a run with ``support`` would not obey; empty where it can run."""
    layout, schedule = plan.role_layout, plan.update_schedule
    mode, stage, rollout = plan.data_requirements["mode"], plan.initialization["stage"], plan.rollout["strategy"]
    lacking = sorted(plan.required_capabilities - support.capabilities)
    adapted = {group.name for group in layout.groups if group.storage != "independent_module"}
    adapted |= {binding.group for binding in layout.bindings if binding.adapter is not None}
    apart = [
        pair for pair in _TOGETHER if {*pair} <= {*layout.roles} and len({plan.group_of(role) for role in pair}) > 1
    ]
    phases = (*schedule.phases, *schedule.warmup_phases)
    reused = any(phase.batch_policy == "reuse_student" for phase in phases)
    torn = [phase.kind for phase in phases if len({plan.group_of(role) for role in phase.trainable_roles}) > 1]
    backend = plan.export.checkpoint_engine_backend
    played = ", ".join(sorted(support.rollouts)) or "none"
    missing = {
        f"the capabilities {lacking}, which neither loss type, model family nor engine declares": bool(lacking),
        f"the rollout strategy {rollout!r} (the engine plays {played})": rollout not in support.rollouts,
        f"the score transport {layout.score_transport.provider!r}": layout.score_transport.provider != "colocated",
        "standalone placement of a role group": any(group.placement == "standalone" for group in layout.groups),
        f"the initialization stage {stage!r}": stage != "base",
        f"adapters on the base of {sorted(adapted)} (role_storage='actor_critic' has none)": bool(adapted),
        f"the roles {apart} in separate groups": bool(apart),
        f"the data mode {mode!r}": mode != "prompts",
        "a batch that is used twice (batch_policy 'reuse_student')": reused,
        "a student step without its moving average (update_ema=False)": "student_ema" in layout.roles
        and not schedule.phases[0].update_ema,
        "a discriminator": "discriminator" in layout.roles,
        f"phases that train roles of several groups ({', '.join(torn)})": bool(torn),
        f"the checkpoint engine {backend!r}": backend != "naive",
    }
    return tuple(reason for reason, is_missing in missing.items() if is_missing)


def require_runnable(plan: DistillationPlan, support: Support = SHIPPED) -> None:
    """Raises NotBuilt, which names all that a run with ``support`` would not do."""
    if reasons := unsupported(plan, support):
        raise NotBuilt(f"plan {plan.name!r} can be declared but not run: {'; '.join(reasons)}")
