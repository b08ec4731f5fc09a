"""Overhead of groups, FSDP2, Ray and the driver: seconds per cycle, divided by those of one bare loop.

    python benchmarks/orchestration.py                       # ratio and time split; JSON beside the table
    python benchmarks/orchestration.py --memory-cycles 200   # memory of every process along a long run
    python benchmarks/orchestration.py --rollout-batch-size 128 --micro-batch-size 128   # flags of the run itself

One rank in fp32 goes without FSDP2: `--num-trainer-ranks 2` shows it, and what two ranks gain.

The bare loop holds the same networks and takes the same steps on the same batches with the same number of threads:
plain torch modules, no FSDP, no processes, no handles. Cycles of all variants are played in turn.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = 3
"""First cycles that are left out: warm-up, and what is done once."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "trainer_configs" / "digits.yaml"))
    parser.add_argument("--cycles", type=int, default=20, help="student steps of each variant [20]")
    parser.add_argument("--memory-cycles", type=int, default=0, help="measure memory over so many cycles instead")
    parser.add_argument("--ray-auth-mode", default="token", help="of the Ray that is measured [token]")
    parser.add_argument("--json", type=Path, default=Path("orchestration.json"))
    chosen, chosen.more = parser.parse_known_args()
    result = memory(chosen) if chosen.memory_cycles else ratios(chosen)
    chosen.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written to {chosen.json}")
    return 0


def ratios(chosen: argparse.Namespace) -> dict:
    """Cycles of all variants in turn, so that a busy moment of the machine hits all of them alike."""
    with contextlib.ExitStack() as stack:
        ray_cycle, spans, _ = stack.enter_context(run_cycles(arguments(chosen)))
        variants = {"bare loop": bare_cycles(arguments(chosen))}
        if arguments(chosen).num_trainer_ranks == 1:
            variants["--local"], *_ = stack.enter_context(run_cycles(arguments(chosen, "--local")))
        variants["Ray"] = ray_cycle
        times: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(chosen.cycles + SKIPPED):
            if number == SKIPPED:
                mark = spans.mark()
            for name, cycle in variants.items():
                started = time.perf_counter()
                cycle()
                times[name].append(time.perf_counter() - started)
        split = {name: seconds / chosen.cycles for name, seconds in spans.totals(mark).items() if name != "other"}
    medians = {name: statistics.median(found[SKIPPED:]) for name, found in times.items()}
    ratio = {name: value / medians["bare loop"] for name, value in medians.items()}
    print(f"{'variant':<12}{'s/cycle':>10}{'ratio':>8}{'ms over bare':>15}")
    for name, value in medians.items():
        print(f"{name:<12}{value:>10.4f}{ratio[name]:>8.3f}{1000 * (value - medians['bare loop']):>15.1f}")
    print("\nRay, mean seconds a cycle by phase")
    for name, value in split.items():
        print(f"  {name:<14}{value:>8.4f}")
    return {"cycles": chosen.cycles, "seconds_per_cycle": medians, "ratio": ratio, "ray_split": split}


@contextlib.contextmanager
def run_cycles(args):
    """A function that plays the next cycle of a real run, the run's span log and its executor."""
    from miles_dmd.batches import RolloutBatches
    from miles_dmd.executor import GroupExecutor
    from miles_dmd.observe.spans import SpanLog
    from miles_dmd.plan import DistillationTrainerController, requests_until_student_update
    from miles_dmd.preflight.rules import resolve
    from miles_dmd.prompts import PromptSource
    from miles_dmd.run import started_run

    run = resolve(args)
    plan, prompts = run.plan, PromptSource(args.prompt_data, args.seed)
    with started_run(run, prompts.texts) as started:
        spans = SpanLog()
        executor = GroupExecutor(plan, run.loss_type, started, spans)
        provider = RolloutBatches(
            args,
            prompts,
            executor,
            lambda request: requests_until_student_update(plan.update_schedule, controller.counters, request),
        )
        controller = DistillationTrainerController(plan, provider, executor)
        yield (lambda: controller.run(1)), spans, executor


def memory(chosen: argparse.Namespace) -> dict:
    """Private memory of every process along a run: what still rises over its second half leaks.

    Not the peak, which creeps up with every unlucky moment, and not what is shared: a page of Ray's object store counts
    with every process that has touched it, until all have touched all.
    """
    moments = sorted({max(1, round(chosen.memory_cycles * part / 20)) for part in range(1, 21)})
    found: dict[int, dict[str, float]] = {}
    with run_cycles(arguments(chosen)) as (cycle, *_):
        processes = processes_of_the_run()
        for number in range(1, chosen.memory_cycles + 1):
            cycle()
            if number in moments:
                found[number] = {name: private_mib(process) for name, process in processes.items()}
                print(f"cycle {number:>4}  " + "  ".join(f"{name} {mib:.1f}" for name, mib in found[number].items()))
    late = {number: taken for number, taken in found.items() if number >= chosen.memory_cycles / 2}
    trends = {name: trend({number: taken[name] for number, taken in late.items()}) for name in processes}
    print("private memory in MiB; trend of the second half in MiB per 1,000 cycles, and its standard error:")
    print("  " + "  ".join(f"{name} {value:+.1f} ({error:.1f})" for name, (value, error) in trends.items()))
    return {"cycles": chosen.memory_cycles, "private_mib": found, "mib_per_1000_cycles": trends}


