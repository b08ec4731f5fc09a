"""The family of docs/model_family.md is a family: it counts, refuses, trains, and its student opens in diffusers."""

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


def test_it_counts_parameters_as_torch_does(aura, pipeline):
    import importlib

    from diffusers import AuraFlowTransformer2DModel

    network = AuraFlowTransformer2DModel.from_pretrained(pipeline, subfolder="transformer")
    family = importlib.import_module(aura).family

    counted = family.count_parameters(json.loads((pipeline / "transformer" / "config.json").read_text()))

    assert counted == sum(parameter.numel() for parameter in network.parameters())


def test_its_velocity_is_a_step_of_the_stock_pipeline(aura, pipeline):
    """One Euler step from pure noise to 0: noise minus clean, whatever the pipeline does on its way there."""
    import importlib

    from diffusers import AuraFlowPipeline

    code = importlib.import_module(f"{aura}.network")
    stock = AuraFlowPipeline.from_pretrained(pipeline)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sampled = stock("a seven", latents=noise, sigmas=[1.0], num_inference_steps=1, guidance_scale=1.0, height=16,
                    width=16, max_sequence_length=12, output_type="latent").images  # fmt: skip
    cond = code.encode_prompts(pipeline, ["a seven"], max_sequence_length=12, dtype=torch.float32,
                               device=torch.device("cpu"))  # fmt: skip

    with torch.no_grad():
        ours = noise - code.velocity(stock.transformer, noise, torch.ones(1), cond)

    torch.testing.assert_close(ours, sampled)


@pytest.mark.parametrize(("name", "value"), [("in_channels", 8), ("joint_attention_dim", 3), ("patch_size", "two")])
def test_it_refuses_what_does_not_fit_in_one_line(words, pipeline, capsys, name, value):
    from miles_dmd.run import main

    path = pipeline / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    status = main([*words, "--dry-run"])

    (line,) = capsys.readouterr().err.splitlines()
    assert (status, name in line) == (2, True)
