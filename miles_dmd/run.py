"""Composition of a run: arguments, plan, trainer groups, controller, hooks; and the command line.

args --> plan --> trainer groups + rollout worker (Ray, or this process) --> executor --> controller --> hooks
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd import registry
from miles_dmd.batches import RolloutBatches
from miles_dmd.checkpoint.store import checkpoint_before, run_directory
from miles_dmd.config.args import Args
from miles_dmd.config.checks import check_args
from miles_dmd.config.cli import PROGRAM, HelpShown, parse_flags
from miles_dmd.config.places import require_cluster
from miles_dmd.config.resume import Resume, open_resume
from miles_dmd.config.runs import clear, own_directory
from miles_dmd.config.trainers import trainer_args
from miles_dmd.contracts.engine import EngineType, Preflight
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.model_card import usage
from miles_dmd.errors import CheckpointError, ConfigError, FormatError, Unanswered
from miles_dmd.executor import GroupExecutor, StartedRun
from miles_dmd.failure import last_checkpoint, tell
from miles_dmd.generators import seed_globals
from miles_dmd.hooks import SampleGrids
from miles_dmd.journal import Journal
from miles_dmd.observe.best_effort import BestEffort
from miles_dmd.observe.console import lasting_console
from miles_dmd.observe.log import setup_logging
from miles_dmd.plan import (
    BatchProvider,
    DistillationPhaseExecutor,
    DistillationPlan,
    DistillationTrainerController,
    DistillationTrainerHooks,
    PhaseRequest,
    TrainerCounters,
    requests_until_student_update,
)
from miles_dmd.prompts import PromptSource
from miles_dmd.report import resolved_run
from miles_dmd.saving import CheckpointSaver, remembering, restore, restore_random
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
        self.args = args
        if args is not None:
            check_args(args)
            self.loss_type: LossType = registry.load("losses", args.loss_type)
            plan = self.loss_type.plan(args)
        assert plan is not None
        self.plan, self.executor, self.batch_provider, self.hooks = plan, executor, batch_provider, hooks
        self.injected = executor is not None
        self.controller_instance: DistillationTrainerController | None = None
        self.saver: CheckpointSaver | None = None
        self.stop = stop or StopRequest()
        self.directory: Path | None = None
        self.resume: Resume | None = None
        self.began = False
        """Whether groups are up, and the directory holds this run and no older one."""
        self._unloadable = False

    @property
    def last_checkpoint(self) -> Path | None:
        """What can be gone on from: the newest of this run, or else the one that it was started from; where that is
        the one that did not load, the one before it."""
        if self._unloadable and self.resume is not None:
            return checkpoint_before(self.resume.directory)
        own = last_checkpoint(self.directory) if self.began and self.directory is not None else None
        return own or (self.resume.directory if self.resume is not None else None)

    def build_controller(self, **observing: Any) -> DistillationTrainerController:
        """The controller over executor and batch provider, made once."""
        missing = [name for name in ("executor", "batch_provider") if getattr(self, name) is None]
        if missing:
            raise NotImplementedError(
                f"no {' and no '.join(missing)}: inject them, or call fit() on a trainer made from args, which "
                "starts groups"
            )
        if self.controller_instance is None:
            assert self.executor is not None
            assert self.batch_provider is not None
            self.controller_instance = DistillationTrainerController(
                self.plan, self.batch_provider, self.executor, self.hooks, **observing
            )
        return self.controller_instance

    @lasting_console()
    def fit(self, num_cycles: int | None = None) -> DistillationTrainerController:
        """Train: ``num_cycles`` more cycles (warm-up cycles count), or from args until --num-rollout student steps."""
        if self.injected or self.args is None:
            controller = self.build_controller()
            if num_cycles is None:
                raise ConfigError("fit() of injected parts needs num_cycles; a run from args knows its --num-rollout")
            controller.run(num_cycles)
            return controller
        if self.controller_instance is not None:
            raise ConfigError("this trainer has run, and its groups are gone; make another one to run again")
        require_cluster(self.args)
        engine_preflight(self.args)
        with own_directory(self.args) as self.directory:
            # within the lock: a run that was at work there a moment ago may have left a later checkpoint
            self.resume = resume = open_resume(self.args)
            if resume is not None:
                resume.verify()
            with started_run(self.args, self.loss_type, self.plan) as (started, prompts):
                clear(self.args, self.directory)
                seed_globals(self.args.seed, "driver")  # hooks draw here, and in a --local run all plug-ins do
                self.began = True
                return self._train(self.args, self.directory, started, prompts, num_cycles, resume)

    def _train(
        self,
        args: Args,
        directory: Path,
        started: StartedRun,
        prompts: PromptSource,
        num_cycles: int | None,
        resume: Resume | None,
    ) -> DistillationTrainerController:
        done = 0 if resume is None else resume.manifest.cycle
        with Journal(args, self.plan, directory, num_cycles, done) as journal:
            executor = GroupExecutor(self.plan, self.loss_type, started, journal.spans)
            grids = SampleGrids(
                args, prompts.texts, directory / "samples", self.loss_type.teacher_sampling(args), journal.note
            )
            earlier = run_directory(resume.directory) if resume is not None else None
            best = KeepBest(args, self.loss_type, directory / BEST_STUDENT, earlier and earlier / BEST_STUDENT)
            extra = self.hooks if isinstance(self.hooks, Sequence) else [self.hooks] if self.hooks else []
            self.executor, self.hooks = executor, [grids, *extra]
            self.batch_provider = batches = RolloutBatches(args, prompts, executor, self._ahead)

            def committed(counters: TrainerCounters, metrics: Mapping[str, Any]) -> None:
                row = journal.committed(counters, metrics)
                best.committed(row, executor)
                saver.committed(counters)  # last: a checkpoint vouches for all that this cycle left

            def rescue(error: BaseException, counters: TrainerCounters, metrics: Mapping[str, Any]) -> bool:
                if isinstance(error, Unanswered):
                    return False
                if journal.told < counters.completed_cycles:  # a hook failed, before the row was told
                    row = journal.committed(counters, metrics)
                    BestEffort("the best student")(lambda: best.committed(row, executor))
                return saver.rescue(counters)

            controller = self.build_controller(
                observer=committed, rescue=rescue, max_consecutive_skipped_cycles=args.max_consecutive_skipped_cycles
            )
            own = {"alarms": journal.alarms, "grids": grids, "best": best, "skips": controller.skips, "draws": batches}
            parts: dict[str, Any] = {"executor": executor, "batches": batches, "prompts": prompts}
            parts["observers"] = {**own, **remembering(extra)}
            self.saver = saver = CheckpointSaver(args, directory, resume=resume, sync_rows=journal.sync, **parts)
            if resume is None:
                grids.draw_teacher(executor)
                grids.draw(0, executor)
            else:
                counters = resume.manifest.counters
                print(f"Going on from {resume.directory}, after {counters['global_step']} student steps", flush=True)
                self._restore(resume, controller=controller, **parts)
                grids.draw_teacher(executor)
                restore_random(resume, executor)
            with self.stop.finishing_cycles() if args.save_interval else contextlib.nullcontext():
                self._play(args, controller, journal, num_cycles)
                saver.finish(controller.counters)
            self.stop.raise_if_requested()
            grids.finish(controller.counters, executor)
            student = export_student(args, self.loss_type, executor, directory / STUDENT)
            grids.draw_exported(directory / STUDENT, student, controller.counters.global_step, executor)
            journal.finish(executor, controller)
            print(usage(registry.load("models", args.model_family).pipeline, directory / STUDENT, student))
        return controller

    def _restore(self, resume: Resume, **parts: Any) -> None:
        try:
            restore(resume, **parts)
        except (CheckpointError, FormatError):
            self._unloadable = True
            raise

    def _play(
        self, args: Args, controller: DistillationTrainerController, journal: Journal, num_cycles: int | None
    ) -> None:
        """All cycles, or those until somebody or an alarm stops the run."""

        def stop() -> bool:
            return self.stop.requested or (args.on_alarm == "stop" and bool(journal.alarms.ringing))

        if num_cycles is None:
            controller.run_until(args.num_rollout, stop)
        else:
            controller.run(num_cycles, stop)
        if args.on_alarm == "stop" and journal.alarms.ringing:
            alarms, step = ", ".join(sorted(journal.alarms.ringing)), controller.counters.global_step
            print(f"Stopped after {step} student steps by --on-alarm stop: {alarms}")

    def _ahead(self, request: PhaseRequest) -> int:
        assert self.args is not None
        counters = self.build_controller().counters
        return requests_until_student_update(self.plan.update_schedule, counters, request, self.args.num_rollout)


def engine_preflight(args: Args) -> str:
    """A line on what the rollout engine needs outside of the run and was found there. Raises ConfigError."""
    engine: EngineType = registry.load("engines", args.rollout_engine)
    if engine.preflight is None:
        return ""
    preflight: Preflight = registry.resolve(engine.preflight)
    return preflight(args)


@contextlib.contextmanager
def started_run(args: Args, loss_type: LossType, plan: DistillationPlan) -> Iterator[tuple[StartedRun, PromptSource]]:
    """Trainer groups, rollout worker and prompts; in this process with --local, else as Ray actors."""
    assert args.prompt_data is not None
    prompts = PromptSource(args.prompt_data, args.seed)
    group_args = trainer_args(args)
    if tuple(group_args) != plan.groups:
        raise ConfigError(
            f"trainers {', '.join(group_args)} are not the plan's groups {', '.join(plan.groups)}, in order"
        )
    # late, because the Ray driver needs no torch and a local run no Ray
    home = importlib.import_module("miles_dmd.local" if args.local else "miles_dmd.cluster.run")
    parts = {"plan": plan, "loss_type": loss_type, "texts": prompts.texts}
    with home.started(args, group_args, horizons=plan.optimizer_steps(args.num_rollout), **parts) as started:
        yield started, prompts


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
            args = parse_flags(argv, program)
            # a dry run is what it shows, and fails where it cannot; a run goes on without a console
            with contextlib.nullcontext() if args.dry_run else lasting_console():
                trainer = DistillationTrainer(args, stop=request)  # checks them, once
                show(resolved_run(args))
                resume = open_resume(args)
                if resume is not None and (why := nothing_left(args, resume)):
                    show(f"\n{why}")
                elif not args.dry_run:
                    trainer.fit()
                else:
                    if found := engine_preflight(args):
                        show(f"\n{found}")
                    if resume is not None:
                        resume.verify()
                        show(f"\n{resume}")
    except HelpShown:
        return 0
    except BaseException as error:  # noqa: BLE001 - the one place where a failure is told; a plug-in may exit, too
        state = (trainer.began, trainer.directory, trainer.last_checkpoint) if trainer else (False, None, None)
        return tell(program, error, *state, signal_number=request.signal)
    return 0
