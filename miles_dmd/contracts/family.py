"""Model family contract: a declaration without torch, and the code that computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What every modality's families declare, read from a directory's JSON files and weight headers alone.

    Each modality adds what its machinery asks of a family, and how a directory is read: the functions below that raise
    NotImplementedError here.
    """

    name: str
    network_component: str = ""
    """The folder of the network that is distilled; "" where the directory itself is that."""
    shard_blocks: tuple[str, ...] = ()
    """Class names of the blocks that FSDP shards one by one; where it names none, those that the network names."""
    torch_module: str
    """Dotted name of the module that implements ``FamilyCode`` and what its modality adds to it."""
    buffer_bytes: Callable[[Mapping[str, Any]], int] = lambda config: 0
    """Bytes of the network's buffers, which every rank holds whole, from its config.json."""
    saved_buffers: tuple[str, ...] = ()
    """Names of those buffers that weight files hold beside the parameters."""
    capabilities: frozenset[str] = frozenset()
    """Items of a plan's ``required_capabilities`` that it brings, such as ``autoregressive``."""

    @property
    def modality(self) -> str:
        """The modality that it belongs to."""
        raise NotImplementedError

    def blocks(self, network: nn.Module) -> tuple[str, ...]:
        """Class names of the blocks of ``network`` that FSDP shards one by one."""
        return self.shard_blocks or tuple(getattr(network, "_no_split_modules", None) or ())

    def count_parameters(self, directory: Path) -> int:
        """Exact number of the network's parameters, of a directory without weights."""
        raise NotImplementedError

    def require(self, directory: Path, *, weights: bool) -> None:
        """Raises ConfigError unless ``directory`` is a whole model of the family, with all ``weights`` if asked."""
        raise NotImplementedError

    def require_alike(self, directory: Path, other_flag: str, other: Path, known: Path | None) -> None:
        """Raises ConfigError unless two networks of a run can look at each other's samples; the folder ``known``
        remembers digests of large files."""
        raise NotImplementedError

    def lacking(self, directory: Path) -> list[str]:
        """Parts of which only the configuration is there: a dry run needs no more, and a run refuses them."""
        raise NotImplementedError

    def fingerprint(self, directory: Path, known: Path | None) -> str:
        """SHA-256 over all that makes up a model of the family; ``known`` as above."""
        raise NotImplementedError

    def distilled(self, directory: Path) -> str:
        """By what a model is seen to be distilled already; empty where it is not."""
        raise NotImplementedError

    @property
    def mark(self) -> str:
        """Name of the file by which a directory of the family is known."""
        raise NotImplementedError

    def code(self) -> Any:
        """The module that computes; each modality says by a protocol what it holds."""
        return cast("FamilyCode", importlib.import_module(self.torch_module))


class FamilyCode(Protocol):
    """The part that knows torch: functions of a module. None of it is about losses, roles or Ray."""

    def build_network(self, directory: Path) -> nn.Module:
        """The network of ``directory``'s config.json; call it under ``init_empty_weights``."""
        ...
