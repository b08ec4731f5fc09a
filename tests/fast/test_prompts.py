"""Prompts come in an order that only the seed and the cursor decide; a bad file is refused with its line."""

import json
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.errors import ConfigError, FormatError
from miles_dmd.prompts import Prompt, PromptSource

TEXTS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=7)


def _written(tmp_path, content, name="prompts.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_has_one_prompt_a_line_and_blank_lines_are_none(tmp_path):
    path = _written(tmp_path, "a cat\n\n  # a dog  \r\n\t\na café\u2028here")

    assert PromptSource(path, 0).texts == ("a cat", "# a dog", "a café\u2028here")


def test_a_jsonl_file_has_one_object_a_line_and_other_keys_are_left_alone(tmp_path):
    lines = [{"prompt": "a cat", "id": 4}, {"prompt": " a dog "}]
    path = _written(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n", "prompts.jsonl")

    assert PromptSource(str(path), 0).texts == ("a cat", "a dog")


def test_a_byte_order_mark_is_not_part_of_the_first_prompt(tmp_path):
    path = _written(tmp_path, b"\xef\xbb\xbfa cat\n")

    assert PromptSource(path, 0).texts == ("a cat",)


def test_a_symbolic_link_is_followed(tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to(_written(tmp_path, "a cat\n", "data.bin"))

    assert PromptSource(link, 0).texts == ("a cat",)


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("p.txt", b"", ["holds no prompts", "one prompt a line"]),
        ("p.txt", b"\n \n", ["holds no prompts"]),
        ("p.txt", b"good\nbad \xff\n", ["line 2", "UTF-8"]),
        ("p.csv", b"a,b\n", [".txt", ".jsonl"]),
        ("p.jsonl", b"", ["holds no prompts"]),
        ("p.jsonl", b'{"prompt": "a"}\n\nnot json\n', ["line 3", "not JSON"]),
        ("p.jsonl", b'{"caption": "a"}\n', ["line 1", '"prompt"']),
        ("p.jsonl", b'["a"]\n', ["line 1", '"prompt"']),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 3}\n', ["line 2", "3", "not a text"]),
        ("p.jsonl", b'{"prompt": "  "}\n', ["line 1", "not a text"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_flag_file_line_and_cure(tmp_path, name, content, fragments):
    path = _written(tmp_path, content, name)

    with pytest.raises(ConfigError) as refusal:
        PromptSource(path, 0)

    message = str(refusal.value)
    assert "\n" not in message
    assert all(fragment in message for fragment in ["--prompt-data", str(path), *fragments])


@pytest.mark.parametrize(("name", "fragment"), [("none.txt", "no such file"), ("folder.txt", "is a directory")])
def test_a_path_that_is_no_file_is_refused(tmp_path, name, fragment):
    (tmp_path / "folder.txt").mkdir()

    with pytest.raises(ConfigError, match=fragment):
        PromptSource(tmp_path / name, 0)


def test_no_prompts_at_all_are_refused():
    with pytest.raises(ConfigError, match="--prompt-data"):
        PromptSource([], 0)


@given(TEXTS, st.integers(0, 99))
def test_each_epoch_visits_each_line_once(texts, seed):
    source = PromptSource(texts, seed)

    epochs = [source.next(len(texts)) for _ in range(3)]

    assert all(Counter(prompt.text for prompt in epoch) == Counter(texts) for epoch in epochs)


@given(TEXTS, st.integers(0, 99), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_sequence_does_not_depend_on_how_many_are_drawn_at_once(texts, seed, sizes):
    pieces, whole = PromptSource(texts, seed), PromptSource(texts, seed)

    assert sum((pieces.next(size) for size in sizes), ()) == whole.next(sum(sizes))


@given(TEXTS, st.integers(1, 20))
def test_ids_name_the_draw_and_the_text(texts, n):
    source = PromptSource(texts, 0)

    prompts = source.next(n)

    assert [prompt.sample_id for prompt in prompts] == list(range(n))
    assert all(source.texts[prompt.prompt_id] == prompt.text for prompt in prompts)
    assert source.texts == tuple(dict.fromkeys(texts))


@given(TEXTS, st.integers(0, 99), st.integers(1, 20))
def test_a_resumed_source_continues_where_the_other_stopped(texts, seed, drawn):
    source, resumed = PromptSource(texts, seed), PromptSource(texts, seed)
    source.next(drawn)

    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))

    assert resumed.next(11) == source.next(11)


def test_epochs_and_seeds_have_orders_of_their_own():
    texts = [str(number) for number in range(30)]
    first, second = (PromptSource(texts, 0).next(60)[half] for half in (slice(30), slice(30, 60)))

    assert [prompt.text for prompt in first] != [prompt.text for prompt in second]
    assert [prompt.text for prompt in first] != [prompt.text for prompt in PromptSource(texts, 1).next(30)]


def test_the_order_never_changes_between_versions():
    # a checkpoint holds only the cursor: another order would repeat some prompts and skip others
    drawn = PromptSource(["a", "b", "c"], 0).next(7)

    assert "".join(prompt.text for prompt in drawn) == "bcabacc"
    assert drawn[3] == Prompt(3, 1, "b")


@pytest.mark.parametrize(
    ("change", "error", "fragment"),
    [
        ({"format": 2}, FormatError, "format 2"),
        ({"digest": PromptSource(["other"], 0).digest}, ConfigError, "--prompt-data"),
        ({"seed": 5}, ConfigError, "--seed 0.*--seed 5"),
        ({"cursor": -1}, FormatError, "-1"),
        ({"cursor": True}, FormatError, "True"),
        ({"extra": 1}, FormatError, "extra"),
    ],
)
def test_a_state_that_is_not_this_sources_is_refused_and_changes_nothing(change, error, fragment):
    source = PromptSource(["a", "b"], 0)
    source.next(3)

    with pytest.raises(error, match=fragment):
        source.load_state_dict(source.state_dict() | change)

    assert source.cursor == 3


def test_the_same_prompts_in_another_order_are_another_file():
    assert PromptSource(["a", "b"], 0).digest != PromptSource(["b", "a"], 0).digest
    assert PromptSource(["a", "b"], 0).digest != PromptSource(["a", "b", "b"], 0).digest


def test_a_source_travels_to_another_process_with_its_place():
    source = PromptSource(["a", "b", "c"], 0)
    source.next(4)

    assert pickle.loads(pickle.dumps(source)).next(5) == source.next(5)


@pytest.mark.parametrize("n", [0, -1, True, 1.0])
def test_a_count_of_prompts_is_a_whole_number(n):
    with pytest.raises(ValueError, match="at least 1"):
        PromptSource(["a"], 0).next(n)
