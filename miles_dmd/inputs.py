"""Bounded readers of foreign files: regular, of limited size and depth, UTF-8.

Everything that a run reads before it starts comes through here, so a pipe cannot hold it up, a device not fill its
memory, and a document not reach its recursion limit.
"""

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.shown import short_repr

MIB = 2**20
LARGEST = 16 * MIB
"""Bytes of a configuration file: a tokenizer's, of tens of thousands of tokens, is among them."""
DEEPEST = 64
LONGEST_NUMBER = 40
"""Digits: transformers writes "no limit" as a number of 31."""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_OF_THE_KERNEL = ("/proc", "/sys")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def is_file(path: str | Path) -> bool:
    """True if a regular file lies there. Raises ConfigError where that cannot be known."""
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: str | Path) -> bool:
    """True if a directory lies there. Raises ConfigError where that cannot be known."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def exists(path: str | Path) -> bool:
    """True if anything lies there. Raises ConfigError where that cannot be known."""
    return _status(path) is not None


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """The whole of a regular file. Raises ConfigError."""
    status = _status(path)
    if status is None:
        raise ConfigError(f"{path}: no such file")
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ConfigError(f"{path}: is {kind}, and no regular file")
    too_large = ConfigError(f"{path}: has more than {largest / MIB:,g} MiB, which no such file needs; name another")
    if status.st_size > largest:
        raise too_large
    try:
        # not blocking, should it have become a pipe by now
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = file.read(largest + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > largest:  # it grew, or is one of those that say 0, as in /proc
        raise too_large
    return content


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """UTF-8, with or without a byte order mark. Raises ConfigError."""
    content = read_bytes(path, largest)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError that says what is wrong: no JSON, a name that stands twice, a number, a depth or a text that
    no document needs."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    _require_sound(value)
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError, as ``parse_json``, and for another kind of value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object, but a {type(value).__name__}")
    return value


def unwritable(path: str | Path) -> str:
    """Reason why a folder ``path`` cannot be written to, or made; empty where it can. Raises ConfigError."""
    path = Path(os.path.abspath(path))
    nearest = next(place for place in (path, *path.parents) if exists(place) or place.is_symlink())
    if not exists(nearest):
        return f"{nearest} is a link to {os.readlink(nearest)}, which is not there"
    if not is_folder(nearest):
        return f"{nearest} is no directory"
    if os.stat(nearest).st_dev in {os.stat(root).st_dev for root in _OF_THE_KERNEL if exists(root)}:
        return f"{nearest} is the kernel's own, and keeps no files"  # root may write there, says its mode
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written to"


def unsound(text: str) -> str:
    """Defect of ``text`` for files, tokenizers or terminals (NUL, half a surrogate pair); empty without one."""
    if "\0" in text:
        return "holds a NUL character"
    if _HALF_A_PAIR.search(text):
        return "is no UTF-8"
    return ""


def other_locale() -> str:
    """A cure for names that are not ASCII, where Python takes those of files for something else than UTF-8."""
    encoding = sys.getfilesystemencoding()
    return "" if encoding == "utf-8" else f"; this locale's names are {encoding}: set PYTHONUTF8=1"


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # no permission, a name too long, a circle of links
        raise ConfigError(f"{path}: cannot be looked at ({error.strerror})") from error
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise ConfigError(f"{path}: is no path ({error}){other_locale()}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{short_repr(twice)} stands twice in one object")
    return found


def _whole(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _require_sound(document: Any) -> None:
    level = [document]
    for _ in range(DEEPEST):
        texts = [value for value in level if isinstance(value, str)]
        texts += [name for value in level if isinstance(value, dict) for name in value]
        for text in texts:
            if why := unsound(text):
                raise ValueError(f"{short_repr(text)} {why}")
        level = [
            item
            for value in level
            if isinstance(value, list | dict)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST} deep")
