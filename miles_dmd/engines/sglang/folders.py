"""Weight folders: each belongs to a process, and is removed when that has ended, however it ended.

A process holds a lock on its folder. Whoever finds one without a lock, of a process of the same machine, removes it.
Knows no torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.locks import lock

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


def weights_root(args: Args) -> Path:
    return Path(args.cache_dir) / "sglang" / "weights"


class OwnFolder:
    """A new folder below ``root``, of this process until ``close``."""

    def __init__(self, root: Path) -> None:
        held = None
        while held is None:  # somebody who sweeps may have found it before it was locked
            self.path = root / f"{socket.gethostname()}-{secrets.token_hex(8)}"
            self.path.mkdir(parents=True)
            held = _lock(self.path)
        self._descriptor = held
        self._parts: list[Path] = []

    def fresh(self, name: str) -> Path:
        """An empty folder in it, of a name that nothing has had before: a network file system whose cache is behind
        would show the files of an older one. The one before it stays, which a server may want to go back to."""
        path = self.path / f"{name}-{secrets.token_hex(4)}"
        path.mkdir()
        self._parts.append(path)
        for old in self._parts[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del self._parts[:-2]
        return path

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def sweep(root: Path) -> None:
    """Remove what processes of this machine left below ``root`` that run no more."""
    for path in root.glob(f"{socket.gethostname()}-*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or a file system without locks: then nobody can tell
            if (descriptor := _lock(path, required=True)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _lock(path: Path, *, required: bool = False) -> int | None:
    """A descriptor that holds the lock of the folder that is at ``path`` now; None where another process has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        free = lock(descriptor)
    except OSError:
        free = True
        if required:
            os.close(descriptor)
            raise
    if not free:
        os.close(descriptor)
        return None
    if os.fstat(descriptor).st_nlink == 0:  # removed between the two
        os.close(descriptor)
        return None
    return descriptor
