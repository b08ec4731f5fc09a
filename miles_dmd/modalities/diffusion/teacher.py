"""Teacher samples for a run's prompts: drawn once, cached beside the encoded prompts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.errors import EngineError
from miles_dmd.files import atomic_write_bytes, digest_file, digests
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.modalities.diffusion.family import DiffusionFamily, diffusion_family
from miles_dmd.modalities.diffusion.guided import sample_guided
from miles_dmd.network.pretrained import load_network
from miles_dmd.observe.count import Count
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.sampling.partition import micro_batches
from miles_dmd.training.compute import Compute, release_cached_memory

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


def teacher_samples(
    args: Args,
    requests: Sequence[RolloutRequest],
    sampling: Mapping[str, Any],
    *,
    shape: Sequence[int],
    compute: Compute,
    prompts: PromptTable,
) -> Tensor:
    """[B, C, H, W] fp32 on the CPU: finished latents of ``requests``, whose stop steps are ignored.

    ``sampling`` has ``num_inference_steps`` and ``guidance_scale``, as a loss type's ``teacher_sampling`` tells them.
    The network is there only meanwhile.
    """
    family, directory = diffusion_family(args), args.teacher_directory
    kept = _kept(args, family, directory, requests, sampling, shape, prompts)
    with contextlib.suppress(OSError, SafetensorError, KeyError):  # not there, or not whole
        return load(kept.read_bytes())["latents"]
    network = load_network(family, directory, dtype=compute.dtype).requires_grad_(False).to(compute.device)
    model = Denoiser(family.code(), network, compute.dtype)
    scale = float(sampling["guidance_scale"])
    parts, count = [], Count("drawing the teacher's samples", len(requests))
    # guidance asks the network twice about each sample, in one call
    for rows in micro_batches(len(requests), max(1, args.rollout_micro_batch_size // 2)):
        drawn = sample_guided(
            model,
            prompts.lookup([requests[row].prompt_id for row in rows]),
            prompts.unconditional(len(rows)),
            scale=scale,
            seeds=[requests[row].seed for row in rows],
            sigmas=family.code().sampling_sigmas(directory, sampling["num_inference_steps"], shape),
            shape=shape,
            device=compute.device,
        )
        parts.append(drawn.cpu())
        count.at(rows[-1] + 1)
    del network, model
    release_cached_memory()
    latents = torch.cat(parts)
    if not torch.isfinite(latents).all():
        raise EngineError(f"the teacher {directory} draws samples that are not finite with {dict(sampling)}")
    with contextlib.suppress(OSError):  # no room to keep them: they are drawn again
        atomic_write_bytes(kept, save({"latents": latents}))
    return latents


def _kept(
    args: Args,
    family: DiffusionFamily,
    directory: Path,
    requests: Sequence[RolloutRequest],
    sampling: Mapping[str, Any],
    shape: Sequence[int],
    prompts: PromptTable,
) -> Path:
    """Named by a hash of all that the samples depend on; the name of the prompts' table stands for the prompts."""
    digest = hashlib.sha256()
    component = directory / family.network_component
    for path in (component / "config.json", *weight_files(component), *sorted((directory / "scheduler").glob("*"))):
        digest_file(digest, path, digests(args.cache_dir))
    about = [1, args.model_family, prompts.path.name, args.compute_dtype, dict(sampling), list(shape)]
    about += [(request.prompt_id, request.seed) for request in requests]
    digest.update(json.dumps(about, sort_keys=True).encode())
    return Path(args.cache_dir) / "teacher" / f"{digest.hexdigest()[:32]}.safetensors"
