"""How does a file come to be whole or absent? Written beside its place, forced to the disk, then renamed into it."""

import os
import secrets
from pathlib import Path


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """``path`` holds ``data``, or what it held before: never a part. Missing folders are made. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """As atomic_write_bytes, in UTF-8 and with the newlines that ``text`` has."""
    atomic_write_bytes(path, text.encode())


def fsync_directory(directory: str | Path) -> None:
    """A rename survives a power cut only once its folder is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
