"""Composition of a run: trainer groups, executor, controller, observers; and the command line.

args --> resolve --> start groups and rollout worker --> restore --> cycles --> export
         (door)      (local, or Ray)                    |  rollout: batches of samples
                                                        |  executor: score, train, weights to the engine
                                                        |  commit: sample grids, hooks, metrics, checkpoint
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd import registry
from miles_dmd.batches import RolloutBatches
from miles_dmd.checkpoint.store import checkpoint_before, run_directory
from miles_dmd.config.args import Args
from miles_dmd.config.cli import PROGRAM, HelpShown, parse_args
from miles_dmd.contracts.engine import Preflight
from miles_dmd.contracts.modality import Samples
from miles_dmd.errors import CheckpointError, ConfigError, FormatError
from miles_dmd.executor import GroupExecutor, StartedRun
from miles_dmd.failure import last_checkpoint, report_failure
from miles_dmd.generators import seed_globals
from miles_dmd.hooks import open_hooks
from miles_dmd.observe.console import lasting_console
from miles_dmd.observe.log import setup_logging
from miles_dmd.observer import CommitObserver
from miles_dmd.plan import (
    BatchProvider,
    DistillationPhaseExecutor,
    DistillationPlan,
    DistillationTrainerController,
    DistillationTrainerHooks,
    PhaseRequest,
    requests_until_student_update,
)
from miles_dmd.preflight.places import require_cluster
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.resume import Resume, open_resume
from miles_dmd.preflight.rules import resolve
from miles_dmd.preflight.run_directory import clear, own_directory
from miles_dmd.prompts import PromptSource
from miles_dmd.report import run_tables, unchecked
from miles_dmd.run_logger import RunLogger
from miles_dmd.saving import CheckpointSaver, Observer, RunState, remembering
from miles_dmd.signals import StopRequest, listening
from miles_dmd.streams import show
from miles_dmd.students import BEST_STUDENT, STUDENT, KeepBest, export_student, nothing_left


class DistillationTrainer:
    """A run, from ``args``; or the control plane alone, from a ``plan`` and parts of your own.

    ``DistillationTrainer(args).fit()`` starts groups, trains, exports. With ``executor`` and ``batch_provider``
    injected nothing is started: ``fit(num_cycles)`` plays the plan on them (the fakes of ``miles_dmd.plan`` will do).
    """

    def __init__(
        self,
        args: Args | None = None,
        *,
        plan: DistillationPlan | None = None,
        executor: DistillationPhaseExecutor | None = None,
        batch_provider: BatchProvider | None = None,
        hooks: DistillationTrainerHooks | Sequence[DistillationTrainerHooks] | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        if (args is None) == (plan is None):
            raise ConfigError("DistillationTrainer takes either args, from which its plan follows, or a plan; not both")
        if (executor is None) != (batch_provider is None):
            raise ConfigError("executor and batch_provider come together: the batches of one are what the other plays")
        self.resolved: ResolvedRun | None = None if args is None else resolve(args)
        plan = self.resolved.plan if self.resolved else plan
        assert plan is not None
        self.plan, self.executor, self.batch_provider, self.hooks = plan, executor, batch_provider, hooks
        self.injected = executor is not None
        self.controller_instance: DistillationTrainerController | None = None
        self.saver: CheckpointSaver | None = None
        self.stop = stop or StopRequest()
        self.directory: Path | None = None
        self.resume: Resume | None = None
        self.began = False
        """True once groups are up, and the directory holds this run and no older one."""
        self._unloadable = False

    @property
    def last_checkpoint(self) -> Path | None:
        """The checkpoint to go on from: the newest of this run, or else the one that it was started from; where that
        is the one that did not load, the one before it."""
        if self._unloadable and self.resume is not None:
            return checkpoint_before(self.resume.directory)
        own = last_checkpoint(self.directory) if self.began and self.directory is not None else None
        return own or (self.resume.directory if self.resume is not None else None)

    def build_controller(self) -> DistillationTrainerController:
        """The controller over executor and batch provider, made once."""
        missing = [name for name in ("executor", "batch_provider") if getattr(self, name) is None]
        if missing:
            raise NotImplementedError(
                f"no {' and no '.join(missing)}: inject them, or call fit() on a trainer made from args, which "
                "starts groups"
            )
        if self.controller_instance is None:
            skips = self.resolved.args.max_consecutive_skipped_cycles if self.resolved else 0
            self.controller_instance = DistillationTrainerController(
                self.plan, self.batch_provider, self.executor, self.hooks, max_consecutive_skipped_cycles=skips
            )
        return self.controller_instance

    @lasting_console()
    def fit(self, num_cycles: int | None = None) -> DistillationTrainerController:
        """Train: ``num_cycles`` more cycles (warm-up cycles count), or from args until --num-rollout student steps."""
        if self.injected or self.resolved is None:
            controller = self.build_controller()
            if num_cycles is None:
                raise ConfigError("fit() of injected parts needs num_cycles; a run from args knows its --num-rollout")
            controller.run(num_cycles)
            return controller
        if self.controller_instance is not None:
            raise ConfigError("this trainer has run, and its groups are gone; make another one to run again")
        run = self.resolved
        require_cluster(run.args)
        outside(run)
        with own_directory(run.args) as self.directory:
            # within the lock: a run that was at work there a moment ago may have left a later checkpoint
            self.resume = open_resume(run)
            if self.resume is not None:
                self.resume.verify()
            prompts = PromptSource(run.args.prompt_data or "", run.args.seed)
            with started_run(run, prompts.texts) as started:
                clear(run.args, self.directory)
                seed_globals(run.args.seed, "driver")  # hooks draw here, and in a --local run all plug-ins do
                self.began = True
                return self._train(run, self.directory, started, prompts, num_cycles)

    def _train(
        self, run: ResolvedRun, directory: Path, started: StartedRun, prompts: PromptSource, num_cycles: int | None
    ) -> DistillationTrainerController:
        """Restore, train, save, export, in this order, with groups that are up."""
        with RunLogger(run, directory, num_cycles, self.resume) as logger:
            executor = GroupExecutor(run.plan, run.loss_type, started, logger.spans)
            samples = run.modality.samples(run, prompts.texts, directory / "samples", logger.note)
            controller, saver = self._composed(run, directory, executor, prompts, samples, logger)
            self._begin(saver.state, samples)
            with self.stop.finishing_cycles() if run.args.save_interval else contextlib.nullcontext():
                self._play(run.args, controller, logger, num_cycles)
                saver.finish(controller.counters)
            self.stop.raise_if_requested()
            samples.finish(controller.counters, executor)
            student = export_student(run, executor, directory / STUDENT)
            samples.draw_exported(directory / STUDENT, student, controller.counters.global_step, executor)
            logger.finish(executor, controller)
            print(run.modality.usage(run, directory / STUDENT, student))
        return controller

    def _composed(
        self,
        run: ResolvedRun,
        directory: Path,
        executor: GroupExecutor,
        prompts: PromptSource,
        samples: Samples,
        logger: RunLogger,
    ) -> tuple[DistillationTrainerController, CheckpointSaver]:
        """The controller over all that hears of a committed cycle, and the saver of the whole run's state."""
        hooks = self._hooks_by_name(run.args, logger.note)
        batches = RolloutBatches(run.args, run.modality, prompts, executor, self._ahead)
        self.executor, self.batch_provider, self.hooks = executor, batches, [samples, *hooks.values()]
        controller = self.build_controller()
        best = KeepBest(run, directory / BEST_STUDENT, _beside(self.resume, BEST_STUDENT))
        observers: dict[str, Observer] = {
            "alarms": logger.alarms, "grids": samples, "best": best, "skips": controller.skips, "draws": batches,
        }  # fmt: skip
        state = RunState(executor, batches, prompts, controller, observers | remembering(hooks))
        self.saver = saver = CheckpointSaver(run, directory, state, self.resume, sync_rows=logger.sync)
        watch = CommitObserver(logger, best, saver, executor)
        controller.observer, controller.rescue = watch.committed, watch.rescue
        return controller, saver

    def _hooks_by_name(self, args: Args, note: Callable[[Mapping[str, float]], None]) -> dict[str, Any]:
        """Hooks of the user's own in their order: those of --hook, then those given in Python."""
        given = self.hooks if isinstance(self.hooks, Sequence) else [self.hooks] if self.hooks else []
        return open_hooks(args, note) | {f"hook_{number}": hook for number, hook in enumerate(given)}

    def _begin(self, state: RunState, samples: Samples) -> None:
        """Restore the checkpoint that the run goes on from, or draw the student as it is before its first step."""
        if self.resume is None:
            samples.draw_teacher(state.executor)
            samples.draw(0, state.executor)
            return
        steps = self.resume.manifest.counters["global_step"]
        print(f"Going on from {self.resume.directory}, after {steps} student steps", flush=True)
        try:
            state.restore(self.resume)
        except (CheckpointError, FormatError):
            self._unloadable = True
            raise
        samples.draw_teacher(state.executor)
        state.restore_random(self.resume)

    def _play(
        self, args: Args, controller: DistillationTrainerController, logger: RunLogger, num_cycles: int | None
    ) -> None:
        """All cycles, or those until somebody or an alarm stops the run."""

        def stop() -> bool:
            return self.stop.requested or (args.on_alarm == "stop" and bool(logger.alarms.ringing))

        if num_cycles is None:
            controller.run_until(args.num_rollout, stop)
        else:
            controller.run(num_cycles, stop)
        if args.on_alarm == "stop" and logger.alarms.ringing:
            alarms, step = ", ".join(sorted(logger.alarms.ringing)), controller.counters.global_step
            print(f"Stopped after {step} student steps by --on-alarm stop: {alarms}")

    def _ahead(self, request: PhaseRequest) -> int:
        """Batches that the student samples before its next update."""
        assert self.resolved is not None
        counters = self.build_controller().counters
        return requests_until_student_update(
            self.plan.update_schedule, counters, request, self.resolved.args.num_rollout
        )


