"""Every flag does something: it changes a run's numbers, files or output, or it is refused by name.

A new flag gets one row in EFFECTS. Best is ``changes(what, "--flag VALUE")``, which is measured here, by a method of
``probes.Probes``; ``shown_by(...)`` names the test that shows the effect where that takes a whole run, a cluster or a
server; ``read_by(...)`` names the module that reads what bears on time, memory or place alone.
"""

import ast
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from miles_dmd import registry
from miles_dmd.config.cli import parse_args
from miles_dmd.config.flags import ENGINE, LOSS, MODALITY, RUN, flags_of
from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.preflight.rules import resolve

_spec = importlib.util.spec_from_file_location("probes", Path(__file__).parent / "probes.py")
probes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(probes)

ROOT = Path(__file__).parents[2]
SGLANG = registry.load("engines", "sglang")
FLAGS = flags_of("dmd2", dmd2, "sglang", SGLANG)
OF_RUN = {flag.argument: flag for flag in FLAGS.values() if flag.scope in (RUN, LOSS, ENGINE, MODALITY)}
OF_TRAINERS = {name: flag for name, flag in FLAGS.items() if flag.scope not in (RUN, LOSS, ENGINE, MODALITY)}


@dataclass(frozen=True)
class Changes:
    probe: str
    flags: tuple[str, ...]
    beside: tuple[str, ...]
    """Flags of the run that it is compared with, too."""


@dataclass(frozen=True)
class Elsewhere:
    file: str
    name: str


@dataclass(frozen=True)
class ReadBy:
    module: str


def changes(probe, flags, beside=""):
    return Changes(probe, tuple(flags.split()), tuple(beside.split()))


def shown_by(place):
    return Elsewhere(*place.split("::"))


def read_by(module):
    return ReadBy(f"miles_dmd/{module}.py")


