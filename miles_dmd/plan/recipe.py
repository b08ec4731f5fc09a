"""Recipe: a plan from a few settings, and the layouts of its roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from miles_dmd.errors import PlanError
from miles_dmd.plan.frozen import immutable
from miles_dmd.plan.layout import ExportSpec, RoleBinding, RoleGroupSpec, RoleLayoutSpec
from miles_dmd.plan.plan import DISTRIBUTION_MATCHING_ROLES, DistillationPlan
from miles_dmd.plan.schedule import UpdatePhaseSpec, UpdateSchedule
from miles_dmd.registry import nearest
from miles_dmd.validators import Check, choice, count

Partition = Mapping[str, Mapping[str, tuple[str, ...]]]
TRAINED = ("student", "fake_score", "discriminator")
SETTINGS = (
    "model_path",
    "fake_update_ratio",
    "fake_warmup_cycles",
    "export_role",
    "profile",
    "data_mode",
    "rollout_strategy",
    "role_storage",
)
"""Settings of every recipe, besides ``<group>_model_path``. None, or absent, is the recipe's default."""

SCORES, STUDENTS = ("teacher_score", "fake_score"), ("student", "student_ema")
ONE_MODEL: Partition = {
    "shared_base_adapters": {"base": (*SCORES, *STUDENTS)},
    "actor_critic": {"critic": SCORES, "actor": STUDENTS},
}


@immutable
class Profile:
    """A variant of a recipe: its data mode, who trains in the fake-score phase, what it requires on top."""

    data_mode: str
    fake_roles: tuple[str, ...] = ("fake_score",)
    capabilities: frozenset[str] = frozenset()


class Recipe:
    """Class attributes say what a recipe allows; the first profile, rollout and storage are its defaults."""

    name: ClassVar[str]
    objective: ClassVar[str]
    objective_roles: ClassVar[tuple[str, ...]] = DISTRIBUTION_MATCHING_ROLES
    """Roles that the objective reads."""
    profiles: ClassVar[Mapping[str, Profile]]
    rollouts: ClassVar[tuple[str, ...]]
    partitions: ClassVar[Partition]
    """role_storage -> group -> its roles, in order; ``colocated_independent`` splits the first of them."""
    stage: ClassVar[str] = "base"
    capabilities: ClassVar[frozenset[str]] = frozenset({"distribution_matching"})
    default_ratio: ClassVar[int] = 5
    default_export: ClassVar[str] = "student_ema"
    objective_settings: ClassVar[Mapping[str, Check]] = {}
    """Settings of its own that become part of the objective, where they are set."""

    def build(self, config: Any) -> DistillationPlan:
        """``config`` is a mapping or has attributes; keys: SETTINGS, ``<group>_model_path``, ``objective_settings``."""
        known = f"of recipe {self.name!r}"
        name = choice(f"profile {known}", read(config, "profile", next(iter(self.profiles))), self.profiles)
        rollout = choice(f"rollout_strategy {known}", read(config, "rollout_strategy", self.rollouts[0]), self.rollouts)
        profile = self.profiles[name]
        mode = read(config, "data_mode", profile.data_mode)
        choice(f"data_mode {known} with profile {name!r}", mode, (profile.data_mode,))
        return DistillationPlan(
            name=self.name,
            version=1,
            role_layout=self.layout(config, profile),
            data_requirements={"mode": mode},
            objective={"name": self.objective, "profile": name, "roles": self.objective_roles, **self._own(config)},
            rollout={"strategy": rollout},
            initialization={"stage": self.stage} | ({"requires_provenance": True} if self.stage != "base" else {}),
            update_schedule=self.schedule(config, profile),
            export=ExportSpec(read(config, "export_role", self.default_export)),
            required_capabilities=self.capabilities | profile.capabilities,
        )

    def _own(self, config: Any) -> dict[str, Any]:
        """Settings of the objective that are set, checked."""
        found = {key: value for key in self.objective_settings if (value := read(config, key)) is not None}
        for key, value in found.items():
            self.objective_settings[key](key, value)
        return found

    def schedule(self, config: Any, profile: Profile) -> UpdateSchedule:
        """The student once, then K updates of the fake score; the warm-up is the fake-score phase alone."""
        ema = "student_ema" in self.objective_roles
        student = UpdatePhaseSpec("student", trainable_roles=("student",), update_ema=ema)
        if not profile.fake_roles:
            for key in ("fake_update_ratio", "fake_warmup_cycles"):
                if value := read(config, key):
                    raise PlanError(f"recipe {self.name!r} has no fake score; drop {key}={value!r}")
            return UpdateSchedule((student,))
        ratio = count("fake_update_ratio", read(config, "fake_update_ratio", self.default_ratio), 1)
        warmup = count("fake_warmup_cycles", read(config, "fake_warmup_cycles", 0))
        fake = UpdatePhaseSpec("fake_score", repeats=ratio, trainable_roles=profile.fake_roles)
        return UpdateSchedule((student, fake), (fake,) if warmup else (), warmup)

    def layout(self, config: Any, profile: Profile) -> RoleLayoutSpec:
        """Roles dealt out to groups; the discriminator of an adversarial profile stands beside the fake score."""
        known = (*self.partitions, "colocated_independent")
        storage = choice(f"role_storage of recipe {self.name!r}", read(config, "role_storage", known[0]), known)
        groups = {
            group: tuple(r for role in roles for r in (profile.fake_roles if role == "fake_score" else (role,)))
            for group, roles in self.partitions.get(storage, self.partitions[known[0]]).items()
        }
        _refuse_unknown_settings(config, self.name, [*self.objective_settings, *map(_path_key, groups)])
        paths = {group: read(config, _path_key(group), read(config, "model_path", "")) for group in groups}
        layout = partition_layout(groups, paths, storage)
        return independent_layout(layout) if storage == "colocated_independent" else layout


