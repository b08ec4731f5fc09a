"""The dtype of an exported student, and the share of what it learned that survives the rounding to it.

With a the average that is exported, s the weights that the student started from, and r(a) the average rounded:

    change kept = 1 - |r(a) - a| / |a - s|        Euclidean norms over all parameters together, at least 0

0 says that the rounding is as large as all that was learned. bf16 has 8 significant bits, so a step of Adam at 1e-5 is
lost on a weight of 0.02, whose neighbours in bf16 are 1.2e-4 away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from miles_dmd.contracts.reports import ENOUGH, ExportReport

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FEWEST_BYTES = 2
Asked = Literal["stored", "bf16", "fp32", "auto"]


def rounded(
    weights: dict[str, Tensor], start: Mapping[str, Tensor], asked: Asked
) -> tuple[dict[str, Tensor], ExportReport]:
    """``weights``, fp32, in the dtype that is ``asked`` for, and what that keeps of their difference to ``start``.

    ``weights`` is emptied on the way, so that no more than one tensor is held twice.
    """
    stored = {name: start[name].dtype for name in weights}
    change = _norm(value - start[name].float() for name, value in weights.items())
    stored_kept = change_kept(weights, stored, change)
    chosen = _chosen(asked, stored, stored_kept)
    report = ExportReport(
        dtype=_named(chosen),
        change_kept=stored_kept if chosen == stored else change_kept(weights, chosen, change),
        stored_dtype=_named(stored),
        stored_change_kept=stored_kept,
    )
    return {name: weights.pop(name).to(dtype) for name, dtype in chosen.items()}, report


def change_kept(weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], change: float) -> float:
    """The share of a change of that norm which ``weights``, fp32, still hold in ``dtypes``: in [0, 1].

    Exact weights keep all, also of no change. A value that overflows keeps nothing.
    """
    error = _norm(value.to(dtypes[name]).float() - value for name, value in weights.items())
    if error == 0:
        return 1.0
    return max(0.0, 1 - error / change) if change > 0 and math.isfinite(error) else 0.0


def _chosen(asked: Asked, stored: Mapping[str, torch.dtype], stored_kept: float) -> dict[str, torch.dtype]:
    if asked == "stored" or (asked == "auto" and stored_kept >= ENOUGH):
        return {name: _storable(dtype) for name, dtype in stored.items()}
    return dict.fromkeys(stored, torch.bfloat16 if asked == "bf16" else torch.float32)


def _storable(dtype: torch.dtype) -> torch.dtype:
    """8 bits are never written: no scale goes with them here, and nothing that was learned is left in them."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= FEWEST_BYTES else torch.float32


def _norm(parts: Iterator[Tensor]) -> float:
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts))


def _named(dtypes: Mapping[str, torch.dtype]) -> str:
    """``bf16``; ``bf16+fp32`` where tensors differ."""
    return "+".join(sorted({NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes.values()}))
