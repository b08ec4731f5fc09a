"""One optimizer step of one group: whose weights move, when nothing moves, and what never changes the result."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from miles_dmd import registry
from miles_dmd.config.trainers import compute_trainer_args
from miles_dmd.contracts.external import ExternalData
from miles_dmd.errors import ExternalDataError
from miles_dmd.local import init_single_rank
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.encoding import ensure_table
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.prompts import read_prompts
from miles_dmd.rollout import RolloutWorker
from miles_dmd.training import trained as trained_module
from miles_dmd.training.compute import choose_compute
from miles_dmd.training.shard import local
from miles_dmd.training.trainer import Trainer


class House:
    """The parts of a run in this process, built on demand."""

    def __init__(self, args, digit_prompts):
        self.args = args
        self.loss_type = registry.load("losses", "dmd2")
        self.plan = self.loss_type.plan(args)
        self.compute = choose_compute("cpu", args.compute_dtype)
        init_single_rank(self.compute)
        self.prompts = PromptTable(ensure_table(args, read_prompts(digit_prompts), self.compute.device))

    def trainer(self, group):
        trainer_config = next(config for config in self.args.trainers if config.role == group)
        return Trainer(
            compute_trainer_args(self.args, trainer_config), group, plan=self.plan, loss_type=self.loss_type,
            compute=self.compute, prompts=self.prompts, horizons={"student": 10, "fake_score": 10},
        )  # fmt: skip

    def batch(self, size=4):
        worker = RolloutWorker(self.args, compute=self.compute, prompts=self.prompts)
        requests = [DenoisingRequest(sample, sample % 10, 100 + sample, sample % 4) for sample in range(size)]
        return worker.generate([requests], 1)[0].chunks[0]


@pytest.fixture(scope="module")
def house(make_args, digit_prompts):
    return House(make_args(), digit_prompts)


def snapshot(model):
    return {name: local(value).clone() for name, value in model.network.named_parameters()}


def changed(before, model):
    return {name for name, value in snapshot(model).items() if not torch.equal(before[name], value)}


def test_an_actor_that_nobody_scored_for_does_not_train(house):
    with pytest.raises(ExternalDataError, match="'actor' was asked to train without external data of critic"):
        house.trainer("actor").train(house.batch(), {})


def test_critic_trains_the_fake_score_and_nothing_else(house):
    critic, batch = house.trainer("critic"), house.batch()
    teacher, fake = snapshot(critic.models["teacher_score"]), snapshot(critic.models["fake_score"])

    report = critic.train(batch, {})

    assert report.applied
    assert changed(teacher, critic.models["teacher_score"]) == set()
    # the text half of the last block feeds nothing, so a few tensors of it see no gradient
    assert len(changed(fake, critic.models["fake_score"])) > 0.9 * len(fake)
    assert all(value.grad is None for value in critic.models["teacher_score"].network.parameters())


def test_scoring_first_and_training_later_works_through_fsdp(make_args, digit_prompts):
    """FSDP2 fixes its dtypes at the first forward, which in a student-first cycle is a scoring pass. One rank that
    computes in fp32 goes without FSDP2; bf16 does not."""
    house = House(make_args("--compute-dtype", "bf16"), digit_prompts)
    critic, actor, batch = house.trainer("critic"), house.trainer("actor"), house.batch()
    before = snapshot(actor.models["student"])
    assert isinstance(critic.models["fake_score"].network, FSDPModule)

    scores = critic.score(batch)
    report = actor.train(batch, {"critic": scores})
    assert critic.train(batch, {}).applied

    assert report.applied
    assert changed(before, actor.models["student"])
    assert all(local(value).dtype == torch.float32 for value in actor.models["student"].network.parameters())


def test_one_rank_in_fp32_goes_without_fsdp(house):
    held = house.trainer("critic").models.values()

    assert not any(isinstance(module, FSDPModule) for model in held for module in model.network.modules())


def test_student_takes_the_sampled_step_again(house):
    critic, actor, batch = house.trainer("critic"), house.trainer("actor"), house.batch()
    before = snapshot(actor.models["student"])

    report = actor.train(batch, {"critic": critic.score(batch)})

    assert report.applied
    assert changed(before, actor.models["student"])
    assert report.metrics["rollout_drift"] < 1e-5


def test_micro_batches_change_nothing(house, make_args, digit_prompts):
    batch = house.batch(7)
    small = House(make_args("--micro-batch-size", "3"), digit_prompts)  # 3 + 3 + 1: the last one is short
    one, several = house.trainer("critic"), small.trainer("critic")
    one.args = replace(one.args, micro_batch_size=7)

    whole, split = one.train(batch, {}), several.train(batch, {})

    assert split.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    assert split.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=1e-5)


def test_nonfinite_sample_skips_the_step_and_advances_nothing(house):
    critic, batch = house.trainer("critic"), house.batch()
    fake = snapshot(critic.models["fake_score"])
    poisoned = batch.clean.clone()
    poisoned[1] = float("nan")

    report = critic.train(replace(batch, clean=poisoned), {})

    assert not report.applied
    assert report.nonfinite > 0
    assert changed(fake, critic.models["fake_score"]) == set()
    assert not critic.trained["fake_score"].optimizer.adamw.state
    assert critic.trained["fake_score"].scheduler.last_epoch == 0


def average_of(actor):
    return local(dict(actor.trained["student"].average.named_parameters())["proj_out.weight"]).clone()


def test_average_follows_successful_student_steps_only(house):
    actor, batch = house.trainer("actor"), house.batch()
    scores = house.trainer("critic").score(batch)
    start = average_of(actor)
    bad = ExternalData(
        "critic", scores.ids, 0, {**scores.tensors, "teacher_clean": scores.tensors["teacher_clean"] * float("nan")}
    )

    assert not actor.train(batch, {"critic": bad}).applied
    after_skip = average_of(actor)
    actor.train(batch, {"critic": scores})
    first = snapshot(actor.models["student"])["proj_out.weight"]
    report = actor.train(batch, {"critic": scores})
    second = snapshot(actor.models["student"])["proj_out.weight"]

    assert torch.equal(start, after_skip)
    assert report.metrics["ema_decay"] == actor.args.ema_decay
    decay = actor.args.ema_decay
    expected = decay * (decay * start + (1 - decay) * first) + (1 - decay) * second  # from the first step on
    torch.testing.assert_close(average_of(actor), expected)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_average_is_a_copy_until_its_start_step_and_moves_from_the_next(make_args, digit_prompts, start):
    house = House(make_args("--num-rollout", "4", "--ema-start-step", str(start), "--ema-decay", "0.5"), digit_prompts)
    actor, batch = house.trainer("actor"), house.batch()
    scores = house.trainer("critic").score(batch)

    used = [actor.train(batch, {"critic": scores}).metrics["ema_decay"] for _ in range(4)]

    assert used == [0.0] * start + [0.5] * (4 - start)


def test_scores_of_another_policy_version_are_refused(house):
    actor, batch = house.trainer("actor"), house.batch()
    scores = house.trainer("critic").score(batch)

    with pytest.raises(ExternalDataError, match="policy version 0; the batch is of version 3"):
        actor.train(replace(batch, policy_version=3), {"critic": scores})


def test_weights_are_copies_of_everything_that_trains(house):
    actor = house.trainer("actor")

    buckets = list(actor.weights("student"))
    for bucket in buckets:
        for value in bucket.values():
            value.zero_()

    names = {name for bucket in buckets for name in bucket}
    assert names == {name for name, _ in actor.models["student"].network.named_parameters()}
    assert snapshot(actor.models["student"])["proj_out.weight"].abs().sum() > 0


def test_weights_travel_in_buckets_that_are_gathered_when_asked_for(house, monkeypatch):
    gathered = []
    full = trained_module._full
    monkeypatch.setattr("miles_dmd.training.trained.BUCKET_BYTES", 200_000)
    monkeypatch.setattr(trained_module, "_full", lambda value: gathered.append(value.nbytes) or full(value))
    actor = house.trainer("actor")
    buckets = actor.weights("student")

    first = next(buckets)

    assert len(gathered) == len(first)
    sizes = [sum(value.nbytes for value in bucket.values()) for bucket in (first, *buckets)]
    planned = actor.trained["student"].buckets
    assert len(sizes) == len(planned) > 5
    assert all(size <= 200_000 or len(names) == 1 for size, names in zip(sizes, planned, strict=True))


def test_bf16_computes_on_fp32_masters(house, make_args, digit_prompts):
    half = House(make_args("--compute-dtype", "bf16"), digit_prompts)
    batch = house.batch()
    exact, coarse = house.trainer("critic"), half.trainer("critic")
    before = snapshot(coarse.models["fake_score"])

    a, b = exact.train(batch, {}), coarse.train(batch, {})

    assert {value.dtype for value in coarse.models["fake_score"].network.parameters()} == {torch.float32}
    assert changed(before, coarse.models["fake_score"])
    assert b.metrics["loss"] == pytest.approx(a.metrics["loss"], rel=0.02)
    assert b.metrics["loss"] != a.metrics["loss"]


def test_gradient_checkpointing_changes_memory_and_not_the_result(house, make_args, digit_prompts):
    batch = house.batch()
    recomputing = House(make_args("--gradient-checkpointing"), digit_prompts)

    a, b = house.trainer("critic").train(batch, {}), recomputing.trainer("critic").train(batch, {})

    assert b.metrics["grad_norm"] == pytest.approx(a.metrics["grad_norm"], rel=1e-5)
    networks = [h.trainer("critic").models["fake_score"].network for h in (house, recomputing)]
    assert [network.gradient_checkpointing for network in networks] == [False, True]


def test_prompt_table_is_encoded_once(house, digit_prompts):
    table = ensure_table(house.args, read_prompts(digit_prompts), house.compute.device)
    stamp = Path(table).stat().st_mtime_ns

    again = ensure_table(house.args, read_prompts(digit_prompts), house.compute.device)

    assert (again, Path(again).stat().st_mtime_ns) == (table, stamp)
