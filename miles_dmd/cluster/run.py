"""All processes of a run, started together and ended together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_dmd import registry
from miles_dmd.cluster.placement import place
from miles_dmd.cluster.preflight import check_nodes
from miles_dmd.cluster.rollout_actor import RayRollouts
from miles_dmd.cluster.server_actor import RayServer
from miles_dmd.cluster.session import every, ray_session
from miles_dmd.cluster.trainer_group import RayTrainerGroup
from miles_dmd.cluster.waiting import TICK, Supervisor
from miles_dmd.contracts.loss import LossType
from miles_dmd.plan import DistillationPlan


@contextlib.contextmanager
def started(
    args: Any,
    group_args: Mapping[str, Any],
    *,
    plan: DistillationPlan,
    loss_type: LossType,
    texts: Sequence[str],
    horizons: Mapping[str, int],
) -> Iterator[tuple[dict[str, RayTrainerGroup], RayRollouts]]:
    """Trainer groups by name and the rollout worker, built and ready; gone when the block ends, however it ends."""
    sizes = {name: own.num_trainer_ranks for name, own in group_args.items()}
    print(f"Starting Ray{f' at {args.ray_address}' if args.ray_address else ''} ...", flush=True)
    with ray_session(args.ray_address) as session:
        checkpoints = {args.teacher_path, *(own.hf_checkpoint for own in group_args.values())}
        for node in check_nodes(sorted(checkpoints)):
            print(f"  {node.node}: miles_dmd {node.version}, {node.free_gib:.1f} GiB of memory free", flush=True)
        num_servers = registry.load("engines", args.rollout_engine).num_servers(args)
        placement = place(
            sizes,
            device=args.device,
            cpu_threads=args.cpu_threads,
            timeout=args.placement_timeout,
            servers=num_servers,
        )
        supervisor = Supervisor(args.remote_timeout, every(TICK, session.died))
        processes: list[RayTrainerGroup | RayRollouts | RayServer] = []
        try:
            servers: list[RayServer] = []
            for number in range(num_servers):
                servers.append(RayServer(group_args[plan.group_of("student")], placement, number, supervisor))
                processes.append(servers[-1])
            student = group_args[plan.group_of("student")]  # the engine samples from it, so it reads what it reads
            # processes start (and import torch) while the prompts are encoded
            rollouts = RayRollouts(placement, supervisor)
            processes.append(rollouts)
            groups: dict[str, RayTrainerGroup] = {}
            for name, size in sizes.items():
                groups[name] = RayTrainerGroup(name, size, placement, supervisor)
                processes.append(groups[name])
            print(f"Encoding {len(texts)} prompts, unless they are cached, and loading models ...", flush=True)
            table = rollouts.encode(args, placement.device, texts)
            calls: dict[str, Any] = {}
            for name, group in groups.items():
                parts = {"plan": plan, "loss_type": loss_type, "prompt_table": table, "horizon": horizons.get(name, 0)}
                calls |= group.build(group_args[name], placement.device, **parts)
            for server in servers:
                supervisor.gather(server.wait(), "starting")
            calls |= rollouts.build(student, placement.device, table, texts, [server.url for server in servers])
            supervisor.gather(calls, "loading models")
            for note in rollouts.notes():
                print(note, flush=True)
            yield groups, rollouts
        finally:
            if not session.died():  # Ray would not answer
                for process in processes:
                    process.kill()
                placement.remove()
