"""Dotted names, checked without importing them: what computes imports torch."""

import ast
import symtable
import sys
from importlib.machinery import ModuleSpec

from miles_dmd import registry
from miles_dmd.errors import NotFound
from miles_dmd.shown import short_repr


def require_defined(dotted: str) -> None:
    """Raises NotFound where ``registry.resolve`` could not find what ``package.module:attribute`` names."""
    path, colon, attribute = dotted.partition(":")
    if path in sys.modules or not (colon and all(map(str.isidentifier, (attribute, *path.split("."))))):
        registry.resolve(dotted)
        return
    source = _source(_spec(path, dotted), dotted)
    if source is not None and not _defines(source, attribute):
        public = [name for name in _assigned(source) if not name.startswith("_")]
        raise NotFound(f"{dotted!r}: module {path!r} defines no {attribute!r}{registry.nearest(attribute, public)}")


def _spec(path: str, dotted: str) -> ModuleSpec:
    """``importlib.util.find_spec`` without importing the packages that ``path`` lies in."""
    found, places, name = None, None, ""
    for part in path.split("."):
        name = f"{name}.{part}".lstrip(".")
        in_package = found is None or places is not None
        found = next(filter(None, (finder.find_spec(name, places) for finder in sys.meta_path)), None)
        if found is None or not in_package:
            raise NotFound(f"{dotted!r}: there is no module {name!r}; is its folder on PYTHONPATH?")
        places = found.submodule_search_locations
    assert found is not None  # split gives one part at least
    return found


def _source(spec: ModuleSpec, dotted: str) -> str | None:
    """None for what has none, such as a compiled module."""
    read = getattr(spec.loader, "get_source", None)
    try:
        return read(spec.name) if read is not None else None
    except (ImportError, OSError) as error:
        raise NotFound(f"{dotted!r}: {spec.origin} cannot be read ({error})") from error


def _assigned(source: str) -> set[str]:
    top = symtable.symtable(source, "<module>", "exec")
    return {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}


def _defines(source: str, name: str) -> bool:
    """True if the module may have that attribute; what fills itself in while it is imported may have any."""
    try:
        assigned = _assigned(source)
        starred = any(
            row.name == "*" for node in ast.walk(ast.parse(source)) for row in getattr(node, "names", ())
            if isinstance(row, ast.alias)
        )  # fmt: skip
    except (SyntaxError, ValueError) as error:
        raise NotFound(f"{short_repr(name)} lies in a module that is no Python ({error})") from error
    return starred or "__getattr__" in assigned or name in assigned or "globals" in source
