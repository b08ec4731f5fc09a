"""Samples dealt out to ranks and micro-batches. Whole numbers only."""

from __future__ import annotations

from miles_dmd.errors import ConfigError
from miles_dmd.validators import count


def rows_of_rank(num_samples: int, rank: int, world_size: int) -> range:
    """The rows of a global batch that ``rank`` holds: contiguous, in rank order, equally many on every rank."""
    count("num_samples", num_samples, 1)
    count("world_size", world_size, 1)
    if count("rank", rank) >= world_size:
        raise ConfigError(f"rank {rank} is none of {world_size} ranks; they count from 0")
    rows, left_over = divmod(num_samples, world_size)
    if left_over:
        near = [multiple for multiple in (rows * world_size, (rows + 1) * world_size) if multiple]
        nearest = min(near, key=lambda multiple: abs(multiple - num_samples))
        raise ConfigError(f"{num_samples} samples do not divide evenly over {world_size} ranks; {nearest} does")
    return range(rank * rows, (rank + 1) * rows)


def micro_batches(num_samples: int, micro_batch_size: int) -> list[range]:
    """A rank's rows in pieces of ``micro_batch_size``; the last may be shorter."""
    count("num_samples", num_samples)
    count("micro_batch_size", micro_batch_size, 1)
    starts = range(0, num_samples, micro_batch_size)
    return [range(start, min(start + micro_batch_size, num_samples)) for start in starts]
