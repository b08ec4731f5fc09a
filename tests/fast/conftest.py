"""Shared fixtures of refusals: pipeline directories without weights, and loss types of a user's own."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.models.sd3.configs import CLASSES
from miles_dmd.preflight.rules import resolve

SD35_MEDIUM: Mapping[str, Any] = {
    "_class_name": "SD3Transformer2DModel",
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": list(range(13)),
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
"""transformer/config.json of stabilityai/stable-diffusion-3.5-medium."""


NUMBERS = ("", "_2", "_3")


@pytest.fixture
def sd35_medium_config() -> dict[str, Any]:
    return dict(SD35_MEDIUM)


@pytest.fixture
def configuration_only(tmp_path: Path) -> Path:
    """A directory that holds SD3.5-Medium's configuration files and no weights."""
    directory = tmp_path / "sd35"
    names = (
        "transformer",
        "vae",
        "scheduler",
        *(f"{kind}{n}" for kind in ("tokenizer", "text_encoder") for n in NUMBERS),
    )
    index = {"_class_name": "StableDiffusion3Pipeline", **{name: [_library(name), CLASSES[name][0]] for name in names}}
    files = {
        "model_index.json": index,
        "transformer/config.json": dict(SD35_MEDIUM),
        "vae/config.json": {
            "_class_name": "AutoencoderKL",
            "block_out_channels": [128, 256, 512, 512],
            "latent_channels": 16,
            "scaling_factor": 1.5305,
            "shift_factor": 0.0609,
        },
        "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        "tokenizer/tokenizer_config.json": {"model_max_length": 77},
        "tokenizer_2/tokenizer_config.json": {"model_max_length": 77},
        "tokenizer_3/tokenizer_config.json": {"model_max_length": 512},
        "text_encoder/config.json": {"projection_dim": 768, "hidden_size": 768, "num_hidden_layers": 12},
        "text_encoder_2/config.json": {"projection_dim": 1280, "hidden_size": 1280, "num_hidden_layers": 32},
        "text_encoder_3/config.json": {"d_model": 4096, "num_layers": 24},
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


def _library(component: str) -> str:
    return "transformers" if component.startswith("t") and component != "transformer" else "diffusers"


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a red cube\na blue ball\n")
    return path


@pytest.fixture
def asked(configuration_only: Path, prompt_file: Path) -> list[str]:
    """A command line with which nothing is wrong."""
    return ["--hf-checkpoint", str(configuration_only), "--prompt-data", str(prompt_file), "--dry-run"]


@pytest.fixture
def run(tmp_path, asked, latest, capsys, monkeypatch):
    """(exit code, lines on stderr, what was written) of the command line, in an empty directory."""
    from miles_dmd.run import main

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def ask(*flags, whole=True):
        before = set(tmp_path.rglob("*"))
        code = main(latest([*asked, *flags]) if whole else list(flags))
        err = capsys.readouterr().err
        assert err.removesuffix("\n").isprintable()
        return code, err.splitlines(), sorted(set(tmp_path.rglob("*")) - before)

    return ask


@pytest.fixture
def refused(asked: list[str], latest: Callable[[list[str]], list[str]]) -> Callable[..., str]:
    """``refused("--lr", "0")``: the one line with which the door refuses ``asked`` and these flags."""

    def parse(*flags: str) -> str:
        with pytest.raises(ConfigError) as error:
            resolve(parse_args(latest([*asked, *flags])))
        assert "\n" not in str(error.value)
        return str(error.value)

    return parse


LOSS_TYPE = """
from dataclasses import dataclass

from miles_dmd.contracts.loss import LossType
from miles_dmd.plan import build_plan


@dataclass(frozen=True, kw_only=True)
class Options:
    {options}


def plan(args):
    return build_plan("opd", {{"model_path": args.hf_checkpoint}}, {{"token_matching"}})


objectives = {{"student": "miles_dmd.losses.dmd2.objective:generator_loss"}}
loss_type = LossType(options=Options, roles={roles!r}, plan=plan, objectives=objectives)
"""


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes a loss type into a package of the user's own, and returns its import path."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, roles: tuple[str, ...] = ("actor",), options: str = "pass") -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "loss.py").write_text(LOSS_TYPE.format(options=options, roles=roles))
        return f"{name}.loss"

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__path__", getattr(sys.modules[name], "__file__", ""))):
            del sys.modules[name]
