"""Command line parsing: defaults, then the preset, then flags. Refusals are ConfigErrors."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.config.elsewhere import nearest_flag
from miles_dmd.config.flags import ENGINE, LOSS, MODALITY, RUN, Flag, Given, flags_of, per_trainer
from miles_dmd.config.idle import without_idle
from miles_dmd.config.nested import NOTHING, check_nested
from miles_dmd.config.presets import Preset, read_preset
from miles_dmd.config.trainers import TrainerConfig
from miles_dmd.config.values import ANY, flag_name, from_text, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.shown import short_repr
from miles_dmd.streams import show

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import LossType

PROGRAM = "train_diffusion.py"
DESCRIPTIONS = (
    "Distil a flow-matching teacher into a few-step student. Defaults stand in [brackets].",
    "Distil a language model into a smaller one, on what the student samples. Defaults stand in [brackets].",
)
DEFAULT_LOSS_TYPE, DEFAULT_ENGINE = "dmd2", "inprocess"
DEFAULT_LOSS_TYPES = {"train_llm.py": "resopd"}
"""program -> its default loss type, where that is another."""
KNOWN_GROUPS = {"teacher"}
"""Groups that users speak of, whether or not an installed loss type has them."""


def default_loss_type(program: str) -> str:
    """The loss type of a command line that names none."""
    return DEFAULT_LOSS_TYPES.get(program, DEFAULT_LOSS_TYPE)


class HelpShown(SystemExit):
    """``--help`` was asked for and printed: the process has nothing more to do. Others who exit are a failure."""


def parse_args(argv: Sequence[str] | None = None, program: str = PROGRAM) -> Args:
    """Arguments of the run that ``argv`` asks for, each of its kind; ``program`` is what ``--help`` calls it.

    ``preflight.rules.resolve`` checks them against each other and against the disk. Raises ConfigError; HelpShown,
    which exits.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    config = _peek(words, "--config")
    preset = read_preset(config) if config is not None else Preset()
    loss_name = _plugin_name(words, preset, "loss_type", default_loss_type(program))
    engine_name = _plugin_name(words, preset, "rollout_engine", DEFAULT_ENGINE)
    loss_type, engine = registry.load("losses", loss_name), registry.load("engines", engine_name)
    modality = registry.load("modalities", loss_type.modality)
    if preset.nested is not NOTHING:
        unnamed = Args(loss_type=loss_name, hf_checkpoint="unnamed", teacher_checkpoint="unnamed")
        check_nested(preset.nested, loss_name, loss_type.plan(unnamed))
    flags = flags_of(loss_name, loss_type, engine_name, engine)
    from_flags = _given(words, flags, loss_name, loss_type.roles, program)

    def args_of(given: Given) -> Args:
        return Args(
            **{**given.run, "loss_type": loss_name, "rollout_engine": engine_name},
            loss_options=loss_type.options(**given.loss),
            engine_options=engine.options(**given.engine),
            modality_options=modality.options(**given.modality),
            trainers=tuple(TrainerConfig(role, dict(given.trainers.get(role, {}))) for role in loss_type.roles),
        )

    from_preset = preset.given(flags, loss_name, loss_type.roles)
    given = without_idle(from_preset, from_flags, args_of).under(from_flags)
    _refuse_overridden(given, loss_type)
    if given.run.get("model_family") == "":
        registry.load("models", "")  # which refuses it; left out, it is the modality's own
    return args_of(given)


def _refuse_overridden(given: Given, loss_type: LossType) -> None:
    """Raises ConfigError for a value of the run that none of its trainers reads, since each has its own."""
    of_run = {name: value for name, value in given.run.items() if name in per_trainer()}
    for name, value in {**of_run, **given.loss}.items():
        readers = loss_type.roles if name in of_run else loss_type.trainers_of(name)
        own = {role: given.trainers.get(role, {}) for role in readers}
        if own and all(name in overrides for overrides in own.values()):
            flags = " and ".join(flag_name(name, role) for role in own)
            values = ", ".join(f"{role} {overrides[name]}" for role, overrides in own.items())
            raise ConfigError(
                f"{flag_name(name)} {value}: every trainer that reads it has its own ({values}); pass {flags} or "
                "drop it"
            )


