"""Which names make up the control plane? Those of who trains when, as plain data, and of the loop that plays it."""

# ruff: noqa: F401 - a facade imports what it does not use

from miles_dmd.errors import NotBuilt, PhaseReportError, PlanTypeError, UnknownName
from miles_dmd.plan.configuration import TRAINER_TYPES, build_plan_from_config
from miles_dmd.plan.contracts import (
    EXPORTABLE_ROLES,
    ExportSpec,
    RoleBinding,
    RoleGroupSpec,
    RoleLayoutSpec,
    ScoreTransportSpec,
    describe_role_groups,
    resolve_export_role,
    validate_export_role,
    validate_role_layout,
)
from miles_dmd.plan.controller import (
    BatchProvider,
    DistillationPhaseExecutor,
    DistillationTrainerController,
    DistillationTrainerHooks,
)
from miles_dmd.plan.fakes import FakeBatchProvider, FakeDistillationHooks, FakePhaseExecutor
from miles_dmd.plan.frozen import FrozenDict, freeze
from miles_dmd.plan.plan import (
    DataRequirements,
    DistillationPlan,
    InitializationSpec,
    ObjectiveSpec,
    RolloutSpec,
    unsupported,
    validate_distillation_plan,
)
from miles_dmd.plan.recipes import (
    CausVidRecipe,
    DMD2Recipe,
    DMDRecipe,
    OnPolicyDistillationRecipe,
    Profile,
    Recipe,
    SelfForcingRecipe,
    build_plan,
    independent_layout,
    initialization_registry,
    objective_registry,
    partition_layout,
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
from miles_dmd.registry import Registry
from miles_dmd.sampling.grid import shifted, sigma_grid
from miles_dmd.sampling.partition import micro_batches, rows_of_rank
from miles_dmd.sampling.stopping import stop_steps
