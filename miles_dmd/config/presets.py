"""Presets: ``--config`` names a YAML file of trainer_configs/, or one of the user's own.

    args: {lr: 8.0e-5, fake_update_ratio: 3}
    trainers:
      - {role: critic, overrides: {lr: 4.0e-6}}

It may also be written in the nested form (``algorithm``, ``distillation``) that ``nested`` translates.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.config.elsewhere import nearest_argument
from miles_dmd.config.flags import ENGINE, LOSS, MODALITY, RUN, Flag, Given, per_trainer
from miles_dmd.config.nested import KEYS, NOTHING, Nested, mapping, translate
from miles_dmd.config.strict_yaml import read_yaml
from miles_dmd.config.trainers import require_role
from miles_dmd.config.values import OwnPath, checked, kind_of, kinds
from miles_dmd.errors import ConfigError, NotFound
from miles_dmd.inputs import exists, is_file, is_folder
from miles_dmd.registry import nearest
from miles_dmd.shown import short_repr

SHIPPED = (Path(__file__).parents[1] / "shipped" / "trainer_configs").resolve()
"""In a clone a link to the folder at its top."""
TOP = ("args", "trainers", *KEYS)
NOT_IN_A_PRESET = ("config", "dry_run")
SCOPES = (RUN, LOSS, ENGINE, MODALITY)
_PATH = kind_of(OwnPath)


@dataclass(frozen=True, slots=True)
class Preset:
    """One file's wishes, not yet checked against the flags of a loss type."""

    path: Path = Path()
    args: Mapping[str, Any] = field(default_factory=dict)
    trainers: Sequence[Mapping[str, Any]] = ()
    nested: Nested = NOTHING

    def given(self, flags: Mapping[str, Flag], loss_name: str, roles: tuple[str, ...]) -> Given:
        """Values that it gives. Raises ConfigError for a name or a value that ``flags`` do not have."""
        declared = {flag.argument: flag for flag in flags.values() if flag.scope in SCOPES}
        known = {name: flag for name, flag in declared.items() if name not in NOT_IN_A_PRESET}
        may_override = {name: flag for name, flag in known.items() if name in per_trainer() or flag.scope == LOSS}
        self._require_no_trainers_own(known, may_override, roles)
        aliases = {flag.alias[2:].replace("-", "_"): name for name, flag in known.items() if flag.alias}
        if twice := [name for alias, name in aliases.items() if {alias, name} <= self.args.keys()]:
            raise ConfigError(f"{self.path}: args.{twice[0]} is there under two names; give it once")
        wishes = {aliases.get(name, name): value for name, value in self.args.items()}
        values = self._values(wishes, known, "args", f"no argument of a {loss_name} run", roles)
        overrides: dict[str, Mapping[str, Any]] = {}
        for role, own in self._trainers():
            require_role(role, roles, loss_name, f"{self.path}: trainers")
            overrides[role] = self._values(own, may_override, f"trainers.{role}", "no argument of a single trainer")
        run, loss, engine, modality = (
            {name: value for name, value in values.items() if known[name].scope == scope} for scope in SCOPES
        )
        return Given(run, loss, overrides, engine, modality)

    def _require_no_trainers_own(
        self, known: Collection[str], may_override: Collection[str], roles: Sequence[str]
    ) -> None:
        """Raises ConfigError for args that are named as the flag of one trainer is, ``critic_lr``."""
        for role, argument in itertools.product(roles, may_override):
            if (name := f"{role}_{argument}") in self.args and name not in known:
                raise ConfigError(
                    f"{self.path}: args.{name} is the {role}'s own; write it as "
                    f"trainers: [{{role: {role}, overrides: {{{argument}: ...}}}}]"
                )

    def _values(
        self, wishes: Mapping[str, Any], known: Mapping[str, Flag], section: str, what: str, roles: Sequence[str] = ()
    ) -> dict[str, Any]:
        for name in wishes:
            if name not in known:
                raise ConfigError(f"{self.path}: {section}.{name} is {what}{nearest_argument(name, known, roles)}")
        return {
            name: self._value(known[name], value, f"{self.path}: {section}.{name}") for name, value in wishes.items()
        }

    def _value(self, flag: Flag, value: Any, where: str) -> Any:
        value = checked(flag.kind, value, where)
        read = flag.kind.path is not None and flag.kind.path.read
        return self._located(value) if read and value is not None else value

    def _located(self, path: str) -> str:
        """Path read like a flag's, from the current directory; else beside the preset, else in the folder above it."""
        if Path(path).exists():
            return path
        folder = self.path.resolve().parent
        return next((str(root / path) for root in (folder, folder.parent) if (root / path).exists()), path)

    def _trainers(self) -> list[tuple[str, Mapping[str, Any]]]:
        rows = []
        for row in self.trainers:
            where = f"{self.path}: trainers"
            row = mapping(row, where, ("role", "overrides"))
            if not isinstance(row.get("role"), str):
                raise ConfigError(
                    f"{where}: each trainer needs a role, as in {{role: ROLE, overrides: {{lr: 1.0e-5}}}}"
                )
            rows.append((row["role"], mapping(row.get("overrides"), f"{where}.{row['role']}.overrides")))
        roles = [role for role, _ in rows]
        if twice := [role for role, times in Counter(roles).items() if times > 1]:
            raise ConfigError(f"{self.path}: trainers names {short_repr(twice[0])} twice; put its overrides together")
        return rows


