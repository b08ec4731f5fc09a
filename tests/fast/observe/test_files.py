"""A file is whole or absent, whatever happens while it is written."""

import os
import stat
from pathlib import Path

import pytest

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
