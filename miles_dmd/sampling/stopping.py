"""The step at which the rollout of each sample stops."""

from __future__ import annotations

from hashlib import blake2b

from miles_dmd.validators import choice, count

POLICIES = ("uniform", "stratified", "cycle")


def stop_steps(policy: str, num_samples: int, num_steps: int, *, seed: int, first: int = 0) -> tuple[int, ...]:
    """A step in [0, num_steps) for each sample of a global batch, the same on every machine and Python.

    ``uniform``: drawn independently, from the sample's own draw. ``stratified``: over the batch every step occurs
    equally often, give or take one, in a drawn order: less variance than uniform at the same law. ``cycle``: the global
    index modulo ``num_steps``, nothing drawn. ``first`` is the global index of the batch's first sample.
    """
    choice("--stop-step-policy", policy, POLICIES)
    count("num_samples", num_samples)
    count("num_steps", num_steps, 1)
    samples = range(count("first", first), first + num_samples)
    if policy == "cycle":
        return tuple(sample % num_steps for sample in samples)
    if policy == "uniform":
        return tuple(_draw(seed, "sample", sample) % num_steps for sample in samples)
    steps = sorted(range(num_steps), key=lambda step: _draw(seed, "step", step))
    places = sorted(range(num_samples), key=lambda place: _draw(seed, "sample", first + place))
    stops = dict(zip(places, (steps[i % num_steps] for i in range(num_samples)), strict=True))
    return tuple(stops[place] for place in range(num_samples))


def _draw(seed: int, what: str, index: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{what}/{index}".encode(), digest_size=8).digest())
