"""Checkpoint manifest: every file with its size and SHA-256, and the counters of the run.

It is written last and holds a checksum of itself, so a directory with a sound manifest is a whole checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from miles_dmd.errors import CheckpointError, ConfigError, FormatError, PlanError, SaveError
from miles_dmd.files import write_synced
from miles_dmd.inputs import MIB, exists, parse_object, read_bytes
from miles_dmd.shown import short_repr
from miles_dmd.validators import Check, count, each, fields, positive, string, table

FORMAT = 2
"""Format number of the manifest and of every record beside it."""
KIND = "miles_dmd.checkpoint"
NAME = "manifest.json"
HASHING_THREADS = 4
_BLOCK = 1 << 20
LARGEST = 64 * MIB
"""Bytes of a record: a million cycles of what alarms remember fit."""
COUNTERS = fields({"global_step": count, "optimizer_steps": table(count), "completed_cycles": count})
FIELDS = {
    "run": string,
    "parent": string,
    "loss_type": string,
    "plan": fields({"name": string, "version": positive, "fingerprint": string}),
    "counters": COUNTERS,
    "policy_version": count,
    "groups": table(positive),
    "versions": table(string),
    "created": string,
    "files": each(fields({"path": string, "size": count, "sha256": string})),
}
"""Fields of manifest.json, beside kind, format and its own checksum."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its place below the checkpoint's directory, with forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``counters`` are the controller's, of the last committed cycle."""

    run: str
    """Random name of the run that wrote it."""
    parent: str
    """``RUN@CYCLE`` that this run was started from, where it was started from a checkpoint of another one."""
    loss_type: str
    plan: Mapping[str, Any]
    """name, version, fingerprint."""
    counters: Mapping[str, Any]
    policy_version: int
    groups: Mapping[str, int]
    """group -> ranks that wrote it."""
    versions: Mapping[str, str]
    """package -> version."""
    created: str
    """Time of writing, ISO 8601, UTC."""
    files: tuple[FileEntry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def cycle(self) -> int:
        return int(self.counters["completed_cycles"])


def entry_of(path: Path, root: Path) -> FileEntry:
    """``path``, which lies below ``root``, as it is now."""
    return FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, _sha256(path))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Raises OSError."""
    content = {"kind": KIND, "format": FORMAT, **dataclasses.asdict(manifest)}
    write_json(directory / NAME, {**content, "sha256": _digest(content)})


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError for a directory that is no whole checkpoint, FormatError for another format of one."""
    content = read_json(directory / NAME)
    if content.get("kind") != KIND:
        raise CheckpointError(f"{directory / NAME} is no manifest of a miles_dmd checkpoint")
    require_format(content, directory)
    if content.pop("sha256", None) != _digest(content):
        raise CheckpointError(f"{directory / NAME} is damaged: its content does not have the checksum that it states")
    return _parsed(content, directory / NAME)


def check_presence(directory: Path, manifest: Manifest) -> None:
    """Every file there with its size, and no other one. Raises CheckpointError that names the first that is not."""
    for entry in manifest.files:
        path = directory / entry.path
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is missing; the manifest lists it with {entry.size:,} bytes")
        if (size := path.stat().st_size) != entry.size:
            raise CheckpointError(
                f"{path} has {size:,} bytes, and the manifest says {entry.size:,}: it is "
                "damaged, or belongs to another run"
            )
    listed = {NAME, *(entry.path for entry in manifest.files)}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        # a reader of shards takes every file of a folder, so a stray one would be read too
        if (path.is_symlink() or not path.is_dir()) and name not in listed:
            raise CheckpointError(f"{path} is not of this checkpoint: the manifest does not list it")


def check_sums(directory: Path, manifest: Manifest, wanted: Callable[[str], bool] = lambda path: True) -> None:
    """SHA-256 of every file whose path is ``wanted``. Raises CheckpointError that names the first that differs."""
    entries = [entry for entry in manifest.files if wanted(entry.path)]
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        for entry, found in zip(entries, pool.map(lambda e: _sha256(directory / e.path), entries), strict=True):
            if found != entry.sha256:
                raise CheckpointError(
                    f"{directory / entry.path} has another content than the manifest says (SHA-256 {found[:12]}..., "
                    f"not {entry.sha256[:12]}...): it is damaged, or belongs to another run"
                )


def require_format(content: Mapping[str, Any], path: Path) -> None:
    """Raises FormatError for another format than this version's."""
    version = content.get("format")
    if type(version) is not int or version != FORMAT:  # True is 1
        age = "an unknown" if type(version) is not int else "a newer" if version > FORMAT else "an older"
        raise FormatError(
            f"{path} has {age} checkpoint format, {short_repr(version)}; "
            f"this version of miles_dmd reads format {FORMAT}"
        )


def require_fields(content: Mapping[str, Any], checks: Mapping[str, Check], path: Path) -> None:
    """Raises CheckpointError that names ``path`` and the first field that is not as ``checks`` want it."""
    try:
        fields(checks)("", content)
    except PlanError as error:
        raise CheckpointError(f"{path} does not have the fields of its format: {error}") from None


def with_entries(manifest: Manifest, entries: Iterable[FileEntry]) -> Manifest:
    return dataclasses.replace(manifest, files=tuple(sorted(entries, key=lambda entry: entry.path)))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record that ``read_json`` takes back. Raises OSError, SaveError."""
    data = json.dumps(content, indent=1, allow_nan=False).encode()
    try:
        if len(data) > LARGEST:
            raise ValueError(f"has more than {LARGEST // MIB} MiB")
        parse_object(data)
    except ValueError as error:  # what a hook of the user's remembers, say
        raise SaveError(f"{path.name} could not be read again: {error}") from error
    write_synced(path, data)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises CheckpointError."""
    try:
        content = read_bytes(path, LARGEST) if exists(path) else None
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if content is None:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is no whole checkpoint")
    try:
        return parse_object(content)
    except ValueError as error:  # UnicodeDecodeError is one
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _parsed(content: Mapping[str, Any], path: Path) -> Manifest:
    values = {name: value for name, value in content.items() if name not in ("kind", "format")}
    require_fields(values, FIELDS, path)
    files = tuple(FileEntry(**row) for row in values.pop("files"))
    seen: set[str] = set()
    for entry in files:
        _require_inside(entry.path, path)
        if entry.path in seen:
            raise CheckpointError(f"{path} lists {entry.path!r} twice; it is not read")
        seen.add(entry.path)
    for group in values["groups"]:
        if not all(map(str.isidentifier, group.split("."))):  # it becomes the name of a folder
            raise CheckpointError(f"{path} names a group {group!r}, which is no name of one; it is not read")
    return Manifest(**values, files=files)


def _require_inside(name: str, manifest: Path) -> None:
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or {"\\", "\0"} & set(name)
        or path.as_posix() != name
        or not path.parts
    ):
        raise CheckpointError(f"{manifest} lists {name!r}, which leaves the checkpoint's directory; it is not read")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
