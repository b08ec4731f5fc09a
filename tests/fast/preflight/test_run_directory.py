"""Run directories: one for each run, and nothing of another run lost unasked."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.errors import ConfigError
from miles_dmd.observe.metrics import MetricsWriter
from miles_dmd.preflight.run_directory import (
    check_save,
    clear,
    fresh_run_directory,
    holds_run,
    occupied,
    own_directory,
    preset_name,
)


def test_runs_of_a_preset_are_numbered(tmp_path):
    names = [fresh_run_directory(tmp_path / "runs", "digits").name for _ in range(3)]

    assert names == ["digits-1", "digits-2", "digits-3"]


def test_runs_that_start_at_once_never_share_a_directory(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        directories = list(pool.map(lambda _: fresh_run_directory(tmp_path, "digits"), range(40)))

    assert len(set(directories)) == 40


@pytest.mark.parametrize(
    ("given", "name"),
    [({"config": "trainer_configs/digits.yaml"}, "digits"), ({"config": "digits"}, "digits"), ({}, "dmd2")],
)
def test_a_run_is_called_after_its_preset(given, name):
    assert preset_name(Args(**given)) == name


def test_without_save_a_run_gets_a_fresh_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with own_directory(Args(config="digits")) as directory:
        assert str(directory) == "runs/digits-1"
        assert directory.is_dir()


def test_save_is_made_with_its_parents(tmp_path):
    with own_directory(Args(save=str(tmp_path / "a" / "b"))) as directory:
        assert directory.is_dir()
        assert not holds_run(directory)
        (directory / "metrics.jsonl").touch()

    assert (tmp_path / "a" / "b" / "metrics.jsonl").exists()


@pytest.mark.parametrize("save", [None, "a/b"])
def test_a_run_that_never_began_leaves_no_directory(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RuntimeError), own_directory(Args(save=save, config="digits")):
        raise RuntimeError("no GPU, say")

    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_stays(tmp_path):
    with own_directory(Args(save=str(tmp_path / "run"))):
        pass
    (tmp_path / "run").mkdir()
    with own_directory(Args(save=str(tmp_path / "run"))):
        pass

    assert (tmp_path / "run").is_dir()


def claim(args):
    """As a run does it: the directory first, and room in it once the groups are up."""
    with own_directory(args) as directory:
        clear(args, directory)
    return directory


def written_by_a_run(directory):
    MetricsWriter(directory / "metrics.jsonl").close()


WHOLE = ["student/model_index.json", "metrics.jsonl", "summary.json"]
OF_A_KILLED_RUN = [
    f"{name}/model_index.json"
    for name in ("student.partial", "student.old", "student_best.new", "student_best.new.partial", "student_best.old")
]


@pytest.mark.parametrize("left", [*WHOLE, *OF_A_KILLED_RUN])
def test_another_run_is_replaced_only_when_asked(tmp_path, left):
    path = tmp_path / "run" / left
    path.parent.mkdir(parents=True)
    path.touch()
    written_by_a_run(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").touch()
    save = str(tmp_path / "run")

    with pytest.raises(ConfigError, match=f"--save {save} holds another run.*--overwrite.*--load"):
        claim(Args(save=save))
    assert path.exists()
    claim(Args(save=save, overwrite=True))
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "student").symlink_to(tmp_path / "precious")
    written_by_a_run(tmp_path / "run")

    claim(Args(save=str(tmp_path / "run"), overwrite=True))

    assert (tmp_path / "precious").is_dir()


@pytest.mark.parametrize("metrics", [None, "cycle,loss\n1,2\n"], ids=["no metrics", "somebody's metrics"])
def test_files_that_no_run_wrote_are_never_removed(tmp_path, metrics):
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    thesis = tmp_path / "samples" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.touch()

    with pytest.raises(ConfigError, match=r"--overwrite: .* holds files that no run wrote there"):
        claim(Args(save=str(tmp_path), overwrite=True))

    assert thesis.exists()


@pytest.mark.parametrize(
    ("flag", "argument", "inside"),
    [("--hf-checkpoint", "hf_checkpoint", "student"), ("--prompt-data", "prompt_data", "samples/prompts.txt")],
)
def test_what_a_run_reads_is_never_removed(tmp_path, flag, argument, inside):
    written_by_a_run(tmp_path)
    path = tmp_path / inside
    path.mkdir(parents=True)

    with pytest.raises(ConfigError, match=f"--overwrite would remove {flag} {path}"):
        check_save(Args(save=str(tmp_path), overwrite=True, **{argument: str(path)}))


def test_what_a_plug_in_reads_is_never_removed(tmp_path, own_loss):
    option = "from miles_dmd.config.values import ReadPath\n    images: ReadPath | None = None"
    loss_type = registry.load("losses", own_loss("with_images", options=option))
    run, path = tmp_path / "run", tmp_path / "run" / "samples" / "images"
    written_by_a_run(run)
    path.mkdir(parents=True)
    asked = Args(
        save=str(run), overwrite=True, loss_type="with_images.loss", loss_options=loss_type.options(images=str(path))
    )

    with pytest.raises(ConfigError, match=f"--overwrite would remove --images {path}"):
        check_save(asked)


def test_a_run_does_not_write_into_its_teacher(tmp_path):
    with pytest.raises(ConfigError, match=f"--save {tmp_path}/out lies in --hf-checkpoint {tmp_path}"):
        check_save(Args(save=str(tmp_path / "out"), hf_checkpoint=str(tmp_path)))


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match="--save '' is empty"):
        check_save(Args(save=""))


@pytest.mark.parametrize("save", ["file", "file/below"])
def test_a_file_in_the_way_is_named(tmp_path, save):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"--save .*file is a file; name a directory"):
        check_save(Args(save=str(tmp_path / save)))


def test_checking_writes_nothing(tmp_path):
    check_save(Args(save=str(tmp_path / "a")))

    assert list(tmp_path.iterdir()) == []


def test_two_runs_never_write_to_one_directory(tmp_path):
    """Two that go on from the same checkpoint, say, or the second with --overwrite: nothing of the first is touched."""
    written_by_a_run(tmp_path)

    with occupied(tmp_path), pytest.raises(ConfigError, match=f"--save {tmp_path}: another run writes to it"):
        claim(Args(save=str(tmp_path), overwrite=True))

    assert (tmp_path / "metrics.jsonl").exists()
    claim(Args(save=str(tmp_path), overwrite=True))


def test_what_the_first_run_left_is_seen_by_the_one_that_waited_at_the_door(tmp_path, monkeypatch):
    """The first run ends between the second's look into the directory and its lock."""
    from miles_dmd.preflight import run_directory as runs

    locked = runs._locked
    monkeypatch.setattr(runs, "_locked", lambda directory: (written_by_a_run(directory), locked(directory))[1])

    with pytest.raises(ConfigError, match="holds another run"):
        claim(Args(save=str(tmp_path)))


