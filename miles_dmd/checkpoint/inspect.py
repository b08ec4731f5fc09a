"""A checkpoint's manifest as text."""

from __future__ import annotations

from collections.abc import Iterator

from miles_dmd.checkpoint.manifest import Manifest, check_presence, check_sums, read_manifest
from miles_dmd.checkpoint.store import find_checkpoint, whole_checkpoints
from miles_dmd.errors import ConfigError
from miles_dmd.shown import aligned, printable


def inspect(directory: str, *, verify: bool = False) -> str:
    """Text about the checkpoint at, or the newest below, ``directory``; with ``verify`` all checksums are computed.

    Raises CheckpointError for one that is damaged, FormatError for one of another format.
    """
    if not directory:
        raise ConfigError("DIR '' is empty; name a checkpoint, or a run's directory")
    path = find_checkpoint(directory, None)
    manifest = read_manifest(path)
    check_presence(path, manifest)
    if verify:
        check_sums(path, manifest)
    lines = [str(path), *aligned(_facts(manifest)), "", *_files(manifest), ""]
    others = [other.name for other in whole_checkpoints(path.parent) if other != path]
    lines += [f"beside it: {', '.join(others)}"] if others else []
    state = "every file has its checksum" if verify else "every file has its size; --verify computes the checksums"
    # what a manifest holds may be anybody's: a terminal must show it, and not obey it
    return "\n".join(printable(line, longest=10_000) for line in [*lines, f"whole: {state}"])


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    steps = ", ".join(f"{role} {count:,}" for role, count in manifest.counters["optimizer_steps"].items())
    yield "written", manifest.created
    yield "run", manifest.run + (f", from {manifest.parent}" if manifest.parent else "")
    yield "loss type", manifest.loss_type
    yield "plan", f"{manifest.plan['name']} {manifest.plan['version']}, fingerprint {manifest.plan['fingerprint']}"
    yield "cycles", f"{manifest.cycle:,}"
    yield "student steps", f"{manifest.counters['global_step']:,}"
    yield "optimizer steps", steps
    yield "policy version", str(manifest.policy_version)
    yield "ranks", ", ".join(f"{group} {ranks}" for group, ranks in manifest.groups.items())
    yield "versions", ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    yield "size", f"{manifest.size:,} bytes in {len(manifest.files)} files"


def _files(manifest: Manifest) -> list[str]:
    rows = [(entry.path, f"{entry.size:,}", entry.sha256) for entry in manifest.files]
    return aligned([("file", "bytes", "SHA-256"), *rows])
