"""Atomic writes, fsync, cached SHA-256.

A file is written beside its place, then renamed into it.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

DIGEST_CACHE_MIN_BYTES = 64 << 20
"""Bytes from which on the digest of a file is cached."""
_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")
MTIME_RESOLUTION_S = 10.0
"""Seconds after a change from which on a later one has another time, on any file system."""


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """``path`` holds ``data``, or what it held before: never a part. Missing folders are made. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def temporary_beside(path: Path) -> Path:
    """Temporary path beside ``path``, unique to this process and call."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def remove_temporaries(folder: Path, older_than: float = 0.0) -> None:
    """Remove temporary files and folders that killed processes left in ``folder``.

    Others may write to a shared folder at this moment: there only what has not changed for ``older_than`` seconds goes.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) and time.time() - path.lstat().st_mtime >= older_than:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Atomic write of text in UTF-8, with the newlines that ``text`` has."""
    atomic_write_bytes(path, text.encode())


def copy_tree(source: Path, target: Path) -> None:
    """Copy what is in a folder, links followed, to a new one. Raises OSError, for the first file that fails.

    Content alone: modes are this process's own. A shared teacher may be read-only, and a copy of it that is could not
    be removed; under a strict umask a copy must not be readable to others because its source was.
    """
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy_tree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it, read-only ones too, if it is there. Raises OSError."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except PermissionError:
        _make_writable(path)
        shutil.rmtree(path)


def _make_writable(folder: Path) -> None:
    """Make folders writable. To unlink a file its folder must be; its own mode does not matter."""
    folder.chmod(0o700)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            _make_writable(Path(entry))


def replace_directory(new: Path, target: Path) -> None:
    """``target`` becomes what ``new`` was, which is gone then; what it was before is removed. Raises OSError.

    The two are exchanged in one step where the file system can. Elsewhere ``target`` is set aside as ``<name>.old``
    first, and a process that dies in between leaves it there: see ``recover_directory``.
    """
    old = target.with_name(f"{target.name}.old")
    with contextlib.suppress(OSError):
        remove_tree(old)
    if not target.exists():
        new.rename(target)
    elif _exchanged(new, target):
        remove_tree(new)
    else:
        target.rename(old)
        new.rename(target)
        remove_tree(old)


def recover_directory(target: Path) -> None:
    """Put back what a process that died in ``replace_directory`` had set aside, or remove the rest. Raises OSError."""
    old = target.with_name(f"{target.name}.old")
    if old.is_dir() and not target.exists():
        old.rename(target)
    with contextlib.suppress(OSError):
        remove_tree(old)


def _exchanged(one: Path, other: Path) -> bool:
    """Linux swaps two names at once; Python has no name for that call."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(swap(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def write_synced(path: Path, data: bytes) -> None:
    """A new file, forced to the disk; it may be a part of ``data`` if that fails. Raises OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: str | Path) -> None:
    """Force a file, or the names in a folder, to the disk: a rename survives a power cut only once its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digests(cache_dir: str | Path) -> Path:
    """The folder of --cache-dir in which digests of large files are remembered."""
    return Path(cache_dir) / "digests"


def digest_file(digest: "hashlib._Hash", path: Path, known: Path | None = None) -> None:
    """Feed size and content of a file to ``digest``; of a large one, the SHA-256 of its content, which ``known``, a
    folder, remembers: SD3.5's encoders have 19 GB."""
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    if size > DIGEST_CACHE_MIN_BYTES:
        digest.update(_content_digest(path, known).encode())
        return
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)


def _content_digest(path: Path, known: Path | None) -> str:
    """SHA-256 of all of it, computed once for a file that has not been written to since."""
    place = path.resolve()
    status = place.stat()
    name = "\0".join(map(str, (place, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)))
    key = hashlib.sha256(os.fsencode(name)).hexdigest()
    found = _digests.get(key) or _remembered(known, key)
    if found is None:
        with place.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time() - status.st_mtime < MTIME_RESOLUTION_S:
            return found  # it could change once more within one tick of its clock
        with contextlib.suppress(OSError):  # a folder that cannot be written to costs time, nothing else
            if known is not None:
                atomic_write_text(known / key, found)
    _digests[key] = found
    return found


_digests: dict[str, str] = {}


def _remembered(known: Path | None, key: str) -> str | None:
    try:
        text = (known / key).read_text(encoding="utf-8") if known is not None else ""
    except (OSError, ValueError):
        return None
    return text if len(text) == 64 and set(text) <= set("0123456789abcdef") else None
