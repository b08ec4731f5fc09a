"""A killed run goes on as if it had not been killed: k cycles, a resume and N - k cycles are N cycles, to the bit."""

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from miles_dmd.checkpoint.manifest import read_manifest
from miles_dmd.errors import CheckpointError
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer, main
from miles_dmd.saving import CheckpointSaver

CYCLES = 4
"""One of warm-up, three with a student step."""
SCHEDULE = ("--num-rollout", "3", "--lr-scheduler", "cosine", "--lr-warmup-steps", "1")
SAVING = ("--save-interval", "1", "--keep-checkpoints", "0")
WATCHED = ("--sample-prompts", "1", "--sample-interval", "2", "--alarm-window", "1", "--alarm-critic-loss-slope", "0",
           "--alarm-critic-lag", "1e-4", "--keep-best", "min:actor/loss")  # fmt: skip
"""What remembers something from cycle to cycle: alarms that compare with the beginning, grids, the best student."""


def checkpoint(directory, cycle):
    return directory / "checkpoints" / f"cycle_{cycle:06d}"


def tensors(directory):
    """Everything that a checkpoint holds of networks, averages, moments and waiting samples, rank by rank."""
    files = sorted(directory.rglob("*.safetensors"))
    return {
        f"{file.relative_to(directory)}: {name}": value for file in files for name, value in load_file(file).items()
    }


def rows(directory, after=0):
    """Rows of metrics, without times and memory."""
    clock = ("time/", "seconds", "peak_memory")
    found = [row for row in read_metrics(directory / "metrics.jsonl") if row["cycle"] > after]
    return [{name: value for name, value in row.items() if not any(word in name for word in clock)} for row in found]


def driver(directory):
    return {name: value for name, value in json.loads((directory / "driver.json").read_text()).items() if name != "run"}


