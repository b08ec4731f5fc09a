"""A file is whole or absent, whatever happens while it is written; its digest is that of all of it."""

import hashlib
import os
import stat
from pathlib import Path

import pytest

from miles_dmd import files
from miles_dmd.files import atomic_write_bytes, atomic_write_text


def test_a_file_and_its_folders_appear_with_their_content(tmp_path):
    path = tmp_path / "a" / "b.txt"

    atomic_write_text(path, "größe\r\n")

    assert path.read_bytes() == "größe\r\n".encode()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    atomic_write_bytes(path, b"old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), fail)
    with pytest.raises(OSError, match="No space"):
        atomic_write_bytes(path, b"new")

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda one, other: calls.append("replace") or replace(one, other))

    atomic_write_bytes(tmp_path / "file", b"new")

    assert calls == ["fsync", "replace", "fsync"]


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "usual").write_text("")

    atomic_write_text(tmp_path / "atomic", "")

    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "atomic")}
    assert len(modes) == 1


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that counts as large, and that nobody has written to lately."""
    monkeypatch.setattr(files, "DIGEST_CACHE_MIN_BYTES", 100)
    monkeypatch.setattr(files, "_digests", {})
    path = tmp_path / "weights"
    path.write_bytes(bytes(1000))
    os.utime(path, (0, 0))
    return path


def digest_of(path, known=None):
    digest = hashlib.sha256()
    files.digest_file(digest, path, known)
    return digest.hexdigest()


@pytest.mark.parametrize("place", [0, 1, 499, 998, 999])
def test_one_byte_anywhere_in_a_large_file_is_another_digest(large, tmp_path, place):
    before = digest_of(large, tmp_path / "known")

    large.write_bytes(bytes(place) + b"x" + bytes(999 - place))

    assert digest_of(large, tmp_path / "known") != before


def test_a_large_file_is_read_once(large, tmp_path, monkeypatch):
    first = digest_of(large, tmp_path / "known")
    monkeypatch.setattr(files, "_digests", {})  # another process
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("it is read again"))

    assert digest_of(large, tmp_path / "known") == first


def test_a_digest_is_not_remembered_of_a_file_that_may_still_be_written(large, tmp_path):
    os.utime(large)
    digest_of(large, tmp_path / "known")

    assert not (tmp_path / "known").exists()


def test_a_memory_that_is_damaged_or_closed_is_done_without(large, tmp_path, monkeypatch):
    first = digest_of(large, tmp_path / "known")
    (entry,) = (tmp_path / "known").iterdir()
    monkeypatch.setattr(files, "_digests", {})
    entry.write_text("damaged")

    assert digest_of(large, tmp_path / "known") == first
    monkeypatch.setattr(files, "_digests", {})
    assert digest_of(large, large / "no folder") == first
