"""User hooks: --hook package.module:factory, called after every committed student step, after the sample grids.

A factory takes the run's arguments and ``report``, and returns an object with ``after_completed_step(counters, metrics,
executor)``. What it reports within a step stands in that cycle's row of metrics, as ``hook/<name>``. With
``state_dict()``, which JSON takes, and ``load_state_dict(state)`` it is part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from miles_dmd import registry
from miles_dmd.errors import ConfigError
from miles_dmd.plan import DistillationTrainerHooks
from miles_dmd.preflight.hooks import PREFIX
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

Report = Callable[[Mapping[str, float]], None]
"""Takes numbers by name; they must be finite."""
HookFactory = Callable[["Args", Report], DistillationTrainerHooks]


def open_hooks(args: Args, note: Report) -> dict[str, DistillationTrainerHooks]:
    """Dotted name -> hook, in the order of --hook. Raises ConfigError for a factory that returns no hook."""
    return {name: _open(name, args, note) for name in args.hook}


def _open(name: str, args: Args, note: Report) -> DistillationTrainerHooks:
    factory: HookFactory = registry.resolve(name)
    if not callable(factory):
        raise ConfigError(
            f"--hook {name} is {short_repr(factory)}; name a function of (args, report) that returns a hook"
        )

    def report(numbers: Mapping[str, float]) -> None:
        values = {f"{PREFIX}{key}": float(value) for key, value in numbers.items()}
        if odd := [key for key, value in values.items() if not math.isfinite(value)]:
            raise ValueError(f"--hook {name} reports {odd[0]} {values[odd[0]]}, and metrics are finite numbers")
        note(values)

    hook = factory(args, report)
    if not isinstance(hook, DistillationTrainerHooks):
        raise ConfigError(f"--hook {name} returned {short_repr(hook)}, which has no after_completed_step")
    return hook
