"""A resolved run whose teacher is a directory, or is held by servers: nothing of it is opened then."""

import pytest
from language import write_models

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.preflight.rules import resolve
from miles_dmd.report import run_tables


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def resolved(models, tmp_path):
    def ask(*flags):
        words = [
            "--loss-type", "resopd", "--hf-checkpoint", f"{models}/student", "--prompt-data",
            f"{models}/prompts.jsonl", "--max-new-tokens", "6", "--max-prompt-tokens", "12", "--local",
            "--cache-dir", str(tmp_path), "--save", str(tmp_path / "run"), *flags,
        ]  # fmt: skip
        return resolve(parse_args(words))

    return ask


def test_the_teacher_group_opens_the_directory_that_is_named(resolved, models):
    run = resolved("--teacher-checkpoint", f"{models}/teacher")

    assert {str(path): flag for path, flag in run.directories.items()} == {
        f"{models}/teacher": "--teacher-checkpoint",
        f"{models}/student": "--hf-checkpoint",
    }
    assert f"teacher  {models}/teacher" in run_tables(run)


def test_of_a_teacher_that_servers_hold_nothing_is_opened(resolved, models):
    run = resolved("--opd-teacher-url", "http://127.0.0.1:9")

    assert [str(path) for path in run.directories] == [f"{models}/student"]
    assert run.trainers["teacher"].teacher_checkpoint is None
    assert run.teacher_sampling == {}
    shown = run_tables(run)
    assert "teacher  held by servers" in shown
    assert "rollout holds the teacher" not in shown


@pytest.mark.parametrize("flags", [[], ["--teacher-checkpoint", "TEACHER", "--opd-teacher-url", "http://127.0.0.1:9"]])
def test_a_run_has_exactly_one_teacher(resolved, models, flags):
    flags = [f"{models}/teacher" if word == "TEACHER" else word for word in flags]

    with pytest.raises(ConfigError, match="the teacher has exactly one source: --teacher-checkpoint"):
        resolved(*flags)


def test_a_head_beyond_the_vocabulary_is_refused(resolved, models):
    with pytest.raises(ConfigError, match=r"--opd-top-k 258 is more than the vocabulary of --hf-checkpoint .*, 257"):
        resolved("--teacher-checkpoint", f"{models}/teacher", "--opd-top-k", "258")
