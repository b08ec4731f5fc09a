"""Trainer group proxy for the driver: every call goes to all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.trainer_actor import TrainerActor
from miles_dmd.cluster.waiting import Supervisor, names
from miles_dmd.cluster.watched import actor_class
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle


class RayTrainerGroup:
    """Starts its processes at once; ``build`` makes them load their models, together with other groups'."""

    def __init__(self, name: str, size: int, placement: Placement, supervisor: Supervisor) -> None:
        self.name, self.size, self.supervisor = name, size, supervisor
        actor, limit = actor_class(TrainerActor), supervisor.timeout
        self.actors = [actor.options(**placement.options(rank)).remote(name, rank, size, limit) for rank in range(size)]
        for who, process in zip(names(name, size), self.actors, strict=True):
            supervisor.watch(who, process)

    def build(self, args: Any, device: str, **parts: Any) -> dict[str, ray.ObjectRef]:
        """Calls to wait for, by rank; ``parts`` are the trainer's plan, loss type, prompt table and horizons."""
        who = names(self.name, self.size)
        meeting = self.supervisor.fetch(self.actors[0].open_store.remote(), who[0], "opening the group's meeting point")
        return {
            name: actor.build.remote(meeting, args, device, **parts)
            for name, actor in zip(who, self.actors, strict=True)
        }

    def train(self, batch: BatchHandle, scores: Mapping[str, ScoreHandle], roles: Sequence[str]) -> list[TrainReport]:
        def call(rank: int, actor: Any) -> ray.ObjectRef:
            chunks = batch.of_rank(rank, self.size)
            parts = {producer: handle.of_rank(rank, self.size) for producer, handle in scores.items()}
            counts = {producer: len(refs) for producer, refs in parts.items()}
            return actor.train.remote(roles, len(chunks), counts, *chunks, *chain.from_iterable(parts.values()))

        return self._each("training", call)

    def score(self, batch: BatchHandle) -> ScoreHandle:
        # two results a rank: a number to wait for, which carries a failure too, and tensors that stay unopened
        pairs = [
            actor.score.options(num_returns=2).remote(*batch.of_rank(rank, self.size))
            for rank, actor in enumerate(self.actors)
        ]
        waiting = dict(zip(names(self.name, self.size), (seconds for seconds, _ in pairs), strict=True))
        self.supervisor.gather(waiting, "scoring")
        return ScoreHandle(self.name, tuple(scores for _, scores in pairs))

    def weights(self, role: str, *, averaged: bool) -> WeightHandle:
        return WeightHandle(self._buckets(role, averaged))

    def _buckets(self, role: str, averaged: bool) -> Iterator[tuple[ray.ObjectRef, bool]]:
        """(bucket, whether it is the last): the next is gathered when this one has been taken."""
        last, number = False, 0
        while not last:
            # two results a rank: a truth to wait for, and rank 0's tensors, which stay unopened
            pairs = [actor.bucket.options(num_returns=2).remote(role, averaged, number) for actor in self.actors]
            waiting = dict(zip(names(self.name, self.size), (told for told, _ in pairs), strict=True))
            last, number = self.supervisor.gather(waiting, "gathering weights")[0], number + 1
            yield pairs[0][1], last
            del pairs  # before the next one is made

    def save(self, directory: Path) -> list[FileEntry]:
        per_rank = self._each("saving", lambda rank, actor: actor.save.remote(directory))
        return [entry for entries in per_rank for entry in entries]

    def load(self, directory: Path) -> None:
        self._each("loading a checkpoint", lambda rank, actor: actor.load.remote(directory))

    def _each(self, doing: str, call: Any) -> list[Any]:
        refs = [call(rank, actor) for rank, actor in enumerate(self.actors)]
        return self.supervisor.gather(dict(zip(names(self.name, self.size), refs, strict=True)), doing)

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
