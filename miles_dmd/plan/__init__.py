"""The control plane: who trains when, as plain data, and the loop that plays it. Its public names."""

# ruff: noqa: F401 - a facade imports what it does not use

from miles_dmd.errors import NotBuilt, PhaseReportError, PlanTypeError, UnknownName
from miles_dmd.plan.configuration import TRAINER_TYPES, build_plan_from_config
from miles_dmd.plan.controller import (
    BatchProvider,
    DistillationPhaseExecutor,
    DistillationTrainerController,
    DistillationTrainerHooks,
)
from miles_dmd.plan.declared.recipes import CausVidRecipe, DMDRecipe, SelfForcingRecipe
from miles_dmd.plan.declared.transport import ScoreTransportSpec
from miles_dmd.plan.fakes import FakeBatchProvider, FakeDistillationHooks, FakePhaseExecutor
from miles_dmd.plan.frozen import FrozenDict, freeze
from miles_dmd.plan.layout import (
    EXPORTABLE_ROLES,
    ExportSpec,
    RoleBinding,
    RoleGroupSpec,
    RoleLayoutSpec,
    describe_role_groups,
    resolve_export_role,
    validate_export_role,
    validate_role_layout,
)
from miles_dmd.plan.plan import (
    DataRequirements,
    DistillationPlan,
    InitializationSpec,
    ObjectiveSpec,
    RolloutSpec,
    validate_distillation_plan,
)
from miles_dmd.plan.recipe import Profile, Recipe, independent_layout, partition_layout
from miles_dmd.plan.recipes import (
    DMD2Recipe,
    OnPolicyDistillationRecipe,
    build_plan,
    initialization_registry,
    objective_registry,
    recipe_registry,
    rollout_registry,
)
from miles_dmd.plan.schedule import (
    PhaseRequest,
    PhaseResult,
    TrainerCounters,
    UpdateCycle,
    UpdatePhaseSpec,
    UpdateSchedule,
    requests_until_student_update,
)
from miles_dmd.plan.support import Support, require_runnable, unsupported
from miles_dmd.registry import Registry
from miles_dmd.sampling.grid import shifted, sigma_grid
from miles_dmd.sampling.partition import micro_batches, rows_of_rank
from miles_dmd.sampling.stopping import stop_steps
