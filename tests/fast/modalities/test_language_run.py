"""A run of a language model in this process: what it shows, leaves and refuses, and the script that judges it."""

import importlib.util
import json
from pathlib import Path

import language
import pytest
from safetensors.torch import load_file

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError, FormatError
from miles_dmd.modalities.language import modality
from miles_dmd.modalities.language.record import read_record
from miles_dmd.preflight.rules import resolve
from miles_dmd.run import DistillationTrainer, main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return language.write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(models, cache_dir):
    def words(save, *more):
        return [
            "--loss-type", "resopd", "--hf-checkpoint", f"{models}/student", "--teacher-checkpoint",
            f"{models}/teacher", "--prompt-data", f"{models}/prompts.jsonl", "--max-new-tokens", "5",
            "--max-prompt-tokens", "12", "--rollout-batch-size", "4", "--num-rollout", "2", "--lr", "1e-3", "--local",
            "--sample-prompts", "2", "--cache-dir", str(cache_dir), "--save", str(save), *more,
        ]  # fmt: skip

    return words


@pytest.fixture(scope="module")
def run(asked, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    assert main(asked(directory), program="train_llm.py") == 0
    return directory


def test_a_run_leaves_texts_rows_and_a_student(run):
    assert sorted(path.name for path in (run / "samples").iterdir()) == [
        "step_000000.txt", "step_000002.txt", "teacher.txt",
    ]  # fmt: skip
    text = (run / "samples" / "step_000002.txt").read_text()
    assert text.startswith("student after 2 updates, at temperature 1")
    assert ">>> response" in text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    assert 1 <= rows[-1]["samples/length"] <= 5
    assert 0 <= rows[-1]["samples/ended"] <= 1
    assert rows[-1]["actor/weight"] <= 20


def test_the_teacher_is_bit_identical_afterwards_and_nothing_of_it_trains(asked, models, tmp_path):
    trainer = DistillationTrainer(parse_args(asked(tmp_path / "run")))
    trainer.fit()

    teacher = trainer.executor._groups["teacher"].trainer
    stored = load_file(models / "teacher" / "model.safetensors")
    held = dict(teacher.models["teacher_score"].network.named_parameters())
    assert held.keys() == stored.keys()
    assert all(held[name].equal(stored[name]) and not held[name].requires_grad for name in stored)
    assert teacher.trained == {}
    assert list((tmp_path / "run" / "checkpoints").rglob("teacher/*.safetensors")) == []


def test_the_record_tells_where_the_student_comes_from(run, models, asked):
    record = read_record(run / "student")
    resolved = resolve(parse_args(asked(run / "other")))

    assert (record.teacher, record.policy_version, record.loss_type) == ("teacher", 2, "resopd")
    assert record.teacher_sha256 == modality.describe(resolved, 2).teacher_sha256
    assert "AutoModelForCausalLM.from_pretrained" in modality.usage(resolved, run / "student", record)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}'])
def test_another_file_is_no_record(tmp_path, content):
    (tmp_path / "distillation.json").write_text(content)

    with pytest.raises(FormatError, match="export the student again"):
        read_record(tmp_path)
    with pytest.raises(FormatError, match=r"has no distillation\.json"):
        read_record(tmp_path / "nowhere")


def test_a_dry_run_shows_what_is_sampled(asked, tmp_path, capsys):
    assert main(asked(tmp_path / "run", "--dry-run"), program="train_llm.py") == 0

    out = capsys.readouterr().out
    assert "temperature 1, full support, at most 5 new tokens" in out
    assert "teacher_score" in out


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--max-new-tokens", "120"), ["--max-prompt-tokens 12 and --max-new-tokens 120", "128 positions"]),
        (("--shift", "3"), ["--shift 3 is a flag of 'diffusion' models", "'resopd'"]),
        (("--model-family", "sd3"), ["--model-family sd3 is a family of diffusion models", "language"]),
    ],
)
def test_what_a_language_model_cannot_do_is_refused_at_the_door(asked, tmp_path, more, parts):
    words = [word for word in asked(tmp_path / "run") if word not in ("--max-new-tokens", "5")]

    with pytest.raises(ConfigError) as refused:
        resolve(parse_args([*words, *(("--max-new-tokens", "5") if "--max-new-tokens" not in more else ()), *more]))

    assert all(part in str(refused.value) for part in parts), refused.value


def test_a_prompt_that_is_too_long_is_refused_with_its_length(asked, tmp_path, capsys):
    words = [word if word != "12" else "5" for word in asked(tmp_path / "run")]

    assert main(words, program="train_llm.py") != 0

    assert "--max-prompt-tokens 5: 13 of 13 prompts are longer, the longest has 9 tokens" in capsys.readouterr().err


def test_students_are_judged_by_their_exact_reverse_kl(run, models, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("evaluate_opd", ROOT / "examples" / "opd" / "evaluate.py")
    evaluate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evaluate)
    words = ["--teacher", f"{models}/teacher", "--prompts", f"{models}/prompts.jsonl", "--rollouts", "8",
             "--max-new-tokens", "4", "--json", f"{tmp_path}/rows.json"]  # fmt: skip

    assert evaluate.main(["--start", f"{models}/student", "--student", f"{run}/student", *words]) == 0
    assert evaluate.main(["--start", f"{models}/teacher", *words[:-2]]) == 0
    assert evaluate.main(["--start", f"{tmp_path}/none", *words]) == 2

    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(row["reverse_kl"] > 0 and row["tokens"] <= 32 for row in rows.values())
    assert f"{models}/teacher".rjust(1) in capsys.readouterr().out


def test_the_program_of_language_models_has_their_loss_type_and_their_preset(capsys):
    assert main(["--help"], program="train_llm.py") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert main([], program="train_llm.py") == 2

    assert "usage: train_llm.py --loss-type resopd" in shown
    assert "It brings trainer groups and flags of its own. [resopd]" in shown
    assert "start from a preset: --config opd_bytes" in capsys.readouterr().err
