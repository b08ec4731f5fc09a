"""Manifests, and the refusal of a directory that differs from its own by the name of the file."""

import pytest

from miles_dmd.checkpoint import manifest
from miles_dmd.checkpoint.manifest import check_presence, check_sums, read_manifest
from miles_dmd.errors import CheckpointError, FormatError


def test_every_file_is_listed_with_size_and_checksum(saved):
    read = read_manifest(saved)

    check_presence(saved, read)
    check_sums(saved, read)

    assert {entry.path for entry in read.files} == {
        path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file() and path.name != manifest.NAME
    }
    assert read.size == sum(path.stat().st_size for path in saved.rglob("*") if path.name not in (manifest.NAME,)
                            and path.is_file())  # fmt: skip


def test_bit_that_flipped_is_found(saved):
    shard = saved / "actor" / "shard-0.safetensors"
    content = bytearray(shard.read_bytes())
    content[50] ^= 1
    shard.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"actor/shard-0\.safetensors has another content"):
        check_sums(saved, read_manifest(saved))


def test_file_that_was_cut_short_is_found(saved):
    shard = saved / "critic" / "shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"critic/shard-0\.safetensors has \d+ bytes, .* says \d+"):
        check_presence(saved, read_manifest(saved))


def test_shard_that_is_missing_is_named(saved):
    (saved / "actor" / "shard-0.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"actor/shard-0\.safetensors is missing"):
        check_presence(saved, read_manifest(saved))


def test_file_that_is_not_listed_is_refused(saved):
    (saved / "actor" / "shard-7.safetensors").write_bytes(b"more weights")

    with pytest.raises(CheckpointError, match=r"actor/shard-7\.safetensors is not of this checkpoint"):
        check_presence(saved, read_manifest(saved))


def test_link_in_the_place_of_a_file_is_refused(saved, tmp_path):
    shard = saved / "actor" / "shard-0.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CheckpointError, match=r"actor/shard-0\.safetensors is missing"):
        check_presence(saved, read_manifest(saved))


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "actor/../../secret", "actor\\..\\secret", "", "./a"])
def test_path_that_leaves_the_directory_is_refused(saved, rewrite, path):
    rewrite(saved, lambda content: content["files"][0].update(path=path))

    with pytest.raises(CheckpointError, match="which leaves the checkpoint's directory; it is not read"):
        read_manifest(saved)


def test_manifest_that_was_touched_is_damaged(saved, rewrite):
    rewrite(saved, lambda content: content["counters"].update(global_step=9), sound=False)

    with pytest.raises(CheckpointError, match="does not have the checksum that it states"):
        read_manifest(saved)


@pytest.mark.parametrize(("version", "age"), [(3, "a newer"), (1, "an older"), (None, "an unknown")])
def test_other_formats_are_refused_by_name(saved, rewrite, version, age):
    rewrite(saved, lambda content: content.update(format=version))

    with pytest.raises(FormatError, match=f"{age} checkpoint format, {version}; .* reads format 2"):
        read_manifest(saved)


def test_other_kind_of_file_is_no_manifest(saved, rewrite):
    rewrite(saved, lambda content: content.update(kind="something else"))

    with pytest.raises(CheckpointError, match="no manifest of a miles_dmd checkpoint"):
        read_manifest(saved)


@pytest.mark.parametrize("change", [lambda c: c.pop("run"), lambda c: c.update(more=1), lambda c: c.update(files=[{}])])
def test_manifest_with_other_fields_is_refused(saved, rewrite, change):
    rewrite(saved, change)

    with pytest.raises(CheckpointError, match="does not have the fields of its format"):
        read_manifest(saved)


@pytest.mark.parametrize("content", ["", "[1]", '{"kind": '])
def test_torn_manifest_is_damaged(saved, content):
    (saved / "manifest.json").write_text(content)

    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(saved)


def test_directory_without_a_manifest_is_no_checkpoint(saved):
    (saved / "manifest.json").unlink()

    with pytest.raises(CheckpointError, match=r"has no manifest\.json: it is no whole checkpoint"):
        read_manifest(saved)


@pytest.mark.parametrize("name", ["../escaped", "/tmp", "", ".", "..", "a/b", "a\\b", "a\x7fb"])
def test_groups_that_would_leave_the_directory_are_refused(saved, rewrite, name):
    rewrite(saved, lambda content: content["groups"].update({name: 1}))

    with pytest.raises(CheckpointError, match=r"names a group .* is no name of one; it is not read"):
        read_manifest(saved)