def outside(run: ResolvedRun) -> str:
    """A line for each thing that engine and loss type need outside of the run, and found there. Raises ConfigError."""
    found = []
    for name in filter(None, (run.engine.preflight, run.loss_type.preflight)):
        preflight: Preflight = registry.resolve(name)
        found.append(preflight(run.args))
    return "\n".join(filter(None, found))


def started_run(run: ResolvedRun, texts: Sequence[str]) -> contextlib.AbstractContextManager[StartedRun]:
    """Trainer groups and rollout worker; in this process with --local, else as Ray actors."""
    # late, because the Ray driver needs no torch and a local run no Ray
    home = importlib.import_module("miles_dmd.local" if run.args.local else "miles_dmd.cluster.run")
    started: contextlib.AbstractContextManager[StartedRun] = home.started(run, texts)
    return started


def _beside(resume: Resume | None, name: str) -> Path | None:
    """``name`` in the directory of the run whose checkpoint this one goes on from."""
    directory = run_directory(resume.directory) if resume is not None else None
    return None if directory is None else directory / name


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """The command line. 0: done; 1: the run failed; 2: it was asked for what cannot be, and nothing was written;
    129, 130 and 143: it was told to stop, by SIGHUP, SIGINT or SIGTERM."""
    setup_logging()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's is another, and shows everything
            stream.reconfigure(errors="backslashreplace")  # a path may hold what it cannot show
    request, trainer = StopRequest(), None
    try:
        with listening(request):
            args = parse_args(argv, program)
            # a dry run is what it shows, and fails where it cannot; a run goes on without a console
            with contextlib.nullcontext() if args.dry_run else lasting_console():
                trainer = DistillationTrainer(args, stop=request)
                assert trainer.resolved is not None
                run = trainer.resolved
                show(run_tables(run))
                if why := nothing_left(run):
                    show(f"\n{why}")
                elif not args.dry_run:
                    trainer.fit()
                else:
                    if found := outside(run):
                        show(f"\n{found}")
                    if run.resume is not None:
                        run.resume.verify()
                        show(f"\n{run.resume}")
                    show(f"\n{unchecked(run)}")
    except HelpShown:
        return 0
    except BaseException as error:  # noqa: BLE001 - the one place where a failure is told; a plug-in may exit, too
        state = (trainer.began, trainer.directory, trainer.last_checkpoint) if trainer else (False, None, None)
        return report_failure(program, error, *state, signal_number=request.signal)
    return 0
