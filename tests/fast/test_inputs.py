"""Files that somebody else wrote: read whole or refused in one line, never waited for, never obeyed."""

import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.config.strict_yaml import read_yaml
from miles_dmd.errors import ConfigError
from miles_dmd.inputs import DEEPEST, exists, is_file, is_folder, parse_json, read_bytes, read_text, unwritable
from miles_dmd.prompts import read_prompts

NOBODY = 65534


def as_nobody(work):
    """Result of ``work``, or its exception, in a process without root's rights."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            answer = str(work())
        except ConfigError as error:
            answer = f"refused: {error}"
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as file:
        return file.read().decode()


@pytest.fixture
def locked(tmp_path):
    """A folder that only its owner may look into, and a file in it."""
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "file.txt").write_text("x")
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o055)
    folder.chmod(0o700)
    return folder


def test_a_regular_file_is_read_whole(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    (tmp_path / "link").symlink_to("a.txt")

    assert read_text(tmp_path / "link") == "café"
    assert (is_file(tmp_path / "link"), is_folder(tmp_path), exists(tmp_path / "b")) == (True, True, False)


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (make_pipe, "is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (make_socket, "is a socket"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: None, "no such file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"x" * 101), "has more than"),
        (lambda path: path.write_bytes(b"a\n\xff"), "line 2: not UTF-8"),
        (lambda path: path.symlink_to("/proc/self/maps"), "has more than"),
    ],
)
def test_what_is_no_bounded_regular_text_is_refused(tmp_path, monkeypatch, make, part):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "input.txt"
    make(path)

    with pytest.raises(ConfigError, match=part) as refused:
        read_text(path, largest=100)

    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize("look", [is_file, is_folder, exists, read_bytes, unwritable])
@pytest.mark.parametrize(("name", "part"), [("x" * 300, "too long"), ("a\0b", "is no path"), ("\ud800", "is no path")])
def test_a_name_that_cannot_be_is_refused(tmp_path, look, name, part):
    with pytest.raises(ConfigError, match=part):
        look(tmp_path / name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody with fewer rights")
@pytest.mark.parametrize("look", [is_file, is_folder, exists, read_bytes])
def test_a_folder_that_may_not_be_looked_into_is_refused(locked, look):
    answer = as_nobody(lambda: look(locked / "file.txt"))

    assert answer == f"refused: {locked / 'file.txt'}: cannot be looked at (Permission denied)"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody with fewer rights")
def test_a_folder_is_writable_if_it_or_what_is_above_it_is(locked):
    (locked.parent / "open").mkdir()
    (locked.parent / "open").chmod(0o777)

    assert as_nobody(lambda: unwritable(locked.parent / "closed" / "deep")) == f"{locked.parent} cannot be written to"
    assert as_nobody(lambda: unwritable(locked.parent / "open" / "deep")) == ""
    assert unwritable(locked / "file.txt" / "deep") == f"{locked / 'file.txt'} is no directory"


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_no_folder_can_be_made_where_a_link_leads_nowhere(tmp_path, below):
    (tmp_path / "link").symlink_to("gone")

    assert unwritable(tmp_path / "link" / below) == f"{tmp_path / 'link'} is a link to gone, which is not there"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, f"nested more than {DEEPEST}"),
        ("[" * 65 + "]" * 65, f"nested more than {DEEPEST}"),
        ("9" * 5000, "a number of 5000 digits"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"a": "\\ud800"}', "is no UTF-8"),
        ('{"a": ["\\u0000"]}', "holds a NUL"),
        ('{"\\u0000": 1}', "holds a NUL"),
        ("{", "not JSON"),
    ],
)
def test_json_that_no_document_needs_is_refused(text, part):
    with pytest.raises(ValueError, match=part):
        parse_json(text)


def refusal_of(read, path):
    """Message about the file; nothing where it is taken. Any other error is the test's."""
    try:
        read(path)
    except ConfigError as refused:
        return str(refused)
    return ""


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(1 << 43)  # more than any memory

    with pytest.raises(ConfigError, match=r"more than 1,024 MiB"):
        read_bytes(tmp_path / "large.txt", largest=1 << 30)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
SCRAPS = ["&a", "*a", "!!int", "!!timestamp", "2020-13-45", "<<:", "? ", "- ", "\n", "  ", "{", "}", "[", "]", ":", "'"]
YAML = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=5), max_size=30).map("".join)


@given(st.binary(max_size=200) | YAML.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_yaml_or_refused_with_file_and_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)

    message = refusal_of(read_yaml, path)

    assert message == "" or message.startswith((f"{path}: line ", f"{path}, line "))


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps({"prompt": value}).encode()))
def test_any_bytes_are_prompts_or_refused_with_flag_and_file(tmp_path_factory, content):
    for suffix in ("jsonl", "txt"):
        path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
        path.write_bytes(content)

        message = refusal_of(read_prompts, path)

        assert message == "" or message.startswith(f"--prompt-data {path}")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: &a [x]\nb: *a", ["line 2", "aliases"]),
        ("a: !!int abc", ["line 1", "'abc' is no int"]),
        ("a:\n  b: 2020-13-45", ["line 2", "'2020-13-45' is no timestamp", "quotes"]),
        ("a: " + "9" * 5000, ["line 1", "is no int"]),
        ("a: " + "[" * 5000, ["line 1", "nested more than 20 deep"]),
        ("a: 010", ["line 1", "'010' is another number to YAML"]),
        ("a: 1:30", ["line 1", "'1:30' is another number"]),
        ("a: 0x10", ["line 1", "'0x10'", "plain decimals"]),
        ("a: 1_000.5", ["line 1", "'1_000.5'"]),
        ("a: 1\na: 2", ["line 2", "'a' stands twice"]),
        ("a: b\n\x00", ["line 2"]),
        ("? [a]\n: b", ["line 1", "a key must be a name"]),
        ("a: !!python/name:os.system", ["line 1"]),
        ("--- a\n--- b", ["line 2"]),
    ],
)
def test_yaml_that_no_preset_needs_is_refused_with_its_line(tmp_path, text, parts):
    path = tmp_path / "mine.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as refused:
        read_yaml(path)

    assert all(part in str(refused.value) for part in [str(path), *parts]), str(refused.value)


def test_plain_numbers_texts_and_times_are_read_as_ever(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: [0, -1, 10, 1.5, 1.0e-5, .inf, 0.01, '010', 1:30pm, x]")

    assert read_yaml(path) == {"a": [0, -1, 10, 1.5, 1e-5, float("inf"), 0.01, "010", "1:30pm", "x"]}
