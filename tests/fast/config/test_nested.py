"""Nested form of a preset: translated once, and refused where it disagrees with the loss type."""

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.config.nested import OF_EVERY_LOSS, settings_that_run
from miles_dmd.errors import ConfigError
from miles_dmd.plan.configuration import FIXED, ON_POLICY_LOSS, ON_POLICY_SETTINGS, PLAN_SETTINGS, TRAINER_SETTINGS


@pytest.fixture
def parse(tmp_path):
    def read(text, *flags):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return parse_args(["--config", str(path), *flags])

    return read


def test_the_nested_form_becomes_arguments(parse):
    args = parse(
        """
        algorithm: {trainer_type: distillation}
        actor_rollout_ref: {model: {path: some/dir}}
        distillation:
          enabled: false
          distribution_matching:
            recipe: dmd2
            profile: null
            fake_update_ratio: 2
            fake_warmup_cycles: 1
            rollout_strategy: ode_euler
            ema_decay: 0.5
            fake_lr: 4e-6
            student_micro_batch_size: 2
        args: {lr: 1e-4}
        """
    )

    assert (args.loss_type, args.hf_checkpoint, args.solver, args.ema_decay) == ("dmd2", "some/dir", "euler", 0.5)
    assert (args.loss_options.fake_update_ratio, args.loss_options.fake_warmup_cycles) == (2, 1)
    assert [dict(trainer.overrides) for trainer in args.trainers] == [{"lr": 4e-6}, {"micro_batch_size": 2}]


PUBLISHED = """
actor_rollout_ref:
  model: {path: some/dir, use_fused_kernels: false}
  actor: {use_torch_compile: false}
distillation:
  enabled: true
  distillation_loss:
    loss_mode: resopd
    topk: 8
    use_policy_gradient: false
    use_task_rewards: false
    loss_max_clamp: null
    log_prob_min_clamp: null
args: {teacher_checkpoint: other/dir}
"""


def test_the_published_settings_of_on_policy_distillation_become_arguments(parse):
    args = parse(PUBLISHED)

    assert (args.loss_type, args.hf_checkpoint, args.teacher_checkpoint) == ("resopd", "some/dir", "other/dir")
    assert (args.loss_options.opd_loss, args.loss_options.opd_top_k) == ("resopd", 8)


@pytest.mark.parametrize(
    ("setting", "value", "parts"),
    [
        ("use_policy_gradient: false", "true", ["use_policy_gradient True must be false", "score gradient"]),
        ("use_task_rewards: false", "true", ["use_task_rewards True must be false", "no rewards"]),
        ("loss_max_clamp: null", "10.0", ["loss_max_clamp 10.0 must be unset", "biases the estimator"]),
        ("log_prob_min_clamp: null", "-10.0", ["log_prob_min_clamp -10.0 must be unset", "biases the estimator"]),
        ("use_fused_kernels: false", "true", ["actor_rollout_ref.model.use_fused_kernels true", "reads logits"]),
        ("use_torch_compile: false", "true", ["actor_rollout_ref.actor.use_torch_compile true", "compiled"]),
        ("use_torch_compile: false", "1", ["use_torch_compile must be true or false, got 1"]),
        ("topk: 8", "0", ["distillation_loss.topk must be a whole number of at least 1, got 0"]),
        ("topk: 8", "true", ["distillation_loss.topk must be a whole number", "True"]),
        ("loss_mode: resopd", "k1", ["loss_mode 'k1' is not offered", "expected gradient is zero"]),
        ("loss_mode: resopd", "low_var_kl", ["loss_mode 'low_var_kl' is not offered", "forward KL"]),
        ("loss_mode: resopd", "forward_kl_topk", ["loss_mode 'forward_kl_topk' is not offered", "the tail"]),
        ("loss_mode: resopd", "resobd", ["distillation_loss.loss_mode 'resobd'", "sampled_k2", "mean resopd?"]),
        ("enabled: true", "false", ["distillation_loss is on-policy distillation's", "enabled to true"]),
        ("loss_mode: resopd", "resopd\n    topc: 1", ["unknown key 'topc'", "mean topk?"]),
        ("enabled: true", "true\n  distribution_matching: {}", ["distillation.enabled", "must be false"]),
    ],
)
def test_another_value_of_a_published_setting_is_refused_with_the_reason(parse, setting, value, parts):
    name = setting.partition(":")[0]
    assert setting in PUBLISHED

    with pytest.raises(ConfigError) as refused:
        parse(PUBLISHED.replace(setting, f"{name}: {value}"))

    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert "\n" not in str(refused.value)


