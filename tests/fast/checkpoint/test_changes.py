"""Arguments that may differ from a checkpoint's, and those that are refused unless named."""

import dataclasses

import pytest

from miles_dmd.config.args import Args
from miles_dmd.config.values import kinds
from miles_dmd.errors import CheckpointError
from miles_dmd.preflight.changes import HARMLESS, Change, changes, recorded_arguments, refuse_changes


@pytest.fixture(scope="module")
def recorded(resolved):
    return recorded_arguments(resolved())


def shown(found):
    return [str(change) for change in found]


def test_same_arguments_are_no_change(recorded, resolved):
    assert changes(recorded, resolved()) == []


def test_change_for_all_trainers_is_told_once(recorded, resolved):
    assert shown(changes(recorded, resolved("--lr", "3e-4"))) == ["lr was 0.0001, is 0.0003"]


def test_change_of_one_trainer_is_told_as_its_own(recorded, resolved):
    assert shown(changes(recorded, resolved("--actor-betas", "0", "0.9"))) == [
        "actor-betas was [0.9, 0.999], is [0.0, 0.9]"
    ]


def test_options_of_the_loss_count(recorded, resolved):
    assert shown(changes(recorded, resolved("--teacher-guidance", "3"))) == ["teacher-guidance was 4.0, is 3.0"]


@pytest.mark.parametrize(
    "harmless",
    [
        ("--save-interval", "7", "--sample-interval", "3", "--sample-prompts", "2", "--keep-checkpoints", "9"),
        ("--cache-dir", "/elsewhere", "--ray-address", "10.0.0.1:6379", "--placement-timeout", "5"),
        ("--cpu-threads", "2", "--tensorboard", "--on-save-failure", "continue", "--local"),
        ("--num-trainer-ranks", "2", "--micro-batch-size", "2", "--rollout-micro-batch-size", "1"),
        ("--gradient-checkpointing", "--save", "/tmp/elsewhere-entirely"),
        ("--num-rollout", "20"),
    ],
)
def test_what_does_not_alter_training_passes(recorded, resolved, harmless):
    found = changes(recorded, resolved(*harmless))

    assert found == []


@pytest.mark.parametrize("flag", ["--seed 1", "--solver euler", "--shift 2", "--rollout-batch-size 8", "--height 16"])
def test_what_alters_training_is_told(recorded, resolved, flag):
    (change,) = changes(recorded, resolved(*flag.split()))

    assert change.name == flag.split()[0].removeprefix("--")


def test_longer_run_alters_a_learning_rate_that_falls_towards_its_end(resolved):
    falling = ("--lr-scheduler", "cosine")
    recorded = recorded_arguments(resolved(*falling))

    assert shown(changes(recorded, resolved(*falling, "--num-rollout", "20"))) == ["num-rollout was 2, is 20"]


def test_argument_that_the_checkpoint_does_not_know_is_told(recorded, resolved):
    older = {name: {**row, "arguments": {k: v for k, v in row["arguments"].items() if k != "clip_grad"}}
             for name, row in recorded.items()}  # fmt: skip

    assert shown(changes(older, resolved())) == ["clip-grad was absent, is 1.0"]


def test_harmless_arguments_exist():
    assert set(kinds(Args)) >= HARMLESS
    assert HARMLESS.isdisjoint({"seed", "lr", "compute_dtype", "hidden"})


LR, CLIP = Change("lr", "critic", 1.0, 2.0), Change("clip_grad", "", 1.0, 2.0)


@pytest.mark.parametrize(
    "allowed",
    [("critic-lr", "clip-grad"), ("critic_lr", "clip_grad"), ("lr", "--clip-grad"), ("--critic-lr", "clip_grad")],
)
def test_named_changes_pass(allowed):
    assert refuse_changes([LR, CLIP], allowed) == [LR, CLIP]


def test_all_that_is_not_named_is_listed():
    with pytest.raises(CheckpointError) as refused:
        refuse_changes([LR, CLIP, dataclasses.replace(CLIP, argument="seed")], ["critic-lr"])

    message = str(refused.value)
    assert "clip-grad was 1.0, is 2.0; seed was 1.0, is 2.0" in message
    assert message.endswith("--allow-changed clip-grad seed")


def test_name_of_another_trainer_does_not_allow():
    with pytest.raises(CheckpointError, match="--allow-changed actor-lr: that did not change"):
        refuse_changes([LR], ["actor-lr"])


def test_name_that_did_not_change_is_a_slip():
    with pytest.raises(CheckpointError, match=r"--allow-changed crtic-lr: that did not change.*critic-lr"):
        refuse_changes([LR], ["crtic-lr"])
