"""Presets: read strictly, and every shipped one parses."""

import pytest

from miles_dmd.config import presets
from miles_dmd.config.cli import parse_args
from miles_dmd.config.presets import read_preset, shipped
from miles_dmd.errors import ConfigError, NotFound


@pytest.fixture
def refused(tmp_path):
    def parse(text, *flags):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError) as error:
            parse_args(["--config", str(path), *flags])
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(path), "mine.yaml")

    return parse


def test_the_main_jobs_preset_and_the_real_models_preset_are_shipped():
    assert {"digits", "sd35_medium_dmd2"} <= set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_preset_parses_and_warms_its_fake_score_up(name):
    args = parse_args(["--config", name])

    assert args.loss_type == "resopd" or args.loss_options.fake_warmup_cycles == 1


def test_a_shipped_preset_is_found_by_name_by_path_and_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    named, by_path = read_preset("digits"), read_preset("trainer_configs/digits.yaml")

    assert named == by_path


def test_paths_of_a_preset_are_looked_for_here_then_beside_it_then_above(monkeypatch, tmp_path):
    here, home = tmp_path / "here", tmp_path / "home"
    (home / "configs").mkdir(parents=True)
    here.mkdir()
    preset = home / "configs" / "mine.yaml"
    preset.write_text("args: {prompt_data: p.txt}")
    monkeypatch.chdir(here)

    def found():
        return parse_args(["--config", str(preset)]).prompt_data

    nowhere = found()
    (home / "p.txt").touch()
    above = found()
    (home / "configs" / "p.txt").touch()
    beside = found()
    (here / "p.txt").touch()
    assert (nowhere, above, beside, found()) == ("p.txt", f"{home}/p.txt", f"{home}/configs/p.txt", "p.txt")


def test_a_trainers_path_is_looked_for_too(monkeypatch, tmp_path):
    (tmp_path / "weights").mkdir()
    preset = tmp_path / "mine.yaml"
    preset.write_text("trainers: [{role: critic, overrides: {hf_checkpoint: weights}}]")

    args = parse_args(["--config", str(preset)])

    assert args.trainers[0].overrides == {"hf_checkpoint": f"{tmp_path}/weights"}


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(NotFound, match=r"--config 'digit' is neither .*digits, .*did you mean digits\?"):
        read_preset("digit")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("arg: {lr: 1}", ["mine.yaml", "unknown key 'arg'", "did you mean args?"]),
        ("args: {lrr: 1}", ["mine.yaml: args.lrr", "did you mean lr?"]),
        ("args: {rollout-batch-size: 8}", ["args.rollout-batch-size", "did you mean rollout_batch_size?"]),
        ("args: {critic_lr: 1}", ["args.critic_lr is", "trainers: [{role: critic, overrides: {lr: ...}}]"]),
        ("args: {actor_solver: euler}", ["args.actor_solver is no argument"]),
        ("args: {config: digits}", ["args.config is no argument"]),
        ("args: {dry_run: true}", ["args.dry_run is no argument"]),
        ("args: {trainers: []}", ["args.trainers is no argument"]),
        ("args: {lr: fast}", ["args.lr 'fast' must be a finite number"]),
        ("args: {num_rollout: true}", ["args.num_rollout True must be a whole number"]),
        ("args: {num_rollout: 2.5}", ["args.num_rollout 2.5"]),
        ("args: {num_rollout: 0}", ["args.num_rollout 0", "at least 1"]),
        ("args: {solver: ode}", ["args.solver 'ode'", "renoise, euler"]),
        ("args: {negative_prompt: no}", ["args.negative_prompt False", "quotes"]),
        ("args: {loss_type: 3}", ["loss_type 3 must be text"]),
        ("args: {lr: 1, lr: 2}", ["mine.yaml: line 1: 'lr' stands twice"]),
        ("args: [lr]", ["mine.yaml: args must hold names and values"]),
        ("args: {1: 2}", ["key 1 must be a name"]),
        ("args: {[1]: 2}", ["mine.yaml: line 1: a key must be a name"]),
        ("- args", ["mine.yaml must hold names and values"]),
        ("args: {lr: 1", ["mine.yaml: line 1"]),
        ("args: !!python/object:os.system {}", ["mine.yaml: line 1", "could not determine a constructor"]),
        ("trainers: {critic: {lr: 1}}", ["trainers must be a list"]),
        ("trainers: 0", ["trainers must be a list"]),
        ("trainers: false", ["trainers must be a list"]),
        ('trainers: ""', ["trainers must be a list"]),
        ("trainers: [critic]", ["trainers must hold names and values"]),
        ("trainers: [{overrides: {lr: 1}}]", ["each trainer needs a role"]),
        ("trainers: [{role: critic, override: {lr: 1}}]", ["unknown key 'override'", "did you mean overrides?"]),
        ("trainers: [{role: critc, overrides: {lr: 1}}]", ["no group 'critc'", "did you mean critic?"]),
        ("trainers: [{role: teacher, overrides: {lr: 1}}]", ["no group 'teacher'", "critic, actor"]),
        ("trainers: [{role: critic, overrides: {lrr: 1}}]", ["trainers.critic.lrr", "did you mean lr?"]),
        (
            "trainers: [{role: critic, overrides: {seed: 1}}]",
            ["trainers.critic.seed is no argument of a single trainer"],
        ),
        ("trainers: [{role: critic, overrides: {lr: -1}}]", ["trainers.critic.lr -1.0", "above 0"]),
        ("trainers: [{role: critic}, {role: critic}]", ["names 'critic' twice"]),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(refused, text, parts):
    message = refused(text)

    assert all(part in message for part in parts), message


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match="line 1: not UTF-8"):
        read_preset(str(path))


def test_an_option_of_another_loss_type_is_refused(refused, own_loss):
    message = refused("args: {fake_update_ratio: 3}", "--loss-type", own_loss("lab"))

    assert "args.fake_update_ratio is no argument of a lab.loss run" in message


def test_empty_sections_ask_for_nothing(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("args:\ntrainers:\n")

    assert parse_args(["--config", str(path)]).trainers == parse_args([]).trainers


def test_presets_lie_beside_the_package():
    assert presets.SHIPPED.is_dir()
