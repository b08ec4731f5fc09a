"""Preflight of user hooks: --hook names factories that exist, each once. None is imported."""

from __future__ import annotations

from miles_dmd.errors import ConfigError, NotFound
from miles_dmd.preflight.dotted import require_defined
from miles_dmd.preflight.resolved import ResolvedRun

PREFIX = "hook/"
"""Prefix of the metrics that user hooks report."""


def check_hooks(run: ResolvedRun) -> None:
    names = run.args.hook
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--hook {twice[0]} is there twice; give it once")
    for name in names:
        try:
            require_defined(name)
        except NotFound as error:
            raise ConfigError(f"--hook {error}") from error