def read(config: Any, key: str, default: Any = None) -> Any:
    """One setting of a mapping or of an object with attributes; None counts as absent."""
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return default if value is None else value


def _path_key(group: str) -> str:
    return "model_path" if group == "base" else f"{group.removesuffix('_base')}_model_path"


def _refuse_unknown_settings(config: Any, recipe: str, own: Iterable[str]) -> None:
    if not isinstance(config, Mapping):
        return
    known = [*SETTINGS, *own]
    for key in config:
        if key not in known and config[key] is not None:
            there = ", ".join(dict.fromkeys(known))
            raise PlanError(f"recipe {recipe!r} has no setting {key!r}{nearest(str(key), known)}; there are {there}")


def partition_layout(
    groups: Mapping[str, tuple[str, ...]], model_refs: Mapping[str, str], storage: str
) -> RoleLayoutSpec:
    """Layout from groups of roles. In a shared base the teacher is the base itself, other roles are adapters on it."""
    shared = storage == "shared_base_adapters"
    kind = "shared_base_adapters" if shared else "independent_module"
    return RoleLayoutSpec(
        groups=tuple(RoleGroupSpec(name, model_refs[name], kind) for name in groups),
        bindings=tuple(
            RoleBinding(
                role,
                group,
                adapter=role if shared and role != "teacher_score" else None,
                trainable=role in TRAINED,
                optimizer_key=role if role in TRAINED else None,
            )
            for group, roles in groups.items()
            for role in roles
        ),
    )


def independent_layout(layout: RoleLayoutSpec) -> RoleLayoutSpec:
    """The same roles, each in a group and a module of its own."""
    refs = {group.name: group.model_ref for group in layout.groups}
    roles = {f"{binding.role}_model": (binding.role,) for binding in layout.bindings}
    return partition_layout(
        roles, {f"{binding.role}_model": refs[binding.group] for binding in layout.bindings}, "independent_module"
    )
