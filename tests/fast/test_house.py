"""House rules: small files, docstrings that grep finds, nobody writes to args, nobody branches on a recipe's name."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import miles_dmd
from miles_dmd import registry
from miles_dmd.plan import recipe_registry

PACKAGE = Path(miles_dmd.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PROGRAMS = sorted(path for place in ("examples", "benchmarks", "scripts") for path in ROOT.glob(f"{place}/**/*.py"))
VAGUE = {"What", "Who", "Whose", "Which", "Where", "When", "Whether", "Why", "How", "If", "Of", "As", "That", "Those"}
NEUTRAL = [
    "run.py",
    "executor.py",
    "batches.py",
    "local.py",
    "rollout.py",
    "contracts/modality.py",
    "students.py",
    "run_logger.py",
    "plan/controller.py",
]
OF_ANY_LOSS = ("observe", "checkpoint", "config")
"""Rooms that serve every loss type: another one must not have to edit them."""
OF_ANY_MODALITY = [
    *(PACKAGE / name for name in NEUTRAL if "/" not in name),
    *(PACKAGE / f"{name}.py" for name in ("report", "memory", "saving", "observer", "hooks", "handles", "failure")),
    *(path for room in ("cluster", "training", "preflight", "checkpoint", "observe", "contracts")
      for path in sorted((PACKAGE / room).rglob("*.py"))),
]  # fmt: skip
"""The shared machinery: driver, trainers, rollout worker, checkpoints, and what they and plug-ins agree on."""
OF_A_MODALITY = """
    latent sigma timestep velocity shift solver noise denoise denoised denoiser denoising stop_step
    pixel image grid vae saturation diversity guidance cond uncond embedding encoder decoder diffuser
    token tokenizer logit logprob vocab vocabulary response temperature causal autoregressive transformer
"""
"""Words that mean something to one modality alone, beside the modalities' names and options; plurals count, too."""
AUTHENTICATION = {"token"}
OF_NONE_AFTER_ALL = {
    "run.py": {"grid"},  # "grids": the samples' name in checkpoints, which go on loading
    "checkpoint/records.py": {"grid"},  # likewise
    "contracts/loss.py": {"diffusion"},  # the modality of loss types that name none
    "saving.py": {"diffuser", "transformer", "token"},  # versions that a checkpoint notes; secrets.token_hex
    "training/ema.py": {"diffuser"},  # its moving average serves any network
    "training/trained.py": {"diffuser"},  # so do its learning rate schedules
    "observe/pictures.py": {"grid", "image", "height", "width"},  # of PNG files: curves, and a grid for who has images
    "observe/summary.py": {"width"},  # of a line of text
    "observe/trackers.py": {"token"},  # secrets.token_hex
    "preflight/places.py": AUTHENTICATION,
    **{f"cluster/supervision/{name}.py": AUTHENTICATION for name in ("auth_probe", "authentication", "session")},
}
"""Words that are no modality's where they stand."""
COMMON = {"student", "teacher", "base"}
"""Names of the whole house, whatever the loss: what is distilled, of what, and the group of a shared model."""
EXCEPTIONS = {"config/trainers.py": {"actor"}}
"""Arguments of another program, a Namespace, belong to no loss type: they have the actor alone."""


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_room_is_small(path):
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    assert len(text.splitlines()) <= 400
    assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60] == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_of_tests_is_of_one_topic(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", [*FILES, *TESTS, *PROGRAMS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_first_line_names_the_subject_in_words_that_grep_finds(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))

    assert docstring
    first = docstring.split("\n")[0]
    assert "?" not in first
    assert first.split()[0] not in VAGUE


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_docstring_begins_with_its_subject_or_an_imperative(path):
    """Docstrings of modules, classes, functions and attributes, private ones too: readers grep for them."""
    first_lines = [
        (node.lineno, node.value.value.strip().split("\n")[0])
        for node in ast.walk(ast.parse(path.read_text()))
        if is_bare_string(node)
    ]

    assert [(number, line) for number, line in first_lines if line.split()[0].strip(",:") in VAGUE or "?" in line] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nobody_writes_to_args(path):
    stores = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]

    written = [
        node.lineno for node in stores if isinstance(node.ctx, ast.Store) and ast.unparse(node.value).endswith("args")
    ]

    assert written == []


