"""Diffusion model families: what a declaration says of a pipeline directory, and the code that computes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from miles_dmd import registry
from miles_dmd.contracts.family import FamilyCode, ModelFamily
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.pipelines import consistency
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.fingerprint import fingerprint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from miles_dmd.config.args import Args

    Cond = Mapping[str, Tensor]
    """Keyword arguments of the network that stand for the prompt, each with a leading sample axis."""
    Encode = Callable[[Sequence[str]], Cond]
    """Texts -> their conditions, on the CPU."""


def diffusion_family(args: Args) -> DiffusionFamily:
    """The family of a run of this modality."""
    return cast("DiffusionFamily", registry.load("models", args.model_family))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Texts that one text encoder does not read to their end."""

    encoder: str
    limit: int
    """Tokens that it reads, those that mark a text's ends among them."""
    count: int
    """Texts that have more."""
    longest: int
    """Tokens of the longest text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionFamily(ModelFamily):
    """The declaration of a family of diffusers pipelines."""

    pipeline: str
    """Class that model_index.json must name."""
    components: Mapping[str, tuple[str, ...]]
    """Folders that a pipeline directory of this family must have -> the classes that model_index.json may name."""
    check: Callable[[Path], None]
    """Raises ConfigError, ``FILE: what is wrong; cure``, for a pipeline directory whose JSON files have a value of
    another type, or do not fit each other."""
    parameters: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]]
    """Name -> shape of every parameter of the network, as its weight files call them, from its config.json."""
    marks: Callable[[Path], Mapping[str, Mapping[str, tuple[int, ...]]]]
    """component -> tensors and their shapes by which the weights of a pipeline directory are known to be its own; the
    distilled network is known by all of its ``parameters``."""
    shared: Callable[[Path], Mapping[str, Any]]
    """Properties of latents and text, by name, which all networks of a run must have alike."""
    scheduler_shift: Callable[[Path], float]
    """Timestep shift that a pipeline directory itself samples with."""
    pixel_multiple: Callable[[Path], int]
    """Height and width must be multiples of this, for a pipeline directory."""
    default_pixels: Callable[[Path], tuple[int, int]]
    """(height, width) that a pipeline directory was made for."""
    max_pixels: Callable[[Path], int]
    """Longest side of an image, in pixels, that a pipeline directory can make."""
    default_max_sequence_length: Callable[[Path], int]
    """Text length (T5's, where there are several encoders) of a pipeline directory."""
    condition_shapes: Callable[[Path, int], Mapping[str, tuple[int, ...]]]
    """Name -> shape of what one prompt becomes for the network, for a pipeline directory and a text length."""
    longest_text: int = 512
    """Most text tokens that the stock pipeline takes."""
    can_guide: bool = True
    """True if there is an unconditional branch; guidance-distilled models have none."""

    @property
    def modality(self) -> str:
        return "diffusion"

    @property
    def mark(self) -> str:
        return "model_index.json"

    def resolution(self, args: Args) -> tuple[int, int]:
        """(height, width) of a run's images: as asked, or what its pipeline directory was made for."""
        height, width = self.default_pixels(args.pipeline_directory)
        return diffusion_options(args).height or height, diffusion_options(args).width or width

    def text_length(self, args: Args) -> int:
        """Text tokens of a run's prompts: as asked, or what the teacher's pipeline uses, by which they are encoded."""
        return diffusion_options(args).max_sequence_length or self.default_max_sequence_length(args.teacher_directory)

    def count_parameters(self, directory: Path) -> int:
        config = read_json(directory / self.network_component / "config.json")
        return sum(map(math.prod, self.parameters(config).values()))

    def require(self, directory: Path, *, weights: bool) -> None:
        consistency.check_pipeline(directory, self, weights=weights)

    def require_alike(self, directory: Path, other_flag: str, other: Path, known: Path | None) -> None:
        consistency.require_alike(self, directory, other_flag, other, known)

    def lacking(self, directory: Path) -> list[str]:
        return consistency.lacking(directory, self)

    def fingerprint(self, directory: Path, known: Path | None) -> str:
        return fingerprint(directory, self.components, known)

    def distilled(self, directory: Path) -> str:
        return consistency.distilled(directory)

    def code(self) -> DiffusionCode:
        return cast("DiffusionCode", importlib.import_module(self.torch_module))


class DiffusionCode(FamilyCode, Protocol):
    """The part that knows torch and diffusers: functions of a module.

    ``directory`` is a pipeline directory. The module has mypy compare itself with this protocol, as sd3's does.
    """

    def velocity(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """One call of the network: x [B, C, H, W], sigma [B] in [0, 1] -> velocity [B, C, H, W]."""
        ...

    def latent_shape(self, directory: Path, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents."""
        ...

    def open_encoder(
        self, directory: Path, *, max_sequence_length: int, dtype: torch.dtype, device: torch.device
    ) -> Encode:
        """Load the text encoders; the result encodes a few texts as the pipeline itself does, into the declaration's
        ``condition_shapes``, in ``dtype``."""
        ...

    def truncations(self, directory: Path, texts: Sequence[str], max_sequence_length: int) -> Sequence[Truncation]:
        """Count the ``texts`` that each encoder cuts; opens tokenizers alone."""
        ...

    def open_decoder(self, directory: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
        """latents [B, C, H, W] fp32 -> images [B, H, W, 3] uint8."""
        ...

    def sampling_sigmas(self, directory: Path, num_steps: int, shape: Sequence[int]) -> list[float]:
        """Noise levels that the pipeline visits in ``num_steps`` steps for latents of ``shape``, and the final 0."""
        ...

    def write_scheduler(self, target: Path, *, directory: Path, shift: float, solver: str) -> str:
        """Write the scheduler that samples with ``solver`` to ``target``; returns its class name for model_index.json.

        ``directory`` is the pipeline from which the student started.
        """
        ...
