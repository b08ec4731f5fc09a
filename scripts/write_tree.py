"""Write the tree of docs/architecture.md from module docstrings; with --check, only compare."""

import ast
import configparser
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "miles_dmd"
WINGS = ("losses", "models", "engines", "roles")
BEGIN, END = "    miles_dmd/\n", "    trainer_configs/*.yaml"
COLUMN, WIDTH = 35, 120


def tree() -> str:
    """The package as an indented list, floors bottom up, each entry with the first sentence of its docstring."""
    return "".join(f"{entry:<{COLUMN}}{sentence}".rstrip() + "\n" for entry, sentence in _package())


def _package() -> Iterator[tuple[str, str]]:
    yield "    miles_dmd/", ""
    for name in _bottom_up():
        path = PACKAGE / name
        yield from _folder(path, 3) if path.is_dir() else [_line(path.with_suffix(".py"), 3)]


def _bottom_up() -> list[str]:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    layers = contracts["importlinter:contract:floors"]["layers"].split("\n")
    names = [name.strip() for layer in reversed(layers) for name in layer.split("|") if name.strip()]
    return [name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()]


def _folder(folder: Path, depth: int) -> Iterator[tuple[str, str]]:
    yield _line(folder / "__init__.py", depth)
    if folder.parent.name in WINGS:  # a plug-in is one thing; its files are its own matter
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            yield from _folder(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield _line(path, depth + 1)


def _line(path: Path, depth: int) -> tuple[str, str]:
    name = f"{path.parent.name}/" if path.name == "__init__.py" else path.name
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = docstring.split("\n")[0].partition(". ")[0].rstrip(".")
    while len(sentence) > WIDTH - COLUMN and (cut := max(map(sentence.rfind, (", ", ": ", "; ")))) > 0:
        sentence = sentence[:cut]
    return "  " * depth + name, sentence


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(BEGIN), text.index(END)
    written = text[:start] + tree() + text[end:]
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(written, encoding="utf-8")
    elif written != text:
        sys.exit("docs/architecture.md shows another tree than the package: run python scripts/write_tree.py")


if __name__ == "__main__":
    main()
