"""How does a file come to be whole or absent? Written beside its place, forced to the disk, then renamed into it."""

import hashlib
import os
import secrets
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
