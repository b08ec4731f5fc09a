"""Trainer checkpoint state: weights, average, optimizer, scheduler, random states of every rank.

    <group>/shard-00001-model-00003-of-00007.safetensors   tensors of one rank, through torch.distributed.checkpoint
    <group>/trainer.json                                   whole numbers: steps of the optimizer, scheduler and average
    <group>/rank_0.json                                    random state of a rank

Why safetensors: the files that torch.distributed.checkpoint writes by default (``.metadata``, ``__0_0.distcp``) are
pickles, and reading one runs what it says. Its Hugging Face storage writes and reads safetensors with the offsets of
each shard in the header, and reshards as well. Only tensors go there; numbers are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from miles_dmd.checkpoint.manifest import FileEntry, entry_of
from miles_dmd.checkpoint.records import FORMAT, read_trainer, restore_generators
from miles_dmd.errors import CheckpointError, SaveError
from miles_dmd.files import write_synced
from miles_dmd.generators import random_state
from miles_dmd.training.buckets import pack
from miles_dmd.training.shard import like

FILE_BYTES = 256 << 20
"""Most tensors of a file, of all ranks together: what a save holds in memory beside the shards themselves."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Average(Protocol):
    """Moving average of trained parameters."""

    steps: int

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """State that moves with the optimizer steps of one trained role."""

    parameters: Mapping[str, nn.Parameter]
    """Parameters that train, by name."""
    optimizer: torch.optim.Optimizer
    shards: Mapping[str, Tensor] | None = None
    """Tensors that the optimizer holds, by parameter, where these are this rank's shards instead of parameters."""
    scheduler: torch.optim.lr_scheduler.LRScheduler
    average: Average | None = None

    def tensors(self) -> dict[str, Tensor]:
        """This rank's shards, by name: the live memory, not copies."""
        tensors: dict[str, Tensor] = {f"network.{name}": value.detach() for name, value in self.parameters.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value.detach() for name, value in self.average.named_parameters()}
        for name, state in self._optimizer_states():
            whole = self.parameters[name]
            tensors |= {
                f"{moment}.{name}": like(whole, state[moment]) if self.shards else state[moment] for moment in MOMENTS
            }
        return tensors

    def numbers(self) -> dict[str, Any]:
        """Steps taken, for trainer.json."""
        return {
            "parameters": list(self.parameters),
            # a parameter that no gradient has reached yet has no state, and must have none after a resume either
            "optimizer_steps": {name: int(state["step"]) for name, state in self._optimizer_states()},
            "scheduler_steps": self.scheduler.last_epoch,
            "average_steps": self.average.steps if self.average is not None else None,
        }

    def prepare(self, numbers: Mapping[str, Any], where: str) -> None:
        """Take ``numbers``, and make room for the tensors that were saved with them. Raises CheckpointError."""
        self._require_same(numbers, where)
        self._prepare_moments(numbers["optimizer_steps"])
        self._set_scheduler(numbers["scheduler_steps"])
        if self.average is not None:
            self.average.steps = numbers["average_steps"]

    def _optimizer_states(self) -> Iterator[tuple[str, Any]]:
        state, held = self.optimizer.state, self._held()
        return ((name, state[held[name]]) for name in held if held[name] in state)

    def _held(self) -> Mapping[str, Tensor]:
        return self.shards if self.shards is not None else self.parameters

    def _require_same(self, numbers: Mapping[str, Any], where: str) -> None:
        here = self.parameters.keys()
        if apart := sorted(here ^ set(numbers["parameters"])):
            raise CheckpointError(f"{where} holds another network: {apart[0]} is in one of the two only")
        if strange := sorted(numbers["optimizer_steps"].keys() - here):
            raise CheckpointError(f"{where} has steps of {strange[0]}, which is not there")
        if (self.average is None) != (numbers["average_steps"] is None):
            raise CheckpointError(f"{where}: one of checkpoint and run has a moving average, the other has none")

    def _prepare_moments(self, steps: Mapping[str, int]) -> None:
        """Give the optimizer the state that it had, with zeros for moments, through its own ``load_state_dict``."""
        state = self.optimizer.state_dict()
        state["state"] = {
            index: {"step": torch.tensor(float(steps[name])), **{m: torch.zeros_like(value) for m in MOMENTS}}
            for index, (name, value) in enumerate(self._held().items())
            if name in steps
        }
        self.optimizer.load_state_dict(state)

    def _set_scheduler(self, steps: int) -> None:
        """Set the learning rate from the steps taken; how it depends on them is for this run's arguments."""
        self.scheduler.last_epoch, self.scheduler._step_count = steps, steps + 1
        lambdas: list[Any] = self.scheduler.lr_lambdas  # type: ignore[attr-defined]
        rates = [base * rate(steps) for base, rate in zip(self.scheduler.base_lrs, lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State that moves in a trainer: its trained roles by name, none in a group that trains nothing; random state."""

    roles: Mapping[str, RoleState] = field(default_factory=dict)

    def save(self, directory: Path) -> list[FileEntry]:
        """Write this rank's part into ``directory``, which exists; every rank of the group must call it.

        Returns what this rank wrote, with paths below the parent of ``directory``. Raises SaveError.
        """
        rank = dist.get_rank()
        write_tensors(directory, self._tensors())
        try:
            write_synced(directory / f"rank_{rank}.json", _json(random_state()))
            if rank == 0:
                write_synced(directory / "trainer.json", _json(self._numbers()))
            own = [*directory.glob(f"shard-{rank + 1:05d}-*"), directory / f"rank_{rank}.json"]
            own += [directory / "trainer.json"] if rank == 0 else []
            return [entry_of(path, directory.parent) for path in own]
        except OSError as error:
            raise SaveError(f"{directory}: {error.strerror}") from error

    def load(self, directory: Path) -> None:
        """Restore everything that ``save`` wrote, on any number of ranks. Raises CheckpointError."""
        numbers = read_trainer(directory)["roles"]
        if apart := sorted(self.roles.keys() ^ numbers.keys()):
            raise CheckpointError(f"{directory} holds other trained roles: {apart[0]} is in one of the two only")
        for role, state in self.roles.items():
            state.prepare(numbers[role], f"{directory / 'trainer.json'}: {role}")
        read_tensors(directory, self._tensors())
        own = directory / f"rank_{dist.get_rank()}.json"
        if own.is_file():  # of a group that has grown, a new rank keeps its own
            restore_generators(own, "torch")

    def _tensors(self) -> dict[str, Tensor]:
        own = {role: state.tensors() for role, state in self.roles.items()}
        return {f"{role}.{name}": value for role, tensors in own.items() for name, value in tensors.items()}

    def _numbers(self) -> dict[str, Any]:
        roles = {role: state.numbers() for role, state in self.roles.items()}
        return {"format": FORMAT, "ranks": dist.get_world_size(), "roles": roles}


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write every rank's shards in files of at most FILE_BYTES, synced. Raises SaveError, on all ranks if on one."""
    if not tensors:
        return
    writer = dcp.HuggingFaceStorageWriter(str(directory), _files(tensors), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # a BaseException
        raise SaveError(f"{directory}: {_cause(error)}") from error


def read_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` in place, resharding where the ranks are others. Raises CheckpointError."""
    if not tensors:
        return
    try:
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    except CheckpointException as error:
        raise CheckpointError(f"{directory} does not fit this run: {_cause(error)}") from error


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """tensor -> file, counted from 1. The same on all ranks: it depends on whole tensors, not on shards."""
    files = pack({name: value.nbytes for name, value in tensors.items()}, FILE_BYTES)
    return {name: number for number, names in enumerate(files, 1) for name in names}


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return f"rank {rank}: {text}".splitlines()[0]


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
