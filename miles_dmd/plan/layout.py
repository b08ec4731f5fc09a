"""Logical roles, the physical groups that hold them, and the role that is exported."""

from __future__ import annotations

from collections.abc import Collection

from miles_dmd.errors import PlanError
from miles_dmd.plan.declared.transport import ScoreTransportSpec
from miles_dmd.plan.frozen import assign, immutable
from miles_dmd.validators import choice, flag, instance, optional, repeated, sequence, string, text

STORAGES = ("shared_base_adapters", "independent_module")
PLACEMENTS = ("colocated", "standalone")
EXPORTABLE_ROLES = ("student", "student_ema")
FROZEN_ROLES = ("teacher_score", "student_ema")


@immutable
class RoleGroupSpec:
    """One physical model, or several of a kind that live and move together: what a trainer group holds."""

    name: str
    model_ref: str = ""
    """Directory of the pretrained model. A plan needs it; a layout can be drawn without."""
    storage: str = "shared_base_adapters"
    """``shared_base_adapters``: one base, a role is an adapter on it. ``independent_module``: each role its own."""
    placement: str = "colocated"

    def __post_init__(self) -> None:
        text("RoleGroupSpec.name", self.name)
        string(f"model_ref of role group {self.name!r}", self.model_ref)
        choice(f"storage of role group {self.name!r}", self.storage, STORAGES)
        choice(f"placement of role group {self.name!r}", self.placement, PLACEMENTS)


@immutable
class RoleBinding:
    """One logical role, in one group."""

    role: str
    group: str
    adapter: str | None = None
    trainable: bool = False
    optimizer_key: str | None = None

    def __post_init__(self) -> None:
        text("RoleBinding.role", self.role)
        text(f"group of role {self.role!r}", self.group)
        flag(f"trainable of role {self.role!r}", self.trainable)
        optional(text)(f"adapter of role {self.role!r}", self.adapter)
        optional(text)(f"optimizer_key of role {self.role!r}", self.optimizer_key)


@immutable
class ExportSpec:
    """The role that is exported. Teacher, fake score and discriminator never are."""

    role: str = "student_ema"
    checkpoint_engine_backend: str = "naive"

    def __post_init__(self) -> None:
        choice("export role", self.role, EXPORTABLE_ROLES)
        text("ExportSpec.checkpoint_engine_backend", self.checkpoint_engine_backend)


@immutable
class RoleLayoutSpec:
    """Groups in the order in which they are built and in which outputs flow: a scoring group before those it serves."""

    groups: tuple[RoleGroupSpec, ...]
    bindings: tuple[RoleBinding, ...]
    score_transport: ScoreTransportSpec = ScoreTransportSpec()

    def __post_init__(self) -> None:
        assign(
            self,
            groups=sequence("RoleLayoutSpec.groups", self.groups, RoleGroupSpec),
            bindings=sequence("RoleLayoutSpec.bindings", self.bindings, RoleBinding),
        )
        instance("RoleLayoutSpec.score_transport", self.score_transport, ScoreTransportSpec)
        validate_role_layout(self)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(binding.role for binding in self.bindings)

    @property
    def trainable_roles(self) -> tuple[str, ...]:
        return tuple(binding.role for binding in self.bindings if binding.trainable)

    def roles_of(self, group: str) -> tuple[str, ...]:
        return tuple(binding.role for binding in self.bindings if binding.group == group)

    def binding(self, role: str) -> RoleBinding:
        for binding in self.bindings:
            if binding.role == role:
                return binding
        raise PlanError(f"no role {role!r} in this layout; bound are {', '.join(self.roles)}")


def validate_role_layout(layout: RoleLayoutSpec) -> None:
    """Raises PlanError for a layout whose parts contradict each other."""
    if not layout.groups:
        raise PlanError("a role layout needs at least one role group")
    if not layout.bindings:
        raise PlanError("a role layout needs at least one role binding")
    if names := repeated(group.name for group in layout.groups):
        raise PlanError(f"duplicate role group names {names}; a group is named once")
    if roles := repeated(layout.roles):
        raise PlanError(f"duplicate role bindings {roles}; a role lives in one group")
    _check_optimizers(layout)
    groups = {group.name: group for group in layout.groups}
    for binding in layout.bindings:
        if binding.group not in groups:
            raise PlanError(f"role {binding.role!r} is bound to unknown group {binding.group!r}; one of {[*groups]}")
    for group in layout.groups:
        _check_group(layout, group)


def _check_optimizers(layout: RoleLayoutSpec) -> None:
    for binding in layout.bindings:
        if binding.trainable and binding.role in FROZEN_ROLES:
            raise PlanError(f"role {binding.role!r} never trains: set trainable=False")
        if binding.trainable and binding.optimizer_key is None:
            raise PlanError(f"trainable role {binding.role!r} needs an optimizer_key")
        if not binding.trainable and binding.optimizer_key is not None:
            raise PlanError(f"frozen role {binding.role!r} cannot have optimizer_key {binding.optimizer_key!r}")
    if keys := repeated(b.optimizer_key for b in layout.bindings if b.optimizer_key is not None):
        raise PlanError(f"duplicate optimizer_key {keys}; every trainable role steps its own optimizer")


def _check_group(layout: RoleLayoutSpec, group: RoleGroupSpec) -> None:
    bindings = [binding for binding in layout.bindings if binding.group == group.name]
    if not bindings:
        raise PlanError(f"role group {group.name!r} holds no role; bind one to it or drop it")
    if group.storage != "shared_base_adapters":
        return
    if bare := [binding.role for binding in bindings if binding.trainable and binding.adapter is None]:
        raise PlanError(f"trainable roles {bare} share the base of group {group.name!r}: name an adapter for each")
    if adapters := repeated(binding.adapter for binding in bindings if binding.adapter is not None):
        raise PlanError(f"duplicate adapter {adapters} in shared-base group {group.name!r}; one adapter a role")


def validate_export_role(export: ExportSpec, roles: Collection[str]) -> None:
    """Raises PlanError for the export of a role that the layout does not bind."""
    if export.role not in roles:
        raise PlanError(f"export role {export.role!r} is not bound; bound are {', '.join(sorted(roles))}")


def resolve_export_role(export: ExportSpec) -> str:
    """The logical role whose weights a run leaves behind."""
    return choice("export role", instance("export", export, ExportSpec).role, EXPORTABLE_ROLES)


def describe_role_groups(layout: RoleLayoutSpec) -> dict[str, str]:
    """One line a group, for logs: ``{"critic": "teacher_score, fake_score (independent_module, colocated)"}``."""
    return {
        group.name: f"{', '.join(layout.roles_of(group.name))} ({group.storage}, {group.placement})"
        for group in layout.groups
    }