def test_switches_of_kernels_say_the_same_to_distribution_matching(parse):
    off = "actor_rollout_ref: {model: {use_fused_kernels: false}}\ndistillation: {distribution_matching: {}}"

    assert parse(off).loss_type == "dmd2"
    with pytest.raises(ConfigError, match="use_fused_kernels true must be false"):
        parse(off.replace("false", "true", 1))


def test_every_setting_of_the_on_policy_loss_has_an_argument_or_one_value():
    assert {*ON_POLICY_SETTINGS} == {*settings_that_run(ON_POLICY_LOSS), *FIXED}


@pytest.mark.parametrize("strategy", ["consistency_renoise", "backward_simulated"])
def test_sampling_by_renoising_has_two_names(parse, strategy):
    args = parse(f"distillation: {{distribution_matching: {{rollout_strategy: {strategy}}}}}", "--lr", "1")

    assert (args.solver, args.loss_type) == ("renoise", "dmd2")


def test_without_a_trainer_type_the_loss_type_decides(parse, own_loss):
    args = parse("algorithm: {trainer_type: null}\ndistillation: {enabled: true}", "--loss-type", own_loss("lab"))

    assert args.loss_type == "lab.loss"


@pytest.mark.parametrize(
    ("text", "flags", "parts"),
    [
        ("algorithm: {trainer_type: ppo}", [], ["trainer_type 'ppo'", "distillation"]),
        ("algorithm: {trainer_typ: x}", [], ["unknown key 'trainer_typ'", "did you mean trainer_type?"]),
        ("algorithm: {trainer_type: distillation}", ["lab"], ["--loss-type lab.loss", "'distillation'"]),
        ("distillation: {distribution_matching: {}}", ["lab"], ["--loss-type lab.loss", "'distillation'"]),
        (
            "distillation: {distribution_matching: {recipe: causvid}}",
            ["dmd2"],
            ["--loss-type dmd2", "recipe 'causvid'"],
        ),
        ("distillation: {enabled: true, distribution_matching: {}}", [], ["distillation.enabled", "must be false"]),
        ("distillation: {enabled: true}", ["dmd2"], ["distillation.enabled", "must be false", "--loss-type dmd2"]),
        ("distillation: {enabled: 1}", [], ["distillation.enabled must be true or false, got 1"]),
        ("distillation: {distribution_matching: {fake_ratio: 2}}", [], ["unknown key 'fake_ratio'", "did you mean"]),
        ("distillation: {distribution_matching: {fake_update_ratio: 0.5}}", [], ["fake_update_ratio 0.5"]),
        ("distillation: {distribution_matching: {profile: paper}}", [], ["profile 'paper'", "distribution_only"]),
        ("distillation: {distribution_matching: {rollout_strategy: self_forced}}", [], ["'self_forced'", "ode_euler"]),
        (
            "distillation: {distribution_matching: {causal_model_path: c}}",
            [],
            ["causal_model_path 'c' cannot"],
        ),
        ("distillation: {distribution_matching: [1]}", [], ["distribution_matching must hold names", "not list"]),
        ("actor_rollout_ref: {model: {pth: 1}}", [], ["actor_rollout_ref.model: unknown key 'pth'", "mean path?"]),
        ("actor_rollout_ref: x", [], ["actor_rollout_ref must hold names and values", "not str"]),
        ("distillation: {distribution_matching: {rollout_strategy: [1]}}", [], ["[1]", "ode_euler"]),
        ("distillation: {distribution_matching: {recipe: dmd3}}", [], ["'dmd3'"]),
        ("args: {solver: euler}\ndistillation: {distribution_matching: {rollout_strategy: ode_euler}}", [], ["solver"]),
        (
            "trainers: [{role: critic, overrides: {}}]\ndistillation: {distribution_matching: {fake_lr: 1e-5}}",
            [],
            ["'critic' twice"],
        ),
    ],
)
def test_what_disagrees_or_has_no_meaning_is_refused_in_one_line(parse, own_loss, text, flags, parts):
    loss_type = [own_loss("lab") if name == "lab" else name for name in flags]

    with pytest.raises(ConfigError) as refused:
        parse(text, *(word for name in loss_type for word in ("--loss-type", name)))

    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_setting_but_those_of_causal_recipes_becomes_an_argument():
    known = {"recipe", *PLAN_SETTINGS, *TRAINER_SETTINGS}

    assert known - {*OF_EVERY_LOSS, *settings_that_run()} == {"causal_model_path", "bidirectional_model_path"}
    assert known >= {*OF_EVERY_LOSS, *settings_that_run()}
