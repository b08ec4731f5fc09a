"""Strict YAML reader: safe types, no name twice, no aliases, bounded depth.

Aliases are refused because ten lines of them spell out more than fits into memory, and no preset needs one.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import MIB, read_text
from miles_dmd.shown import short_repr

LARGEST = MIB // 4
DEEPEST = 20
_TRAPS = {"int": re.compile(r"[_:]|^[+-]?0[\dxb]|^\+"), "float": re.compile(r"[_:]|^\+")}
"""YAML 1.1 reads 010 as 8, 1:30 as 90, and 0b11 as 3; +3 is no number on the command line either."""

_CURES = {
    "tag": "tags (!name) are not read; take it out, or put the text in quotes",
    "another document": "a preset is one document; take out what follows ---",
    r"'\t'": "indent with spaces",
}
"""Part of a problem, as the YAML library words it -> the cure."""
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """Raises ConfigError that names file and line."""
    text = read_text(path, LARGEST)
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark else f"line {_line_of(text, error)}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "is no YAML"
        cure = next((f"; {cure}" for part, cure in _CURES.items() if part in problem), "")
        raise ConfigError(f"{path}: {line}: {problem}{cure}") from error


def _line_of(text: str, error: yaml.YAMLError) -> int:
    """Line of a character that YAML does not take at all: its reader counts no lines."""
    return text.count("\n", 0, getattr(error, "position", 0)) + 1


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise _problem("aliases (*name) are not read; write the value out", mark)
        if self.depth == DEEPEST:
            raise _problem(f"nested more than {DEEPEST} deep", mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in _TRAPS and _TRAPS[kind].search(str(node.value)):
            raise _problem(
                f"{short_repr(node.value)} is another number to YAML; write it in plain decimals", node.start_mark
            )
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # says it is a number or a date, and is none
            raise _problem(f"{short_repr(node.value)} is no {kind}; put it in quotes", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a key must be a name", key.start_mark)
            if key.tag == _MERGE:
                raise _problem("merge keys (<<) are not read; write the names out", key.start_mark)
            if key.value in seen:
                raise _problem(f"{short_repr(key.value)} stands twice", key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def _problem(what: str, mark: yaml.Mark) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, mark)
