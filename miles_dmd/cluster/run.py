"""Start and shutdown of all Ray processes of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import ray

from miles_dmd.cluster.placement import own_python, place
from miles_dmd.cluster.preflight import check_nodes
from miles_dmd.cluster.rollout_actor import RayRollouts
from miles_dmd.cluster.server_actor import RayServer, serve_all
from miles_dmd.cluster.supervision.session import every, ray_session, raylet_stderr
from miles_dmd.cluster.supervision.timed_calls import LEAVING
from miles_dmd.cluster.supervision.waiting import TICK, Supervisor
from miles_dmd.cluster.trainer_group import RayTrainerGroup
from miles_dmd.contracts.engine import EngineType
from miles_dmd.executor import StartedRun
from miles_dmd.observe.count import Count
from miles_dmd.preflight.resolved import ResolvedRun

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


@contextlib.contextmanager
def started(run: ResolvedRun, texts: Sequence[str]) -> Iterator[StartedRun]:
    """Trainer groups and rollout worker, built and ready; gone when the block ends, however it ends."""
    args, student, engine = run.args, run.student, run.engine
    sizes = {name: own.num_trainer_ranks for name, own in run.trainers.items()}
    print(f"Starting Ray{f' at {args.ray_address}' if args.ray_address else ''} ...", flush=True)
    limit, timeout = f"--placement-timeout {args.placement_timeout:g}", args.placement_timeout
    with _tidied(student, engine), ray_session(args.ray_address, timeout, args.ray_auth_mode) as session:
        ask, files = session.calls.run, sorted(str(path / run.family.mark) for path in run.directories)
        for node in ask("looking at the nodes", timeout + LEAVING, lambda: check_nodes(files, timeout), limit):
            print(f"  {node.node}: miles_dmd {node.version}, {node.free_gib:.1f} GiB of memory free", flush=True)
        num_servers = engine.num_servers(args)
        python = own_python() if session.address is None else None
        reserve = partial(place, sizes, args.device, args.cpu_threads, timeout, servers=num_servers, python=python)
        placement = ask("reserving the bundles", timeout + LEAVING, reserve, limit)
        died = every(TICK, session.died)
        # of a joined cluster the process may be on another node, whose raylet is not to be heard here
        stderr = raylet_stderr if session.address is None else lambda: ""
        supervisor = Supervisor(args.remote_timeout, died, start_timeout=timeout, raylet_stderr=stderr)
        groups: dict[str, RayTrainerGroup] = {}
        others: list[RayRollouts | RayServer] = []
        try:
            servers: list[RayServer] = []
            for number in range(num_servers):
                servers.append(RayServer(student, placement, number, supervisor))
                others.append(servers[-1])
            rollouts = RayRollouts(placement, supervisor)
            others.append(rollouts)
            for name, size in sizes.items():
                groups[name] = RayTrainerGroup(name, size, placement, supervisor)
            supervisor.await_start()
            prepared = rollouts.prepare(args, placement.device, texts)
            # then engine and trainers in turn, as they take turns on the device ever after
            urls = serve_all(servers, supervisor)
            supervisor.gather(rollouts.build(student, placement.device, prepared, texts, urls), "loading models")
            for note in rollouts.notes():
                print(note, flush=True)
            rollouts.sleep()
            print("Loading models ...", flush=True)
            calls: dict[str, ray.ObjectRef] = {}
            for name, group in groups.items():
                calls |= group.build(
                    run.trainers[name],
                    placement.device,
                    prepared,
                    plan=run.plan,
                    loss_type=run.loss_type,
                    horizons=run.horizons,
                )
            supervisor.gather(calls, "loading models", Count("processes that have loaded models", len(calls)).at)
            yield StartedRun(groups, rollouts)
        finally:
            if session.calls.answers:
                ended = lambda: _end(groups.values(), others)  # noqa: E731
                session.calls.try_run("ending its actors", ended, GRACE + LEAVING)
            if session.calls.answers:  # still: who signals everybody ends Ray while it is left
                session.calls.try_run("giving the bundles back", placement.remove)


GRACE = 10.0
"""Seconds for what ends nicely."""


def _end(groups: Iterable[RayTrainerGroup], others: Sequence[RayRollouts | RayServer]) -> None:
    """Trainers first: a server that wakes, because others go on using it, may take their device."""
    for group in groups:
        group.kill()
    closing = [ref for process in others for ref in process.closing()]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=GRACE)
    for process in others:
        process.kill()


@contextlib.contextmanager
def _tidied(args: Args, engine: EngineType) -> Iterator[None]:
    """Remove what the engine has left on disk, also one that was killed, once it is gone."""
    try:
        yield
    finally:
        engine.tidy(args)
