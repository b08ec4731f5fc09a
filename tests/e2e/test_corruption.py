"""Checkpoints of real runs that are damaged or mixed up: refused by name, in one line, before anything is started."""

import json
import shutil

import pytest

from miles_dmd.checkpoint import manifest
from miles_dmd.run import DistillationTrainer, main

RUN = ("--local", "--num-rollout", "1", "--save-interval", "1", "--keep-checkpoints", "0")
"""Two cycles of two fake-score steps, the first of warm-up."""


@pytest.fixture(scope="module")
def written(make_args, tmp_path_factory):
    """The last checkpoints of two runs that differ in nothing but their learning rate."""
    found = []
    for rate in ("1e-4", "3e-4"):
        directory = tmp_path_factory.mktemp("run")
        DistillationTrainer(make_args(*RUN, "--lr", rate, "--save", str(directory))).fit()
        found.append(directory / "checkpoints" / "cycle_000002")
    return found


@pytest.fixture
def damaged(written, tmp_path):
    """A copy of the first one, to do something to; it does not lie in its run any more."""
    return shutil.copytree(written[0], tmp_path / "copy" / written[0].name)


@pytest.fixture
def refused(flags, tmp_path, capsys):
    """Message with which a run refuses a checkpoint; it has started nothing, and written nothing."""

    def load(checkpoint, *more):
        save = tmp_path / "new"
        status = main(flags(*RUN, *more, "--load", str(checkpoint), "--save", str(save)))
        error = capsys.readouterr().err
        assert (status, error.count("\n")) == (2, 1), error
        assert not save.exists()
        return error

    return load


def files(checkpoint):
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def restored(written, damaged, name):
    shutil.copy(written / name, damaged / name)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage", [flip, truncate, lambda path: path.unlink()], ids=["flipped", "truncated", "missing"]
)
def test_every_file_that_is_damaged_is_named(written, damaged, refused, damage):
    names = files(damaged)
    said = {}
    for name in names:
        damage(damaged / name)
        said[name] = refused(damaged)
        restored(written[0], damaged, name)

    assert {name.partition("/")[0] for name in names} == {
        "actor",
        "critic",
        "pending",
        "driver.json",
        "manifest.json",
        "random.json",
        "rollout.json",
    } - (set() if any(name.startswith("pending") for name in names) else {"pending"})
    assert [name for name in names if name not in said[name]] == []


def test_files_of_another_run_are_named(written, damaged, refused):
    """Same plan, same sizes; those that are equal in both runs are no other run's."""
    other, said = written[1], {}
    for name in files(damaged):
        if name != manifest.NAME and (other / name).read_bytes() != (damaged / name).read_bytes():
            shutil.copy(other / name, damaged / name)
            said[name] = refused(damaged)
            restored(written[0], damaged, name)

    assert {name.rpartition(".")[2] for name in said} == {"json", "safetensors"}
    assert [name for name, line in said.items() if name not in line] == []


def test_manifest_of_another_run_is_refused(written, damaged, refused):
    shutil.copy(written[1] / manifest.NAME, damaged / manifest.NAME)

    assert "belongs to another run" in refused(damaged, "--lr", "3e-4")


def test_group_of_another_run_is_named_though_a_manifest_vouches_for_all(written, damaged, refused):
    """Whoever mixes two runs and writes checksums anew has one run's learning rate in the other's name."""
    for path in (written[1] / "critic").iterdir():
        shutil.copy(path, damaged / "critic" / path.name)
    content = manifest.read_manifest(damaged)
    entries = [manifest.entry_of(damaged / entry.path, damaged) for entry in content.files]
    (damaged / manifest.NAME).unlink()
    manifest.write_manifest(damaged, manifest.with_entries(content, entries))

    assert "critic-lr was 0.0003, is 0.0001" in refused(damaged)


def test_manifest_of_another_plan_is_refused(written, refused):
    said = refused(written[0], "--fake-update-ratio", "3")

    assert "belongs to another plan" in said
    assert "repeats was 2, is 3" in said


def test_nothing_in_a_checkpoint_is_a_pickle(written):
    """JSON and safetensors alone: neither holds anything that would be run when it is read."""
    for name in files(written[0]):
        content = (written[0] / name).read_bytes()
        if name.endswith(".json"):
            json.loads(content)
        else:
            assert name.endswith(".safetensors")
            json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
