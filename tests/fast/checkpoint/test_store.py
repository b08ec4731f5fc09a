"""A checkpoint is whole or absent; the newest stay; and what --load names is found."""

import os

import pytest

from miles_dmd.checkpoint.store import CheckpointStore, cycle_of, find_checkpoint, run_directory, whole_checkpoints
from miles_dmd.errors import CheckpointError


def write(store, cycle, content="state", then=lambda: None):
    with store.writing(cycle) as staging:
        (staging / "group").mkdir()
        (staging / "group" / "state").write_text(content)
        (staging / "manifest.json").write_text("{}")
        then()


def entries(directory):
    return sorted(path.name for path in directory.iterdir())


def test_checkpoint_appears_with_its_pointer(tmp_path):
    write(CheckpointStore(tmp_path / "checkpoints"), 12)

    assert entries(tmp_path / "checkpoints") == ["cycle_000012", "latest"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "cycle_000012\n"
    assert (tmp_path / "checkpoints" / "cycle_000012" / "group" / "state").read_text() == "state"


def test_nothing_of_it_is_seen_before_it_is_whole(tmp_path):
    store = CheckpointStore(tmp_path)

    with store.writing(1) as staging:
        (staging / "manifest.json").write_text("{}")
        during = store.whole()

    assert during == []
    assert [path.name for path in store.whole()] == ["cycle_000001"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_save_leaves_nothing(tmp_path, error):
    store = CheckpointStore(tmp_path)
    write(store, 1)

    def fail():
        raise error

    with pytest.raises(type(error)):
        write(store, 2, then=fail)

    assert entries(tmp_path) == ["cycle_000001", "latest"]
    assert (tmp_path / "latest").read_text() == "cycle_000001\n"


def test_without_a_manifest_nothing_is_published(tmp_path):
    with pytest.raises(CheckpointError, match=r"no manifest\.json"), CheckpointStore(tmp_path).writing(1):
        pass

    assert entries(tmp_path) == []


def test_existing_one_is_never_overwritten(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1, "first")

    with pytest.raises(FileExistsError, match="never overwritten"):
        write(store, 1, "second")

    assert (tmp_path / "cycle_000001" / "group" / "state").read_text() == "first"
    assert entries(tmp_path) == ["cycle_000001", "latest"]


def test_one_that_appears_meanwhile_is_not_overwritten_either(tmp_path):
    def appear():
        (tmp_path / "cycle_000001").mkdir()
        (tmp_path / "cycle_000001" / "other").write_text("theirs")

    with pytest.raises(OSError, match=r"not empty|exists"):
        write(CheckpointStore(tmp_path), 1, then=appear)

    assert entries(tmp_path / "cycle_000001") == ["other"]


def test_only_whole_older_ones_are_removed(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "cycle_000000").mkdir()  # somebody's, without a manifest
    for cycle in (1, 2, 3, 10):
        write(store, cycle)

    assert entries(tmp_path) == ["cycle_000000", "cycle_000003", "cycle_000010", "latest"]


def test_keeping_all_is_possible(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    for cycle in (1, 2, 3):
        write(store, cycle)

    assert len(store.whole()) == 3


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    (tmp_path / ".cycle_000001.4711.00ff00ff.tmp").mkdir()
    (tmp_path / ".latest.4711.00ff00ff.tmp").touch()
    (tmp_path / ".cycle_notes").mkdir()

    write(CheckpointStore(tmp_path), 2)

    assert entries(tmp_path) == [".cycle_notes", "cycle_000002", "latest"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr("pathlib.Path.rename", lambda a, b: events.append("rename") or rename(a, b))

    write(CheckpointStore(tmp_path / "c"), 1)

    before, after = events[: events.index("rename")], events[events.index("rename") :]
    assert [path.rsplit("/", 1)[-1].partition(".")[0] or "staging" for path in before] == ["staging", "group"]
    assert after[1] == str(tmp_path / "c")


# -- what --load names ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for cycle in (2, 3, 1_000_000):
        write(store, cycle)
    return tmp_path / "run"


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/cycle_1000000"])
def test_run_folder_and_checkpoint_itself_are_found(run, below):
    found = find_checkpoint(str(run / below), None)

    assert (found.name, cycle_of(found)) == ("cycle_1000000", 1_000_000)
    assert run_directory(found) == run


def test_latest_is_the_newest_of_save(run):
    assert find_checkpoint("latest", str(run)).name == "cycle_1000000"


def test_newest_counts_also_where_the_pointer_is_behind(run):
    """A process that dies between rename and pointer."""
    (run / "checkpoints" / "latest").write_text("cycle_000002\n")

    assert find_checkpoint(str(run), None).name == "cycle_1000000"


def test_half_a_checkpoint_is_passed_over(run):
    (run / "checkpoints" / "cycle_2000000").mkdir()

    assert find_checkpoint(str(run), None).name == "cycle_1000000"
    with pytest.raises(CheckpointError, match=r"cycle_2000000 has no manifest\.json"):
        find_checkpoint(str(run / "checkpoints" / "cycle_2000000"), None)


@pytest.mark.parametrize(
    ("load", "save", "message"),
    [
        ("latest", None, "name --save DIR"),
        ("latest", "{run}/none", "is no directory"),
        ("{run}/none", None, "is no directory"),
        ("{run}/checkpoints/cycle_000003/group", None, "holds no whole checkpoint; name a run that has saved one"),
    ],
)
def test_where_there_is_none_it_is_said(run, load, save, message):
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(load.format(run=run), save and save.format(run=run))


def test_checkpoint_carried_elsewhere_belongs_to_no_run(run, tmp_path):
    (run / "checkpoints" / "cycle_000003").rename(tmp_path / "cycle_000003")

    assert run_directory(find_checkpoint(str(tmp_path / "cycle_000003"), None)) is None
    assert whole_checkpoints(tmp_path / "nowhere") == []
