"""Batch prefetching: all batches that one student samples, from one engine call after its update.

The student does not change between its own updates, so every fake-score batch of a cycle and the next student batch
can be sampled together: nothing is stale, and the engine wakes once a cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_dmd.executor import GroupExecutor
from miles_dmd.handles import BatchHandle
from miles_dmd.plan import PhaseRequest
from miles_dmd.prompts import PromptSource

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.modality import Modality


class RolloutBatches:
    """A ``BatchProvider``: ``ahead(request)`` says how many batches the student will sample before it changes.

    An observer, too: a checkpoint tells how many batches were drawn of the present size, and since which prompt, so
    that the position in the prompts can be checked by arithmetic.
    """

    def __init__(
        self,
        args: Args,
        modality: Modality,
        prompts: PromptSource,
        executor: GroupExecutor,
        ahead: Callable[[PhaseRequest], int],
    ) -> None:
        self.args, self.modality, self.prompts, self.executor, self.ahead = args, modality, prompts, executor, ahead
        self._ready: deque[BatchHandle] = deque()
        self._since, self._drawn = prompts.cursor, 0

    def next(self, request: PhaseRequest) -> BatchHandle:
        if not self._ready:
            size, count = self.args.rollout_batch_size, self.ahead(request)
            requests = [self.modality.requests(self.args, self.prompts.next(size)) for _ in range(count)]
            self._ready.extend(self.executor.generate(requests))
            self._drawn += len(requests)
        return self._ready.popleft()

    def pending(self) -> tuple[BatchHandle, ...]:
        """Batches that are sampled and not yet used, in order."""
        return tuple(self._ready)

    def restore(self, pending: Sequence[BatchHandle]) -> None:
        """Go on with ``pending``, those of a checkpoint."""
        self._ready = deque(pending)
        self._since, self._drawn = self.prompts.cursor, 0

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.args.rollout_batch_size, "since": self._since, "batches": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Batches of another size are counted from here on."""
        if state["size"] == self.args.rollout_batch_size:
            self._since, self._drawn = state["since"], state["batches"]