def processes_of_the_run() -> dict[str, int]:
    """This process and the actors of its Ray cluster: name -> process id."""
    found = {"driver": os.getpid()}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # it has just ended
            title = (folder / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[0]
            if title.startswith("ray::") and "Actor" in title and is_descendant(int(folder.name)):
                found[f"{title[5:].split('.')[0]} {folder.name}"] = int(folder.name)
    return found


def is_descendant(process: int) -> bool:
    """True if this process started it, or one that it started."""
    while process > 1 and process != os.getpid():
        process = int(status(process)["PPid"])
    return process == os.getpid()


def private_mib(process: int) -> float:
    return int(status(process)["RssAnon"].split()[0]) / 1024


def status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines)


def trend(values: dict[int, float]) -> tuple[float, float]:
    """Slope of the least-squares line per 1,000 cycles, and its standard error."""
    import numpy

    (slope, _), covariance = numpy.polyfit(list(values), list(values.values()), 1, cov=True)
    return float(slope) * 1000, float(covariance[0, 0] ** 0.5) * 1000


def arguments(chosen: argparse.Namespace, *more: str):
    from miles_dmd.config.cli import parse_args

    words = ["--config", chosen.config, "--sample-prompts", "0", "--device", "cpu"]
    of_ray = [] if "--local" in more else ["--ray-auth-mode", chosen.ray_auth_mode]
    return parse_args([*words, *chosen.more, *of_ray, *more])


def bare_cycles(args):
    """A function that plays a cycle: rollouts, K fake-score steps, scoring, student step, EMA, weight sync."""
    import torch

    from miles_dmd import registry
    from miles_dmd.modalities.diffusion.conditions import PromptTable
    from miles_dmd.modalities.diffusion.denoiser import Denoiser
    from miles_dmd.modalities.diffusion.encoding import ensure_table
    from miles_dmd.network.pretrained import load_network
    from miles_dmd.prompts import PromptSource
    from miles_dmd.training.compute import prepare_process
    from miles_dmd.training.ema import ShardedEma

    prepare_process(args.cpu_threads)
    family, checkpoint = registry.load("models", args.model_family), Path(args.hf_checkpoint)
    prompts = PromptSource(args.prompt_data, args.seed)
    table = PromptTable(ensure_table(args, prompts.texts, torch.device("cpu")))
    names = ("student", "fake_score", "teacher_score", "sampler")
    models = {name: Denoiser(family.code(), load_network(family, checkpoint)) for name in names}
    for name in ("teacher_score", "sampler"):
        models[name].network.requires_grad_(False)
    optimizers = {
        role: torch.optim.AdamW(
            models[role].network.parameters(), lr=args.lr, betas=args.betas, weight_decay=args.weight_decay, fused=True
        )
        for role in ("student", "fake_score")
    }
    ema = ShardedEma(dict(models["student"].network.named_parameters()), decay=args.ema_decay, start_step=0)
    return lambda: bare_cycle(args, models, optimizers, ema, prompts, table)


def bare_cycle(args, models, optimizers, ema, prompts, table) -> None:
    from miles_dmd.config.trainers import trainer_args
    from miles_dmd.losses.dmd2.objective import fake_score_loss, generator_loss, score

    options = trainer_args(args)["critic"].loss_options  # of which the student reads none of its own
    *fake_batches, student_batch = [
        rollout(args, models["sampler"], prompts, table) for _ in range(options.fake_update_ratio + 1)
    ]
    for batch in fake_batches:
        step(args, optimizers["fake_score"], models["fake_score"], fake_score_loss(models, batch, {}, options).loss)
    scores = score(models, student_batch, options)
    step(
        args,
        optimizers["student"],
        models["student"],
        generator_loss(models, student_batch, {"critic": scores}, options).loss,
    )
    ema.update()
    models["sampler"].network.load_state_dict(models["student"].network.state_dict())


def step(args, optimizer, model, loss) -> None:
    import torch

    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.network.parameters(), args.clip_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def rollout(args, sampler, prompts, table):
    import torch

    from miles_dmd import registry, seeds
    from miles_dmd.engines.inprocess.sampler import InProcessEngine
    from miles_dmd.modalities.diffusion.requests import DenoisingRequest
    from miles_dmd.sampling.grid import sigma_grid
    from miles_dmd.sampling.stopping import stop_steps

    family, checkpoint = registry.load("models", args.model_family), Path(args.hf_checkpoint)
    drawn = prompts.next(args.rollout_batch_size)
    stops = stop_steps(args.stop_step_policy, len(drawn), args.num_inference_steps, seed=drawn[0].sample_id)
    engine = InProcessEngine(
        sampler, table, sigmas=sigma_grid(args.num_inference_steps, args.shift), solver=args.solver,
        shape=family.code().latent_shape(checkpoint, *family.resolution(args)),
        micro_batch_size=args.rollout_micro_batch_size, run_seed=args.seed, device=torch.device("cpu"),
    )  # fmt: skip
    batch = engine.generate(
        [
            DenoisingRequest(
                prompt.sample_id, prompt.prompt_id, seeds.derive(args.seed, "rollout", prompt.sample_id), stop
            )
            for prompt, stop in zip(drawn, stops, strict=True)
        ]
    )
    return replace(batch, cond=table.lookup(batch.prompt_ids), uncond=table.unconditional(len(batch)))


if __name__ == "__main__":
    sys.exit(main())
