"""Write docs/cli.md from the declared flags; with --check, only compare."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from miles_dmd import registry
from miles_dmd.config.args import PER_TRAINER
from miles_dmd.config.flags import ENGINE, LOSS, RUN, Flag, flags_of
from miles_dmd.config.presets import shipped
from miles_dmd.config.values import ANY, flag_name, kinds
from miles_dmd.contracts.loss import LossType

BAR = r"\|"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
INTRODUCTION = """\
# Command line

This page is written by `python scripts/write_cli_docs.py`; `--help` says the same.

    python train_diffusion.py --loss-type dmd2 --config PRESET [flags]

* **Precedence**: defaults, then the preset that `--config` names, then flags. What a preset says and a flag
  switches off (`--local` on a preset of a cluster) falls back to its default.
* **Presets**: {presets}, or a YAML file of your own: `args: {{lr: 1.0e-5, ...}}` and, for single trainers,
  `trainers: [{{role: critic, overrides: {{lr: 4.0e-6}}}}]`. Names are those of the flags, with underscores. A path in a
  preset is looked for from the current directory, then beside the preset, then in the folder above it.
* **Once**: a flag that stands twice is refused, because one would be dropped; several values follow one flag.
* **Refusals** are one line on stderr that names the flag, its value and a cure. Exit code 2, and nothing was written.
* `--dry-run` prints the resolved run and stops; `--name` and `--no-name` switch what is yes or no.
"""
TRAINERS = """\
## Single trainers

Each trainer of the loss type may read its own value of the flags under {groups}: `--critic-lr 4e-7` is `--lr` for the
critic alone. So it may of the loss type's options that it reads: `--critic-dm-shift 2`. By loss type:

| loss type | prefixes, in the order of the groups, and options of each |
|---|---|
"""


def page() -> str:
    names = registry.names("losses")
    parts = [INTRODUCTION.format(presets=", ".join(f"`{name}`" for name in shipped()))]
    parts += _sections(flag for flag in _flags(names[0]) if flag.scope == RUN)
    for name in names:
        parts += _sections(flag for flag in _flags(name) if flag.scope == LOSS)
    for engine in registry.names("engines"):
        parts += _sections(flag for flag in _flags(names[0], engine) if flag.scope == ENGINE)
    rows = (f"| `{name}` | {_groups(registry.load('losses', name))} |" for name in names)
    parts.append(TRAINERS.format(groups=" and ".join(PER_TRAINER)) + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _groups(loss_type: LossType) -> str:
    return "; ".join(_group(role, loss_type) for role in loss_type.roles)


def _group(role: str, loss_type: LossType) -> str:
    """``--critic-`` and the options of the loss type that take it."""
    options = [f"`{flag_name(name)}`" for name in kinds(loss_type.options) if role in loss_type.trainers_of(name)]
    return f"`--{role}-`" + (f" with {', '.join(options)}" if options else "")


def _flags(loss_name: str, engine: str = "inprocess") -> list[Flag]:
    own = flags_of(loss_name, registry.load("losses", loss_name), engine, registry.load("engines", engine))
    return list(own.values())


def _sections(flags: Iterable[Flag]) -> Iterator[str]:
    by_title: dict[str, list[str]] = {}
    for flag in flags:
        by_title.setdefault(flag.title, []).append(_row(flag))
    for title, rows in by_title.items():
        yield f"## {title}\n\n| flag | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(flag: Flag) -> str:
    many = flag.kind.length == ANY
    values = f"{flag.metavar}..." if many else " ".join([flag.metavar] * (flag.kind.length or 1))
    name = f"{flag.name} {values}".strip()
    default = f"`{flag.shown_default}`" if flag.shown_default else ""
    other = f", or `{flag.alias}`" if flag.alias else ""
    cells = (f"`{name}`{other}", default, flag.words)
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def main(argv: list[str]) -> int:
    text = page()
    if argv == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE} is stale; write it again with: python scripts/write_cli_docs.py", file=sys.stderr)
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
