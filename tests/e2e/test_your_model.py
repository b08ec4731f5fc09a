"""docs/your_model.md is followed to the letter, on a small pipeline and a prompt file of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your_model.md").read_text()
SMALLER = [
    "--local", "--device", "cpu", "--compute-dtype", "fp32", "--num-rollout", "1", "--rollout-batch-size", "2",
    "--micro-batch-size", "1", "--fake-update-ratio", "1", "--sample-prompts", "1", "--max-sequence-length", "12",
]  # fmt: skip


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def followed(teacher, cache_dir, tmp_path_factory):
    """A directory in which the page was followed, and what its commands printed."""
    directory = tmp_path_factory.mktemp("your_model")
    make_pipeline(teacher, directory / "my_model")
    (directory / "my_prompts.txt").write_text("a red cube on a table\na blue ball\n")
    (directory / "my_preset.yaml").write_text(blocks("yaml")[0])
    (directory / "train_diffusion.py").symlink_to(ROOT / "train_diffusion.py")
    printed = []
    for command in blocks("bash"):
        words = command.split()
        assert words[0] == "python"
        run = subprocess.run(
            [sys.executable, *words[1:], *SMALLER, "--cache-dir", str(cache_dir)],
            cwd=directory,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    return directory, printed


def make_pipeline(teacher, directory):
    """A pipeline of other sizes than any shipped one; only its text encoders are the digits teacher's."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(0)
    stock = StableDiffusion3Pipeline.from_pretrained(teacher, vae=None, transformer=None)
    transformer = SD3Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, caption_projection_dim=16, pos_embed_max_size=8, qk_norm="rms_norm",
        dual_attention_layers=(0,), joint_attention_dim=stock.text_encoder_3.config.d_model,
        pooled_projection_dim=sum(e.config.projection_dim for e in (stock.text_encoder, stock.text_encoder_2)),
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        shift_factor=0.0, scaling_factor=1.0,
    )  # fmt: skip
    stock.register_modules(transformer=transformer, vae=vae)
    stock.save_pretrained(directory)


def test_the_page_has_its_preset_its_two_commands_and_its_snippet():
    assert [len(blocks(language)) for language in ("yaml", "bash", "python")] == [1, 2, 1]
    assert yaml.safe_load(blocks("yaml")[0])["args"]["hf_checkpoint"] == "my_model"


def test_the_dry_run_shows_what_the_page_says_to_check(followed):
    _, (dry, _) = followed

    assert "1, 0.9, 0.75, 0.5 (shift 3)" in dry
    assert re.search(r"^  lr +5e-06 +1e-05$", dry, re.MULTILINE)
    assert "images   8 x 8, 12 text tokens" in dry
    assert "samples in the run" in dry
    assert "per rank" in dry


def test_the_run_leaves_the_grids_that_the_page_names(followed):
    directory, _ = followed

    assert (directory / "my_run" / "samples" / "step_000000.png").is_file()
    assert (directory / "my_run" / "curves.png").is_file()


def test_the_snippet_draws_with_the_student(followed, monkeypatch):
    directory, _ = followed
    monkeypatch.chdir(directory)

    exec(compile(blocks("python")[0], "your_model.md", "exec"), {})

    with Image.open(directory / "red_cube.png") as image:
        assert image.size == (8, 8)