def read_preset(name: str) -> Preset:
    """The preset called ``name``, or the YAML file at that path. Raises ConfigError, NotFound."""
    path = _find(name)
    try:
        content = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"--config {error}") from error
    if content in (None, {}) or content == {"args": None}:
        raise ConfigError(f"--config {path}: the file asks for nothing; write arguments under args:, or leave it out")
    _refuse_flat(content, path)
    document = mapping(content, str(path), TOP)
    args = mapping(document.get("args"), f"{path}: args")
    nested = translate(document, str(path)) if any(key in document for key in KEYS) else NOTHING
    if twice := sorted(args.keys() & nested.args.keys()):
        raise ConfigError(f"{path}: {twice[0]} stands under args and in the nested form; say it once")
    trainers = [] if document.get("trainers") is None else document["trainers"]
    if not isinstance(trainers, list):
        raise ConfigError(f"{path}: trainers must be a list of {{role, overrides}}")
    rows = [*trainers, *({"role": role, "overrides": own} for role, own in nested.overrides.items())]
    return Preset(path, {**args, **nested.args}, rows, nested)


def shipped() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _refuse_flat(content: Any, path: Path) -> None:
    """Raises ConfigError for arguments at the top of a document, where other trainers have theirs."""
    if not isinstance(content, dict) or not (names := [name for name in content if isinstance(name, str)]):
        return
    ours = kinds(Args).keys() | kinds(registry.load("losses", Args.loss_type).options).keys()
    for name in names:
        if name in ours:
            raise ConfigError(f"{path}: {short_repr(name)} stands at the top; indent arguments under args:")
        hint = nearest_argument(name, dict.fromkeys(ours), ())
        if name not in TOP and "did you mean" in hint and not nearest(name, TOP):
            raise ConfigError(f"{path}: {short_repr(name)} stands at the top{hint}; indent arguments under args:")


def _find(name: str) -> Path:
    name = checked(_PATH, name, "--config") if name else name
    if _is_there(name):
        return Path(name)
    if name in shipped():
        return SHIPPED / f"{name}.yaml"
    if Path(name).parts[:1] == (SHIPPED.name,) and is_file(SHIPPED.parent / name):
        return SHIPPED.parent / name
    raise NotFound(
        f"--config {name!r} is neither a file nor a preset; there are {', '.join(shipped())}{nearest(name, shipped())}"
    )


def _is_there(name: str) -> bool:
    """A directory of a preset's name (a run's, say) does not hide the preset; a pipe is there, and refused as one."""
    try:
        return exists(name) and not is_folder(name)
    except ConfigError as error:
        raise ConfigError(f"--config {error}; name a preset ({', '.join(shipped())}) or a YAML file") from error