def parser_of(flags: Mapping[str, Flag], program: str = PROGRAM) -> argparse.ArgumentParser:
    """Splits a command line into flags and their words, and prints ``--help``; values stay text."""
    usage = f"{program} --loss-type {default_loss_type(program)} --config PRESET [flags]"
    parser = _Parser(
        program,
        usage,
        DESCRIPTIONS[program in DEFAULT_LOSS_TYPES],
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(flag.title for flag in flags.values())}
    for flag in flags.values():
        if flag.name == flag_name("loss_type"):
            flag = dataclasses.replace(flag, default=default_loss_type(program))
        _add(groups[flag.title], flag)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cures = {
            "expected": "a value that starts with a dash is written --flag=VALUE",
            "ignored explicit": "it takes no value",
        }
        cure = "".join(f"; {cure}" for part, cure in cures.items() if part in message)
        raise ConfigError(message.removeprefix("argument ") + cure)

    def print_help(self, file: Any = None) -> None:
        show(self.format_help().rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown(status)


class _Once(argparse.Action):
    """A value, given once: of two, one would be dropped without a word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise ConfigError(f"{_written(option_string, values)}: {self.dest} is given already; give it once")
        setattr(namespace, self.dest, values)


class _SwitchedOnce(argparse.BooleanOptionalAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise ConfigError(f"{option_string}: {self.dest} is given already, switched on or off; give one of the two")
        super().__call__(parser, namespace, values, option_string)


def _written(name: str | None, values: Any) -> str:
    return " ".join(map(str, [name, *([values] if isinstance(values, str) else values)]))


def _add(group: Any, flag: Flag) -> None:
    shown = f" [{flag.shown_default}]" if flag.shown_default else ""
    words = (flag.words + shown).replace("%", "%%")
    names = (flag.name, flag.alias) if flag.alias else (flag.name,)
    if flag.kind.type is bool:
        group.add_argument(*names, dest=flag.name, action=_SwitchedOnce, help=words)
    else:
        nargs = "+" if flag.kind.length == ANY else flag.kind.length
        group.add_argument(*names, dest=flag.name, action=_Once, metavar=flag.metavar, nargs=nargs, help=words)


def _peek(words: Sequence[str], name: str) -> str | None:
    """The value of one flag, before it is known which others there are."""
    parser = _Parser(PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value")
    value: str | None = parser.parse_known_args(words)[0].value
    return value


def _plugin_name(words: Sequence[str], preset: Preset, argument: str, default: str) -> str:
    """Name of the plug-in that is asked for, before it is known which flags it brings."""
    name = _peek(words, flag_name(argument))
    name = preset.args.get(argument, default) if name is None else name
    if not isinstance(name, str):
        raise ConfigError(f"{preset.path}: args.{argument} {short_repr(name)} must be text")
    return name


def _given(
    words: Sequence[str], flags: Mapping[str, Flag], loss_name: str, roles: tuple[str, ...], program: str
) -> Given:
    """Raises ConfigError for an unknown flag, and for a value that its flag does not take."""
    found, rest = parser_of(flags, program).parse_known_args(_with_negative_numbers(words))
    if rest:
        raise _unknown(rest, flags, loss_name, roles)
    values = {flag: _value(flag, getattr(found, flag.name)) for flag in flags.values() if hasattr(found, flag.name)}
    trainers: dict[str, dict[str, Any]] = {role: {} for role in roles}
    for flag, value in values.items():
        if flag.scope in trainers:
            trainers[flag.scope][flag.argument] = value
    return Given(_of(values, RUN), _of(values, LOSS), trainers, _of(values, ENGINE), _of(values, MODALITY))


def _with_negative_numbers(words: Sequence[str]) -> list[str]:
    """``--lr -1e-5`` as ``--lr=-1e-5``: argparse takes the former's number for a flag."""
    joined: list[str] = []
    for word in words:
        if word.startswith("-") and _is_number(word) and joined and joined[-1].startswith("--"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _of(values: Mapping[Flag, Any], scope: str) -> dict[str, Any]:
    return {flag.argument: value for flag, value in values.items() if flag.scope == scope}


def _value(flag: Flag, found: Any) -> Any:
    if flag.kind.type is bool:
        return found
    return from_text(flag.kind, [found] if flag.kind.length is None else found, flag.name)


def _unknown(rest: Sequence[str], flags: Mapping[str, Flag], loss_name: str, roles: tuple[str, ...]) -> ConfigError:
    """Error for arguments that no flag takes."""
    at = next((index for index, word in enumerate(rest) if word.startswith("-")), None)
    if at is None:
        return ConfigError(
            f"unexpected argument {short_repr(rest[0])}; a yes-or-no flag takes no value (--local, --no-local)"
        )
    name, equals, value = rest[at].partition("=")
    if not equals and at + 1 < len(rest) and not rest[at + 1].startswith("-"):
        value = rest[at + 1]
    asked = f"{name} {value}".rstrip()
    if (role := _absent_group(name, roles)) is not None:
        return ConfigError(f"{asked}: loss type {loss_name!r} has no group {role!r}; its groups are {', '.join(roles)}")
    if (whole := _of_the_whole_run(name, flags, roles)) is not None:
        return ConfigError(f"{asked}: {whole} applies to the whole run, not to one trainer; pass {whole}")
    if owners := _owners(name, loss_name):
        return ConfigError(f"{asked} is a flag of loss type {' and '.join(owners)}, and not of {loss_name!r}")
    if owners := _owners(name, "", "engines"):
        return ConfigError(
            f"{asked} is a flag of --rollout-engine {' and '.join(owners)}; choose that engine, or drop it"
        )
    if owners := _owners(name, "", "modalities"):
        return ConfigError(
            f"{asked} is a flag of {' and '.join(owners)} models, which loss type {loss_name!r} does not train; drop it"
        )
    return ConfigError(f"{asked}: there is no such flag{nearest_flag(name, flags)}; --help lists them")


def _absent_group(name: str, roles: tuple[str, ...]) -> str | None:
    """The group that ``--teacher-lr`` names, where the run has no such group."""
    for argument in per_trainer():
        role = name.removeprefix("--").removesuffix(flag_name(argument)[1:])
        if name == flag_name(argument, role) and role in _all_groups() and role not in roles:
            return role
    return None


def _of_the_whole_run(name: str, flags: Mapping[str, Flag], roles: tuple[str, ...]) -> str | None:
    """``--loss-type``, where somebody writes ``--critic-loss-type``."""
    wholes = (f"--{name.removeprefix(f'--{role}-')}" for role in roles if name.startswith(f"--{role}-"))
    return next((whole for whole in wholes if whole in flags), None)


def _all_groups() -> set[str]:
    return {role for name in registry.names("losses") for role in registry.load("losses", name).roles} | {
        *registry.names("roles"),
        *KNOWN_GROUPS,
    }


def _owners(name: str, chosen: str, wing: Literal["losses", "engines", "modalities"] = "losses") -> list[str]:
    others = (other for other in registry.names(wing) if other != chosen)
    return [repr(other) for other in others if name in map(flag_name, kinds(registry.load(wing, other).options))]
