"""Plug-ins by file name, import path or registered name; a name that stands for nothing is refused with the list."""

import importlib
import subprocess
import sys

import pytest

from miles_dmd import registry
from miles_dmd.contracts.role import Role
from miles_dmd.errors import ConfigError, NotFound, UnknownName
from miles_dmd.plan import recipe_registry
from miles_dmd.registry import Wing

DECLARED = "from miles_dmd.contracts.loss import LossType\nloss_type = LossType("


def test_a_plug_in_is_a_file_or_package_of_its_wing():
    names = registry.names("losses")

    assert "dmd2" in names
    assert registry.load("losses", "dmd2").roles == ("critic", "actor")


@pytest.fixture
def wing(tmp_path, monkeypatch):
    """A wing whose plug-ins say which module they are."""
    package = tmp_path / "wing_of_tests"
    package.mkdir()
    for name in ("__init__", "qwen_image", "_shared", "a"):
        (package / f"{name}.py").write_text(
            "from miles_dmd.contracts.role import Role\nthing = Role({'student': __name__})\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield Wing("--thing", "wing_of_tests", "thing", "miles_dmd.contracts.role:Role")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wing_of_tests"]:
        del sys.modules[name]


def test_dashes_stand_for_underscores(wing):
    assert wing.get("qwen-image") is wing.get("qwen_image")
    assert wing.get("qwen-image").pipelines == {"student": "wing_of_tests.qwen_image"}


def test_a_plug_in_is_loaded_once_and_a_refusal_is_not_remembered(wing, tmp_path, monkeypatch):
    loaded = []
    load = wing._load
    monkeypatch.setattr(wing, "_load", lambda path, asked: loaded.append(path) or load(path, asked))
    first = wing.get("a")
    late = tmp_path / "wing_of_tests" / "late.py"
    with pytest.raises(NotFound):
        wing.get("wing_of_tests.late")
    late.write_text("from miles_dmd.contracts.role import Role\nthing = Role({})\n")
    importlib.invalidate_caches()

    assert wing.get("a") is first
    assert loaded == ["wing_of_tests.a", "wing_of_tests.late"]
    assert wing.get("wing_of_tests.late") == Role({})


def test_a_private_module_is_no_plug_in(wing):
    assert wing.names == ("a", "qwen_image")


def test_what_is_made_in_code_stands_beside_the_files_of_a_wing(wing):
    mine = wing.register("mine", Role({}))

    assert wing.names == ("a", "mine", "qwen_image")
    assert wing.get("mine") is mine
    with pytest.raises(ConfigError, match="--thing 'a' is already registered, among a, mine, qwen_image"):
        wing.register("a", mine)


def test_plug_ins_and_recipes_are_refused_in_the_same_words(wing):
    messages = []
    for known in (wing, recipe_registry):
        with pytest.raises(UnknownName) as refused:
            known.get("nothing")
        messages.append(str(refused.value))

    assert messages == [
        "--thing 'nothing' is not among a, qwen_image; one of your own is named by its import path",
        "recipe 'nothing' is not among causvid, dmd, dmd2, opd, self_forcing",
    ]


def test_a_plug_in_of_the_users_own_is_named_by_its_import_path(own_loss):
    name = own_loss("lab")

    assert registry.load("losses", name).roles == ("actor",)


@pytest.mark.parametrize(
    ("wing", "name", "parts"),
    [
        ("losses", "dmd3", ["--loss-type", "'dmd3'", "dmd2", "did you mean dmd2?"]),
        ("models", "sd4", ["--model-family", "'sd4'", "sd3"]),
        ("engines", "vllm", ["--rollout-engine", "'vllm'", "inprocess"]),
        ("roles", "critc", ["trainer role", "did you mean critic?"]),
        ("losses", "", ["--loss-type", "''"]),
        ("losses", "../dmd2", ["--loss-type", "'../dmd2'", "did you mean dmd2?"]),
        ("losses", "my_lab..loss", ["'my_lab..loss'"]),
        ("losses", "no_such_lab.loss", ["--loss-type no_such_lab.loss", "no module 'no_such_lab'", "PYTHONPATH"]),
        ("losses", "miles_dmd.errors", ["--loss-type miles_dmd.errors", "defines no 'loss_type'"]),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused_in_one_line(wing, name, parts):
    with pytest.raises(NotFound) as refused:
        registry.load(wing, name)

    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import no_such_dependency", ["cannot be imported", "No module named 'no_such_dependency'"]),
        ("raise RuntimeError('no licence')", ["cannot be imported", "RuntimeError: no licence"]),
        ("def (", ["cannot be imported", "SyntaxError", "line 1"]),
        ("import sys; sys.exit(3)", ["cannot be imported", "SystemExit: 3"]),
        ("loss_type = 3", ["loss_type of broken.lab is 3, not a LossType"]),
        (f"{DECLARED}options=dict, roles=(), plan=str, objectives={{}})", ["options", "dict", "frozen dataclass"]),
        ("", ["defines no 'loss_type'"]),
    ],
)
def test_a_plug_in_that_is_broken_is_refused_in_one_line(tmp_path, monkeypatch, source, parts):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "lab.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.delitem(sys.modules, "broken.lab", raising=False)

    with pytest.raises(NotFound) as refused:
        registry.load("losses", "broken.lab")

    assert all(part in str(refused.value) for part in ["--loss-type broken.lab", *parts]), str(refused.value)


@pytest.mark.parametrize("name", [3, None, ["dmd2"], "", "x" * 300, "a\0b", "dmd2\n"])
def test_a_name_that_can_be_none_is_refused(name):
    with pytest.raises(NotFound, match=r"--loss-type .*dmd2"):
        registry.load("losses", name)


def test_resolve_imports_what_a_dotted_name_means():
    assert registry.resolve("miles_dmd.errors:NotFound") is NotFound


@pytest.mark.parametrize(
    "dotted", ["miles_dmd.errors", "miles_dmd.errors:", ":x", ".errors:x", "miles_dmd.errors:NotFnd"]
)
def test_resolve_refuses_what_is_no_dotted_name(dotted):
    with pytest.raises(NotFound) as refused:
        registry.resolve(dotted)

    assert "\n" not in str(refused.value)


def test_listing_a_wing_imports_no_plug_in():
    code = "import sys, miles_dmd.registry as r; r.names('models'); print([m for m in sys.modules if 'sd3' in m])"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_a_module_of_the_users_own_needs_no_dot(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_file_lab.py").write_text("from miles_dmd.losses.dmd2 import loss_type\n")

    assert registry.load("losses", "one_file_lab") is registry.load("losses", "dmd2")
    monkeypatch.delitem(sys.modules, "one_file_lab")


def test_a_module_that_is_no_plug_in_is_named_as_one():
    with pytest.raises(NotFound, match="--loss-type colorsys: module 'colorsys' defines no 'loss_type'"):
        registry.load("losses", "colorsys")


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("--lora-rank", ["--num-trainer-ranks"], ""),
        ("--fake-lr", ["--fake-shift", "--lr"], ""),
        ("--validation-prompt", ["--negative-prompt"], ""),
        ("--ab", ["--lr"], ""),
        ("-lr", ["--lr"], " (did you mean --lr?)"),
        ("--rollout_batch", ["--rollout-batch-size"], " (did you mean --rollout-batch-size?)"),
        ("num_rolout", ["num_rollout"], " (did you mean num_rollout?)"),
    ],
)
def test_a_hint_is_given_for_a_typing_error_and_for_nothing_else(name, known, hint):
    assert registry.nearest(name, known) == hint
