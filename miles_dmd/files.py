"""How does a file come to be whole or absent? Written beside its place, forced to the disk, then renamed into it."""

import ctypes
import hashlib
import os
import secrets
import shutil
from pathlib import Path

WHOLE = 64 << 20
BLOCK = 1 << 16
BLOCKS = 64


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """``path`` holds ``data``, or what it held before: never a part. Missing folders are made. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """As atomic_write_bytes, in UTF-8 and with the newlines that ``text`` has."""
    atomic_write_bytes(path, text.encode())


def replace_directory(new: Path, target: Path) -> None:
    """``target`` becomes what ``new`` was, which is gone then; what it was before is removed. Raises OSError.

    The two are exchanged in one step where the file system can. Elsewhere ``target`` is set aside as ``<name>.old``
    first, and a process that dies in between leaves it there: see ``recover_directory``.
    """
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if not target.exists():
        new.rename(target)
    elif _exchanged(new, target):
        shutil.rmtree(new)
    else:
        target.rename(old)
        new.rename(target)
        shutil.rmtree(old)


def recover_directory(target: Path) -> None:
    """Put back what a process that died in ``replace_directory`` had set aside. Raises OSError."""
    old = target.with_name(f"{target.name}.old")
    if old.is_dir() and not target.exists():
        old.rename(target)


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


def digest_file(digest: "hashlib._Hash", path: Path) -> None:
    """Feed size and content of a file to ``digest``.

    A file above 64 MiB is represented by its size, its first and last block of 64 KiB and blocks at even distances
    between (4 MiB read instead of the 19 GB of SD3.5's encoders): training changes every one of them.
    """
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= WHOLE:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return
        for part in range(BLOCKS + 1):
            file.seek((size - BLOCK) * part // BLOCKS)
            digest.update(file.read(BLOCK))
