"""Exceptions that the package raises on purpose.

MilesDmdError
├── ConfigError          the user asked for something that cannot be: names the flag, the value and the cure
│   ├── CheckpointError  a checkpoint that is not loaded: damaged, half of one, or of another run
│   ├── NotFound         no loss type, model family, engine, role or preset of that name: lists those there are
│   │   └── UnknownName  a registry has nothing of that name (a KeyError, too)
│   └── PlanError        a plan that cannot be: its parts contradict each other
│       ├── PlanTypeError a part of a plan has the wrong type (a TypeError, too)
│       └── NotBuilt     a plan that can be declared and inspected, and that nothing here can run
├── PhaseError           a phase of a cycle broke its promise; the driver is terminal
│   └── PhaseReportError an executor reported other optimizer steps than it was asked for
├── ExternalDataError    one group handed another the wrong samples, keys or policy version
│   └── ScoresError      scores that cannot be a teacher's about these samples (a ValueError, too)
├── EngineError          the rollout engine could not, or did not, do what it was asked
│   ├── EngineRefused    a server said no: asking again would change nothing
│   ├── EngineUnavailable a server gave no answer, or failed: asking again, or another one, may help
│   │   └── EngineGone   a server is dead for good: only another one may help
│   └── EngineMisanswer  a server answered with something else than it was asked for
├── ClusterError         trainer groups could not be placed, or one of their processes died
│   └── Unanswered       a process did not answer in time: another call to it would wait as long
├── SaveError            a checkpoint could not be written; the ones before it are as they were
└── FormatError          a file of another format, or of a newer version than this package reads
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from miles_dmd.shown import printable


class MilesDmdError(Exception):
    """The root: catch it to tell a refusal of ours from a bug."""


class ConfigError(MilesDmdError, ValueError):
    """The user asked for something that cannot be, in one printable line, whatever the value holds. Exit code 2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class CheckpointError(ConfigError):
    """A checkpoint that is not loaded: damaged, half of one, or of another run, plan or set of arguments."""


class NotFound(ConfigError, LookupError):
    """A name that stands for nothing."""


class UnknownName(NotFound, KeyError):
    """Nothing is registered under a name; says what is."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr


class PlanError(ConfigError):
    """A plan that cannot be."""


class PlanTypeError(PlanError, TypeError):
    """A part of a plan, or a leaf of it, has the wrong type."""


class NotBuilt(PlanError, NotImplementedError):
    """A plan that can be declared and inspected, and that nothing here can run."""


class PhaseError(MilesDmdError, RuntimeError):
    """A phase broke its promise; restart from the last checkpoint."""


class PhaseReportError(PhaseError, ValueError):
    """An executor reported other optimizer steps than it was asked for."""


class ExternalDataError(MilesDmdError, RuntimeError):
    """Data handed from one group to another is about other samples, or incomplete."""


class ScoresError(ExternalDataError, ValueError):
    """Scores that no teacher could have given of these samples: misaligned, incomplete, or of another dtype."""


class EngineError(MilesDmdError, RuntimeError):
    """The rollout engine failed."""


class EngineRefused(EngineError):
    """A server said no."""


class EngineUnavailable(EngineError):
    """A server gave no answer, or failed."""


class EngineGone(EngineUnavailable):
    """A server has died, and nobody starts it again."""


class EngineMisanswer(EngineError):
    """A server answered with something else than it was asked for."""


class ClusterError(MilesDmdError, RuntimeError):
    """Trainer groups could not be placed, or a process of theirs died."""


class Unanswered(ClusterError):
    """A process of a run did not answer in time."""


class SaveError(MilesDmdError, RuntimeError):
    """A checkpoint could not be written."""


class FormatError(MilesDmdError, ValueError):
    """A file that this version of the package cannot read."""


@contextlib.contextmanager
def noting(who: str, doing: str) -> Iterator[None]:
    """Add a note to an error: who was doing what. In a Ray run the ClusterError says the same."""
    try:
        yield
    except BaseException as error:  # a plug-in may also exit, or be cancelled
        error.add_note(f"{who}, while {doing}")
        raise
