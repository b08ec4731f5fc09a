"""Groups, bindings, transport and export: every layout that contradicts itself is refused where it is written."""

import pytest

from miles_dmd.errors import PlanError
from miles_dmd.plan import (
    ExportSpec,
    RoleBinding,
    RoleGroupSpec,
    RoleLayoutSpec,
    ScoreTransportSpec,
    describe_role_groups,
    independent_layout,
    partition_layout,
    resolve_export_role,
    validate_export_role,
    validate_role_layout,
)

BASE, ACTOR = RoleGroupSpec("base", "/m"), RoleGroupSpec("actor", "/m", "independent_module")
TEACHER = RoleBinding("teacher_score", "base")
STUDENT = RoleBinding("student", "base", "student", True, "student")
FAKE = RoleBinding("fake_score", "base", "fake_score", True, "fake_score")


def layout(groups=(BASE,), bindings=(TEACHER, STUDENT), **more):
    return RoleLayoutSpec(groups, bindings, **more)


REFUSALS = {
    "no groups": (lambda: layout(groups=()), "at least one role group"),
    "no bindings": (lambda: layout(bindings=()), "at least one role binding"),
    "duplicate group": (lambda: layout(groups=(BASE, BASE)), r"duplicate role group names \['base'\]"),
    "unknown group": (lambda: layout(bindings=(RoleBinding("student", "actor"),)), "unknown group 'actor'.*base"),
    "duplicate role": (lambda: layout(bindings=(TEACHER, TEACHER)), r"duplicate role bindings \['teacher_score'\]"),
    "empty group": (lambda: layout(groups=(BASE, ACTOR)), "'actor' holds no role"),
    "trainable without key": (
        lambda: layout(bindings=(RoleBinding("student", "base", "a", True),)),
        "'student' needs an optimizer_key",
    ),
    "frozen with key": (
        lambda: layout(bindings=(RoleBinding("teacher_score", "base", optimizer_key="t"),)),
        "frozen role 'teacher_score' cannot have optimizer_key 't'",
    ),
    "trainable teacher": (
        lambda: layout(bindings=(RoleBinding("teacher_score", "base", "t", True, "t"),)),
        "'teacher_score' never trains",
    ),
    "trainable average": (
        lambda: layout(bindings=(RoleBinding("student_ema", "base", "t", True, "t"),)),
        "'student_ema' never trains",
    ),
    "duplicate optimizer_key": (
        lambda: layout(bindings=(STUDENT, RoleBinding("fake_score", "base", "f", True, "student"))),
        r"duplicate optimizer_key \['student'\]",
    ),
    "shared base without adapter": (
        lambda: layout(bindings=(RoleBinding("student", "base", None, True, "student"),)),
        "name an adapter",
    ),
    "duplicate adapter": (
        lambda: layout(bindings=(STUDENT, RoleBinding("fake_score", "base", "student", True, "f"))),
        r"duplicate adapter \['student'\]",
    ),
    "a group that is none": (lambda: layout(groups=("base",)), r"groups\[0\] must be a RoleGroupSpec"),
    "groups that are a string": (lambda: layout(groups="base"), "groups must be a sequence of RoleGroupSpec"),
    "a binding that is none": (lambda: layout(bindings=(None,)), r"bindings\[0\] must be a RoleBinding"),
    "a transport that is none": (lambda: layout(score_transport="ray"), "must be a ScoreTransportSpec"),
    "unnamed group": (lambda: RoleGroupSpec(""), "RoleGroupSpec.name must not be empty"),
    "numbered group": (lambda: RoleGroupSpec(3), "RoleGroupSpec.name must be a string, got 3"),
    "model_ref that is no string": (
        lambda: RoleGroupSpec("base", 3),
        "model_ref of role group 'base' must be a string",
    ),
    "unknown storage": (
        lambda: RoleGroupSpec("base", storage="remote"),
        "must be one of shared_base_adapters, .*'remote'",
    ),
    "unknown placement": (
        lambda: RoleGroupSpec("base", placement="there"),
        "one of colocated, standalone; got 'there'",
    ),
    "unnamed role": (lambda: RoleBinding("", "base"), "RoleBinding.role must not be empty"),
    "role of no group": (lambda: RoleBinding("student", ""), "group of role 'student' must not be empty"),
    "trainable as a number": (lambda: RoleBinding("student", "base", trainable=1), "must be true or false, got 1"),
    "empty adapter": (
        lambda: RoleBinding("student", "base", adapter=""),
        "adapter of role 'student' must not be empty",
    ),
    "empty optimizer_key": (
        lambda: RoleBinding("student", "base", "s", True, ""),
        "optimizer_key of role 'student' must not be empty",
    ),
    "colocated over a remote backend": (lambda: ScoreTransportSpec("colocated", "mooncake"), "colocated takes local"),
    "ray over local": (lambda: ScoreTransportSpec("ray", "local"), "ray takes ray_nixl or mooncake"),
    "ray by default": (lambda: ScoreTransportSpec("ray"), "cannot use the tensor backend 'local'"),
    "unknown provider": (lambda: ScoreTransportSpec("http"), "provider must be one of colocated, ray"),
    "unknown backend": (lambda: ScoreTransportSpec("ray", "tcp"), "tensor_backend must be one of local, ray_nixl"),
    "exported teacher": (lambda: ExportSpec("teacher_score"), "export role must be one of student, student_ema"),
    "exported fake score": (lambda: ExportSpec("fake_score"), "got 'fake_score'"),
    "exported discriminator": (lambda: ExportSpec("discriminator"), "got 'discriminator'"),
    "no export backend": (lambda: ExportSpec("student", ""), "checkpoint_engine_backend must not be empty"),
    "export of an unbound role": (
        lambda: validate_export_role(ExportSpec(), {"student"}),
        "'student_ema' is not bound",
    ),
    "unknown role asked for": (lambda: layout().binding("fake_score"), "no role 'fake_score' in this layout"),
}


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS)
def test_invariant_2_a_layout_that_contradicts_itself_is_refused(build, message):
    with pytest.raises(PlanError, match=message) as refusal:
        build()

    assert "\n" not in str(refusal.value)


def test_a_shared_base_holds_the_teacher_bare_and_every_other_role_as_an_adapter():
    shared = partition_layout(
        {"base": ("teacher_score", "fake_score", "student")}, {"base": "/m"}, "shared_base_adapters"
    )

    assert [(b.role, b.adapter, b.optimizer_key) for b in shared.bindings] == [
        ("teacher_score", None, None),
        ("fake_score", "fake_score", "fake_score"),
        ("student", "student", "student"),
    ]


def test_independent_groups_hold_one_role_each_and_inherit_the_model():
    split = independent_layout(layout())

    assert [(g.name, g.model_ref, g.storage) for g in split.groups] == [
        ("teacher_score_model", "/m", "independent_module"),
        ("student_model", "/m", "independent_module"),
    ]
    assert [(b.role, b.group, b.adapter) for b in split.bindings] == [
        ("teacher_score", "teacher_score_model", None),
        ("student", "student_model", None),
    ]


def test_a_sound_layout_is_accepted_again_and_described():
    sound = layout(bindings=(TEACHER, STUDENT, FAKE))

    validate_role_layout(sound)
    assert sound.trainable_roles == ("student", "fake_score")
    assert describe_role_groups(sound) == {
        "base": "teacher_score, student, fake_score (shared_base_adapters, colocated)"
    }
    assert resolve_export_role(ExportSpec("student")) == "student"
