"""On-policy distillation of a language model: local and Ray, one rank and two, killed and resumed, exported."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import language
import pytest
import torch
from safetensors.torch import load_file

from miles_dmd.config.cli import parse_args
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer

ROOT = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return language.write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(models, cache_dir):
    def words(save, *more):
        return [
            "--loss-type", "resopd", "--hf-checkpoint", f"{models}/student", "--teacher-checkpoint",
            f"{models}/teacher", "--prompt-data", f"{models}/prompts.jsonl", "--max-new-tokens", "6",
            "--max-prompt-tokens", "12", "--rollout-batch-size", "4", "--num-rollout", str(STEPS), "--lr", "1e-3",
            "--sample-prompts", "2", "--cache-dir", str(cache_dir), "--save", str(save), *more,
        ]  # fmt: skip

    return words


@pytest.fixture(scope="module")
def run(asked, tmp_path_factory):
    """``run("--local", ...)``: the directory that such a run leaves."""

    def fit(*more):
        directory = tmp_path_factory.mktemp("run")
        DistillationTrainer(parse_args(asked(directory, *more))).fit()
        return directory

    return fit


@pytest.fixture(scope="module")
def whole(run):
    """A run in one process, with a checkpoint after each step."""
    return run("--local", "--save-interval", "1", "--keep-checkpoints", "0")


def numbers(directory):
    clock = ("time/", "seconds", "peak_memory")
    return [
        {name: value for name, value in row.items() if not any(word in name for word in clock)}
        for row in read_metrics(directory / "metrics.jsonl")
    ]


def weights(directory):
    return load_file(directory / "student" / "model.safetensors")


def assert_close(one, other, relative=1e-5):
    for here, there in zip(numbers(one), numbers(other), strict=True):
        assert here.keys() == there.keys()
        for name in here:
            assert here[name] == pytest.approx(there[name], rel=relative, abs=1e-6), name


def test_the_student_learns_and_the_teacher_stays_as_it_is(whole, models):
    before, after = load_file(models / "student" / "model.safetensors"), weights(whole)

    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before)
    rows = numbers(whole)
    assert [row["global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["opd/kl_coarse"] >= 0 and row["actor/weight"] <= 24 for row in rows)


def test_the_exported_student_opens_in_stock_transformers(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole / "student")
    tokens = AutoTokenizer.from_pretrained(whole / "student")("line 3: ", return_tensors="pt")

    assert model(**tokens).logits.shape == (1, 8, 257)
    record = json.loads((whole / "student" / "distillation.json").read_text())
    assert (record["policy_version"], record["teacher"]) == (STEPS, "teacher")


def test_texts_of_student_and_teacher_are_shown(whole):
    names = sorted(path.name for path in (whole / "samples").iterdir())

    assert names == ["step_000000.txt", f"step_{STEPS:06d}.txt", "teacher.txt"]
    assert "line 0: " in (whole / "samples" / "step_000000.txt").read_text()


@pytest.mark.parametrize(
    "more", [("--actor-micro-batch-size", "1", "--teacher-micro-batch-size", "3"), ("--rollout-micro-batch-size", "3")]
)
def test_splitting_changes_nothing(run, whole, more):
    assert_close(whole, run("--local", *more))


def test_local_and_ray_and_two_ranks_agree(run, whole, ray_cluster):
    two = run("--ray-address", "auto", "--actor-num-trainer-ranks", "2", "--teacher-num-trainer-ranks", "2")
    one = run("--ray-address", "auto")

    assert_close(whole, one)
    assert_close(whole, two)


def test_groups_of_different_sizes_and_recomputed_activations_agree(run, whole, ray_cluster):
    other = run("--ray-address", "auto", "--teacher-num-trainer-ranks", "2", "--actor-gradient-checkpointing")

    assert_close(whole, other)


def test_a_killed_run_resumes_bit_equal(asked, whole, tmp_path):
    killed = tmp_path / "killed"
    program = [sys.executable, ROOT / "train_llm.py", *asked(killed, "--local", "--save-interval", "1")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("cycle 1/"):
                process.send_signal(signal.SIGKILL)
                break
    left = max((killed / "checkpoints").glob("cycle_*"), default=None)
    if left is None:  # it died before its first checkpoint was whole: go on from that of the other run
        shutil.copytree(whole / "checkpoints" / "cycle_000001", killed / "checkpoints" / "cycle_000001")

    resumed = subprocess.run([*program, "--load", "latest"], capture_output=True, text=True)

    assert resumed.returncode == 0, resumed.stderr
    assert numbers(killed)[-1] == numbers(whole)[-1]
    one, other = weights(killed), weights(whole)
    assert all(one[name].equal(other[name]) for name in other)


def test_bf16_trains_and_keeps_what_it_learned(run):
    rows = numbers(run("--local", "--compute-dtype", "bf16"))

    assert all(torch.tensor(row["actor/loss"]).isfinite() for row in rows)
