"""One rank of a trainer group as a Ray actor. Torch is imported when the actor lives."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import ray

from miles_dmd.cluster.supervision.watched import Watched
from miles_dmd.generators import seed_globals

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from miles_dmd.checkpoint.manifest import FileEntry
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.batch import Batch
    from miles_dmd.contracts.external import ExternalData
    from miles_dmd.contracts.loss import LossType
    from miles_dmd.contracts.reports import TrainReport
    from miles_dmd.plan import DistillationPlan
    from miles_dmd.training.compute import Compute

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
COLLECTIVE_MARGIN = 60.0
"""Seconds that ranks wait for each other beyond what the driver waits for them: it is the one to say who is late."""


class TrainerActor(Watched):
    def __init__(self, group: str, rank: int, size: int, timeout: float) -> None:
        super().__init__()
        self.group, self.rank, self.size = group, rank, size
        self.timeout = timedelta(seconds=timeout + COLLECTIVE_MARGIN)

    def open_store(self) -> tuple[str, int]:
        """Open the store where ranks meet, on rank 0; its port is bound at once, so no two groups can pick the same."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        listening = socket.create_server((host, 0))  # the store by itself would listen on every address
        port = listening.getsockname()[1]
        self._store = TCPStore(
            host, port, self.size, is_master=True, wait_for_workers=False, timeout=self.timeout,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        return host, port

    def build(
        self,
        meeting: tuple[str, int],
        args: Args,
        device: str,
        prepared: str,
        plan: DistillationPlan,
        loss_type: LossType,
        horizons: Mapping[str, int],
    ) -> None:
        from miles_dmd import registry
        from miles_dmd.cluster.arrays import send_tensors_as_arrays
        from miles_dmd.training.compute import choose_compute, prepare_process
        from miles_dmd.training.trainer import Trainer

        send_tensors_as_arrays()
        prepare_process(args.cpu_threads)
        seed_globals(args.seed, self.group, self.rank)
        compute = choose_compute(device, args.compute_dtype)
        self._join(meeting, compute)
        self.trainer = Trainer(
            args,
            self.group,
            plan=plan,
            loss_type=loss_type,
            compute=compute,
            prompts=registry.load("modalities", loss_type.modality).torch().open_prompts(prepared),
            horizons=horizons,
        )

    def _join(self, meeting: tuple[str, int], compute: Compute) -> None:
        import torch
        import torch.distributed as dist

        if compute.device.type == "cuda":
            torch.cuda.set_device(compute.device)
        host, port = meeting
        if host == LOOPBACK:
            for backend in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{backend}_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        store = self._store if self.rank == 0 else dist.TCPStore(host, port, self.size, timeout=self.timeout)
        dist.init_process_group(
            compute.backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )

    # Chunks and scores are arguments of their own, not a list of them: Ray has them here when the call starts, small
    # ones in the call itself.

    def train(self, roles: Sequence[str], num_chunks: int, producers: Mapping[str, int], *parts: Any) -> TrainReport:
        """``parts`` are ``num_chunks`` chunks of a batch, then the scores of each of ``producers`` (name -> count)."""
        from miles_dmd.contracts.batch import join
        from miles_dmd.contracts.external import ExternalData

        left = iter(parts)
        batch = join(list(islice(left, num_chunks)))
        scores = {name: ExternalData.join(list(islice(left, count))) for name, count in producers.items()}
        return self.trainer.train(batch, scores, roles)

    def score(self, *chunks: Batch) -> tuple[float, ExternalData]:
        """(seconds, external data): two Ray objects, of which the driver opens the first alone."""
        from miles_dmd.contracts.batch import join

        started = time.perf_counter()
        scores = self.trainer.score(join(chunks))
        return time.perf_counter() - started, scores

    def save(self, directory: Path) -> list[FileEntry]:
        return self.trainer.state.save(directory)

    def load(self, directory: Path) -> None:
        self.trainer.state.load(directory)

    def bucket(self, role: str, averaged: bool, number: int) -> tuple[bool, dict[str, Tensor] | None]:
        """(whether it is the last, a bucket of the role's full weights), asked for in order. The tensors come from rank
        0; the others take part in gathering them."""
        if number == 0:
            self._weights = self.trainer.weights(role, averaged=averaged)
        bucket, last = next(self._weights), number + 1 == len(self.trainer.trained[role].buckets)
        return last, bucket if self.rank == 0 else None
