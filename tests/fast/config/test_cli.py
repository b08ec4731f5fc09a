"""Command line parsing: defaults, then preset, then flags."""

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.config.trainers import TrainerConfig, compute_trainer_args, compute_trainer_configs


@pytest.fixture
def preset(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_stand_where_nothing_is_said():
    args = parse_args([])

    assert (args.loss_type, args.lr, args.loss_options.fake_update_ratio) == ("dmd2", 1e-5, 5)
    assert args.trainers == (TrainerConfig("critic", {}), TrainerConfig("actor", {}))


def test_flags_win_over_the_preset_and_the_preset_over_defaults(preset):
    path = preset("args: {lr: 2e-5, clip_grad: 5, fake_update_ratio: 3, teacher_guidance: 2}")

    args = parse_args(["--config", path, "--lr", "3e-5", "--teacher-guidance", "1.5"])

    assert (args.lr, args.clip_grad, args.weight_decay) == (3e-5, 5.0, 1e-4)
    assert (args.loss_options.fake_update_ratio, args.loss_options.teacher_guidance) == (3, 1.5)


def test_a_trainers_flag_wins_over_its_preset(preset):
    path = preset("trainers: [{role: critic, overrides: {lr: 1e-6, clip_grad: 9, teacher_guidance: 2}}]")

    args = parse_args(["--config", path, "--critic-lr", "4e-7", "--lr", "1e-4"])

    critic, actor = (compute_trainer_args(args, trainer) for trainer in compute_trainer_configs(args))
    assert (critic.lr, critic.clip_grad, critic.loss_options.teacher_guidance) == (4e-7, 9.0, 2.0)
    assert (actor.lr, actor.clip_grad) == (1e-4, 1.0)


def test_a_flag_may_switch_off_what_a_preset_switched_on(preset):
    path = preset("args: {gradient_checkpointing: true, tensorboard: true}")

    args = parse_args(["--config", path, "--no-gradient-checkpointing"])

    assert (args.gradient_checkpointing, args.tensorboard) == (False, True)


def test_the_preset_may_choose_the_loss_type(preset, own_loss):
    path = preset(f"args: {{loss_type: {own_loss('lab')}}}")

    assert parse_args(["--config", path]).trainers == (TrainerConfig("actor", {}),)
    assert parse_args(["--config", path, "--loss-type", "dmd2"]).loss_type == "dmd2"


def test_a_loss_type_of_the_users_own_brings_its_flags(own_loss):
    name = own_loss("lab", ("teacher", "actor"), "margin: float = 0.5")

    args = parse_args(["--loss-type", name, "--margin", "2", "--teacher-micro-batch-size", "7"])

    assert args.loss_options.margin == 2.0
    assert args.trainers[0] == TrainerConfig("teacher", {"micro_batch_size": 7})


def test_values_may_follow_an_equals_sign_and_start_with_a_dash():
    args = parse_args(["--negative-prompt=--blurry", "--betas", "0", "0.99", "--lr=1e-3"])

    assert (args.modality_options.negative_prompt, args.betas, args.lr) == ("--blurry", (0.0, 0.99), 1e-3)


def test_help_is_shown_without_a_loss_type(capsys):
    with pytest.raises(SystemExit) as left:
        parse_args(["--help"])

    assert left.value.code == 0
    assert "--fake-update-ratio" in capsys.readouterr().out


def test_help_tells_the_flags_of_the_chosen_loss_type(own_loss, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--loss-type", own_loss("lab", ("actor",), "margin: float = 0.5"), "--help"])

    out = capsys.readouterr().out
    assert "--margin" in out
    assert "--fake-update-ratio" not in out


def test_a_command_line_with_nothing_wrong_passes(asked):
    args = parse_args(asked)

    assert args.dry_run
