"""Saving and restoring of whole-run checkpoints by the driver.

a cycle is committed, its row of metrics is on the disk
    --> every group's shards | sampled batches that wait | driver.json | args.json for each trainer
    --> manifest.json --> rename --> latest --> older ones removed
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import platform
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles_dmd.batches import RolloutBatches
from miles_dmd.checkpoint.manifest import FileEntry, Manifest, entry_of, with_entries, write_json, write_manifest
from miles_dmd.checkpoint.records import DRIVER_STATE, FORMAT, restore_generators
from miles_dmd.checkpoint.store import FOLDER, CheckpointStore, name_of
from miles_dmd.errors import SaveError
from miles_dmd.executor import GroupExecutor
from miles_dmd.generators import random_state
from miles_dmd.plan import DistillationTrainerController, TrainerCounters
from miles_dmd.plan.frozen import plain
from miles_dmd.preflight.changes import recorded_arguments
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.resume import Resume
from miles_dmd.prompts import PromptSource
from miles_dmd.version import VERSION

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "ray")


@runtime_checkable
class Observer(Protocol):
    """State from one committed cycle to the next that is a part of every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """State as JSON takes it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a checkpoint holds, as the driver reaches it."""

    executor: GroupExecutor
    batches: RolloutBatches
    prompts: PromptSource
    controller: DistillationTrainerController
    observers: Mapping[str, Observer]

    def restore(self, resume: Resume) -> None:
        """Put a verified checkpoint into groups that are up. Raises CheckpointError."""
        driver, directory = resume.driver, resume.directory
        self.controller.load_state_dict(driver["counters"])
        self.prompts.load_state_dict(driver["prompts"])
        self.batches.restore(self.executor.load(directory, driver["policy_version"], len(driver["pending"])))
        for name in self.observers.keys() & driver["observers"].keys():  # a hook of the user's may be new
            self.observers[name].load_state_dict(driver["observers"][name])

    def restore_random(self, resume: Resume) -> None:
        """Restore the global generators of rollout worker and driver; ranks have theirs. Last of all: a --local run has
        one process, in which whatever is restored may draw."""
        self.executor.load_random_state(resume.directory)
        restore_generators(resume.directory / DRIVER_STATE)


