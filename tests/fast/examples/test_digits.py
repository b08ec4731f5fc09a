"""The digits example: its data, measures and shipped files."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits"
TEACHER = EXAMPLE / "teacher"


@pytest.fixture(scope="module")
def digits():
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prompts_file_is_the_ten_prompts(digits):
    lines = (EXAMPLE / "prompts.txt").read_text().splitlines()

    assert tuple(lines) == digits.PROMPTS
    assert lines[0] == "a handwritten zero"
    assert lines[9] == "a handwritten nine"


def test_a_prompt_knows_its_digit_and_a_stranger_is_refused(digits):
    assert [digits.label_of(prompt) for prompt in digits.PROMPTS] == list(range(10))
    with pytest.raises(ValueError, match="asks for no digit"):
        digits.label_of("a cat")


def test_image_there_and_back_keeps_the_ink(digits):
    ink, _ = digits.load_digits()

    image = digits.to_image(ink[:50])
    back = digits.to_ink(image)

    assert image.shape == (50, 3, 64, 64)
    assert image.min() >= -1
    assert image.max() <= 1
    assert (back - ink[:50]).abs().mean() < 0.05


def test_ink_is_bright_on_black(digits):
    ink = torch.zeros(1, 8, 8)
    ink[0, 3:5, 3:5] = 1

    image = digits.to_image(ink)

    assert image[0, :, 32, 32].min() > 0.9
    assert image[0, :, 0, 0].max() == -1


def test_ink_of_an_image_is_never_outside_its_range(digits):
    ink = digits.to_ink(torch.full((1, 3, 64, 64), 1.4))

    assert ink.max() == 1


def test_frechet_distance_of_shifted_gaussians_is_the_squared_shift(digits):
    features = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))

    assert digits.frechet_distance(features, features + 2.0) == pytest.approx(5 * 4.0, rel=1e-5)


def test_frechet_distance_of_scaled_gaussians_is_that_of_their_deviations(digits):
    features = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    centred = features - features.mean(0)

    expected = torch.cov(centred.double().T).trace().item() * (3 - 1) ** 2
    assert digits.frechet_distance(centred, 3 * centred) == pytest.approx(expected, rel=1e-5)


def test_frechet_distance_to_itself_is_zero_also_when_features_depend_on_each_other(digits):
    features = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 6)

    assert digits.frechet_distance(features, features) == pytest.approx(0, abs=1e-6)


def test_spread_looks_within_a_prompt_only(digits):
    ink = torch.zeros(4, 8, 8)
    ink[2:] = 1
    together, apart = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])

    assert digits.spread(ink, together) == 0
    assert digits.spread(ink, apart) == pytest.approx(math.sqrt(64))


def test_the_judge_reads_digits_it_never_saw(digits):
    ink, labels = digits.load_digits()
    _, held_out = digits.split(len(ink))
    judge = digits.shipped_classifier()

    read = digits.accuracy(judge, digits.to_ink(digits.to_image(ink[held_out])), labels[held_out])

    assert read > 0.985
    assert read == pytest.approx(digits.ensure_classifier(), abs=0.003)


def test_the_judges_features_have_unit_variance_on_the_data(digits):
    ink, _ = digits.load_digits()

    features = digits.shipped_classifier().features(digits.to_ink(digits.to_image(ink)))

    assert features.var(0).mean() == pytest.approx(1, rel=1e-3)


def test_shipped_files_are_small_and_hold_no_pickle():
    files = [file for file in EXAMPLE.rglob("*") if file.is_file()]

    weights = [file for file in files if file.suffix == ".safetensors"]
    assert sum(file.stat().st_size for file in weights) <= 4e6
    assert not [file for file in files if file.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}]


def test_shipped_configurations_name_no_machine():
    texts = {file: file.read_text() for file in TEACHER.rglob("*.json")}

    assert not [file for file, text in texts.items() if "_name_or_path" in text or re.search(r'"/\w+/', text)]


def test_the_teacher_has_the_features_of_sd35_medium():
    transformer = json.loads((TEACHER / "transformer/config.json").read_text())
    scheduler = json.loads((TEACHER / "scheduler/scheduler_config.json").read_text())
    vae = json.loads((TEACHER / "vae/config.json").read_text())

    assert transformer["qk_norm"] == "rms_norm"
    assert transformer["dual_attention_layers"]
    assert transformer["patch_size"] == 2
    assert scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert scheduler["shift"] == 3.0
    assert len(vae["block_out_channels"]) == 4
    assert vae["latent_channels"] == 16
    assert vae["use_quant_conv"] is False


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_2", "tokenizer_3"])
def test_every_tokenizer_sees_twelve_tokens_and_has_its_original_files(name):
    settings = json.loads((TEACHER / name / "tokenizer_config.json").read_text())
    originals = {"spiece.model"} if name == "tokenizer_3" else {"vocab.json", "merges.txt"}

    assert settings["model_max_length"] == 12
    assert originals <= {file.name for file in (TEACHER / name).iterdir()}


def test_the_card_names_data_and_licence():
    card = (TEACHER / "README.md").read_text()

    assert "CC BY 4.0" in card
    assert "Apache-2.0" in card
    assert "random" in card
    assert "{" not in card.split("```")[0]