@pytest.mark.parametrize("path", [*NEUTRAL, *(name_of(path) for path in (PACKAGE / "training").glob("*.py"))])
def test_driver_and_trainer_know_no_recipe_and_no_architecture(path):
    names = {*recipe_registry.names, *registry.names("losses"), *registry.names("models")}
    tree = ast.parse((PACKAGE / path).read_text())
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)}

    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    assert names & (words - docstrings) == set()


def words_of_losses():
    """Roles, groups, metrics and alarms of the recipes and loss types that come with the package."""
    config = {"model_path": "a", "causal_model_path": "b", "bidirectional_model_path": "c"}
    found = set(registry.names("roles"))
    for recipe in map(recipe_registry.get, recipe_registry.names):
        known = config if recipe.stage != "base" else {"model_path": "a"}
        layout = recipe().build(known).role_layout
        found |= {*layout.roles, *(group.name for group in layout.groups)}
    for loss_type in (registry.load("losses", name) for name in registry.names("losses")):
        found |= {*loss_type.roles, *loss_type.objectives, *loss_type.headline}
        found |= {metric for metrics in loss_type.metrics.values() for metric in metrics}
        found |= {word for alarm in loss_type.alarms for word in (alarm.name, alarm.metric, alarm.series)}
    return found - COMMON - {""}


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[len(PACKAGE.parts)] in OF_ANY_LOSS], ids=name_of)
def test_rooms_of_any_loss_name_no_role_and_no_metric_of_one(path):
    tree = ast.parse(path.read_text())
    docstrings = {node.value.value for node in ast.walk(tree) if is_bare_string(node)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    said = {word for text in strings - docstrings for word in re.findall(r"[\w/]+", text)}

    assert said & words_of_losses() - EXCEPTIONS.get(name_of(path), set()) == set()


def names_in(path):
    """Identifiers, attributes, arguments and imports of a file, and strings that are a single name, as for getattr."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if is_bare_string(node)}
    for node in nodes:
        for part in ("id", "attr", "arg", "name", "asname", "module", "value") if node not in docstrings else ():
            name = getattr(node, part, None)
            if isinstance(name, str) and re.fullmatch(r"[\w.:]+", name):
                yield from re.split(r"[.:]", name)


def of_a_modality_in(path):
    modalities = {name: registry.load("modalities", name) for name in registry.names("modalities")}
    options = {row.name for modality in modalities.values() for row in dataclasses.fields(modality.options)}
    names = set(names_in(path))
    words = names | {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+", name)}
    singular = words | {word.removesuffix("s") for word in words}
    return singular & {*OF_A_MODALITY.split(), *modalities} | names & options


@pytest.mark.parametrize("path", OF_ANY_MODALITY, ids=name_of)
def test_shared_machinery_names_no_modality_and_nothing_of_one(path):
    assert of_a_modality_in(path) - OF_NONE_AFTER_ALL.get(name_of(path), set()) == set()


@pytest.mark.parametrize("name", OF_NONE_AFTER_ALL)
def test_no_exception_to_that_outlives_its_need(name):
    assert of_a_modality_in(PACKAGE / name) == OF_NONE_AFTER_ALL[name]


def is_bare_string(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def test_driver_needs_no_torch():
    """All that runs on the driver: its imports are the start of every run, and of every error message."""
    code = "import sys, miles_dmd.run, miles_dmd.cluster.run; print({'torch', 'diffusers'} & set(sys.modules))"

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.strip() == "set()"


def test_help_needs_no_torch_and_no_ray():
    code = "import sys, miles_dmd.run; print({'torch', 'ray', 'diffusers', 'numpy', 'matplotlib'} & set(sys.modules))"

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.strip() == "set()"


def test_trainer_is_exported_lazily():
    code = (
        "import sys, miles_dmd; before = 'miles_dmd.run' in sys.modules; miles_dmd.DistillationTrainer; print(before)"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.strip() == "False"
