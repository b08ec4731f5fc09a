"""Flags of a run: its own, its loss type's, its rollout engine's, and each trainer's."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd import registry
from miles_dmd.config.args import GROUPS, PER_TRAINER
from miles_dmd.config.values import Kind, flag_name, kinds
from miles_dmd.errors import ConfigError

if TYPE_CHECKING:
    from miles_dmd.contracts.engine import EngineType
    from miles_dmd.contracts.loss import LossType
    from miles_dmd.contracts.modality import Modality

RUN, LOSS, ENGINE, MODALITY = "run", "loss", "engine", "modality"
"""Scopes of a flag; any other scope is a trainer's role."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: where its value goes, what it may be, and what ``--help`` says of it."""

    name: str
    """With its dashes, as it is written."""
    scope: str
    """RUN, LOSS, ENGINE, MODALITY, or the role of the trainer that reads it."""
    argument: str
    kind: Kind
    default: Any
    title: str
    """Title of its group in ``--help``."""
    words: str
    alias: str = ""
    """Another name for it, with its dashes."""

    @property
    def metavar(self) -> str:
        """Placeholder of one value in ``--help``."""
        if self.kind.choices:
            return "{" + ",".join(self.kind.choices) + "}"
        return {int: "N", float: "X", str: "PATH" if self.kind.path else "TEXT", bool: ""}[self.kind.type]

    @property
    def shown_default(self) -> str:
        """Default as one would write it; empty where there is none."""
        if self.default is None or self.default == "":
            return ""
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


@dataclass(frozen=True, slots=True)
class Given:
    """Values that were given, by scope; what is not in it keeps its default."""

    run: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    trainers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """role -> overrides."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    modality: Mapping[str, Any] = field(default_factory=dict)

    def without(self, wheres: Collection[tuple[str, str]]) -> Given:
        """All but these: (role, argument), where no role is the whole run's."""
        trainers = {
            role: {name: value for name, value in own.items() if (role, name) not in wheres}
            for role, own in self.trainers.items()
        }
        run, modality = (
            {name: value for name, value in given.items() if ("", name) not in wheres}
            for given in (self.run, self.modality)
        )
        return dataclasses.replace(self, run=run, modality=modality, trainers=trainers)

    def under(self, stronger: Given) -> Given:
        """Both; where both speak, ``stronger`` wins."""
        roles = [*self.trainers, *(role for role in stronger.trainers if role not in self.trainers)]
        both = {role: {**self.trainers.get(role, {}), **stronger.trainers.get(role, {})} for role in roles}
        engine, modality = {**self.engine, **stronger.engine}, {**self.modality, **stronger.modality}
        return Given({**self.run, **stronger.run}, {**self.loss, **stronger.loss}, both, engine, modality)


def flags_of(
    loss_name: str, loss_type: LossType, engine_name: str = "", engine: EngineType | None = None
) -> dict[str, Flag]:
    """name -> flag, in the order of ``--help``. A declared flag wins over a trainer's of the same name.

    Raises ConfigError where a loss type or an engine declares a flag that the run has.
    """
    declared = {flag.name: flag for title, group in GROUPS.items() for flag in _flags(group, RUN, title)}
    modality: Modality = registry.load("modalities", loss_type.modality)
    title = f"Samples: {loss_type.modality}"
    declared |= _own_flags(declared, modality.options, MODALITY, title, f"modality {loss_type.modality}")
    declared |= _own_flags(declared, loss_type.options, LOSS, f"Loss type {loss_name}", f"--loss-type {loss_name}")
    if engine is not None:
        asked = f"--rollout-engine {engine_name}"
        declared |= _own_flags(declared, engine.options, ENGINE, f"Rollout engine {engine_name}", asked)
    trainers = {flag.name: flag for role in loss_type.roles for flag in _trainer_flags(role, loss_type)}
    return declared | {name: flag for name, flag in trainers.items() if name not in declared}


def _own_flags(declared: Mapping[str, Flag], options: type, scope: str, title: str, asked: str) -> dict[str, Flag]:
    own = {flag.name: flag for flag in _flags(options, scope, title)}
    if twice := sorted(declared.keys() & own.keys()):
        raise ConfigError(f"{asked} declares {twice[0]}, which every run has; rename that option")
    return own


def per_trainer() -> tuple[str, ...]:
    """Arguments that every trainer may read its own of."""
    return tuple(row.name for title in PER_TRAINER for row in dataclasses.fields(GROUPS[title]))


def _flags(arguments: type, scope: str, title: str) -> Iterator[Flag]:
    words = docstrings(arguments)
    rows = {row.name: row for row in dataclasses.fields(arguments)}
    for name, kind in kinds(arguments).items():
        alias, default = rows[name].metadata.get("alias"), _default(rows[name])
        other = flag_name(alias) if alias else ""
        yield Flag(flag_name(name), scope, name, kind, default, title, words.get(name, ""), other)


def _trainer_flags(role: str, loss_type: LossType) -> Iterator[Flag]:
    """Flags that give one trainer a value of its own: of those that its group reads, and of the loss type's options."""
    options = {name: kind for name, kind in kinds(loss_type.options).items() if role in loss_type.trainers_of(name)}
    for arguments in (*(kinds(GROUPS[title]) for title in PER_TRAINER), options):
        for name, kind in arguments.items():
            words = f"{flag_name(name)}, for the {role} alone."
            yield Flag(flag_name(name, role), role, name, kind, None, f"Trainer {role}", words)


def _default(row: dataclasses.Field[Any]) -> Any:
    return None if row.default is dataclasses.MISSING else row.default


def docstrings(arguments: type) -> Mapping[str, str]:
    """field -> the words under it, on one line, read from the source of the dataclass and of those it extends."""
    found: dict[str, str] = {}
    for base in reversed(arguments.__mro__[:-1]):
        found |= _docstrings_of(base)
    return found


@functools.cache
def _docstrings_of(arguments: type) -> dict[str, str]:
    source = getattr(importlib.import_module(arguments.__module__), "__file__", None)
    if source is None:
        return {}
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == arguments.__name__)
    return {name: words for node in classes for name, words in _documented(node.body)}


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for row, below in itertools.pairwise(body):
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name) and isinstance(below, ast.Expr):
            value = getattr(below.value, "value", None)
            if isinstance(value, str):
                yield row.target.id, " ".join(value.split())
