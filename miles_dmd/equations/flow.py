"""Rectified-flow parametrisation: clean sample, noise, velocity and sigma.

Rectified flow: x_sigma = (1 - sigma) x0 + sigma eps, with velocity v = eps - x0 and sigma in [0, 1] (Lipman et al.
2023, arXiv 2210.02747; Esser et al. 2024, arXiv 2403.03206, eq. 13). All arithmetic is fp32 and so are the results,
also for half inputs: formed in bf16, the difference of two clean predictions is off by a fifth.
"""

from torch import Tensor

from miles_dmd.equations.shapes import level_of, same_shape

ALPHA_MIN = 1e-3
"""Least alpha that x0 is divided by: there fp32 is right to 3e-5, at 1e-6 only to 3e-2."""


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """[B, ...] fp32: x_sigma = (1 - sigma) x0 + sigma noise.

    ``x0``, ``noise`` [B, ...]; ``sigma`` [B], a number, or broadcastable. Raises ValueError for shapes that do not fit.
    Esser et al. 2024, eq. 13.
    """
    same_shape(x0=x0, noise=noise)
    level = level_of(sigma, x0)
    return (1 - level) * x0.float() + level * noise.float()


def velocity_to_x0(x: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """[B, ...] fp32: x0 = x - sigma v, the clean sample that a velocity at ``x`` = x_sigma points to.

    ``x``, ``velocity`` [B, ...]; ``sigma`` [B], a number, or broadcastable. Raises ValueError for shapes that do not
    fit. From x_sigma = x0 + sigma (eps - x0): Esser et al. 2024, eq. 13.
    """
    same_shape(x=x, velocity=velocity)
    return x.float() - level_of(sigma, x) * velocity.float()


def epsilon_to_x0(x: Tensor, epsilon: Tensor, alpha: Tensor | float, sigma: Tensor | float) -> Tensor:
    """[B, ...] fp32: x0 = (x - sigma eps) / alpha, for x = alpha x0 + sigma eps.

    ``x``, ``epsilon`` [B, ...]; ``alpha``, ``sigma`` [B], numbers, or broadcastable (a flow has alpha = 1 - sigma).
    Raises ValueError for shapes that do not fit and for |alpha| < ALPHA_MIN, where division magnifies rounding.
    Ho et al. 2020, arXiv 2006.11239, eq. 15.
    """
    same_shape(x=x, epsilon=epsilon)
    alpha = level_of(alpha, x)
    least = alpha.abs().min().item()
    if not least >= ALPHA_MIN:  # so that NaN is refused too
        raise ValueError(f"alpha={least:g} is too small to divide by (least {ALPHA_MIN:g}); use a velocity instead")
    return (x.float() - level_of(sigma, x) * epsilon.float()) / alpha


def v_prediction_to_x0(x: Tensor, v: Tensor, alpha: Tensor | float, sigma: Tensor | float) -> Tensor:
    """[B, ...] fp32: x0 = alpha x - sigma v, for x = alpha x0 + sigma eps and v = alpha eps - sigma x0.

    Of a variance-preserving process, alpha^2 + sigma^2 = 1, and not of a flow, whose "v" is eps - x0.
    ``x``, ``v`` [B, ...]; ``alpha``, ``sigma`` [B], numbers, or broadcastable. Raises ValueError for shapes that do not
    fit, and where alpha^2 + sigma^2 is not 1 (to 1e-2, as half levels are rounded).
    Salimans and Ho 2022, arXiv 2202.00512, appendix D.
    """
    same_shape(x=x, v=v)
    alpha, sigma = level_of(alpha, x), level_of(sigma, x)
    if not ((alpha**2 + sigma**2 - 1).abs() <= 1e-2).all():
        raise ValueError("alpha^2 + sigma^2 must be 1 for a v-prediction; a flow's velocity goes to velocity_to_x0")
    return alpha * x.float() - sigma * v.float()


def ode_euler_step(x: Tensor, velocity: Tensor, sigma_from: Tensor | float, sigma_to: Tensor | float) -> Tensor:
    """[B, ...] fp32: x + (sigma_to - sigma_from) v, one Euler step along the flow; no fresh noise.

    ``x`` at ``sigma_from``, ``velocity`` [B, ...]; sigmas [B], numbers, or broadcastable. Raises ValueError for shapes
    that do not fit. Liu et al. 2023, arXiv 2209.03003, section 2.
    """
    same_shape(x=x, velocity=velocity)
    return x.float() + (level_of(sigma_to, x) - level_of(sigma_from, x)) * velocity.float()


def consistency_renoise_step(x0: Tensor, noise: Tensor, sigma_to: Tensor | float) -> Tensor:
    """[B, ...] fp32: (1 - sigma_to) x0 + sigma_to noise, with ``noise`` drawn afresh for this step.

    ``x0`` is the clean prediction of the step before. ``x0``, ``noise`` [B, ...]; ``sigma_to`` [B], a number, or
    broadcastable. Raises ValueError for shapes that do not fit.
    Song et al. 2023, arXiv 2303.01469, algorithm 1, on the rectified flow; DMD2 (arXiv 2405.14867), section 4.4.
    """
    return add_noise(x0, noise, sigma_to)
