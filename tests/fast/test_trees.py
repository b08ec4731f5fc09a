"""Folders are copied with our own modes, and removed whatever their modes are."""

import ctypes
import os
import stat
from contextlib import contextmanager

import pytest

from miles_dmd.config.args import Args
from miles_dmd.files import copy_tree, recover_directory, remove_tree, replace_directory
from miles_dmd.preflight.run_directory import clear

NOBODY = 65534


@contextmanager
def unprivileged():
    """File modes do not bind root: as root, this thread looks at files as nobody does."""
    if os.geteuid() != 0:
        yield
        return
    of_files = ctypes.CDLL(None).setfsuid
    of_files(NOBODY)
    try:
        yield
    finally:
        of_files(0)


@pytest.fixture
def place(tmp_path):
    """A folder of the user's own."""
    if os.geteuid() == 0:
        os.chown(tmp_path, NOBODY, NOBODY)
        for parent in (tmp_path.parent, tmp_path.parent.parent):
            parent.chmod(parent.stat().st_mode | 0o055)
    with unprivileged():
        yield tmp_path


def read_only(folder, mode=0o555):
    (folder / "vae" / "deep").mkdir(parents=True)
    for path in (folder / "a", folder / "vae" / "b", folder / "vae" / "deep" / "c"):
        path.write_text("x")
        path.chmod(0o444)
    for path in (folder / "vae" / "deep", folder / "vae", folder):
        path.chmod(mode)
    return folder


@pytest.mark.parametrize("mode", [0o555, 0o500, 0o000])
def test_a_read_only_folder_is_removed(place, mode):
    remove_tree(read_only(place / "student", mode))

    assert list(place.iterdir()) == []


def test_nothing_is_removed_behind_a_link(place):
    outside = read_only(place / "teacher")
    (place / "student" / "vae").mkdir(parents=True)
    (place / "student" / "vae" / "link").symlink_to(outside)
    (place / "student" / "vae").chmod(0o555)

    remove_tree(place / "student")

    assert (outside / "vae" / "deep" / "c").read_text() == "x"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o555
    remove_tree(outside)


def test_removing_what_is_not_there_is_no_error(place):
    remove_tree(place / "student")


def test_a_copy_of_a_read_only_folder_is_ours(place):
    source = read_only(place / "teacher")

    copy_tree(source, place / "copy")

    (place / "copy" / "vae" / "more").write_text("written")
    assert (place / "copy" / "vae" / "deep" / "c").read_text() == "x"
    remove_tree(source)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_read_only_student_is_replaced(place, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr("miles_dmd.files._exchanged", lambda one, other: False)
    read_only(place / "student")
    read_only(place / "student.old")
    (place / "new").mkdir()

    replace_directory(place / "new", place / "student")

    assert [path.name for path in place.iterdir()] == ["student"]
    assert list((place / "student").iterdir()) == []


def test_what_was_set_aside_goes_though_it_is_read_only(place):
    read_only(place / "student.old")
    (place / "student").mkdir()

    recover_directory(place / "student")

    assert [path.name for path in place.iterdir()] == ["student"]


def test_overwrite_removes_a_read_only_student(place):
    read_only(place / "student")
    (place / "metrics.jsonl").touch()

    clear(Args(save=str(place), overwrite=True), place)

    assert list(place.iterdir()) == []


def test_a_pipe_among_the_files_is_named_and_not_waited_for(place):
    (place / "teacher").mkdir()
    os.mkfifo(place / "teacher" / "pipe")

    with pytest.raises(OSError, match="pipe"):
        copy_tree(place / "teacher", place / "copy")
