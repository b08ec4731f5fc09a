"""Pipeline directories that are damaged, or of another network: refused in one line, with nothing written."""

import json
import shutil

import pytest

CHANGES = [
    ("transformer/config.json", "patch_size", "two"),
    ("transformer/config.json", "patch_size", 0),
    ("transformer/config.json", "pos_embed_max_size", None),
    ("transformer/config.json", "qk_norm", "x"),
    ("transformer/config.json", "qk_norm", []),
    ("transformer/config.json", "num_layers", 10**12),
    ("transformer/config.json", "num_layers", True),
    ("transformer/config.json", "dual_attention_layers", "all"),
    ("transformer/config.json", "_class_name", "FluxTransformer2DModel"),
    ("transformer/config.json", "in_channels", 32),
    ("transformer/config.json", "out_channels", 32),
    ("transformer/config.json", "caption_projection_dim", 64),
    ("transformer/config.json", "pooled_projection_dim", 1),
    ("transformer/config.json", "joint_attention_dim", 1),
    ("transformer/config.json", "sample_size", 10**5),
    ("vae/config.json", "block_out_channels", 5),
    ("vae/config.json", "block_out_channels", []),
    ("vae/config.json", "block_out_channels", [1] * 5000),
    ("vae/config.json", "scaling_factor", "1"),
    ("vae/config.json", "shift_factor", None),
    ("vae/config.json", "_class_name", "AsymmetricAutoencoderKL"),
    ("scheduler/scheduler_config.json", "shift", "three"),
    ("scheduler/scheduler_config.json", "num_train_timesteps", 100),
    ("scheduler/scheduler_config.json", "_class_name", "DDIMScheduler"),
    ("tokenizer_3/tokenizer_config.json", "model_max_length", None),
    ("tokenizer_3/tokenizer_config.json", "model_max_length", "x"),
    ("tokenizer/tokenizer_config.json", "model_max_length", None),
    ("text_encoder_3/config.json", "d_model", "wide"),
    ("model_index.json", "x" * 300, ["diffusers", "Class"]),
]


@pytest.mark.parametrize(("file", "name", "value"), CHANGES, ids=range(len(CHANGES)))
def test_a_pipeline_whose_files_have_other_types_or_do_not_fit_is_refused(run, configuration_only, file, name, value):
    path = configuration_only / file
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    code, lines, written = run()

    assert (code, len(lines), written) == (2, 1, [])
    assert len(lines[0]) < 1500
    assert all(part in lines[0] for part in ("--hf-checkpoint", str(configuration_only), name[:20])), lines[0]


@pytest.mark.parametrize(
    "content", ["", "{", "null", "[" * 9999, '{"a": ' * 99, '{"a": ' + "9" * 5000 + "}", "\0", "\ud800"]
)
@pytest.mark.parametrize(
    "file",
    ["model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json",
     "tokenizer_3/tokenizer_config.json", "vae/diffusion_pytorch_model.safetensors.index.json"],
)  # fmt: skip
def test_a_pipelines_file_that_is_no_json_is_named(run, configuration_only, file, content):
    (configuration_only / file).write_bytes(content.encode("utf-8", "surrogatepass"))

    code, lines, written = run()

    assert (code, len(lines), written) == (2, 1, [])
    assert f"--hf-checkpoint {configuration_only}: {configuration_only / file}" in lines[0]


@pytest.mark.parametrize("flag", ["--teacher-checkpoint", "--critic-hf-checkpoint", "--actor-hf-checkpoint"])
def test_a_checkpoint_of_other_latents_or_text_is_refused_at_the_door(run, teacher, flag):
    """The digits teacher has SD3.5's latents, and text of other widths."""
    code, lines, written = run(flag, str(teacher))

    assert (code, len(lines), written) == (2, 1, [])
    assert str(teacher) in lines[0]
    assert "--hf-checkpoint" in lines[0]
    assert " are 1.00759, and those of " in lines[0] or " are 1.5305, and those of " in lines[0]


def test_weights_of_another_network_are_refused_at_the_door(run, tmp_path, teacher):
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    path = copy / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 3}))

    code, lines, written = run("--hf-checkpoint", str(copy))

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in (f"--hf-checkpoint {copy}", "more of", "download both"))


def without(*names):
    def spoil(directory):
        for name in names:
            (directory / name).unlink()

    return spoil


def copied(source, target):
    return lambda directory: shutil.copy(directory / source, directory / target)


def written(name, text):
    return lambda directory: (directory / name).write_text(text)


def indexed(name, entry):
    def spoil(directory):
        path = directory / "model_index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: entry}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (without("tokenizer/vocab.json", "tokenizer/tokenizer.json"), ["tokenizer has neither tokenizer.json"]),
        (without("tokenizer_3/spiece.model", "tokenizer_3/tokenizer.json"), ["tokenizer_3 has neither"]),
        (written("tokenizer_3/tokenizer.json", "{"), ["tokenizer_3/tokenizer.json is no JSON"]),
        (
            copied("text_encoder_3/model.safetensors", "text_encoder/model.safetensors"),
            ["text_encoder have no text_projection.weight", "download both"],
        ),
        (
            copied("transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
            ["vae have no decoder.conv_in.weight"],
        ),
        (
            written("text_encoder/config.json", '{"hidden_size": 16, "projection_dim": 16}'),
            ["(167 more of 197 differ)"],
        ),
        (indexed("image_encoder", ["transformers", "SiglipVisionModel"]), ["lacks the component image_encoder"]),
        (indexed("scheduler", ["diffusers", "DDIMScheduler"]), ["'DDIMScheduler' as scheduler", "FlowMatchEuler"]),
        (indexed("tokenizer_3", ["transformers", "Nonsense"]), ["'Nonsense' as tokenizer_3", "T5Tokenizer"]),
    ],
)
def test_what_would_be_made_up_in_silence_is_refused(run, tmp_path, teacher, flags, spoil, parts):
    """transformers draws missing weights at random, and reads every word as unknown where it has no vocabulary."""
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    spoil(copy)

    code, lines, written = run(*flags("--hf-checkpoint", str(copy)), whole=False)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in (f"--hf-checkpoint {copy}", *parts)), lines[0]