TRAINER_TESTS, RESUME = "tests/fast/training/test_trainer.py", "tests/e2e/test_resume.py"
SAVING, SGLANG_TESTS = "tests/fast/checkpoint/test_saving.py", "tests/fast/engines/test_sglang_options.py"
PREFLIGHT = "tests/fast/preflight"
EFFECTS = {
    # Model
    "model_family": shown_by("tests/fast/test_registry.py::test_a_plug_in_is_a_file_or_package_of_its_wing"),
    "hf_checkpoint": changes("trained", "--hf-checkpoint OTHER"),
    "teacher_checkpoint": changes("trained", "--teacher-checkpoint OTHER"),
    "compute_dtype": changes("trained", "--compute-dtype bf16"),
    "gradient_checkpointing": shown_by(
        f"{TRAINER_TESTS}::test_gradient_checkpointing_changes_memory_and_not_the_result"
    ),
    "max_sequence_length": changes("called", "--max-sequence-length 16"),
    "load": shown_by(f"{RESUME}::test_resumed_run_ends_bit_equal"),
    "save": shown_by("tests/e2e/test_run.py::test_run_leaves_what_it_promises"),
    # Optimizer
    "lr": changes("trained", "--lr 1e-3"),
    "betas": changes("trained", "--betas 0.5 0.6"),
    "adam_eps": changes("trained", "--adam-eps 1"),
    "weight_decay": changes("trained", "--weight-decay 9"),
    "clip_grad": changes("trained", "--clip-grad 1e-9"),
    "lr_scheduler": changes("trained", "--lr-scheduler cosine"),
    "lr_warmup_steps": changes("trained", "--lr-warmup-steps 1 --lr-scheduler constant_with_warmup"),
    "micro_batch_size": shown_by(f"{TRAINER_TESTS}::test_micro_batches_change_nothing"),
    "num_trainer_ranks": shown_by("tests/e2e/test_run.py::test_ray_run_equals_the_local_run"),
    "ema_decay": changes("trained", "--ema-decay 0.5"),
    "ema_start_step": changes("trained", "--ema-start-step 1"),
    # Loss
    "loss_type": shown_by("tests/fast/config/test_cli.py::test_a_loss_type_of_the_users_own_brings_its_flags"),
    "fake_update_ratio": changes("scheduled", "--fake-update-ratio 3"),
    "fake_warmup_cycles": changes("scheduled", "--fake-warmup-cycles 2"),
    "teacher_guidance": changes("trained", "--teacher-guidance 2"),
    "dm_sigma_min": changes("trained", "--dm-sigma-min 0.5"),
    "dm_sigma_max": changes("trained", "--dm-sigma-max 0.5"),
    "dm_shift": changes("trained", "--dm-shift 7"),
    "fake_shift": changes("trained", "--fake-shift 7"),
    "teacher_num_inference_steps": changes("called", "--teacher-num-inference-steps 3"),
    "normalizer_floor": changes("trained", "--normalizer-floor 9"),
    # Rollout
    "rollout_engine": shown_by(
        "tests/e2e/test_sglang.py::test_run_through_ray_with_its_own_server_equals_the_in_process_run"
    ),
    "prompt_data": changes("sampled", "--prompt-data OTHER_PROMPTS"),
    "rollout_batch_size": changes("sampled", "--rollout-batch-size 8"),
    "rollout_micro_batch_size": read_by("engines/inprocess/sampler"),
    "num_rollout": changes("scheduled", "--num-rollout 3"),
    "num_inference_steps": changes("sampled", "--num-inference-steps 2"),
    "shift": changes("sampled", "--shift 1"),
    "solver": changes("sampled", "--solver euler"),
    "stop_step_policy": changes("sampled", "--stop-step-policy uniform"),
    "height": changes("sampled", "--height 32"),
    "width": changes("sampled", "--width 32"),
    "negative_prompt": changes("trained", "--negative-prompt eight"),
    # Run
    "config": shown_by("tests/fast/config/test_cli.py::test_flags_win_over_the_preset_and_the_preset_over_defaults"),
    "overwrite": shown_by("tests/fast/preflight/test_run_directory.py::test_another_run_is_replaced_only_when_asked"),
    "save_interval": shown_by(f"{SAVING}::test_saved_every_interval_and_at_the_end"),
    "keep_checkpoints": shown_by(f"{SAVING}::test_older_ones_are_removed"),
    "on_save_failure": shown_by(f"{SAVING}::test_full_disk_leaves_the_previous_checkpoint"),
    "allow_changed": shown_by(f"{RESUME}::test_changed_argument_is_refused_unless_it_is_named"),
    "seed": changes("sampled", "--seed 7"),
    "device": shown_by("tests/fast/config/test_bad_input.py::test_a_device_that_is_not_there_is_refused_without_torch"),
    "local": shown_by("tests/e2e/test_run.py::test_ray_run_equals_the_local_run"),
    "dry_run": shown_by("tests/fast/preflight/test_rules.py::test_a_run_needs_weights_and_a_dry_run_does_not"),
    "ray_address": shown_by("tests/e2e/test_cluster.py::test_run_joins_a_cluster_of_two_nodes_that_wants_a_token"),
    "export_dtype": shown_by("tests/e2e/test_export.py::test_the_share_is_told_and_auto_loses_nothing"),
    "ray_auth_mode": shown_by(f"{PREFLIGHT}/test_ray_places.py::test_ray_authenticates_unless_it_is_told_not_to"),
    "cpu_threads": read_by("cluster/trainer_actor"),
    "cache_dir": shown_by(
        "tests/fast/modalities/diffusion/test_teacher.py::test_they_are_drawn_once_for_what_they_depend_on"
    ),
    "sample_interval": changes("drawn", "--sample-interval 1", beside="--sample-prompts 2"),
    "sample_prompts": changes("drawn", "--sample-prompts 2"),
    "placement_timeout": read_by("cluster/run"),
    "remote_timeout": read_by("cluster/run"),
    "max_consecutive_skipped_cycles": shown_by(
        "tests/e2e/test_faults.py::test_number_that_is_not_finite_on_one_rank_is_skipped_by_all"
    ),
    "hook": shown_by("tests/e2e/test_hooks.py::test_hook_reports_remembers_and_decides_which_student_is_best"),
    "on_alarm": shown_by("tests/e2e/test_alarms.py::test_alarm_ends_a_run_cleanly_if_asked"),
    "alarm_window": changes("rung", "--alarm-window 10"),
    "alarm_critic_lag": changes("rung", "--alarm-critic-lag 1.5"),
    "alarm_critic_loss_slope": changes("rung", "--alarm-critic-loss-slope 0.1"),
    "alarm_saturation": changes("rung", "--alarm-saturation 0.001", beside="--sample-prompts 1"),
    "alarm_diversity": changes("rung", "--alarm-diversity 0.9", beside="--sample-prompts 1"),
    "alarm_rollout_drift": changes("rung", "--alarm-rollout-drift 0.01"),
    "keep_best": shown_by(
        "tests/e2e/test_alarms.py::test_grids_tell_diversity_and_the_best_student_stays_beside_the_last"
    ),
    "tensorboard": shown_by("tests/fast/observe/test_trackers.py::test_tensorboard_gets_every_number_at_its_cycle"),
    "wandb_project": shown_by(
        "tests/fast/observe/test_trackers.py::test_wandb_gets_the_row_at_its_cycle_and_the_configuration"
    ),
    # Rollout engine sglang
    "sglang_url": shown_by("tests/e2e/test_sglang.py::test_weights_travel_either_way"),
    "sglang_python": shown_by(f"{SGLANG_TESTS}::test_command_names_all_that_samples_depend_on"),
    "num_sglang_servers": shown_by(
        "tests/e2e/test_sglang_faults.py::test_run_goes_on_with_the_second_server_and_ends_at_once_without_any"
    ),
    "sglang_host": read_by("engines/sglang/__init__"),
    "sglang_args": shown_by(f"{SGLANG_TESTS}::test_command_names_all_that_samples_depend_on"),
    "sglang_log_dir": shown_by(f"{SGLANG_TESTS}::test_server_that_ends_at_once_is_told_with_its_last_words"),
    "sglang_start_timeout": shown_by(f"{SGLANG_TESTS}::test_server_that_never_answers_is_given_up_and_ended"),
    "sglang_concurrency": read_by("engines/sglang/fleet_engine"),
    "sglang_timeout": read_by("engines/sglang/fleet_engine"),
    "sglang_probe_timeout": shown_by(
        "tests/fast/engines/test_sglang_fleet.py::test_server_that_hangs_is_given_seconds_and_not_minutes"
    ),
    "sglang_first_sample_timeout": shown_by(
        "tests/fast/engines/test_sglang_fleet.py::test_server_that_hangs_at_its_first_sample_is_given_a_limit_of_its_own"
    ),
    "sglang_deadline": shown_by("tests/e2e/test_sglang.py::test_rollout_goes_on_without_a_server_that_fails"),
    "sglang_weights": shown_by("tests/e2e/test_sglang.py::test_weights_travel_either_way"),
    "verify_weights_interval": shown_by(
        "tests/fast/engines/test_sglang_sampler.py::test_updates_are_compared_as_often_as_asked"
    ),
    "verify_weights": shown_by(
        "tests/fast/engines/test_sglang_sampler.py::test_updates_are_compared_as_often_as_asked"
    ),
}
UNMEASURED = {"micro_batch_size": "3", "num_trainer_ranks": "2", "gradient_checkpointing": None}
"""Values for what a trainer may be asked for and is not measured here."""


