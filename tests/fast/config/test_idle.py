"""Arguments that would do nothing beside the others of their run: refused, or left out of a preset by a flag."""

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.config.idle import UNREAD
from miles_dmd.modalities.diffusion import modality as diffusion
from miles_dmd.preflight.rules import resolve

SWITCHED_OFF = {
    "ray_address": "--local --ray-address auto",
    "placement_timeout": "--local --placement-timeout 5",
    "remote_timeout": "--local --remote-timeout 5",
    "keep_checkpoints": "--save-interval 0 --keep-checkpoints 5",
    "on_save_failure": "--save-interval 0 --on-save-failure continue",
    "ray_auth_mode": "--local --ray-auth-mode disabled",
    "overwrite": "--overwrite",
    "sample_interval": "--sample-prompts 0 --sample-interval 3",
    "alarm_diversity": "--sample-prompts 0 --alarm-diversity 0.5",
    "alarm_saturation": "--sample-prompts 0 --alarm-saturation 0.5",
    "alarm_window": "OFF --alarm-window 5",
    "on_alarm": "OFF --on-alarm stop",
    "stop_step_policy": "--num-inference-steps 1 --stop-step-policy cycle",
    "lr_warmup_steps": "--lr-warmup-steps 5",
    "ema_start_step": "--num-rollout 10 --ema-start-step 10",
    "lr_scheduler": "--lr-scheduler constant_with_warmup",
}
"""argument -> flags among which it does nothing."""
ALARMS_OFF = " ".join(
    f"--alarm-{name} 0" for name in ("critic-lag", "critic-loss-slope", "saturation", "diversity", "rollout-drift")
)


def words(text):
    return text.replace("OFF", ALARMS_OFF).split()


def test_every_argument_that_can_be_switched_off_is_tried():
    assert set(SWITCHED_OFF) == {name for unread in (*UNREAD, *diffusion.idle) for name in unread.arguments}


@pytest.mark.parametrize("argument", SWITCHED_OFF)
def test_argument_that_nothing_reads_is_refused_by_name(refused, argument):
    message = refused(*words(SWITCHED_OFF[argument]))

    assert message.startswith(f"--{argument.replace('_', '-')} ")


@pytest.mark.parametrize(
    "flags",
    [
        "--lr-warmup-steps 5 --lr-scheduler constant_with_warmup",
        "--lr-warmup-steps 5 --actor-lr-scheduler cosine",  # one of the two reads it
        "--num-rollout 10 --ema-start-step 9",
        "--save-interval 0",
        "--sample-prompts 0",
        "--sample-prompts 0 --alarm-diversity 0",  # off both ways
        "--sample-prompts 0 --sample-interval 3 --keep-best min:actor/loss",
        "--local",
        "OFF",
    ],
)
def test_what_is_read_passes(asked, latest, flags):
    resolve(parse_args(latest([*asked, *words(flags)])))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--critic-lr-warmup-steps 5", "--critic-lr-warmup-steps 5 does nothing under --lr-scheduler constant; pass"),
        ("--actor-lr-scheduler constant_with_warmup", "--actor-lr-scheduler constant_with_warmup has no warm-up"),
        ("--num-rollout 5 --lr-scheduler cosine --lr-warmup-steps 5", "--lr-warmup-steps 5: the actor takes 5 steps"),
        ("--num-rollout 5 --actor-lr-scheduler linear --actor-lr-warmup-steps 7", "--actor-lr-warmup-steps 7: the ac"),
        ("--negative-prompt x --teacher-guidance 1", "--negative-prompt 'x' is the text of the teacher's uncond"),
    ],
)
def test_neighbours_of_the_table_are_refused_too(refused, flags, part):
    assert part in refused(*words(flags))


@pytest.mark.parametrize(
    ("preset", "flags", "argument", "default"),
    [
        ("args: {remote_timeout: 5, placement_timeout: 9}", "--local", "remote_timeout", 1800.0),
        ("args: {keep_checkpoints: 5}", "--save-interval 0", "keep_checkpoints", 2),
        ("args: {sample_interval: 5}", "--sample-prompts 0", "sample_interval", 50),
        ("args: {lr_scheduler: cosine, lr_warmup_steps: 5}", "--lr-scheduler constant", "lr_warmup_steps", 0),
        ("args: {ema_start_step: 50}", "--num-rollout 10", "ema_start_step", 0),
    ],
)
def test_what_a_flag_switches_off_is_left_out_of_a_preset(asked, latest, tmp_path, preset, flags, argument, default):
    (tmp_path / "mine.yaml").write_text(preset)

    args = resolve(parse_args(latest([*asked, "--config", str(tmp_path / "mine.yaml"), *flags.split()]))).args

    assert getattr(args, argument) == default


def test_what_is_switched_off_of_one_trainer_is_left_out_there(asked, latest, tmp_path):
    row = "{role: critic, overrides: {lr_scheduler: cosine, lr_warmup_steps: 5}}"
    (tmp_path / "mine.yaml").write_text(f"trainers: [{row}]")

    words = [*asked, "--config", str(tmp_path / "mine.yaml"), "--critic-lr-scheduler", "constant"]
    args = resolve(parse_args(latest(words))).args

    assert args.trainers[0].overrides == {"lr_scheduler": "constant"}


def test_preset_that_contradicts_itself_is_refused_beside_any_flag(refused, tmp_path):
    (tmp_path / "mine.yaml").write_text("args: {save_interval: 0, keep_checkpoints: 5}")

    assert "--keep-checkpoints 5" in refused("--config", str(tmp_path / "mine.yaml"), "--local")