@pytest.fixture(scope="module")
def uninterrupted(make_args, tmp_path_factory):
    """A run of all cycles that left a checkpoint after each of them."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    DistillationTrainer(make_args("--local", *SCHEDULE, *SAVING, *WATCHED, "--save", str(directory))).fit()
    return directory


def assert_same_state(one, other):
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not a[name].equal(b[name])] == []
    assert driver(one) == driver(other)
    for group in ("actor", "critic"):
        assert (one / group / "trainer.json").read_text() == (other / group / "trainer.json").read_text()


@pytest.mark.parametrize("k", range(1, CYCLES + 1))
def test_resumed_run_ends_bit_equal(uninterrupted, make_args, tmp_path, k):
    start = checkpoint(uninterrupted, k)
    args = make_args("--local", *SCHEDULE, *SAVING, *WATCHED, "--save", str(tmp_path), "--load", str(start))

    trainer = DistillationTrainer(args)
    controller = trainer.fit()

    assert controller.counters.completed_cycles == CYCLES
    assert rows(tmp_path, k) == rows(uninterrupted, k) if k < CYCLES else not rows(tmp_path)
    assert_same_state(checkpoint(tmp_path, CYCLES), checkpoint(uninterrupted, CYCLES))
    student = "student/transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / student).read_bytes() == (uninterrupted / student).read_bytes()
    assert summary(tmp_path)["alarms"] == summary(uninterrupted)["alarms"] == ["critic_lag"]
    assert_same_best(tmp_path, uninterrupted)
    assert trainer.batch_provider.prompts.next(4) == next_prompts(uninterrupted, trainer.batch_provider.prompts)


def summary(directory):
    return json.loads((directory / "summary.json").read_text())


def assert_same_best(one, other):
    """Also a best student from before the checkpoint: then it was taken over."""
    for name in ("best.json", "distillation.json", "transformer/diffusion_pytorch_model.safetensors"):
        assert (one / "student_best" / name).read_bytes() == (other / "student_best" / name).read_bytes()


def next_prompts(directory, prompts):
    prompts.load_state_dict(driver(checkpoint(directory, CYCLES))["prompts"])
    return prompts.next(4)


def kind_of(tensor):
    """``role.moment`` of ``role.moment.parameter``, or ``latents`` of a batch."""
    return ".".join(tensor.split(".")[:2])


def test_checkpoint_holds_the_whole_run(uninterrupted):
    """Warm-up included; a teacher is not saved, and waiting samples are."""
    first = checkpoint(uninterrupted, 1)

    names = set(tensors(first))
    manifest = read_manifest(first)

    assert {path.name for path in (uninterrupted / "checkpoints").iterdir()} == {
        "latest", *(f"cycle_{cycle:06d}" for cycle in range(1, CYCLES + 1))
    }  # fmt: skip
    assert (uninterrupted / "checkpoints" / "latest").read_text() == f"cycle_{CYCLES:06d}\n"
    assert manifest.counters == {"global_step": 0, "optimizer_steps": {"fake_score": 2}, "completed_cycles": 1}
    kinds = {f"{name.partition('/')[0]} {kind_of(name.partition(': ')[2])}" for name in names}
    assert kinds == {
        "actor student.network", "actor student.average", "critic fake_score.network", "critic fake_score.exp_avg",
        "critic fake_score.exp_avg_sq",
        "pending latents", "pending sigma", "pending clean",
    }  # fmt: skip
    assert not any("teacher" in name for name in names)
    steps = json.loads((first / "critic" / "trainer.json").read_text())["roles"]["fake_score"]["optimizer_steps"]
    assert set(steps.values()) == {2}


def test_run_goes_on_in_its_own_directory(uninterrupted, make_args, tmp_path, capsys):
    """Killed after cycle 3, when the newest checkpoint was that of cycle 2: what came after it is told again."""
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted, directory)
    for cycle in (3, 4):
        shutil.rmtree(checkpoint(directory, cycle))
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:40])
    args = make_args("--local", *SCHEDULE, *SAVING, *WATCHED, "--save", str(directory), "--load", "latest")

    DistillationTrainer(args).fit()

    assert rows(directory) == rows(uninterrupted)
    assert_same_best(directory, uninterrupted)
    assert_same_state(checkpoint(directory, CYCLES), checkpoint(uninterrupted, CYCLES))
    assert json.loads((directory / "summary.json").read_text())["counters"]["completed_cycles"] == CYCLES
    assert "cycle 4/4" in capsys.readouterr().err
    manifests = [read_manifest(checkpoint(directory, cycle)) for cycle in (2, CYCLES)]
    assert manifests[0].run == manifests[1].run


def test_hook_of_the_users_own_goes_on_counting(make_args, tmp_path, counting_hook):
    save = ("--local", *SCHEDULE, *SAVING, "--save", str(tmp_path))
    DistillationTrainer(make_args(*save), hooks=counting_hook()).fit(num_cycles=3)
    hook = counting_hook()

    DistillationTrainer(make_args(*save, "--load", "latest"), hooks=hook).fit()

    assert hook.count == 3


def test_finished_run_can_be_made_longer(make_args, tmp_path, monkeypatch):
    save = ("--local", "--save", str(tmp_path), *SAVING[:2])
    DistillationTrainer(make_args(*save, "--num-rollout", "1")).fit()
    told, write = [], CheckpointSaver._write
    monkeypatch.setattr(
        CheckpointSaver,
        "_write",
        lambda self, counters: (
            told.append((counters.completed_cycles, rows(tmp_path)[-1]["cycle"])) or write(self, counters)
        ),
    )

    controller = DistillationTrainer(make_args(*save, "--num-rollout", "2", "--load", "latest")).fit()

    assert controller.counters.global_step == 2
    assert told == [(3, 3)]  # its row of metrics was there before the checkpoint
    assert [row["cycle"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "cycle_000002", "cycle_000003", "latest"
    ]  # fmt: skip


def test_finished_run_says_that_nothing_is_left_and_loads_nothing(flags, tmp_path, capsys):
    run = tmp_path / "run"
    asked = flags("--local", "--num-rollout", "1", "--save", str(run))
    assert main(asked) == 0
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    code = "import sys; from miles_dmd.run import main; c = main(); assert 'torch' not in sys.modules; sys.exit(c)"

    done = subprocess.run(
        [sys.executable, "-c", code, *asked, "--load", "latest"], capture_output=True, text=True, timeout=120
    )

    newest = run / "checkpoints" / "cycle_000002"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == (
        f"Nothing is left to do: {newest} has all 1 student steps, and its student is {run / 'student'}. To train on, "
        "raise --num-rollout; to export it again, remove it."
    )
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before

    shutil.rmtree(run / "student")
    assert main([*asked, "--load", "latest"]) == 0
    assert (run / "student" / "distillation.json").is_file()
    assert "Going on from" in capsys.readouterr().out
    elsewhere = flags("--local", "--num-rollout", "1", "--save", str(tmp_path / "other"), "--load", str(newest))
    assert main(elsewhere) == 0
    assert (tmp_path / "other" / "student").is_dir()


def test_dry_run_says_that_a_checkpoint_would_load(uninterrupted, flags, tmp_path, capsys):
    asked = flags("--local", *SCHEDULE, "--dry-run", "--load", str(uninterrupted), "--save", str(tmp_path / "new"))

    status = main(asked)

    assert status == 0
    assert f"{checkpoint(uninterrupted, 4)} would load: cycle 4" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_changed_argument_is_refused_unless_it_is_named(uninterrupted, make_args, flags, tmp_path, capsys):
    changed = ("--local", *SCHEDULE, "--critic-lr", "3e-4", "--clip-grad", "2", "--load", str(uninterrupted))

    status = main(flags(*changed, "--dry-run"))
    refusal = capsys.readouterr().err
    allowed = main(flags(*changed, "--dry-run", "--allow-changed", "critic-lr", "clip_grad"))
    shown = capsys.readouterr().out

    assert (status, refusal.count("\n")) == (2, 1)
    assert "clip-grad was 1.0, is 2.0; critic-lr was 0.0001, is 0.0003" in refusal
    assert "--allow-changed clip-grad critic-lr" in refusal
    assert allowed == 0
    assert "allowed: critic-lr was 0.0001, is 0.0003" in shown


def losses(directory, after):
    names = ("actor/loss", "critic/loss")
    return [((row["cycle"], name), row[name]) for row in rows(directory, after) for name in names if name in row]


TWO = (*SCHEDULE, *SAVING, "--num-trainer-ranks", "2")


@pytest.fixture(scope="module")
def two_ranks(make_args, ray_cluster, tmp_path_factory):
    """The same run, of two ranks a group, through Ray."""
    directory = tmp_path_factory.mktemp("two_ranks")
    DistillationTrainer(make_args(*TWO, "--save", str(directory))).fit()
    return directory


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_ranks_through_ray_end_bit_equal(two_ranks, make_args, tmp_path):
    k = CYCLES - 1

    DistillationTrainer(make_args(*TWO, "--save", str(tmp_path), "--load", str(checkpoint(two_ranks, k)))).fit()

    assert rows(tmp_path, k) == rows(two_ranks, k)
    assert len(list((checkpoint(tmp_path, CYCLES) / "actor").glob("shard-*"))) == 2
    assert_same_state(checkpoint(tmp_path, CYCLES), checkpoint(two_ranks, CYCLES))


@pytest.mark.timeout(900)
def test_finished_run_goes_on_through_ray(uninterrupted, make_args, ray_cluster, tmp_path):
    """Its last checkpoint has no batches that wait."""
    longer = str(int(SCHEDULE[SCHEDULE.index("--num-rollout") + 1]) + 1)
    more = ("--num-rollout", longer, "--allow-changed", "num-rollout")  # a cosine ends elsewhere then
    asked = (*SCHEDULE, *SAVING, *more, "--load", str(checkpoint(uninterrupted, CYCLES)))

    controller = DistillationTrainer(make_args(*asked, "--save", str(tmp_path))).fit()

    assert controller.counters.global_step == int(longer)
    assert (tmp_path / "student" / "distillation.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_another_number_of_ranks_takes_the_state_over(two_ranks, make_args, tmp_path):
    """Two ranks wrote it; one reads it, resharded, and goes on for three cycles with equal losses."""
    one = ("--local", *SCHEDULE, *SAVING, "--load", str(checkpoint(two_ranks, 1)))

    DistillationTrainer(make_args(*one, "--save", str(tmp_path))).fit()

    assert_equal_losses(two_ranks, tmp_path)
    ranks = [read_manifest(checkpoint(run, CYCLES)).groups for run in (two_ranks, tmp_path)]
    assert ranks == [{"critic": 2, "actor": 2}, {"critic": 1, "actor": 1}]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_more_ranks_than_wrote_it_take_the_state_over(uninterrupted, make_args, ray_cluster, tmp_path):
    """One rank wrote it; two read it, each its shard, and the new one keeps its own random state."""
    DistillationTrainer(make_args(*TWO, "--save", str(tmp_path), "--load", str(checkpoint(uninterrupted, 1)))).fit()

    assert_equal_losses(uninterrupted, tmp_path)
    assert read_manifest(checkpoint(tmp_path, CYCLES)).groups == {"critic": 2, "actor": 2}


def assert_equal_losses(whole, resumed):
    """To rounding, over the three cycles after the first."""
    expected, found = losses(whole, 1), losses(resumed, 1)
    assert [place for place, _ in found] == [place for place, _ in expected]
    assert {cycle for (cycle, _), _ in found} == {2, 3, 4}
    apart = [abs(value - other) / value for (_, value), (_, other) in zip(expected, found, strict=True)]
    assert max(apart) < 1e-5


def test_checkpoint_of_another_teacher_is_refused(uninterrupted, make_args, teacher, tmp_path):
    """The same path in the plan would not tell: teachers are compared by what is in them."""
    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    weights = other / "transformer" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    with pytest.raises(CheckpointError, match=rf"critic-teacher-checkpoint was {teacher} .*, is {other}"):
        make_args("--local", *SCHEDULE, "--teacher-checkpoint", str(other), "--load", str(uninterrupted))


def test_teacher_that_has_only_moved_is_the_same(uninterrupted, make_args, teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "moved")

    args = make_args(
        "--local", *SCHEDULE, "--teacher-checkpoint", str(tmp_path / "moved"), "--load", str(uninterrupted)
    )

    assert args.load == str(uninterrupted)
