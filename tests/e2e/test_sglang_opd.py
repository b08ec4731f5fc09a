"""On-policy distillation whose teacher is SGLang's real language-model server, against the same teacher in process."""

import contextlib
from types import SimpleNamespace

import language
import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.engines.sglang import Options
from miles_dmd.engines.sglang.launch import serve
from miles_dmd.modalities.language.options import LanguageOptions
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer, main

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # a server that starts on a busy machine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return language.write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def teacher_url(models, sglang_python, tmp_path_factory):
    args = SimpleNamespace(
        engine_options=Options(sglang_python=sglang_python),
        modality_options=LanguageOptions(max_prompt_tokens=32, max_new_tokens=32), loss_type="resopd",
        compute_dtype="fp32", seed=0,
        cpu_threads=1, cache_dir=tmp_path_factory.mktemp("cache"), pipeline_directory=models / "teacher",
    )  # fmt: skip
    with contextlib.closing(serve(args, device="cpu", number=0, host="127.0.0.1")) as server:
        yield server.wait()


@pytest.fixture(scope="module")
def asked(models, cache_dir):
    def words(save, *more):
        return [
            "--loss-type", "resopd", "--hf-checkpoint", f"{models}/student", "--prompt-data",
            f"{models}/prompts.jsonl", "--max-new-tokens", "6", "--max-prompt-tokens", "12", "--local",
            "--rollout-batch-size", "4", "--num-rollout", "2", "--lr", "1e-3", "--sample-prompts", "0",
            "--cache-dir", str(cache_dir), "--save", str(save), *more,
        ]  # fmt: skip

    return words


def numbers(directory):
    clock = ("time/", "seconds", "peak_memory")
    rows = read_metrics(directory / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not any(word in name for word in clock)} for row in rows]


def test_a_served_teacher_gives_the_run_of_the_same_teacher_in_process(asked, models, teacher_url, tmp_path):
    for name, more in {"here": ["--teacher-checkpoint", f"{models}/teacher"], "there": ["--opd-teacher-url", teacher_url]}.items():  # fmt: skip # noqa: E501
        DistillationTrainer(parse_args(asked(tmp_path / name, *more))).fit()

    for here, there in zip(numbers(tmp_path / "here"), numbers(tmp_path / "there"), strict=True):
        assert here.keys() == there.keys()
        for name in here:
            assert here[name] == pytest.approx(there[name], rel=1e-3, abs=1e-4), name


def test_a_dry_run_tells_of_the_servers(asked, teacher_url, tmp_path, capsys):
    assert main(asked(tmp_path / "run", "--opd-teacher-url", teacher_url, "--dry-run")) == 0

    assert f"Teacher: {teacher_url} runs with --skip-tokenizer-init" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_refused_with_the_flag(asked, tmp_path, capsys):
    assert main(asked(tmp_path / "run", "--opd-teacher-url", "http://127.0.0.1:9")) == 2

    assert "--opd-teacher-url http://127.0.0.1:9: " in capsys.readouterr().err
