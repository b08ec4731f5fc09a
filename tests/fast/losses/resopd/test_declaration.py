"""On-policy distillation at the door: options, plan, and refusals that name the flag, the value and the cure."""

import pytest

from miles_dmd import registry
from miles_dmd.config.cli import parse_args
from miles_dmd.losses.resopd import Options, loss_type
from miles_dmd.observe.alarms import Alarms

BOTH = ["--hf-checkpoint", "student", "--teacher-checkpoint", "teacher"]


def parse(*flags):
    return parse_args(["--loss-type", "resopd", *flags])


def test_a_frozen_teacher_group_scores_before_the_actor():
    plan = loss_type.plan(parse(*BOTH))

    assert plan.groups == loss_type.roles == ("teacher", "actor")
    assert [plan.trainable_role(group) for group in plan.groups] == [None, "student"]
    assert [group.model_ref for group in plan.role_layout.groups] == ["teacher", "student"]
    assert plan.rollout["strategy"] == "on_policy_tokens"
    assert plan.required_capabilities <= loss_type.capabilities
    assert registry.load("roles", "teacher").pipelines == {"teacher_score": "teacher_checkpoint"}


def test_the_size_of_the_head_is_in_the_plans_fingerprint():
    four, five, again = (loss_type.plan(parse(*BOTH, "--opd-top-k", k)) for k in ("4", "5", "4"))

    assert four.objective["opd_top_k"] == 4
    assert four.fingerprint == again.fingerprint != five.fingerprint


def test_the_address_of_a_served_teacher_is_not_in_the_plan():
    plans = [
        loss_type.plan(parse("--hf-checkpoint", "s", "--opd-teacher-url", f"http://127.0.0.1:{port}"))
        for port in (3000, 3001)
    ]

    assert plans[0] == plans[1]
    assert plans[0].role_layout.groups[0].model_ref == "served"


def test_what_one_run_has_one_of_is_no_flag_of_a_trainer():
    own = [name for name in vars(Options()) if loss_type.trainers_of(name)]

    assert own == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        # C1: the head
        ([*BOTH, "--opd-top-k", "0"], ["--opd-top-k", "'0'|0 must", "at least 1"]),
        ([*BOTH, "--opd-top-k", "true"], ["--opd-top-k", "'true'", "whole number"]),
        ([*BOTH, "--opd-top-k", "2.5"], ["--opd-top-k", "'2.5'", "whole number"]),
        # C2: clamps
        ([*BOTH, "--loss-max-clamp", "10"], ["--loss-max-clamp 10", "biases the estimator"]),
        ([*BOTH, "--log-prob-min-clamp", "-10"], ["--log-prob-min-clamp", "biases the estimator"]),
        # C3: policy gradient
        ([*BOTH, "--use-policy-gradient"], ["--use-policy-gradient", "score gradient is built into the loss"]),
        ([*BOTH, "--opd-kl-coef", "1"], ["--opd-kl-coef 1", "score gradient is built into the loss"]),
        # C4: sampling
        ([*BOTH, "--temperature", "0.8"], ["--temperature 0.8", "temperature 1", "biases the estimator"]),
        ([*BOTH, "--rollout-top-p", "0.9"], ["--rollout-top-p 0.9", "full vocabulary", "biases the estimator"]),
        ([*BOTH, "--top-k", "50"], ["--top-k 50", "full vocabulary"]),
        ([*BOTH, "--min-p", "0.1"], ["--min-p 0.1", "full vocabulary"]),
        ([*BOTH, "--repetition-penalty", "1.1"], ["--repetition-penalty 1.1", "full vocabulary"]),
        ([*BOTH, "--logit-bias", "x"], ["--logit-bias x", "full vocabulary"]),
        ([*BOTH, "--bad-words", "x"], ["--bad-words x", "full vocabulary"]),
        # C5: steps
        ([*BOTH, "--num-steps-per-rollout", "2"], ["--num-steps-per-rollout 2", "one optimizer step"]),
        ([*BOTH, "--ppo-epochs", "2"], ["--ppo-epochs 2", "one optimizer step", "--opd-importance-cap"]),
        ([*BOTH, "--partial-rollout"], ["--partial-rollout", "never stale"]),
        # C6: dropout
        ([*BOTH, "--dropout", "0.1"], ["--dropout 0.1", "dropout is off"]),
        # C7: the teacher
        (["--hf-checkpoint", "s"], ["exactly one source", "--teacher-checkpoint", "--opd-teacher-url", "neither"]),
        ([*BOTH, "--opd-teacher-url", "http://a:1"], ["exactly one source", "both are given"]),
        (["--hf-checkpoint", "s", "--opd-teacher-url", "a:1"], ["--opd-teacher-url a:1", "http://HOST:PORT"]),
        ([*BOTH, "--teacher-hf-checkpoint", "x"], ["--teacher-hf-checkpoint x", "--teacher-checkpoint"]),
        # C8: logits
        ([*BOTH, "--use-fused-kernels"], ["--use-fused-kernels", "reads logits"]),
        # C9: the loss
        ([*BOTH, "--opd-loss", "k3"], ["--opd-loss 'k3'", "resopd, forward_kl_topk_tail, sampled_k2"]),
        # what would do nothing
        (
            [*BOTH, "--opd-loss", "sampled_k2", "--opd-residual-baseline", "bucket"],
            ["--opd-residual-baseline bucket", "--opd-loss resopd", "drop it"],
        ),
        (
            [*BOTH, "--opd-loss", "forward_kl_topk_tail", "--opd-importance-cap", "2"],
            ["--opd-importance-cap 2", "samples nothing", "drop it"],
        ),
        ([*BOTH, "--opd-importance-cap", "0.5"], ["--opd-importance-cap", "at least 1"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if value and value[0].startswith("--") else "",
)
def test_what_would_bias_the_estimator_is_refused(refused, flags, parts):
    message = refused(*flags)

    assert all(any(one in message for one in part.split("|")) for part in parts), message


def row(event, variance=0.2, tokens=4096, **more):
    return {"opd/head_event": event, "opd/head_event_variance": variance, "actor/weight": tokens, **more}


@pytest.mark.parametrize(("event", "z", "rings"), [(0.0, 0.0, 0.0), (0.05, 7.155, 1.0), (-0.08, -11.45, 1.0)])
def test_the_on_policy_alarm_rings_on_either_side(event, z, rings):
    (alarm,) = (alarm for alarm in loss_type.alarms if alarm.name == "on_policy")
    alarms = Alarms({alarm: 6.0}, 10)

    found = alarms.check(row(event))

    assert found["opd/on_policy_z"] == pytest.approx(z, rel=1e-3)
    assert found["alarm/on_policy"] == rings


def test_the_head_mass_alarm_looks_at_the_beginning():
    (alarm,) = (alarm for alarm in loss_type.alarms if alarm.name == "head_mass")
    alarms = Alarms({alarm: 0.5}, 2)

    rows = [alarms.check({"opd/student_head_mass": mass}) for mass in (0.6, 0.6, 0.3, 0.2)]

    assert rows[2] == {}
    assert rows[3]["opd/head_mass_growth"] == pytest.approx(0.25 / 0.6)
    assert rows[3]["alarm/head_mass"] == 1
