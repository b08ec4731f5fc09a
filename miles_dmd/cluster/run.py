"""Start and shutdown of all Ray processes of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray

from miles_dmd.cluster.asking import LEAVING
from miles_dmd.cluster.placement import own_python, place
from miles_dmd.cluster.preflight import check_nodes
from miles_dmd.cluster.rollout_actor import RayRollouts
from miles_dmd.cluster.server_actor import RayServer, serve_all
from miles_dmd.cluster.session import every, ray_session, word_of_raylet
from miles_dmd.cluster.trainer_group import RayTrainerGroup
from miles_dmd.cluster.waiting import TICK, Supervisor
from miles_dmd.contracts.engine import EngineType
from miles_dmd.executor import StartedRun
from miles_dmd.observe.count import Count
from miles_dmd.preflight.resolved import ResolvedRun


@contextlib.contextmanager
def started(run: ResolvedRun, texts: Sequence[str]) -> Iterator[StartedRun]:
    """Trainer groups and rollout worker, built and ready; gone when the block ends, however it ends."""
    args, student, engine = run.args, run.student, run.engine
    sizes = {name: own.num_trainer_ranks for name, own in run.trainers.items()}
    print(f"Starting Ray{f' at {args.ray_address}' if args.ray_address else ''} ...", flush=True)
    limit, timeout = f"--placement-timeout {args.placement_timeout:g}", args.placement_timeout
    with _tidied(student, engine), ray_session(args.ray_address, timeout, args.ray_auth_mode) as session:
        ask = session.asker.ask
        paths = sorted(map(str, run.directories))
        for node in ask("looking at the nodes", timeout + LEAVING, lambda: check_nodes(paths, timeout), limit):
            print(f"  {node.node}: miles_dmd {node.version}, {node.free_gib:.1f} GiB of memory free", flush=True)
        num_servers = engine.num_servers(args)
        asked: dict[str, Any] = {"device": args.device, "cpu_threads": args.cpu_threads, "timeout": timeout}
        asked |= {"servers": num_servers, "python": own_python() if session.address is None else None}
        placement = ask("reserving the bundles", timeout + LEAVING, lambda: place(sizes, **asked), limit)
        died = every(TICK, session.died)
        # of a joined cluster the process may be on another node, whose raylet is not to be heard here
        word = word_of_raylet if session.address is None else lambda: ""
        supervisor = Supervisor(args.remote_timeout, died, start_timeout=timeout, word=word)
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
            table = rollouts.encode(args, placement.device, texts)
            # then engine and trainers in turn, as they take turns on the device ever after
            urls = serve_all(servers, supervisor)
            supervisor.gather(rollouts.build(student, placement.device, table, texts, urls), "loading models")
            for note in rollouts.notes():
                print(note, flush=True)
            rollouts.sleep()
            print("Loading models ...", flush=True)
            calls: dict[str, Any] = {}
            for name, group in groups.items():
                parts = {"plan": run.plan, "loss_type": run.loss_type, "prompt_table": table, "horizons": run.horizons}
                calls |= group.build(run.trainers[name], placement.device, **parts)
            supervisor.gather(calls, "loading models", Count("processes that have loaded models", len(calls)).at)
            yield StartedRun(groups, rollouts)
        finally:
            if session.asker.answers:
                ended = lambda: _end(groups.values(), others)  # noqa: E731
                session.asker.try_to("ending its actors", ended, GRACE + LEAVING)
            if session.asker.answers:  # still: who signals everybody ends Ray while it is left
                session.asker.try_to("giving the bundles back", placement.remove)


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
def _tidied(args: Any, engine: EngineType) -> Iterator[None]:
    """Also after an engine that was killed, once it is gone."""
    try:
        yield
    finally:
        engine.tidy(args)
