"""Trainer group proxy for the driver: every call goes to all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.supervision.waiting import Supervisor
from miles_dmd.cluster.supervision.watched import actor_class
from miles_dmd.cluster.trainer_actor import TrainerActor
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.loss import LossType
    from miles_dmd.plan import DistillationPlan


class RayTrainerGroup:
    """Starts its processes at once; ``build`` makes them load their models, together with other groups'."""

    def __init__(self, name: str, size: int, placement: Placement, supervisor: Supervisor) -> None:
        self.name, self.size, self.supervisor = name, size, supervisor
        actor, limit = actor_class(TrainerActor), supervisor.timeout
        self.actors = {
            f"{name} rank {rank}": actor.options(**placement.options(rank)).remote(name, rank, size, limit)
            for rank in range(size)
        }
        for who, process in self.actors.items():
            supervisor.watch(who, process)

    def build(
        self,
        args: Args,
        device: str,
        prepared: str,
        *,
        plan: DistillationPlan,
        loss_type: LossType,
        horizons: Mapping[str, int],
    ) -> dict[str, ray.ObjectRef]:
        """Let every rank build its trainer; returns the calls to wait for, by rank."""
        first, actor = next(iter(self.actors.items()))
        meeting = self.supervisor.fetch(actor.open_store.remote(), first, "opening the group's meeting point")
        return {
            who: actor.build.remote(meeting, args, device, prepared, plan, loss_type, horizons)
            for who, actor in self.actors.items()
        }

    def train(self, batch: BatchHandle, scores: Mapping[str, ScoreHandle], roles: Sequence[str]) -> list[TrainReport]:
        def call(rank: int, actor: Any) -> ray.ObjectRef:
            chunks = batch.of_rank(rank, self.size)
            parts = {producer: handle.of_rank(rank, self.size) for producer, handle in scores.items()}
            counts = {producer: len(refs) for producer, refs in parts.items()}
            return actor.train.remote(roles, len(chunks), counts, *chunks, *chain.from_iterable(parts.values()))

        return self._each("training", call)

    def score(self, batch: BatchHandle) -> ScoreHandle:
        def call(rank: int, actor: Any) -> Sequence[ray.ObjectRef]:
            return actor.score.options(num_returns=2).remote(*batch.of_rank(rank, self.size))

        _, scores = self._each_of_two("scoring", call)
        return ScoreHandle(self.name, tuple(scores))

    def weights(self, role: str, *, averaged: bool) -> WeightHandle:
        return WeightHandle(self._buckets(role, averaged))

    def _buckets(self, role: str, averaged: bool) -> Iterator[tuple[ray.ObjectRef, bool]]:
        """(bucket, whether it is the last): the next is gathered when this one has been taken."""

        def call(rank: int, actor: Any) -> Sequence[ray.ObjectRef]:
            return actor.bucket.options(num_returns=2).remote(role, averaged, number)

        last, number = False, 0
        while not last:
            (last, *_), buckets = self._each_of_two("gathering weights", call)
            number += 1
            yield buckets[0], last
            del buckets  # before the next one is made

    def save(self, directory: Path) -> list[FileEntry]:
        per_rank = self._each("saving", lambda rank, actor: actor.save.remote(directory))
        return [entry for entries in per_rank for entry in entries]

    def load(self, directory: Path) -> None:
        self._each("loading a checkpoint", lambda rank, actor: actor.load.remote(directory))

    def _each(self, doing: str, call: Callable[[int, Any], ray.ObjectRef]) -> list[Any]:
        """Results of all ranks; ``call(rank, actor)`` starts one."""
        calls = {who: call(rank, actor) for rank, (who, actor) in enumerate(self.actors.items())}
        return self.supervisor.gather(calls, doing)

    def _each_of_two(
        self, doing: str, call: Callable[[int, Any], Sequence[ray.ObjectRef]]
    ) -> tuple[list[Any], list[ray.ObjectRef]]:
        """First results of all ranks, which carry a failure too, and references to their second ones: tensors."""
        pairs = [call(rank, actor) for rank, actor in enumerate(self.actors.values())]
        waiting = dict(zip(self.actors, (first for first, _ in pairs), strict=True))
        return self.supervisor.gather(waiting, doing), [second for _, second in pairs]

    def kill(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)
