"""Times at which a run is saved, traces of a failed save, and loading of a checkpoint."""

import json
from types import SimpleNamespace

import pytest

from miles_dmd.checkpoint import store
from miles_dmd.checkpoint.manifest import read_manifest
from miles_dmd.errors import SaveError
from miles_dmd.preflight.resume import open_resume
from miles_dmd.prompts import PromptSource
from miles_dmd.saving import RunState, remembering


def names(run):
    return sorted(path.name for path in (run.directory / "checkpoints").glob("*"))


def test_saved_every_interval_and_at_the_end(make_run):
    run = make_run("--save-interval", "2", "--keep-checkpoints", "0")

    for cycle in range(1, 6):
        run.saver.committed(run.after(cycle))
    run.saver.finish(run.after(5))

    assert names(run) == ["cycle_000002", "cycle_000004", "cycle_000005", "latest"]


def test_last_cycle_is_not_saved_twice(make_run):
    run = make_run("--save-interval", "1")

    run.saver.committed(run.after(1))
    run.saver.finish(run.after(1))

    assert names(run) == ["cycle_000001", "latest"]


def test_interval_of_zero_saves_nothing(make_run):
    run = make_run("--save-interval", "0")

    run.saver.committed(run.after(1))
    run.saver.finish(run.after(1))

    assert names(run) == []


def test_before_the_first_cycle_there_is_nothing_to_save(make_run):
    run = make_run()

    assert run.saver.save(run.after(0)) is None
    assert names(run) == []


def test_older_ones_are_removed(make_run):
    run = make_run("--save-interval", "1", "--keep-checkpoints", "2")

    for cycle in range(1, 5):
        run.saver.committed(run.after(cycle))

    assert names(run) == ["cycle_000003", "cycle_000004", "latest"]


def test_driver_file_says_where_the_run_is(make_run):
    run = make_run()

    driver = json.loads((run.save() / "driver.json").read_text())

    assert driver["prompts"]["cursor"] == 24
    assert driver["pending"] == [{"samples": 4, "policy_version": 1}]
    assert (driver["seed"], driver["policy_version"]) == (0, 1)
    assert driver["observers"]["grids"]["reference"] == {"spread": 2.0, "limit": 3.0}
    assert driver["observers"].keys() == {"alarms", "grids", "best", "skips", "draws"}
    assert driver["plan"]["name"] == run.plan.name


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_full_disk_leaves_the_previous_checkpoint(make_run, full_disk, caplog, policy):
    run = make_run("--on-save-failure", policy)
    first = run.saver.save(run.after(1))
    run.groups["actor"].failure = full_disk

    if policy == "stop":
        with pytest.raises(SaveError, match="No space left on device") as error:
            run.save()
        said = str(error.value)
    else:
        assert run.save() is None
        (said,) = (text for text in caplog.messages if not text.startswith("alarm "))

    assert "the checkpoint of cycle 2 could not be written" in said
    assert f"the last whole one is {first}" in said
    assert names(run) == ["cycle_000001", "latest"]
    assert run.saver.last == first
    read_manifest(first)


def test_after_a_failure_the_next_save_works(make_run, full_disk):
    run = make_run("--on-save-failure", "continue")
    run.groups["actor"].failure = full_disk
    run.save()
    run.groups["actor"].failure = None

    saved = run.saver.save(run.after(3))

    assert saved.name == "cycle_000003"


def test_trainers_save_with_the_engine_asleep(make_run):
    run, calls = make_run(), []
    run.rollouts.sleep = lambda: calls.append("sleep")
    save = run.groups["critic"].save
    run.groups["critic"].save = lambda directory: calls.append("save") or save(directory)

    run.saver.save(run.after(2))

    assert calls == ["sleep", "save"]


def test_failure_of_the_drivers_own_files_counts_too(make_run, monkeypatch):
    run = make_run()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles_dmd.checkpoint.manifest.write_synced", full)

    with pytest.raises(SaveError, match=r"No space left on device.*there is none before it"):
        run.save()


def test_file_that_only_another_node_sees_is_told(make_run):
    run = make_run()
    save = run.groups["actor"].save

    def elsewhere(directory):
        entries = save(directory)
        (directory / "shard-0.safetensors").unlink()
        return entries

    run.groups["actor"].save = elsewhere

    with pytest.raises(SaveError, match="is not seen from here: --save must be on a shared path"):
        run.save()


