"""Checkpoints of one run share encoders, tokenizers and VAE by content; a run has one text length and one teacher."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from miles_dmd.config.cli import parse_args
from miles_dmd.config.trainers import trainer_args
from miles_dmd.errors import ConfigError
from miles_dmd.modalities.diffusion.described import describe
from miles_dmd.preflight.rules import resolve
from miles_dmd.report import run_tables


def moved(file):
    """One number of the last tensor, in the middle of nowhere: sizes and shapes stay."""

    def change(directory):
        tensors = load_file(directory / file)
        name = sorted(tensors)[-1]
        tensors[name].view(-1)[0] += 0.5
        save_file(tensors, directory / file, {"format": "pt"})

    return change


def edited(file, **values):
    def change(directory):
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**content, **values}))

    return change


def swapped(file, one, other):
    def change(directory):
        text = (directory / file).read_text()
        assert one in text
        (directory / file).write_text(text.replace(one, other))

    return change


def without(file):
    return lambda directory: (directory / file).unlink()


@pytest.mark.parametrize("flag", ["--teacher-checkpoint", "--actor-hf-checkpoint", "--critic-hf-checkpoint"])
@pytest.mark.parametrize(
    ("change", "component", "file"),
    [
        (moved("text_encoder/model.safetensors"), "text_encoder", "model.safetensors"),
        (moved("text_encoder_3/model.safetensors"), "text_encoder_3", "model.safetensors"),
        (moved("vae/diffusion_pytorch_model.safetensors"), "vae", "diffusion_pytorch_model.safetensors"),
        (edited("vae/config.json", act_fn="mish"), "vae", "config.json"),
        (edited("text_encoder_2/config.json", hidden_act="gelu_new"), "text_encoder_2", "config.json"),
        (edited("tokenizer_3/tokenizer_config.json", model_max_length=10), "tokenizer_3", "tokenizer_config.json"),
        (swapped("tokenizer/tokenizer.json", "seven", "sevem"), "tokenizer", "tokenizer.json"),
    ],
)
def test_components_of_the_same_sizes_and_another_content_are_refused(
    flags, copy, teacher, flag, change, component, file
):
    change(copy)

    with pytest.raises(ConfigError) as error:
        resolve(parse_args(flags(flag, str(copy))))

    said = str(error.value)
    assert "\n" not in said
    assert f"its {component} is not that of --" in said
    assert f"({file} differs)" in said
    assert str(copy) in said
    assert str(teacher) in said


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: None,
        edited("vae/config.json", _diffusers_version="0.1"),
        edited("text_encoder/config.json", transformers_version="4.1", torch_dtype="float16"),
        without("tokenizer/merges.txt"),
        moved("transformer/diffusion_pytorch_model.safetensors"),
    ],
)
def test_who_wrote_a_file_and_the_network_itself_may_differ(flags, copy, change):
    change(copy)

    resolve(parse_args(flags("--actor-hf-checkpoint", str(copy))))


def test_a_dry_run_compares_what_is_there(flags, copy):
    moved("text_encoder/model.safetensors")(copy)
    (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()

    with pytest.raises(ConfigError, match="text_encoder is not that of"):
        resolve(parse_args(flags("--teacher-checkpoint", str(copy), "--dry-run")))


def test_the_other_encoders_pass_where_they_are_the_same_in_both(flags, copy, tmp_path):
    moved("text_encoder/model.safetensors")(copy)
    shutil.copytree(copy, tmp_path / "again")

    resolve(parse_args(flags("--hf-checkpoint", str(copy), "--teacher-checkpoint", str(tmp_path / "again"))))


@pytest.mark.parametrize("asked", [(), ("--max-sequence-length", "7")])
def test_all_parts_of_a_run_encode_at_one_length(make_args, copy, teacher, asked):
    """The teacher's, by which prompts are encoded; here tokenizers differ, which the door would refuse."""
    edited("tokenizer_3/tokenizer_config.json", model_max_length=10)(copy)
    args = make_args(*asked)
    object.__setattr__(args, "hf_checkpoint", str(copy))
    object.__setattr__(args, "teacher_checkpoint", str(teacher))
    run = replace(resolve(make_args(*asked)), args=args, trainers=trainer_args(args))
    length = 7 if asked else 12

    described = describe(run, 0)

    assert run.family.text_length(args) == length
    assert described.student_call["max_sequence_length"] == described.teacher_call["max_sequence_length"] == length
    assert f", {length} text tokens" in run_tables(run)
    assert {run.family.text_length(own) for own in run.trainers.values()} == {length}


@pytest.mark.parametrize("flag", ["--actor-hf-checkpoint", "--critic-hf-checkpoint"])
def test_a_run_has_one_teacher_whatever_its_trainers_start_from(resolved, copy, teacher, flag):
    run = resolved(flag, str(copy))

    assert {own.teacher_path for own in run.trainers.values()} == {str(teacher)}
    assert describe(run, 0).teacher == "teacher"


def test_the_students_own_checkpoint_says_the_size_of_its_images(resolved, copy):
    edited("transformer/config.json", sample_size=4)(copy)
    run = resolved("--actor-hf-checkpoint", str(copy))

    assert run.student.hf_checkpoint == str(copy)
    assert describe(run, 0).student_call["height"] == 32
    assert "32 x 32" in run_tables(run)
    assert f"student  {copy}" in run_tables(run)


@pytest.mark.parametrize("how", ["distillation.json", "scheduler"])
@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--teacher-checkpoint"])
def test_a_distilled_teacher_is_said_to_be_one(flags, copy, caplog, how, flag):
    if how == "scheduler":
        edited("model_index.json", scheduler=["diffusers", "FlowMatchLCMScheduler"])(copy)
    else:
        (copy / "distillation.json").write_text("{}")

    with caplog.at_level(logging.WARNING, "miles_dmd"):
        resolve(parse_args(flags(flag, str(copy))))

    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{flag} {copy}: the teacher is a distilled student itself ({how}")


def test_a_distilled_student_of_another_teacher_is_nothing_to_speak_of(flags, copy, caplog):
    (copy / "distillation.json").write_text("{}")

    resolve(parse_args(flags("--actor-hf-checkpoint", str(copy))))

    assert caplog.records == []
