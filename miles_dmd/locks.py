"""File locks (flock) against a second process: exclusive, not waited for, released when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file or folder; False where another process has it.

    Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def leads_to(path: Path, descriptor: int) -> bool:
    """True if ``path`` is still the name of the open file: nobody has renamed or removed it since."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
