"""Rules between arguments, and files that are missing: refused before anything starts."""

import json
import math
import os
import struct
from dataclasses import replace

import pytest

from miles_dmd.config.args import Args
from miles_dmd.config.cli import parse_args
from miles_dmd.config.trainers import TrainerConfig
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import Options
from miles_dmd.modalities.diffusion.options import DiffusionOptions
from miles_dmd.models.sd3 import family
from miles_dmd.pipelines.weights import ENCODER_WEIGHTS, WEIGHTS
from miles_dmd.preflight.rules import _flag_and_path, resolve


@pytest.fixture
def args(configuration_only, prompt_file):
    """Args that no command line made, and with which nothing is wrong."""
    return Args(hf_checkpoint=str(configuration_only), prompt_data=str(prompt_file), dry_run=True)


def test_args_with_nothing_wrong_pass(args):
    resolve(args)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_rollout": True}, "--num-rollout True must be a whole number"),
        ({"num_rollout": 1.5}, "--num-rollout 1.5"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"modality_options": DiffusionOptions(solver="heun")}, "--solver 'heun'"),
        ({"betas": (0.9,)}, "--betas"),
        ({"loss_options": Options(fake_update_ratio=True)}, "--fake-update-ratio True"),
        ({"trainers": (TrainerConfig("critic", {"lrr": 1}),)}, "did you mean lr?"),
        ({"trainers": (TrainerConfig("critic", {"lr": -1}),)}, "trainer 'critic': lr -1"),
        ({"trainers": (TrainerConfig("teacher", {"lr": 1}),)}, "no group 'teacher'"),
    ],
)
def test_args_that_no_command_line_made_are_held_to_the_same_kinds(args, change, part):
    with pytest.raises(ConfigError) as refused:
        resolve(replace(args, **change))

    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--model-family", "sd4"], ["--model-family 'sd4'", "sd3"]),
        (["--critic-model-family", "sd4"], ["--critic-model-family sd4", "applies to the whole run"]),
        (["--rollout-engine", "vllm"], ["--rollout-engine 'vllm'", "inprocess"]),
        (["--teacher-guidance", "0.5"], ["--teacher-guidance 0.5", "1"]),
        (["--dm-sigma-min", "0.99"], ["--dm-sigma-min 0.99", "--dm-sigma-max 0.98"]),
        (["--fake-update-ratio", "0"], ["--fake-update-ratio 0", "[1, 1000]"]),
        (["--fake-warmup-cycles", "-1"], ["--fake-warmup-cycles", "-1"]),
        (["--num-steps-per-rollout", "2"], ["--num-steps-per-rollout 2", "a phase is one optimizer step"]),
        (["--critic-num-trainer-ranks", "3"], ["--rollout-batch-size 32", "critic has 3", "--critic-num-", "33"]),
        (["--rollout-batch-size", "3", "--num-trainer-ranks", "8"], ["--rollout-batch-size 3", "nearest", "8"]),
        (["--local", "--num-trainer-ranks", "2"], ["--num-trainer-ranks 2", "--local"]),
        (["--local", "--ray-address", "auto"], ["--ray-address auto", "--local", "drop one of the two"]),
        (["--local", "--placement-timeout", "5"], ["--placement-timeout 5", "--local"]),
        (["--local", "--remote-timeout", "5"], ["--remote-timeout 5", "--local"]),
        (["--height", "100"], ["--height 100", "multiple of 16", "96"]),
        (["--width", "7"], ["--width 7", "multiple of 16", "nearest is 16"]),
        (["--load", "somewhere"], ["--load somewhere"]),
        (["--actor-load", "somewhere"], ["--actor-load somewhere"]),
        (["--teacher-checkpoint", "/no/such"], ["--teacher-checkpoint /no/such", "no directory", "hf download"]),
        (["--critic-hf-checkpoint", "/no/such"], ["--critic-hf-checkpoint /no/such", "no directory"]),
    ],
)
def test_what_cannot_stand_together_is_refused_in_one_line(refused, flags, parts):
    message = refused(*flags)

    assert all(part in message for part in parts), message


def test_the_nearest_batch_that_divides_really_divides_by_all_ranks(refused):
    message = refused("--rollout-batch-size", "32", "--critic-num-trainer-ranks", "4", "--actor-num-trainer-ranks", "6")

    assert message.endswith("the nearest that does is 36")


def test_what_is_missing_is_named_with_a_preset_to_start_from():
    with pytest.raises(ConfigError) as refused:
        resolve(parse_args(["--loss-type", "dmd2"]))

    parts = ["--loss-type dmd2", "--hf-checkpoint", "--prompt-data", "--config digits"]
    assert all(part in str(refused.value) for part in parts)