def test_run_keeps_its_name_where_it_goes_on(make_run, resolved):
    run = make_run()
    first = run.save()
    resume = open_resume(resolved("--load", str(first)))

    here = make_run(resume=resume, cycle=3).save()
    there = make_run(resume=resume, cycle=3, directory=run.directory.with_name("other")).save()

    name = read_manifest(first).run
    assert (read_manifest(here).run, read_manifest(here).parent) == (name, "")
    assert (read_manifest(there).run != name, read_manifest(there).parent) == (True, f"{name}@2")


def test_restoring_hands_everything_back(make_run, resolved, digit_prompts):
    run = make_run()
    resume = open_resume(resolved("--load", str(run.save())))
    told = []
    run.executor.sync_weights = lambda version: told.append(("weights", version, list(run.groups["actor"].loaded)))
    batches = SimpleNamespace(restore=lambda pending: told.append(("batches", pending)))
    controller = SimpleNamespace(load_state_dict=lambda state: told.append(("counters", state)))
    prompts = PromptSource(digit_prompts, 0)
    remembers = SimpleNamespace(load_state_dict=lambda state: told.append(("skips", state)))
    observers = {"skips": remembers, "hook_0": remembers}

    RunState(run.executor, batches, prompts, controller, observers).restore(resume)

    assert told == [
        ("counters", {"global_step": 1, "optimizer_steps": {"fake_score": 4, "student": 1}, "completed_cycles": 2}),
        ("weights", 1, ["actor"]),  # of the student that was loaded, not of the one that was built
        ("batches", [("batch_000.safetensors", 1)]),
        ("skips", {"total": 0, "in_a_row": 0}),  # and nothing for a hook that the checkpoint does not know
    ]
    assert prompts.cursor == 24
    assert run.groups["critic"].loaded == ["critic"]


def test_hooks_that_remember_something_are_part_of_it(counting_hook):
    forgetful, counting = SimpleNamespace(), counting_hook()

    assert remembering({"mine": forgetful, "counting": counting}) == {"counting": counting}


@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize("broken", ["atomic_write_text", "fsync_path", "CheckpointStore._prune"])
def test_what_fails_after_a_checkpoint_is_published_takes_nothing_back(
    make_run, monkeypatch, caplog, policy, broken, full_disk
):
    run = make_run("--on-save-failure", policy, "--save-interval", "1", "--keep-checkpoints", "1")
    original, directory = getattr(store, broken.split(".")[0]), run.directory / "checkpoints"

    def fail(path, *more):
        if broken == "fsync_path" and path != directory:
            return original(path)
        raise OSError(28, "No space left on device", str(directory / "latest"))

    with monkeypatch.context() as patch:
        patch.setattr(f"miles_dmd.checkpoint.store.{broken}", fail)
        saved = run.saver.save(run.after(1))
        run.saver.finish(run.after(1))  # which a run does at its end
    (said,) = (text for text in caplog.messages if not text.startswith("alarm "))

    assert saved == run.saver.last == directory / "cycle_000001"
    assert read_manifest(saved).cycle == 1
    assert f"{saved} is written and whole, but not everything beside it is in order (No space left" in said
    run.saver.committed(run.after(2))
    assert names(run) == ["cycle_000002", "latest"]


def test_checkpoint_does_not_vouch_for_rows_that_are_not_on_the_disk(make_run):
    run = make_run()

    def full():
        raise OSError(28, "No space left on device")

    run.saver.sync_rows = full

    with pytest.raises(SaveError, match=r"the checkpoint of cycle 2 could not be written \(No space left on device\)"):
        run.save()
    assert names(run) == []


def test_last_words_of_a_run_are_a_checkpoint_out_of_turn(make_run):
    run = make_run("--save-interval", "100")

    assert run.saver.rescue(run.after(3))
    assert run.saver.rescue(run.after(3))
    assert names(run) == ["cycle_000003", "latest"]


def test_run_that_never_saves_has_no_last_words(make_run):
    run = make_run("--save-interval", "0")

    assert not run.saver.rescue(run.after(3))
    assert names(run) == []


def test_what_has_just_failed_is_not_tried_again(make_run, full_disk):
    run = make_run("--save-interval", "1")
    run.groups["actor"].failure = full_disk
    with pytest.raises(SaveError):
        run.saver.committed(run.after(3))
    run.groups["actor"].failure = None

    assert not run.saver.rescue(run.after(3))
    assert names(run) == []
