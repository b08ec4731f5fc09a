"""Classifier-free guidance, in both common conventions of its scale."""

import math
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["none", "layer_norm", "scalar"]
_TINY = 1e-12


def standard_cfg(cond: Tensor, uncond: Tensor, scale: float, norm: Norm = "none") -> Tensor:
    """[B, ...] fp32: u + s (c - u); s = 1 is exactly the conditional prediction, s = 0 exactly the unconditional one.

    ``cond``, ``uncond`` [B, ...], of one kind (velocities for a flow). ``norm`` gives the guided prediction back the
    length of the conditional one: "layer_norm" along the last axis, "scalar" by one ratio (at most 1) over the whole
    tensor: that one ties the samples of a batch together, so its result depends on the micro-batch size.
    Raises ValueError for other norms, shapes that differ, a scale that is not finite.
    Ho and Salimans 2022, arXiv 2207.12598, eq. 6, with s = 1 + w; DMD2's guidance scale is this s.
    """
    if cond.shape != uncond.shape:
        raise ValueError(f"shapes differ: cond {tuple(cond.shape)}, uncond {tuple(uncond.shape)}")
    if not math.isfinite(scale):
        raise ValueError(f"guidance scale must be finite, got {scale}")
    cond = cond.float()
    guided = torch.lerp(uncond.float(), cond, float(scale))  # lerp: exact at both ends
    if norm == "none":
        return guided
    if norm == "layer_norm":
        return guided * (_length(cond, dim=-1) / _length(guided, dim=-1).clamp_min(_TINY))
    if norm == "scalar":
        return guided * (_length(cond) / _length(guided).clamp_min(_TINY)).clamp_max(1.0)
    raise ValueError(f"unknown norm {norm!r}: none, layer_norm or scalar")


def legacy_cfg(cond: Tensor, uncond: Tensor, w: float) -> Tensor:
    """[B, ...] fp32: c + w (c - u), as CausVid and Self-Forcing write it; equals standard_cfg at scale w + 1.

    Shapes and errors as in standard_cfg. A published "3.5" of that lineage is 4.5 in the standard form: convert the
    number, never reuse it.
    """
    return standard_cfg(cond, uncond, w + 1.0)


def _length(x: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dim, keepdim=True)
