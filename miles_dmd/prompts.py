"""Prompt source: an endless, shuffled, resumable sequence whose only state is a cursor.

The order of epoch e is a function of (seed, e), and the prompt at a position is a function of the position, so a
resumed run continues exactly where the other one stopped.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from miles_dmd.errors import ConfigError, FormatError
from miles_dmd.inputs import MIB, parse_object, read_text, unsound
from miles_dmd.seeds import derive
from miles_dmd.shown import short_repr

FORMAT = 1
_FLAG = "--prompt-data"
_LARGEST = 1024 * MIB
_CURE = 'a .txt file has one prompt a line, a .jsonl file one {"prompt": "..."} a line'
KEYS = ("prompt", "text", "messages")
"""Of a line of JSON: a text without outer white space, a text as it stands, or a conversation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw: ``sample_id`` is its position in the run, never used twice; ``prompt_id`` indexes ``texts``."""

    sample_id: int
    prompt_id: int
    text: str


class PromptSource:
    """Epochs of permutations over the prompts of a file (.txt or .jsonl) or of a sequence of texts.

    ``texts`` holds each different prompt once, in order of first appearance: what has to be encoded. An epoch visits
    every line once, so a prompt that stands in the file twice is drawn twice an epoch.
    Raises ConfigError (flag, file, line and cure in one line) for a file that holds no prompts or other things.
    """

    def __init__(self, path_or_texts: str | Path | Sequence[str], seed: int) -> None:
        is_path = isinstance(path_or_texts, str | Path)
        lines = read_prompts(path_or_texts) if is_path else tuple(path_or_texts)  # type: ignore[arg-type]
        if not lines:
            raise ConfigError(f"{_FLAG}: no prompts were given; {_CURE}")
        self.name = str(path_or_texts) if is_path else f"<{len(lines)} prompts>"
        self.texts: tuple[str, ...] = tuple(dict.fromkeys(lines))
        self.seed = seed
        self.cursor = 0
        index = {text: number for number, text in enumerate(self.texts)}
        self._prompt_ids = tuple(index[line] for line in lines)
        self._epoch, self._order = 0, _permutation(len(lines), derive(seed, "prompt order", 0))

    def __len__(self) -> int:
        """Prompts in an epoch: the lines of the file."""
        return len(self._prompt_ids)

    def next(self, n: int) -> tuple[Prompt, ...]:
        """The next ``n`` prompts; an epoch that ends within them is followed by the next one."""
        if type(n) is not int or n < 1:
            raise ValueError(f"n must be a whole number of at least 1, got {n!r}")
        prompts = tuple(self._at(position) for position in range(self.cursor, self.cursor + n))
        self.cursor += n
        return prompts

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _permutation(len(self), derive(self.seed, "prompt order", epoch))
        prompt_id = self._prompt_ids[self._order[place]]
        return Prompt(position, prompt_id, self.texts[prompt_id])

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts in file order: which sequence a cursor is a position in."""
        return sha256(json.dumps([self.texts, self._prompt_ids]).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "cursor": self.cursor, "seed": self.seed, "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved cursor. Refused: a newer format, other prompts, another seed, a cursor that is none."""
        version = state.get("format")
        if version != FORMAT:
            raise FormatError(f"prompt source state has format {version!r}; this version reads format {FORMAT}")
        if set(state) != {"format", "cursor", "seed", "digest"}:
            raise FormatError(f"prompt source state has keys {sorted(state)}, expected cursor, digest, format, seed")
        if state["digest"] != self.digest:
            raise ConfigError(
                f"{_FLAG} {self.name}: holds other prompts than the run in the checkpoint was trained on; "
                "give the same file, or start a new run without --load"
            )
        if state["seed"] != self.seed:
            raise ConfigError(
                f"--seed {self.seed}: the checkpoint's prompts were drawn with --seed {state['seed']}; give that seed"
            )
        cursor = state["cursor"]
        if type(cursor) is not int or cursor < 0:
            raise FormatError(f"prompt source state has cursor {cursor!r}, expected a whole number of at least 0")
        self.cursor = cursor


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """Every prompt of a file in order, stripped of outer white space; blank lines are no prompts, ``#`` is not special.

    UTF-8, with or without a byte order mark; lines end as on any system. Raises ConfigError.
    """
    readers = {".txt": _text_line, ".jsonl": _json_line}
    read = readers.get(Path(path).suffix.lower())
    if read is None:
        raise ConfigError(f"{_FLAG} {path}: ends neither in .txt nor in .jsonl; {_CURE}")
    numbered = enumerate(_lines(path), start=1)
    prompts = tuple(read(line.strip(), f"{_FLAG} {path}, line {number}") for number, line in numbered if line.strip())
    if not prompts:
        raise ConfigError(f"{_FLAG} {path}: the file holds no prompts; {_CURE}")
    return prompts


def _lines(path: str | Path) -> list[str]:
    try:
        text = read_text(path, _LARGEST)
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {error}; {_CURE}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _text_line(line: str, where: str) -> str:
    if why := unsound(line):
        raise ConfigError(f"{where}: {short_repr(line)} {why}; {_CURE}")
    return line


def _json_line(line: str, where: str) -> str:
    try:
        record = parse_object(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; {_CURE}") from None
    found = [key for key in KEYS if key in record]
    if len(found) != 1:
        which = f"has both {' and '.join(map(repr, found))}" if found else 'has no key "prompt"'
        raise ConfigError(f"{where}: {which}; {_CURE}")
    prompt = record[found[0]]
    if found[0] == "messages":
        return _messages_text(prompt, where)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f'{where}: "{found[0]}" is {short_repr(prompt)}, not a text; {_CURE}')
    return prompt.strip() if found[0] == "prompt" else prompt


def _messages_text(messages: Any, where: str) -> str:
    """A conversation as one text, from which ``messages_of`` makes it again."""
    if not _are_messages(messages):
        raise ConfigError(
            f'{where}: "messages" is {short_repr(messages)}, not a list of {{"role": ..., "content": ...}} with texts'
        )
    return json.dumps(messages, ensure_ascii=False, sort_keys=True)


def messages_of(text: str) -> list[dict[str, str]] | None:
    """The conversation that a prompt is; None for a plain text."""
    if not text.startswith("[{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if _are_messages(found) else None


def _are_messages(found: Any) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(row, dict) and row.keys() == {"role", "content"} for row in found)
        and all(isinstance(value, str) for row in found for value in row.values())
    )


def _permutation(length: int, seed: int) -> list[int]:
    # sorting by random(): of Python's generator only random() is promised to stay the same between versions
    draw = random.Random(seed).random
    keys = [draw() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)
