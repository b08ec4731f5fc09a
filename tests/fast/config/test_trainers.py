"""Arguments of each trainer: its own, and nobody else's."""

import pickle
from argparse import Namespace
from dataclasses import replace

import pytest

from miles_dmd.config.args import Args
from miles_dmd.config.cli import parse_args
from miles_dmd.config.flags import per_trainer
from miles_dmd.config.trainers import TrainerConfig, compute_trainer_args, compute_trainer_configs
from miles_dmd.config.values import kinds
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.modalities.diffusion import modality as diffusion
from miles_dmd.preflight.overrides import RUN_WIDE, check_run_wide
from miles_dmd.preflight.rules import resolve


def test_a_namespace_has_the_actor_alone():
    assert compute_trainer_configs(Namespace(lr=1e-5)) == [TrainerConfig("actor", {})]
    assert compute_trainer_configs(Namespace(lr=1e-5, trainers=())) == [TrainerConfig("actor", {})]


def test_a_namespace_may_name_its_trainers():
    trainers = [TrainerConfig("critic", {"lr": 1.0}), TrainerConfig("actor")]

    assert compute_trainer_configs(Namespace(trainers=trainers)) == trainers


def test_a_loss_type_of_one_group_has_the_actor_alone(own_loss):
    assert compute_trainer_configs(Args(loss_type=own_loss("solo"))) == [TrainerConfig("actor", {})]


def test_dmd2_has_the_critic_before_the_actor():
    args = Args(trainers=(TrainerConfig("actor", {"lr": 2e-6}),))

    assert compute_trainer_configs(args) == [TrainerConfig("critic", {}), TrainerConfig("actor", {"lr": 2e-6})]


def test_a_role_that_the_loss_type_lacks_is_refused():
    args = Args(trainers=(TrainerConfig("critc", {"lr": 2e-6}),))

    with pytest.raises(ConfigError, match=r"'dmd2' has no group 'critc'.*critic, actor.*did you mean critic"):
        compute_trainer_configs(args)


@pytest.mark.parametrize("make", [Args, lambda **given: Namespace(**{"lr": 1e-5, "nested": {"a": [1]}, **given})])
def test_an_override_is_the_trainers_alone(make):
    args = make(lr=1e-4)

    own = compute_trainer_args(args, TrainerConfig("critic", {"lr": 4e-7}))

    assert (own.lr, args.lr) == (4e-7, 1e-4)
    assert type(own) is type(args)


def test_the_copy_shares_nothing_that_can_change():
    args = Namespace(nested={"a": [1]})
    override = {"nested": {"b": [2]}}

    copied = compute_trainer_args(args, TrainerConfig("actor"))
    overridden = compute_trainer_args(args, TrainerConfig("actor", override))

    assert copied.nested == args.nested
    assert copied.nested["a"] is not args.nested["a"]
    assert overridden.nested["b"] is not override["nested"]["b"]


@pytest.mark.parametrize(
    "args",
    [
        Args(),
        Args(hf_checkpoint="teacher", prompt_data="teacher", trainers=(TrainerConfig("critic", {"lr": 1e-6}),)),
        Namespace(lr=1e-5, loss_type="dmd2", betas=(0.9, 0.999), extra=["dmd2", {"x": "dmd2"}]),
    ],
)
def test_the_copy_of_unmodified_args_pickles_to_the_same_bytes(args):
    own = compute_trainer_args(args, TrainerConfig("actor", {}))

    assert own is not args
    assert pickle.dumps(own) == pickle.dumps(args)


def test_what_follows_from_an_argument_follows_its_override():
    args = Args(hf_checkpoint="student")

    own = compute_trainer_args(args, TrainerConfig("critic", {"hf_checkpoint": "other"}))

    assert (own.teacher_path, args.teacher_path) == ("other", "student")


