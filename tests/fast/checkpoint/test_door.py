"""A checkpoint that does not fit is refused at the door: by name, in one line, before torch or Ray is imported."""

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from miles_dmd.errors import CheckpointError, ConfigError
from miles_dmd.preflight.resume import open_resume
from miles_dmd.run import main


@pytest.fixture
def refused(flags, capsys):
    """Message with which the command line refuses these flags."""

    def run(*more):
        capsys.readouterr()  # what was said before
        status = main(flags("--dry-run", *more))
        error = capsys.readouterr().err
        assert (status, error.count("\n")) == (2, 1), error
        return error

    return run


def test_sound_checkpoint_passes(saved, resolved):
    resume = open_resume(resolved("--load", str(saved)))

    resume.verify()

    assert resume.manifest.cycle == 2
    assert resume.allowed == ()


def test_dry_run_computes_all_checksums(saved, refused):
    shard = saved / "actor" / "shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    assert "actor/shard-0.safetensors has another content" in refused("--load", str(saved))


def test_files_swapped_between_two_runs_are_found(make_run, tmp_path, refused):
    """Files of the same size, from runs of the same plan."""
    one = make_run(directory=tmp_path / "a", content=b"weights").save()
    other = make_run(directory=tmp_path / "b", content=b"theirs!").save()
    for path in ("actor/shard-0.safetensors", "critic/shard-0.safetensors"):
        shutil.copy(other / path, one / path)

    assert "belongs to another run" in refused("--load", str(one))


def test_driver_file_of_another_run_is_found(make_run, tmp_path, refused):
    one, other = (make_run(directory=tmp_path / name).save() for name in ("a", "b"))
    shutil.copy(other / "driver.json", one / "driver.json")

    assert "driver.json has another content" in refused("--load", str(one))


def test_driver_file_of_another_run_is_found_even_if_the_manifest_vouches_for_it(saved, refused, forge):
    forge(saved, "driver.json", lambda driver: driver.update(run="another"))

    assert "manifest.json and driver.json are of different runs or cycles" in refused("--load", str(saved))


@pytest.mark.parametrize("path", ["driver.json", "critic/args.json"])
def test_damaged_records_are_found_before_they_are_believed(saved, refused, path):
    content = bytearray((saved / path).read_bytes())
    content[-3] ^= 1
    (saved / path).write_bytes(content)

    assert f"{path} has another content" in refused("--load", str(saved))


def test_manifest_of_another_plan_is_refused_with_what_differs(saved, refused):
    message = refused("--load", str(saved), "--fake-update-ratio", "3")

    assert "belongs to another plan" in message
    assert "repeats was 2, is 3" in message


def test_forged_fingerprint_is_refused(saved, refused, rewrite):
    rewrite(saved, lambda content: content["plan"].update(fingerprint="0" * 64))

    assert "its own fingerprint is wrong" in refused("--load", str(saved))


def test_manifest_of_another_loss_type_is_refused(saved, refused, rewrite):
    rewrite(saved, lambda content: content.update(loss_type="other"))

    assert "is of --loss-type other, and this run of dmd2" in refused("--load", str(saved))


@pytest.mark.parametrize("version", [1, 3])
def test_other_formats_are_refused(saved, refused, version, rewrite):
    rewrite(saved, lambda content: content.update(format=version))

    assert f"checkpoint format, {version}; this version" in refused("--load", str(saved))


def test_other_format_of_the_drivers_file_is_refused(saved, refused, forge):
    forge(saved, "driver.json", lambda driver: driver.update(format=7))

    assert "driver.json has a newer checkpoint format, 7; this version" in refused("--load", str(saved))


def test_counters_that_the_plan_does_not_reach_are_refused(saved, refused, rewrite, forge):
    def wrong(content):
        content["counters"]["optimizer_steps"]["fake_score"] = 5

    rewrite(saved, wrong)
    forge(saved, "driver.json", wrong)

    assert "are not those that the plan reaches" in refused("--load", str(saved))


def test_other_prompts_are_refused(saved, refused, tmp_path):
    (tmp_path / "other.txt").write_text("one\ntwo\n")

    message = refused("--load", str(saved), "--prompt-data", str(tmp_path / "other.txt"))

    assert "holds other prompts than the run in the checkpoint" in message