def test_only_what_is_missing_is_named(prompt_file):
    with pytest.raises(ConfigError) as refused:
        resolve(parse_args(["--prompt-data", str(prompt_file)]))

    assert "--hf-checkpoint" in str(refused.value)
    assert "--prompt-data" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["no such file"]),
        ("", ["no prompts"]),
        ('{"prompt": "a"}\n{"prompt": 3}\n', ["line 2"]),
    ],
)
def test_a_prompt_file_is_read_before_anything_starts(asked, latest, tmp_path, content, parts):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError) as refused:
        resolve(parse_args(latest([*asked, "--prompt-data", str(path)])))

    assert all(part in str(refused.value) for part in [f"--prompt-data {path}", *parts]), str(refused.value)


def test_a_run_needs_weights_and_a_dry_run_does_not(asked):
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .*lacks the weights .*transformer.*--dry-run"):
        resolve(parse_args([word for word in asked if word != "--dry-run"]))

    resolve(parse_args(asked))


def test_a_component_that_is_not_there_is_named(refused, configuration_only):
    (configuration_only / "text_encoder_3" / "config.json").unlink()

    assert "lacks the component text_encoder_3" in refused()


def test_a_component_that_the_index_leaves_out_is_named(refused, configuration_only):
    path = configuration_only / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"text_encoder_3": [None, None]}))

    assert "lacks the component text_encoder_3" in refused()


@pytest.mark.parametrize("entry", [None, [], "diffusers", 3])
def test_an_index_of_another_shape_is_refused(refused, configuration_only, entry):
    path = configuration_only / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vae": entry}))

    assert "lacks the component vae" in refused()


def test_a_pipeline_of_another_class_is_refused(refused, configuration_only):
    path = configuration_only / "model_index.json"
    path.write_text(path.read_text().replace("StableDiffusion3Pipeline", "FluxPipeline"))

    message = refused()

    assert all(part in message for part in ("--hf-checkpoint", "FluxPipeline", "StableDiffusion3Pipeline"))


@pytest.mark.parametrize(("content", "part"), [("{", "not JSON"), ("[]", "must hold a JSON object")])
def test_a_file_that_is_no_json_is_named(refused, configuration_only, content, part):
    (configuration_only / "model_index.json").write_text(content)

    message = refused()

    assert f"--hf-checkpoint {configuration_only}: {configuration_only / 'model_index.json'}" in message
    assert part in message


def test_a_directory_that_is_no_pipeline_is_refused(asked, latest, tmp_path):
    (tmp_path / "empty").mkdir()

    with pytest.raises(
        ConfigError, match=r"--hf-checkpoint .*empty: is not a diffusers pipeline \(no model_index.json\)"
    ):
        resolve(parse_args(latest([*asked, "--hf-checkpoint", str(tmp_path / "empty")])))


def test_a_run_with_weights_passes(asked, configuration_only, sd35_medium_config):
    tensors_of = {"transformer": family.parameters(sd35_medium_config), **family.marks(configuration_only)}
    for component, tensors in tensors_of.items():
        header, end = {}, 0
        for name, shape in tensors.items():
            start, end = end, end + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        weights = configuration_only / component / (ENCODER_WEIGHTS if "text" in component else WEIGHTS)
        weights.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(weights, 8 + len(text) + end)  # sparse: 40 GB that take no room
    for number in ("", "_2", "_3"):
        (configuration_only / f"tokenizer{number}" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    real = [word for word in asked if word != "--dry-run"]

    args = resolve(parse_args(real)).args

    assert not args.dry_run
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .*text_encoder_3.* not all of it; download it again"):
        resolve(parse_args(real))
    weights.unlink()
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .* lacks the weights .*text_encoder_3"):
        resolve(parse_args(real))


@pytest.mark.parametrize("other", [None, {}, "digits", Options()])
def test_what_is_no_arguments_at_all_is_refused(other):
    with pytest.raises(ConfigError, match=r"is asked for by miles_dmd\.config\.args\.Args"):
        resolve(other)


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/data/sd35/vae/config.json", "--hf-checkpoint /data/sd35/vae/config.json"),
        ("/data/sd35", "--hf-checkpoint /data/sd35"),
        ("/data/sd35/inner/x", "--critic-hf-checkpoint /data/sd35/inner/x"),
        ("/data/sd35_other", "/data/sd35_other"),
        ("/data/cache/x", "--cache-dir /data/cache/x"),
        ("/elsewhere", "/elsewhere"),
        (None, "the current directory"),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_laid_to_the_flag_that_names_it(path, flag):
    """And never to a text that happens to lie in it: the empty one of --negative-prompt lies in all."""
    args = Args(
        hf_checkpoint="/data/sd35", prompt_data="/data/p.txt", cache_dir="/data/cache",
        modality_options=DiffusionOptions(negative_prompt="data"),
        trainers=(TrainerConfig("critic", {"hf_checkpoint": "/data/sd35/inner"}),),
    )  # fmt: skip

    assert _flag_and_path(path, args) == flag
