"""A wheel installed by pip: the program, the presets and the shipped models, from any folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OF_A_CLONE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "dist")
FILES = [
    *(ROOT / "trainer_configs").glob("*.yaml"),
    ROOT / "examples" / "digits" / "prompts.txt",
    ROOT / "examples" / "opd" / "prompts.jsonl",
    *(
        path
        for model in ("digits/teacher", "opd/teacher", "opd/student")
        for path in (ROOT / "examples" / model).rglob("*")
        if path.is_file()
    ),
]
SMALLEST = ["--local", "--device", "cpu", "--num-rollout", "1", "--rollout-batch-size", "4", "--micro-batch-size", "4",
            "--fake-update-ratio", "1", "--sample-prompts", "1"]  # fmt: skip


def execute(words, folder):
    """In a process that sees nothing of this clone."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(source distribution, the wheel that is built from it), without the network: dev dependencies build them."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=NOT_OF_A_CLONE)
    execute([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "clone"], folder)
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def program(built, tmp_path_factory):
    """``miles-dmd`` of a fresh environment, which borrows all but miles_dmd from this one."""
    venv = tmp_path_factory.mktemp("venv")
    execute([sys.executable, "-m", "venv", venv], venv)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    execute([*pip, built[1]], venv)
    (home,) = venv.glob("lib/python*/site-packages")
    # as lines of a .pth they are no site directories: the .pth of an editable installation in them does nothing
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (home / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return venv / "bin" / "miles-dmd"


def test_source_distribution_holds_what_its_pages_name(built):
    with tarfile.open(built[0]) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}

    named = [*FILES, *(ROOT / name for name in ("train_diffusion.py", "constraints.txt", "docs/cli.md"))]
    assert [path for path in named if path.relative_to(ROOT).as_posix() not in members] == []
    assert [name for name, member in members.items() if not (member.isfile() or member.isdir())] == []


def test_wheel_holds_presets_and_teacher_and_nothing_else_of_the_clone(built):
    with zipfile.ZipFile(built[1]) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}

    shipped = {name: content for name, content in held.items() if name.startswith("miles_dmd/shipped/")}
    assert shipped == {f"miles_dmd/shipped/{path.relative_to(ROOT).as_posix()}": path.read_bytes() for path in FILES}
    assert {name.partition("/")[0].partition("-")[0] for name in held} == {"miles_dmd"}


def test_the_installed_program_trains_from_any_folder(program, tmp_path, cache_dir):
    shown = execute([program, "train", "--config", "digits", *SMALLEST, "--cache-dir", cache_dir], tmp_path)

    assert f"student  {program.parents[1]}" in shown
    assert (tmp_path / "runs" / "digits-1" / "student" / "distillation.json").is_file()
    checkpoint = execute([program, "checkpoint", "inspect", "runs/digits-1"], tmp_path)
    assert "cycles           2" in checkpoint


@pytest.mark.parametrize("config", ["trainer_configs/digits.yaml", "digits"])
def test_the_installed_program_knows_presets_as_the_pages_name_them(program, tmp_path, config):
    shown = execute([program, "train", "--config", config, "--dry-run"], tmp_path)

    assert "10 in " in shown
    assert list(tmp_path.iterdir()) == []


def test_it_says_what_it_is_called(program, tmp_path):
    done = subprocess.run([program, "train", "--lr", "fast"], cwd=tmp_path, capture_output=True, text=True)

    assert (done.returncode, done.stderr.partition(": error: ")[0]) == (2, "miles-dmd train")