def test_a_directory_that_its_owner_removed_meanwhile_is_made_again(tmp_path):
    """Many runs that fail at once, at the door: each has the directory that stands, and never one that is gone."""
    stop, seen = threading.Event(), []

    def run():
        while not stop.is_set():
            try:
                with own_directory(Args(save=str(tmp_path / "run"))) as directory:
                    (directory / "mine").touch()
                    seen.append(sorted(path.name for path in directory.iterdir()))
                    (directory / "mine").unlink()
            except ConfigError:
                continue

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 200 and any(thread.is_alive() for thread in threads):
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()

    assert len(seen) >= 200
    assert all(names == ["mine"] for names in seen)


@pytest.mark.parametrize("overwrite", [True, False])
def test_the_log_of_a_failed_start_is_in_nobodys_way(tmp_path, overwrite):
    (tmp_path / "failure.log").touch()

    claim(Args(save=str(tmp_path), overwrite=overwrite))

    assert list(tmp_path.iterdir()) == []


def test_directory_is_free_again_when_its_run_is_gone(tmp_path):
    code = "import sys, os; from pathlib import Path; from miles_dmd.preflight.run_directory import occupied\n"
    code += "with occupied(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)

    with occupied(tmp_path):
        assert list(tmp_path.iterdir()) == []
