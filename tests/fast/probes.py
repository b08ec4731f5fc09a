"""Probes of a run's arguments, without a whole run: numbers by which two of them are compared."""

import functools
from dataclasses import asdict

from miles_dmd.batches import RolloutBatches
from miles_dmd.config.cli import parse_args
from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.local import init_single_rank
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.encoding import ensure_table
from miles_dmd.modalities.diffusion.grids import SampleGrids
from miles_dmd.plan import TrainerCounters
from miles_dmd.preflight.rules import resolve
from miles_dmd.prompts import PromptSource
from miles_dmd.rollout import RolloutWorker
from miles_dmd.run_logger import RunLogger
from miles_dmd.students import describe
from miles_dmd.training.compute import choose_compute
from miles_dmd.training.shard import local
from miles_dmd.training.trainer import Trainer


class House:
    """The parts of a run of ``args`` in this process."""

    def __init__(self, args):
        self.args, self.plan = args, dmd2.plan(args)
        compute = choose_compute("cpu", args.compute_dtype)
        init_single_rank(compute)
        texts = PromptSource(args.prompt_data, args.seed).texts
        self.prompts = PromptTable(ensure_table(args, texts, compute.device))
        self.compute = compute

    def trainer(self, role):
        (config,) = (config for config in compute_trainer_configs(self.args) if config.role == role)
        own = compute_trainer_args(self.args, config)
        return Trainer(
            own, role, plan=self.plan, loss_type=dmd2, compute=choose_compute("cpu", own.compute_dtype),
            prompts=self.prompts, horizons=self.plan.optimizer_steps(own.num_rollout),
        )  # fmt: skip

    def batch(self):
        requests = RolloutBatches(
            self.args, PromptSource(self.args.prompt_data, self.args.seed), None, None
        )._requests()
        return RolloutWorker(self.args, compute=self.compute, prompts=self.prompts).generate([requests], 1)[0].chunks[0]


def sums(named):
    return {name: float(local(value.detach()).double().abs().sum()) for name, value in named}


def stepped(trainer, batch, external):
    """Two steps: the second one knows of the first one's moments, learning rate and average."""
    reports = [trainer.train(batch, external).metrics for _ in range(2)]
    (trained,) = trainer.trained.values()
    average = sums(trained.average.named_parameters()) if trained.average else {}
    return reports, sums(trained.network.named_parameters()), average


@functools.cache
def base_batch(words):
    house = House(parse_args(list(words)))
    batch = house.batch()
    return batch, house.trainer("critic").score(batch)


class Probes:
    """``base``: the command line of the run that all are compared with, of which samples and scores are taken."""

    def __init__(self, base, tmp_path):
        self.base, self.tmp_path = tuple(base), tmp_path

    def trained(self, args, roles=dmd2.roles):
        house, (batch, scores) = House(args), base_batch(self.base)
        told = {}
        if "critic" in roles:
            critic = house.trainer("critic")
            scores = critic.score(batch)
            told["critic"] = sums(scores.tensors.items()), stepped(critic, batch, {})
        if "actor" in roles:
            told["actor"] = stepped(house.trainer("actor"), batch, {"critic": scores})
        return told

    def sampled(self, args):
        batch = House(args).batch()
        texts = PromptSource(args.prompt_data, args.seed).texts
        return (
            batch.stop_steps,
            [texts[i] for i in batch.prompt_ids],
            batch.sigma.tolist(),
            batch.clean.flatten().tolist(),
        )

    def called(self, args):
        return asdict(describe(resolve(args), 1))

    def scheduled(self, args):
        plan = dmd2.plan(args)
        return plan.update_schedule.warmup_cycles, plan.optimizer_steps(args.num_rollout)

    def drawn(self, args):
        class Recorder(SampleGrids):
            def draw(self, step, executor):
                drawn.append((step, len(self.texts)))

        drawn = []
        grids = Recorder(args, PromptSource(args.prompt_data, args.seed).texts, self.tmp_path, {})
        for step in range(1, args.num_rollout + 1):
            grids.after_completed_step(TrainerCounters(step, {}, step), {}, None)
        return drawn

    def rung(self, args):
        logger = RunLogger(resolve(args), self.tmp_path)
        numbers = {"samples/saturation": 0.005, "samples/diversity": 0.5, "actor/rollout_drift": 0.05,
                   "actor/generated_std": 1.0}  # fmt: skip
        series = [
            {**numbers, "actor/teacher_critic_gap": 1 + (n >= 150), "critic/loss": 1 + n / 500} for n in range(300)
        ]
        rung = [logger.alarms.check({"cycle": n + 1, "global_step": n + 1, **row}) for n, row in enumerate(series)]
        logger.trackers.close()
        return rung
