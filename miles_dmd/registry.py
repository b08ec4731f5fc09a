"""Registries: things of one kind by name, such as loss types, engines and recipes.

``--loss-type dmd2`` is ``miles_dmd/losses/dmd2``, exported there under the wing's agreed name. To add a plug-in is to
add a file: no table to edit, no import for its side effect. One that lives elsewhere is named by its import path,
``my_lab.losses.total_variation``; one that is made in code is registered under a name.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from miles_dmd.errors import ConfigError, NotFound, UnknownName
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.contracts.engine import EngineType
    from miles_dmd.contracts.family import ModelFamily
    from miles_dmd.contracts.loss import LossType
    from miles_dmd.contracts.modality import Modality
    from miles_dmd.contracts.role import Role

T = TypeVar("T")

_LONGEST_NAME = 100
_CLOSE = 0.7
"""Least ratio by difflib. dmd3 is this near to dmd2; --lora-rank is not to --num-trainer-ranks (.54), --fake-lr not to
--fake-shift (.59): a wrong hint is worse than none."""


class Registry(Generic[T]):
    """Things of one ``kind``: ``register(name, thing)``, or ``@register(name)`` above a class, adds another."""

    _cure = ""

    def __init__(self, kind: str, things: Mapping[str, T] = MappingProxyType({})) -> None:
        self.kind = kind
        self._things = dict(things)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._things))

    def register(self, name: str, thing: T | None = None) -> Any:
        if type(name) is not str or not name.strip():
            raise ConfigError(f"the name of a {self.kind} must be a non-empty string, got {short_repr(name)}")
        if name in self.names:
            raise ConfigError(f"{self.kind} {short_repr(name)} is already registered, among {', '.join(self.names)}")
        if thing is None:
            return lambda thing: self.register(name, thing)
        self._things[name] = thing
        return thing

    def get(self, name: str) -> T:
        """Raises UnknownName, which lists what there is."""
        if type(name) is str and name in self._things:
            return self._things[name]
        known = ", ".join(self.names) or "none"
        raise UnknownName(
            f"{self.kind} {short_repr(name)} is not among {known}{nearest(str(name), self.names)}{self._cure}"
        )


class Wing(Registry[T]):
    """Plug-ins: the files and packages of ``package``, each of which exports a ``contract`` as ``export``."""

    _cure = "; one of your own is named by its import path"

    def __init__(self, kind: str, package: str, export: str, contract: str) -> None:
        super().__init__(kind)
        self.package, self.export, self._contract = package, export, contract  # dotted: contracts lie on a floor above
        self._loaded: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted; no plug-in is imported."""
        return tuple(sorted({*self._things, *_files(self.package)}))

    def get(self, name: str) -> T:
        """Load a plug-in, once for as long as its module stays the same. Raises NotFound for a name that stands for
        nothing, or for something else."""
        path = self._module(name)
        if path is None:
            return super().get(name)
        if path not in self._loaded or getattr(sys.modules.get(path), self.export, None) is not self._loaded[path]:
            self._loaded[path] = self._load(path, f"{self.kind} {name}")
        return self._loaded[path]

    def _load(self, path: str, asked: str) -> T:
        found, contract = _attribute(_import(path, asked), self.export, asked), resolve(self._contract)
        if not isinstance(found, contract):
            raise NotFound(f"{asked}: {self.export} of {path} is {short_repr(found)}, not a {contract.__name__}")
        if not dataclasses.is_dataclass(getattr(found, "options", contract)):
            raise NotFound(f"{asked}: its options {short_repr(found.options)} must be a frozen dataclass")
        return found  # type: ignore[no-any-return]

    def _module(self, name: str) -> str | None:
        """The module that exports ``name``; None where none does."""
        if not isinstance(name, str) or name in self._things:
            return None
        file = name.replace("-", "_")
        if file in self.names:
            return f"{self.package}.{file}"
        return name if _is_import_path(name) else None


@functools.cache
def _files(package: str) -> frozenset[str]:
    """Names of the modules and packages in ``package``. Listed once: a run asks for plug-ins some hundred times."""
    files = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return frozenset(file.name for file in files if not file.name.startswith("_"))


WINGS: Mapping[str, Wing[Any]] = {
    "losses": Wing("--loss-type", "miles_dmd.losses", "loss_type", "miles_dmd.contracts.loss:LossType"),
    "models": Wing("--model-family", "miles_dmd.models", "family", "miles_dmd.contracts.family:ModelFamily"),
    "engines": Wing("--rollout-engine", "miles_dmd.engines", "engine", "miles_dmd.contracts.engine:EngineType"),
    "modalities": Wing("modality", "miles_dmd.modalities", "modality", "miles_dmd.contracts.modality:Modality"),
    "roles": Wing("trainer role", "miles_dmd.roles", "role", "miles_dmd.contracts.role:Role"),
}


def names(wing: str) -> list[str]:
    """Names of a wing's plug-ins, sorted; none is imported."""
    return list(WINGS[wing].names)


@overload
def load(wing: Literal["losses"], name: str) -> "LossType": ...
@overload
def load(wing: Literal["models"], name: str) -> "ModelFamily": ...
@overload
def load(wing: Literal["engines"], name: str) -> "EngineType": ...
@overload
def load(wing: Literal["modalities"], name: str) -> "Modality": ...
@overload
def load(wing: Literal["roles"], name: str) -> "Role": ...
def load(wing: str, name: str) -> Any:
    """The plug-in of ``wing`` called ``name``. Raises NotFound."""
    return WINGS[wing].get(name)


def resolve(dotted: str) -> Any:
    """Import what ``package.module:attribute`` names. Raises NotFound."""
    path, colon, attribute = dotted.partition(":")
    if not (colon and path and attribute and all(map(str.isidentifier, path.split(".")))):
        raise NotFound(f"{dotted!r} must be written package.module:attribute")
    return _attribute(_import(path, dotted), attribute, dotted)


def nearest(name: str, known: Collection[str]) -> str:
    """Hint of the nearest name, " (did you mean ...)"; empty where none is close."""
    bare = {_bare(option): option for option in known}
    close = difflib.get_close_matches(_bare(name[:_LONGEST_NAME]), bare, n=1, cutoff=_CLOSE)
    return f" (did you mean {bare[close[0]]}?)" if close else ""


def _bare(name: str) -> str:
    """Dashes in front are alike in all flags, and would make any two of them look alike."""
    return name.lstrip("-").replace("_", "-").lower()


def _is_import_path(name: str) -> bool:
    """A module of the user's needs no dot, if it is there."""
    return all(map(str.isidentifier, name.split("."))) and ("." in name or _is_module(name))


def _is_module(name: str) -> bool:
    """One that can be imported; it is not imported here."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # of one that is imported, and says nothing of where from
        return True


def _import(path: str, asked: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}."):
            raise NotFound(f"{asked}: there is no module {error.name!r}; is its folder on PYTHONPATH?") from error
        if isinstance(error, ConfigError):  # of a plug-in that declares what cannot be
            raise NotFound(f"{asked}: {error}") from error
        raise NotFound(
            f"{asked}: cannot be imported ({type(error).__name__}: {error}); see the whole of it with "
            f"python -c 'import {path}'"
        ) from error


def _attribute(module: ModuleType, name: str, asked: str) -> Any:
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise NotFound(f"{asked}: module {module.__name__!r} defines no {name!r}{nearest(name, public)}")
    return getattr(module, name)