class CheckpointSaver:
    """The checkpoints of a run whose groups are up. ``last`` is the newest that it has, or None."""

    def __init__(
        self,
        run: ResolvedRun,
        directory: Path,
        state: RunState,
        resume: Resume | None = None,
        *,
        sync_rows: Callable[[], None] = lambda: None,
    ) -> None:
        """``sync_rows`` returns once the rows of all committed cycles are on the disk, or raises OSError."""
        self.args, self.state, self.executor = run.args, state, state.executor
        directory = directory.resolve()  # workers may have another current directory
        self.sync_rows = sync_rows
        self.store = CheckpointStore(directory / FOLDER, run.args.keep_checkpoints, warn=logger.warning)
        continued = resume is not None and resume.directory.parent == self.store.directory
        self.run = resume.manifest.run if resume is not None and continued else secrets.token_hex(8)
        self.parent = _parent(resume, continued)
        self.last: Path | None = resume.directory if resume is not None else None
        self._tried = self.last
        # what the trainers started from, not what may lie there when a checkpoint is written
        self._arguments = recorded_arguments(run)

    def committed(self, counters: TrainerCounters) -> None:
        """A cycle is committed: save if it is time."""
        interval = self.args.save_interval
        if interval and counters.completed_cycles % interval == 0:
            self.save(counters)

    def finish(self, counters: TrainerCounters) -> None:
        """The run has come to its end: save, unless it never saves."""
        if self.args.save_interval:
            self.save(counters)

    def save(self, counters: TrainerCounters) -> Path | None:
        """The checkpoint of the last committed cycle, written now unless it is there; between cycles only.

        Raises SaveError; with --on-save-failure continue it returns None instead.
        """
        if self.last == self._target(counters) or counters.completed_cycles == 0:
            return self.last
        try:
            return self._publish(counters)
        except (SaveError, OSError) as error:
            self._failed(counters, error)
            return None

    def rescue(self, counters: TrainerCounters) -> bool:
        """Save the last committed cycle of a run that is about to end by something else than its weights; whether it
        is saved. Raises SaveError, OSError, or what the groups raise."""
        if self.args.save_interval and self._tried != self._target(counters):
            self._publish(counters)
        return self.last == self._target(counters)

    def _target(self, counters: TrainerCounters) -> Path:
        return self.store.directory / name_of(counters.completed_cycles)

    def _publish(self, counters: TrainerCounters) -> Path:
        self._tried = target = self._target(counters)
        with self.executor.spans.span("save", group="driver"):
            self._write(counters)
        self.last = target
        return target

    def _failed(self, counters: TrainerCounters, error: SaveError | OSError) -> None:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        safe = f"the last whole one is {self.last}" if self.last else "there is none before it"
        message = f"the checkpoint of cycle {counters.completed_cycles} could not be written ({reason}); {safe}"
        if self.args.on_save_failure == "stop":
            raise SaveError(f"{message}; make room, or go on without by --on-save-failure continue") from error
        logger.warning("%s; the run goes on", message)

    def _write(self, counters: TrainerCounters) -> None:
        self.sync_rows()  # a checkpoint vouches for the numbers of its cycles
        with self.store.writing(counters.completed_cycles) as staging:
            written = self.executor.save(staging, self.state.batches.pending())
            _require_visible(staging, written)
            documents = {f"{name}/args.json": self._arguments[name] for name in self.executor.group_sizes}
            documents |= {"driver.json": self._driver(counters), DRIVER_STATE: random_state()}
            for path, content in documents.items():
                write_json(staging / path, content)
                written.append(entry_of(staging / path, staging))
            write_manifest(staging, with_entries(self._manifest(counters), written))

    def _driver(self, counters: TrainerCounters) -> dict[str, Any]:
        pending = self.state.batches.pending()
        return {
            "format": FORMAT,
            "run": self.run,
            "seed": self.args.seed,
            "counters": dataclasses.asdict(counters),
            "prompts": self.state.prompts.state_dict(),
            "policy_version": self.executor.policy_version,
            "pending": [{"samples": len(batch.ids), "policy_version": batch.policy_version} for batch in pending],
            "plan": plain(self.executor.plan),
            "observers": {name: observer.state_dict() for name, observer in self.state.observers.items()},
        }

    def _manifest(self, counters: TrainerCounters) -> Manifest:
        plan = self.executor.plan
        return Manifest(
            run=self.run,
            parent=self.parent,
            loss_type=self.args.loss_type,
            plan={"name": plan.name, "version": plan.version, "fingerprint": plan.fingerprint},
            counters=dataclasses.asdict(counters),
            policy_version=self.executor.policy_version,
            groups=self.executor.group_sizes,
            versions=installed_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=(),
        )


def remembering(hooks: Mapping[str, object]) -> dict[str, Observer]:
    """The user hooks that are part of a checkpoint: they have both methods of an Observer."""
    return {name: hook for name, hook in hooks.items() if isinstance(hook, Observer)}


def installed_versions() -> Mapping[str, str]:
    found = {"miles_dmd": VERSION, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _parent(resume: Resume | None, continued: bool) -> str:
    if resume is None:
        return ""
    return resume.manifest.parent if continued else f"{resume.manifest.run}@{resume.manifest.cycle}"


def _require_visible(staging: Path, written: list[FileEntry]) -> None:
    for entry in written:
        path = staging / entry.path
        if not path.is_file() or path.stat().st_size != entry.size:
            raise SaveError(f"{path} was written on a node and is not seen from here: --save must be on a shared path")
