"""The control plane needs the standard library alone, and knows no recipe by name where it drives."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import miles_dmd.plan

PLAN = Path(miles_dmd.plan.__file__).parent
RECIPES = set(miles_dmd.plan.recipe_registry.names)
ARCHITECTURES = {"sd3", "sd35", "qwen", "qwen_image", "flux", "wan", "ltx", "causal_lm", "resopd"}
BELOW = {"errors", "registry", "sampling", "shown", "validators"}
DRIVING = ["controller.py", "schedule.py", "plan.py", "support.py", "fakes.py", "layout.py", "frozen.py"]


def test_a_bare_interpreter_imports_the_control_plane():
    code = (
        f"import sys; sys.path.insert(0, {str(PLAN.parents[1])!r})\n"
        "import miles_dmd.plan\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots - set(sys.stdlib_module_names) - {'miles_dmd', '__main__'}))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('miles_dmd.')))"
    )

    # -I and -S: no site-packages, so that an import of torch, ray or yaml fails
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, "")
    foreign, ours = run.stdout.split("\n")[:2]
    assert foreign == ""
    assert {name.split(".")[1] for name in ours.split()} == {"plan", *BELOW, "version"}


@pytest.mark.parametrize("path", sorted(PLAN.rglob("*.py")), ids=lambda path: path.relative_to(PLAN).as_posix())
def test_a_file_imports_the_standard_library_and_the_floor_below(path):
    tree = ast.parse(path.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}

    ours = {name for name in imported if name.startswith("miles_dmd")}
    assert {name.partition(".")[0] for name in imported - ours} <= set(sys.stdlib_module_names)
    assert {name.split(".")[1] for name in ours} <= {"plan", *BELOW}


@pytest.mark.parametrize("name", DRIVING)
def test_invariant_10_what_drives_names_no_recipe_and_no_architecture(name):
    tree = ast.parse((PLAN / name).read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    }
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    assert words & (RECIPES | ARCHITECTURES) == set()


def test_every_name_of_the_control_plane_is_importable_from_it():
    names = """
        FrozenDict RoleGroupSpec RoleBinding RoleLayoutSpec ScoreTransportSpec ExportSpec EXPORTABLE_ROLES
        DataRequirements ObjectiveSpec RolloutSpec InitializationSpec DistillationPlan
        UpdatePhaseSpec UpdateSchedule UpdateCycle PhaseRequest PhaseResult TrainerCounters
        validate_role_layout validate_export_role validate_distillation_plan describe_role_groups resolve_export_role
        unsupported require_runnable Support requests_until_student_update freeze TRAINER_TYPES
        Recipe Profile DMDRecipe DMD2Recipe CausVidRecipe SelfForcingRecipe OnPolicyDistillationRecipe
        build_plan build_plan_from_config partition_layout independent_layout
        Registry recipe_registry objective_registry rollout_registry initialization_registry
        NotBuilt PhaseReportError PlanTypeError UnknownName
        shifted sigma_grid micro_batches rows_of_rank stop_steps
        DistillationTrainerController BatchProvider DistillationTrainerHooks DistillationPhaseExecutor
        FakeBatchProvider FakePhaseExecutor FakeDistillationHooks
    """

    assert [name for name in names.split() if not hasattr(miles_dmd.plan, name)] == []
