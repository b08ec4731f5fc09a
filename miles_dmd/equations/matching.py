"""Distribution matching (DMD, DMD2): gradient, surrogate loss, fake-score loss.

Masks: True (or 1) is active; [B], [B, F], ... goes along the leading axes, a mask with all axes is broadcast. A mask
selects the entries of a mean, so it changes a loss by the active count and nothing else; none active is an error.
"""

import math

import torch
from torch import Tensor

from miles_dmd.equations.shapes import same_shape

NORMALIZER_FLOOR = 1e-5


@torch.no_grad()
def dmd_gradient(
    x_gen: Tensor, x0_real: Tensor, x0_fake: Tensor, eps: float = NORMALIZER_FLOOR
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient [B, ...], normaliser [B, 1, ...], nonfinite []): where the samples should *not* go; fp32, detached.

    gradient = (x0_fake - x0_real) / max(Z, eps), Z = mean over all non-batch axes of |x_gen - x0_real|, per sample and
    never masked. The normaliser returned is Z before the floor. ``x_gen`` are the student's samples, ``x0_real`` and
    ``x0_fake`` the clean predictions of teacher (guided) and fake score at the same noised sample, all [B, ...].

    nonfinite (int64) counts the entries that are not finite or belong to a sample whose Z is not. They are left as they
    are: replaced, an infinity would be 3e38 and overflow the loss, a NaN would be a silent zero. More than none means
    that the optimizer step must be skipped, by agreement of all ranks.
    Raises ValueError for shapes that differ, no axis beside the batch, or an eps that is not positive and finite.
    DMD (arXiv 2311.18828), eq. 7 and 8; the time weight of the scores' difference is what Z stands in for.
    """
    same_shape(x_gen=x_gen, x0_real=x0_real, x0_fake=x0_fake)
    if x_gen.ndim < 2 or x_gen.numel() == 0:
        raise ValueError(f"samples must be [B, ...] with entries, got shape {tuple(x_gen.shape)}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps, the normaliser's floor, must be positive and finite, got {eps}")
    real = x0_real.float()
    normaliser = (x_gen.float() - real).abs().mean(dim=tuple(range(1, x_gen.ndim)), keepdim=True)
    gradient = (x0_fake.float() - real) / normaliser.clamp_min(eps)
    # an infinite Z would turn a whole sample into innocent zeros: count it too
    finite = gradient.isfinite() & normaliser.isfinite()
    return gradient, normaliser, (~finite).sum()


def dmd_surrogate_loss(x_gen: Tensor, gradient: Tensor, mask: Tensor | None = None) -> Tensor:
    """[] fp32: 1/2 mean((x - sg(x - g))^2), whose gradient with respect to ``x_gen`` is exactly g / N.

    ``x_gen`` [B, ...] carries the graph, ``gradient`` [B, ...] is detached here; N is the number of entries, or of
    active ones with a ``mask``. The value is |g|^2 / 2N and no distance: it does not fall as the student gets better.
    Raises ValueError for shapes that do not fit and for a mask without an active entry.
    DMD (arXiv 2311.18828), supplement, algorithm 2.
    """
    same_shape(x_gen=x_gen, gradient=gradient)
    x = x_gen.float()
    # (x - sg(x)) + g, not x - sg(x - g): the same number without losing a small g to the rounding of x - g
    return 0.5 * _mean_square((x - x.detach()) + gradient.detach().float(), mask)


def fake_score_target(x_gen: Tensor, noise: Tensor) -> Tensor:
    """[B, ...] fp32, detached: v = noise - x_gen, the velocity to learn at (1 - sigma) x_gen + sigma noise.

    ``x_gen``, ``noise`` [B, ...]. Raises ValueError for shapes that differ. The fake score's denoising target in DMD
    (arXiv 2311.18828), eq. 6, written for a flow (Lipman et al. 2023, arXiv 2210.02747).
    """
    same_shape(x_gen=x_gen, noise=noise)
    return noise.detach().float() - x_gen.detach().float()


def fake_score_loss(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """[] fp32: mean((v - sg(target))^2), no weight over sigma; the same as the error of x0 over sigma^2.

    ``prediction`` [B, ...] carries the graph, ``target`` [B, ...] is detached here. Raises ValueError for shapes that
    do not fit and for a mask without an active entry. Lipman et al. 2023 (arXiv 2210.02747), conditional flow matching.
    """
    same_shape(prediction=prediction, target=target)
    return _mean_square(prediction.float() - target.detach().float(), mask)


def ode_regression_loss(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """[] fp32: mean over active entries of (prediction - sg(target))^2, towards the ends of the teacher's ODE paths.

    ``prediction``, ``target`` [B, ...]; ``mask`` marks the valid positions (timestep not 0), e.g. [B, F]. Raises
    ValueError for shapes that do not fit and for a mask without an active entry.
    CausVid (arXiv 2412.07772), initialisation of the student by ODE pairs.
    """
    same_shape(prediction=prediction, target=target)
    return _mean_square(prediction.float() - target.detach().float(), mask)


def _mean_square(difference: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        if difference.numel() == 0:
            raise ValueError(f"a mean over no entries: shape {tuple(difference.shape)}")
        return difference.square().mean()
    active = _active(mask, difference)
    count = int(active.sum())
    if count == 0:
        raise ValueError("the mask has no active entry: a loss over nothing would be a silent zero")
    # where, not a product: a masked NaN must not reach the sum
    return torch.where(active, difference, 0.0).square().sum() / count


def _active(mask: Tensor, x: Tensor) -> Tensor:
    """``mask`` as bool of the shape of ``x``: its axes are the leading ones of ``x``."""
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("a mask says which entries count: bool, or 0 and 1")
    fits = 0 < mask.ndim <= x.ndim and all(one in (1, full) for one, full in zip(mask.shape, x.shape, strict=False))
    if not fits:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit {tuple(x.shape)} along its leading axes")
    trailing = [1] * (x.ndim - mask.ndim)
    return (mask != 0).to(x.device).reshape(*mask.shape, *trailing).expand(x.shape)
