"""Rollout engine protocol and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from miles_dmd.errors import ConfigError
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from torch import Tensor

    from miles_dmd.config.args import Args
    from miles_dmd.contracts.batch import Batch
    from miles_dmd.training.compute import Compute


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample: which prompt, and which randomness. A modality may ask for more of it."""

    sample_id: int
    prompt_id: int
    seed: int
    """Seed of the sample's own CPU generator."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of an engine that has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineType:
    """The declaration of an engine: what the command line may know of it without torch."""

    builds: Mapping[str, str]
    """Modality that it samples -> dotted name of a ``BuildEngine``."""
    rollouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Rollout strategies of a plan that it plays -> the arguments under which it does: ``{"solver": "euler"}``."""
    capabilities: frozenset[str] = frozenset()
    """Items of a plan's ``required_capabilities`` that it brings; loss type and model family bring theirs."""
    options: type = NoOptions
    """A frozen dataclass of the knobs that only this engine has; they become flags, read as ``args.engine_options``."""
    check: Callable[[Args], None] = lambda args: None
    """Cross-field rules of its own options; raises ConfigError."""
    serve: str | None = None
    """Dotted name of a ``StartServer``, for an engine that speaks to servers."""
    num_servers: Callable[[Args], int] = lambda args: 0
    """Number of servers that the run starts."""
    beyond_node: Callable[[Args], bool] = lambda args: False
    """True where other nodes reach them. Else ``host`` is loopback, and all are on the rollout worker's node."""
    preflight: str | None = None
    """Dotted name of a ``Preflight``, for an engine that needs something outside of the run."""
    tidy: Callable[[Args], None] = lambda args: None
    """Removes what engines that have ended left on disk; called when a run has."""

    def __post_init__(self) -> None:
        """Raises ConfigError for rollouts of another shape, which the door would read."""
        played = self.rollouts.values() if isinstance(self.rollouts, Mapping) else [self.rollouts]
        if not all(isinstance(arguments, Mapping) for arguments in played):
            raise ConfigError(
                f"EngineType: rollouts {short_repr(self.rollouts)} must map strategies to their arguments"
            )
        if not isinstance(self.builds, Mapping) or not self.builds:
            raise ConfigError(f"EngineType: builds {short_repr(self.builds)} must map modalities to dotted names")


class Server(Protocol):
    """A server that the run has started; it ends with the process that started it, whatever ends that."""

    def wait(self) -> str:
        """Wait until it answers; its address. Raises EngineError that shows the end of its log."""
        ...

    def close(self) -> None: ...


class StartServer(Protocol):
    """Start server ``number`` of the run, which listens at ``host``."""

    def __call__(self, args: Args, *, device: str, number: int, host: str) -> Server: ...


class RolloutEngine(Protocol):
    @property
    def notes(self) -> Sequence[str]:
        """Lines about it for the user, shown once, when the run starts."""
        ...

    def generate(self, requests: Sequence[Any]) -> Batch:
        """Sample the modality's requests, in their order. Safe to repeat: it changes nothing."""
        ...

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on, and stamp batches with ``version``. All of them or EngineError."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory back until ``wake``."""
        ...

    def wake(self) -> None: ...

    def health(self) -> Mapping[str, str]:
        """Server, or other source of samples -> its fault, or ""."""
        ...

    def close(self) -> None: ...


class BuildEngine(Protocol):
    def __call__(
        self, args: Args, *, compute: Compute, prompts: Any, texts: Sequence[str], servers: Sequence[str]
    ) -> RolloutEngine:
        """``prompts`` are what the modality has prepared of them, ``texts`` what they say, both by prompt id;
        ``servers`` are the addresses that ``StartServer`` gave."""
        ...


class Preflight(Protocol):
    def __call__(self, args: Args) -> str:
        """Called before anything loads, by a dry run too, which shows the line that it returns: what was found, and
        what was not checked. Raises ConfigError where the run could not start."""
        ...
