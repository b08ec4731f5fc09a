"""Plug-in registry: files and packages of the wings, loaded by name or import path.

``--loss-type dmd2`` is ``miles_dmd/losses/dmd2``, exported there under the wing's agreed name. To add a plug-in is to
add a file: no table to edit, no decorator, no import for its side effect. One that lives elsewhere is named by its
import path, ``my_lab.losses.total_variation``.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Collection
from types import ModuleType
from typing import Any

from miles_dmd.errors import ConfigError, NotFound
from miles_dmd.shown import shown

EXPORT = {"losses": "loss_type", "models": "family", "engines": "engine", "roles": "role"}
"""wing -> the name under which its plug-ins export themselves."""
ASKED_BY = {"losses": "--loss-type", "models": "--model-family", "engines": "--rollout-engine", "roles": "trainer role"}
"""wing -> what the user wrote to name one of them."""
_CONTRACT = {
    "losses": "miles_dmd.contracts.loss:LossType",
    "models": "miles_dmd.contracts.family:ModelFamily",
    "engines": "miles_dmd.contracts.engine:EngineType",
    "roles": "miles_dmd.contracts.role:Role",
}
"""wing -> what an export must be. By name: contracts lie on a floor above this one."""
_LONGEST_NAME = 100
_CLOSE = 0.7
"""Of difflib's ratio. dmd3 is this near to dmd2; --lora-rank is not to --num-trainer-ranks (.54), --fake-lr not to
--fake-shift (.59): a wrong hint is worse than none."""


def names(wing: str) -> list[str]:
    """The wing's own plug-ins, sorted. None of them is imported."""
    package = importlib.import_module(f"miles_dmd.{wing}")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


def load(wing: str, name: str) -> Any:
    """The plug-in itself. Raises NotFound for a name that stands for nothing, or for something else."""
    if not isinstance(name, str):
        raise NotFound(f"{ASKED_BY[wing]} {shown(name)} must be text; there are {', '.join(names(wing))}")
    asked = f"{ASKED_BY[wing]} {name}"
    module = _import(name if _is_import_path(wing, name) else f"miles_dmd.{wing}.{_known(wing, name)}", asked)
    found, contract = _attribute(module, EXPORT[wing], asked), resolve(_CONTRACT[wing])
    if not isinstance(found, contract):
        raise NotFound(f"{asked}: {EXPORT[wing]} of {module.__name__} is {shown(found)}, not a {contract.__name__}")
    if not dataclasses.is_dataclass(getattr(found, "options", contract)):
        raise NotFound(f"{asked}: its options {shown(found.options)} must be a frozen dataclass")
    return found


def resolve(dotted: str) -> Any:
    """What ``package.module:attribute`` names, imported now. Raises NotFound."""
    path, colon, attribute = dotted.partition(":")
    if not (colon and path and attribute and all(map(str.isidentifier, path.split(".")))):
        raise NotFound(f"{dotted!r} must be written package.module:attribute")
    return _attribute(_import(path, dotted), attribute, dotted)


def nearest(name: str, known: Collection[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no known name is close."""
    bare = {_bare(option): option for option in known}
    close = difflib.get_close_matches(_bare(name[:_LONGEST_NAME]), bare, n=1, cutoff=_CLOSE)
    return f" (did you mean {bare[close[0]]}?)" if close else ""


def _bare(name: str) -> str:
    """Dashes in front are alike in all flags, and would make any two of them look alike."""
    return name.lstrip("-").replace("_", "-").lower()


def _is_import_path(wing: str, name: str) -> bool:
    """A wing's own names come first; a module of the user's needs no dot, if it is there."""
    if not all(map(str.isidentifier, name.split("."))):
        return False
    return "." in name or (name not in names(wing) and _is_module(name))


def _is_module(name: str) -> bool:
    """One that can be imported; it is not imported here."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # of one that is imported, and says nothing of where from
        return True


def _known(wing: str, name: str) -> str:
    known, file = names(wing), name.replace("-", "_")
    if file not in known:
        raise NotFound(
            f"{ASKED_BY[wing]} {shown(name)} is not among {', '.join(known)}{nearest(file, known)}; "
            "one of your own is named by its import path"
        )
    return file


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
