"""The family of docs/model_family.md is a family: it counts, refuses, trains, and its student opens in diffusers."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from miles_dmd.observe.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "model_family.md"
FILE = re.compile(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$", re.M | re.S)
SIZES = {
    "sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8,
    "num_attention_heads": 2, "caption_projection_dim": 16, "pos_embed_max_size": 64,
}  # fmt: skip


@pytest.fixture
def aura(tmp_path, monkeypatch):
    """The page's family, written as it says and imported."""
    for name, body in FILE.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_lab.aura"
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


@pytest.fixture
def pipeline(teacher, tmp_path):
    """A small AuraFlow pipeline whose text encoder is the digits teacher's T5."""
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, AutoencoderKL, FlowMatchEulerDiscreteScheduler
    from transformers import AutoTokenizer, T5EncoderModel

    torch.manual_seed(0)
    encoder = T5EncoderModel.from_pretrained(teacher, subfolder="text_encoder_3")
    stock = AuraFlowPipeline(
        tokenizer=AutoTokenizer.from_pretrained(teacher / "tokenizer_3"),
        text_encoder=encoder,
        transformer=AuraFlowTransformer2DModel(**SIZES, joint_attention_dim=encoder.config.d_model),
        vae=AutoencoderKL(
            block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, scaling_factor=0.5,
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, layers_per_block=1,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )  # fmt: skip
    stock.save_pretrained(tmp_path / "aura")
    return tmp_path / "aura"


@pytest.fixture
def words(flags, aura, pipeline, tmp_path):
    own = {"--hf-checkpoint": pipeline, "--model-family": aura, "--max-sequence-length": 12, "--shift": 1.73}
    return flags("--local", "--num-rollout", "1", "--sample-prompts", "1", "--save", str(tmp_path / "run"),
                 *(str(word) for pair in own.items() for word in pair))  # fmt: skip


def test_it_trains_and_its_student_opens_in_stock_diffusers(words, tmp_path):
    from diffusers import AuraFlowPipeline

    from miles_dmd.run import main

    status = main(words)

    assert status == 0
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["actor/loss"] > 0
    student = AuraFlowPipeline.from_pretrained(tmp_path / "run" / "student")
    call = json.loads((tmp_path / "run" / "student" / "distillation.json").read_text())["student_call"]
    assert student("a handwritten seven", **call, output_type="np").images.shape == (1, 16, 16, 3)


@pytest.mark.parametrize("sizes", [SIZES, {}, {**SIZES, "num_mmdit_layers": 3, "patch_size": 1}])
def test_parameters_are_named_and_shaped_as_diffusers_builds_them(aura, sizes):
    from diffusers import AuraFlowTransformer2DModel

    with torch.device("meta"):
        network = AuraFlowTransformer2DModel.from_config(sizes)
    family = importlib.import_module(aura).family

    assert family.parameters(sizes) == {name: tuple(value.shape) for name, value in network.named_parameters()}
    assert set(network.state_dict()) == {*family.parameters(sizes), *family.saved_buffers}


def test_its_encoders_marks_are_what_transformers_builds(aura, pipeline):
    """AuraFlow's own encoder is UMT5, which names its tensors as T5 does."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"d_model": 24, "d_ff": 64, "num_layers": 3, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
    with torch.device("meta"):
        shapes = {
            name: tuple(value.shape) for name, value in UMT5EncoderModel(UMT5Config(**sizes)).state_dict().items()
        }
    (pipeline / "text_encoder" / "config.json").write_text(json.dumps(sizes))

    marks = importlib.import_module(aura).family.marks(pipeline)["text_encoder"]

    assert shapes | marks == shapes
    assert all("shared" in name or "embed" in name or "relative" in name for name in shapes.keys() - marks.keys())


@pytest.mark.parametrize("page", ["model_family.md", "architecture.md"])
def test_a_page_lists_the_functions_of_the_torch_module(page):
    from miles_dmd.modalities.diffusion.family import DiffusionCode

    functions = [name for name, value in vars(DiffusionCode).items() if not name.startswith("_") and callable(value)]

    listed = ", ".join(f"`{name}`" for name in functions)
    assert len(functions) == 8
    assert listed in " ".join((PAGE.parent / page).read_text(encoding="utf-8").split())


def test_its_velocity_is_a_step_of_the_stock_pipeline(aura, pipeline):
    """One Euler step from pure noise to 0: noise minus clean, whatever the pipeline does on its way there."""
    from diffusers import AuraFlowPipeline

    code = importlib.import_module(f"{aura}.network")
    stock = AuraFlowPipeline.from_pretrained(pipeline)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sampled = stock("a seven", latents=noise, sigmas=[1.0], num_inference_steps=1, guidance_scale=1.0, height=16,
                    width=16, max_sequence_length=12, output_type="latent").images  # fmt: skip
    encode = code.open_encoder(pipeline, max_sequence_length=12, dtype=torch.float32, device=torch.device("cpu"))
    cond = encode(["a seven"])

    with torch.no_grad():
        ours = noise - code.velocity(stock.transformer, noise, torch.ones(1), cond)

    torch.testing.assert_close(ours, sampled)


def test_it_counts_the_texts_that_are_cut(aura, pipeline):
    code = importlib.import_module(f"{aura}.network")

    (cut,) = code.truncations(pipeline, ["a seven", "a seven " * 20], 12)

    assert (cut.encoder, cut.limit, cut.count, cut.longest > 12) == ("text_encoder", 12, 1, True)


REFUSED = {
    "in_channels": 8, "out_channels": 8, "joint_attention_dim": 3, "caption_projection_dim": 8, "patch_size": "two",
    "sample_size": 0, "num_single_dit_layers": 10**12,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_it_refuses_what_does_not_fit_in_one_line(words, pipeline, capsys, name, value):
    from miles_dmd.run import main

    path = pipeline / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    status = main([*words, "--dry-run"])

    (line,) = capsys.readouterr().err.splitlines()
    assert (status, name in line) == (2, True)
