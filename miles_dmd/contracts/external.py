"""ExternalData: what one trainer group hands a later one about the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_dmd.errors import ExternalDataError


@dataclass(frozen=True, slots=True)
class ExternalData:
    """``tensors[name]`` has one row a sample, in the order of ``ids``."""

    producer: str
    ids: tuple[int, ...]
    policy_version: int
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            raise ExternalDataError(f"{self.producer!r} scored a sample twice: ids {self.ids[:8]}")
        for name, value in self.tensors.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise ExternalDataError(
                    f"{self.producer!r} hands no row a sample of {name!r}; make it a tensor of rows"
                )
            if len(value) != len(self.ids):
                raise ExternalDataError(
                    f"{self.producer!r} hands {len(value)} rows of {name!r} for {len(self.ids)} samples"
                )

    def require(self, keys: Sequence[str], ids: Sequence[int], policy_version: int) -> ExternalData:
        """The rows of ``ids``, in that order. Refuses a missing key, a missing sample, and another policy version."""
        if missing := sorted(set(keys) - set(self.tensors)):
            raise ExternalDataError(f"{self.producer!r} handed over {sorted(self.tensors)}, without {missing}")
        if self.policy_version != policy_version:
            raise ExternalDataError(
                f"{self.producer!r} scored samples of policy version {self.policy_version}; the batch is of version "
                f"{policy_version}"
            )
        row_of = {sample: row for row, sample in enumerate(self.ids)}
        if unknown := [sample for sample in ids if sample not in row_of]:
            raise ExternalDataError(
                f"{self.producer!r} did not score samples {unknown[:8]}; it scored {self.ids[:8]}..."
            )
        index = torch.tensor([row_of[sample] for sample in ids])
        tensors = {name: self.tensors[name][index.to(self.tensors[name].device)] for name in keys}
        return ExternalData(self.producer, tuple(ids), policy_version, tensors)

    @staticmethod
    def join(parts: Sequence[ExternalData]) -> ExternalData:
        """External data of several ranks of one group, put together."""
        first = parts[0]
        if any((part.producer, part.policy_version) != (first.producer, first.policy_version) for part in parts):
            raise ExternalDataError("external data of different producers or policy versions cannot be joined")
        if any(part.tensors.keys() != first.tensors.keys() for part in parts):
            raise ExternalDataError(f"ranks of {first.producer!r} handed over different keys")
        return ExternalData(
            first.producer,
            tuple(sample for part in parts for sample in part.ids),
            first.policy_version,
            {name: _stacked(first.producer, name, [part.tensors[name] for part in parts]) for name in first.tensors},
        )


def _stacked(producer: str, name: str, parts: Sequence[Tensor]) -> Tensor:
    """Rows of several parts, which ranks and micro-batches made each for itself. Raises ExternalDataError."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        several = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise ExternalDataError(
            f"{producer!r} hands rows of {name!r} of different shapes, {several}; pad them to one in its scorer"
        )
    return torch.cat(list(parts))