def test_an_option_of_the_loss_type_may_be_overridden():
    args = Args()

    own = compute_trainer_args(args, TrainerConfig("critic", {"teacher_guidance": 2, "lr": 1e-6}))

    assert (own.loss_options.teacher_guidance, own.lr) == (2.0, 1e-6)
    assert args.loss_options.teacher_guidance == 4.0


@pytest.mark.parametrize("args", [Args(), Namespace(lr=1e-5)])
def test_an_unknown_name_is_refused_with_the_nearest(args):
    with pytest.raises(ConfigError, match=r"trainer 'critic' overrides 'lrr', which is no argument.*did you mean lr"):
        compute_trainer_args(args, TrainerConfig("critic", {"lrr": 1}))


@pytest.mark.parametrize("name", ["loss_options", "trainers"])
def test_what_is_no_argument_cannot_be_overridden(name):
    with pytest.raises(ConfigError, match="no argument"):
        compute_trainer_args(Args(), TrainerConfig("critic", {name: ()}))


@pytest.mark.parametrize(("name", "value"), [("lr", "fast"), ("micro_batch_size", True), ("betas", 0.9), ("seed", -1)])
def test_an_override_of_another_kind_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"trainer 'critic': {name}"):
        compute_trainer_args(Args(), TrainerConfig("critic", {name: value}))


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Args(trainers={"critic": {"lr": 1}}), "must be a list of TrainerConfig"),
        (lambda: Args(trainers=None), "trainers None must be a list"),
        (lambda: Args(trainers=({"role": "critic"},)), "must be a list of TrainerConfig"),
        (lambda: Args(trainers=(TrainerConfig("critic"), TrainerConfig("critic"))), "names 'critic' twice"),
        (lambda: Args(loss_type=3), "--loss-type 3 is not among dmd2"),
        (lambda: Args(rollout_engine=None), "--rollout-engine None is not among"),
        (lambda: Args(loss_options={"fake_update_ratio": 1}), "not a dict"),
        (lambda: TrainerConfig(3), "role 3 must be text"),
        (lambda: TrainerConfig("critic", None), "overrides None must map names"),
        (lambda: TrainerConfig("critic", {1: 2}), r"overrides \{1: 2\} must map names"),
        (lambda: compute_trainer_args(Args(), {"role": "critic"}), "must be a TrainerConfig"),
        (lambda: compute_trainer_args(Namespace(lr=1), "critic"), "trainer 'critic' must be a TrainerConfig"),
        (lambda: compute_trainer_args(Args(), TrainerConfig("ghost")), "no group 'ghost'"),
    ],
)
def test_what_no_program_should_pass_is_refused_in_one_line(make, part):
    with pytest.raises(ConfigError, match=part):
        make()


def test_trainers_may_come_in_a_list():
    assert Args(trainers=[TrainerConfig("critic", {"lr": 1.0})]).trainers == (TrainerConfig("critic", {"lr": 1.0}),)


OF_A_RUN = {"shift": 2.0, "solver": "euler", "num_inference_steps": 2, "seed": 3, "rollout_batch_size": 8, "height": 32}


@pytest.mark.parametrize("name", OF_A_RUN)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_what_a_run_has_one_of_is_no_trainers_own_from_python_either(asked, role, name):
    """The trainer would follow it, and the export the run."""
    args = replace(parse_args(asked), trainers=(TrainerConfig(role, {name: OF_A_RUN[name]}),))

    with pytest.raises(ConfigError, match=rf"--{role}-{name.replace('_', '-')} .*applies to the whole run") as refused:
        resolve(args)

    assert f"pass --{name.replace('_', '-')}" in str(refused.value)


def test_every_argument_is_the_runs_or_may_be_a_trainers_own(asked):
    args = parse_args(asked)
    allowed = set()
    for name in kinds(Args):
        try:
            check_run_wide(
                replace(args, trainers=(TrainerConfig("actor", {name: getattr(args, name)}),)), dmd2, diffusion
            )
            allowed.add(name)
        except ConfigError:
            continue

    assert allowed == set(per_trainer()) - set(RUN_WIDE)