def test_moved_prompts_pass(saved, resolved, digit_prompts, tmp_path):
    shutil.copy(digit_prompts, tmp_path / "moved.txt")

    assert open_resume(resolved("--load", str(saved), "--prompt-data", str(tmp_path / "moved.txt")))


def test_changed_arguments_are_listed(saved, refused):
    message = refused("--load", str(saved), "--lr", "3e-4", "--actor-clip-grad", "2")

    assert "lr was 0.0001, is 0.0003; actor-clip-grad was 1.0, is 2.0" in message
    assert "pass --allow-changed lr actor-clip-grad" in message


def test_allowed_change_passes_and_is_told(saved, flags, capsys):
    status = main(flags("--dry-run", "--load", str(saved), "--lr", "3e-4", "--allow-changed", "lr"))

    assert status == 0
    assert "allowed: lr was 0.0001, is 0.0003" in capsys.readouterr().out


def test_seed_cannot_be_allowed(saved, refused):
    """The prompts' order is a function of it, and the cursor a place in that order."""
    assert "--seed 1" in refused("--load", str(saved), "--seed", "1", "--allow-changed", "seed")


def test_run_that_is_shorter_than_its_checkpoint_is_refused(make_run, refused, tmp_path):
    saved = make_run(cycle=3).save()

    assert "has 2 student steps, more than --num-rollout 1" in refused("--load", str(saved), "--num-rollout", "1")


def test_waiting_samples_must_divide_by_the_ranks(saved, refused):
    message = refused("--load", str(saved), "--rollout-batch-size", "6", "--num-trainer-ranks", "3",
                      "--allow-changed", "rollout_batch_size")  # fmt: skip

    assert "sampled batches of 4, which do not divide by 3" in message


def test_full_disk_is_told_before_anything_starts(saved, refused, monkeypatch):
    usage = namedtuple("usage", "total used free")
    full = lambda path: usage(1 << 30, 1 << 30, 1 << 30 if "cache" in Path(path).name else 100)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", full)

    assert "0 MiB free; make room, or name another --save" in refused("--load", str(saved))


def test_later_checkpoints_in_the_way_are_told(make_run, refused):
    run = make_run()
    first = run.saver.save(run.after(1))
    run.saver.save(run.after(2))

    message = refused("--load", str(first), "--save", str(run.directory))

    assert "holds the later cycle_000002, which would be in the way" in message


def test_going_on_in_place_leaves_what_is_there(make_run, make_args):
    from miles_dmd.preflight.run_directory import clear, own_directory

    run = make_run()
    run.save()
    (run.directory / "metrics.jsonl").write_text("rows")

    args = make_args("--load", "latest", "--save", str(run.directory))
    with own_directory(args) as directory:
        clear(args, directory)

    assert directory == run.directory
    assert (directory / "metrics.jsonl").read_text() == "rows"


def test_overwriting_what_is_loaded_is_refused(saved, refused):
    message = refused("--load", str(saved), "--save", str(saved.parent.parent), "--overwrite")

    assert "--overwrite would remove the run that --load" in message
    assert saved.is_dir()


def test_another_run_in_the_way_is_still_refused(saved, refused, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").touch()

    assert "holds another run" in refused("--load", str(saved), "--save", str(tmp_path / "old"))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--load", "/no/such"), "--load /no/such: /no/such is no directory"),
        (("--load", "latest"), "--load latest: means the newest checkpoint of --save"),
        (
            ("--critic-load", "somewhere"),
            "--critic-load somewhere: --load applies to the whole run, not to one trainer",
        ),
        (("--allow-changed", "lr"), "--allow-changed lr requires --load CHECKPOINT"),
    ],
)
def test_what_cannot_be_meant_is_refused(refused, more, part):
    assert part in refused(*more)


def test_nothing_is_imported_to_find_out(saved, flags):
    code = "import sys; from miles_dmd.run import main; main(sys.argv[1:]); print({'torch', 'ray'} & set(sys.modules))"
    words = flags("--dry-run", "--load", str(saved))

    shown = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout

    assert f"Checkpoint {saved} would load" in shown
    assert shown.splitlines()[-1] == "set()"


def test_refusal_is_a_configuration_error(saved, make_args):
    (saved / "driver.json").unlink()

    with pytest.raises(ConfigError) as refusal:
        make_args("--load", str(saved))

    assert isinstance(refusal.value, CheckpointError)
    assert str(refusal.value).startswith(f"--load {saved}: ")