@pytest.fixture(scope="module")
def other(teacher, tmp_path_factory):
    """Files that rows refer to: another network, and other prompts."""
    directory = tmp_path_factory.mktemp("other")
    shutil.copytree(teacher, directory / "teacher")
    path = directory / "teacher" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = {name: value * 1.01 for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    (directory / "prompts.txt").write_text("a handwritten nine\na handwritten one\n")
    return {"OTHER": str(directory / "teacher"), "OTHER_PROMPTS": str(directory / "prompts.txt")}


@pytest.fixture(scope="module")
def probe(flags, latest, other, tmp_path_factory):
    """``probe("trained", words)``: what a run with these flags on top gives. That without any is measured once."""
    base, measured = flags(), {}

    def measure(name, words, again=False, **more):
        key = (name, tuple(words), *more.values())
        if again or key not in measured:
            args = resolve(parse_args(latest([*base, *(other.get(word, word) for word in words)]))).args
            measured[key] = getattr(probes.Probes(base, tmp_path_factory.mktemp("run")), name)(args, **more)
        return measured[key]

    return measure


def test_every_flag_has_its_row():
    assert sorted(EFFECTS) == sorted(OF_RUN), "a new flag needs a row that says what it changes, and how that is seen"


@pytest.mark.parametrize("argument", [name for name, row in EFFECTS.items() if isinstance(row, Changes)])
def test_flag_changes_what_its_row_says(probe, argument):
    row = EFFECTS[argument]

    assert OF_RUN[argument].name in row.flags
    assert probe(row.probe, [*row.beside, *row.flags]) != probe(row.probe, row.beside)


def test_what_is_compared_is_equal_without_a_flag(probe):
    """Else any flag would seem to change it."""
    for name in sorted({row.probe for row in EFFECTS.values() if isinstance(row, Changes)}):
        assert probe(name, ()) == probe(name, (), again=True), name


@pytest.mark.parametrize("argument", [name for name, row in EFFECTS.items() if isinstance(row, Elsewhere)])
def test_test_that_shows_a_flag_is_there_and_its_file_speaks_of_the_flag(argument):
    row, text = EFFECTS[argument], (ROOT / EFFECTS[argument].file).read_text(encoding="utf-8")

    assert f"def {row.name}(" in text
    assert argument in text or OF_RUN[argument].name in text


@pytest.mark.parametrize("argument", [name for name, row in EFFECTS.items() if isinstance(row, ReadBy)])
def test_module_that_is_said_to_read_a_flag_reads_it(argument):
    tree = ast.parse((ROOT / EFFECTS[argument].module).read_text(encoding="utf-8"))

    assert argument in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def of_trainer(role, argument):
    """The words of the argument's row, for one trainer alone."""
    row = EFFECTS[argument]
    words = row.flags if isinstance(row, Changes) else [f"--{argument.replace('_', '-')}", UNMEASURED[argument]]
    names = {f"--{flag.name[3 + len(role) :]}": flag.name for flag in OF_TRAINERS.values() if flag.scope == role}
    return [names.get(word, word) for word in words if word is not None]


@pytest.mark.parametrize("name", OF_TRAINERS)
def test_trainers_own_flag_changes_that_trainer_or_is_refused_by_name(probe, flags, latest, other, name):
    flag = OF_TRAINERS[name]
    words = of_trainer(flag.scope, flag.argument)
    try:
        args = resolve(parse_args(latest([*flags(), *(other.get(word, word) for word in words)]))).args
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""

    if refusal:
        assert name in refusal
        return
    row = EFFECTS[flag.argument]
    if isinstance(row, Changes):
        assert row.probe == "trained"
        assert probe("trained", words, roles=(flag.scope,)) != probe("trained", (), roles=(flag.scope,))
    else:
        (own,) = (t for t in compute_trainer_configs(args) if t.role == flag.scope)
        assert getattr(compute_trainer_args(args, own), flag.argument) != getattr(args, flag.argument)
