"""Prompts are encoded chunk by chunk, once, whatever happens to the run that does it."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

from miles_dmd import registry
from miles_dmd.errors import ConfigError
from miles_dmd.modalities.diffusion import encoding
from miles_dmd.modalities.diffusion.conditions import PromptTable

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXTS = [f"a handwritten {first} {second}" for first in WORDS for second in WORDS[:7]]
"""70: four whole chunks and, with the negative prompt, one of seven."""
CPU = torch.device("cpu")
DYING = '''
"""SD3 whose encoder dies in its third call."""

import os
import signal
from dataclasses import replace

from miles_dmd.models.sd3 import family as sd3, network
from miles_dmd.models.sd3.network import truncations

family = replace(sd3, torch_module=__name__)
calls = []


def open_encoder(checkpoint, **how):
    encode = network.open_encoder(checkpoint, **how)

    def dying(texts):
        calls.append(texts)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(texts)

    return dying
'''
RUN = """
import sys
import torch
from miles_dmd.config.cli import parse_args
from miles_dmd.modalities.diffusion.encoding import ensure_table
print(ensure_table(parse_args(sys.argv[1:]), {texts!r}, torch.device("cpu")))
"""


@pytest.fixture
def encode(make_args, tmp_path):
    """``encode()``: the table of TEXTS in a cache of this test's own."""

    def run(*more, texts=TEXTS):
        return encoding.ensure_table(make_args("--cache-dir", str(tmp_path / "cache"), *more), texts, CPU)

    return run


@pytest.fixture(scope="module")
def whole(make_args, cache_dir):
    """A whole table of TEXTS; not to be changed."""
    return encoding.ensure_table(make_args(), TEXTS, CPU)


@pytest.fixture(scope="module")
def half(make_args, tmp_path_factory):
    """Files of a run that ended in its fourth chunk; not to be changed."""
    cache = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch, counted(patch, stop_at=4), pytest.raises(MemoryError):
        encoding.ensure_table(make_args("--cache-dir", str(cache)), TEXTS, CPU)
    return cache / "prompts"


def test_rows_are_what_the_stock_pipeline_encodes(whole, teacher):
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(teacher)
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(TEXTS[16:32], None, None, False, max_sequence_length=12)
        nothing, _, _, _ = pipeline.encode_prompt("", None, None, False, max_sequence_length=12)

    table = PromptTable(whole)

    found = table.lookup(range(16, 32))
    assert torch.equal(found["encoder_hidden_states"], embeds)
    assert torch.equal(found["pooled_projections"], pooled)
    torch.testing.assert_close(table.unconditional(2)["encoder_hidden_states"], nothing.expand(2, -1, -1))
    assert table.num_prompts == len(TEXTS)


def test_a_table_opens_in_stock_safetensors(encode):
    from safetensors.torch import load_file

    table = PromptTable(encode("--compute-dtype", "bf16"))

    whole, rows = load_file(table.path), table.lookup(range(len(TEXTS) + 1))
    assert whole.keys() == rows.keys()
    assert all(torch.equal(whole[name], rows[name]) for name in rows)
    assert rows["pooled_projections"].dtype == torch.bfloat16


def test_rows_come_in_the_order_asked_for(whole):
    table = PromptTable(whole)

    one = table.lookup([5, 3, 5])["pooled_projections"]

    assert torch.equal(one[0], one[2])
    assert torch.equal(one[1], table.lookup([3])["pooled_projections"][0])
    with pytest.raises(IndexError):
        table.lookup([len(TEXTS) + 1])


def test_a_killed_run_is_gone_on_with(encode, whole, flags, monkeypatch, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "dying.py").write_text(DYING)
    cache, command = tmp_path / "killed", [sys.executable, "-c", RUN.format(texts=TEXTS)]

    killed = subprocess.run(
        [*command, *flags("--cache-dir", str(cache), "--model-family", "own.dying")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    left = sorted(entry.suffix for entry in (cache / "prompts").iterdir())
    with counted(monkeypatch) as calls:
        again = encode("--cache-dir", str(cache))

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert left == [".journal", ".partial"]
    assert calls == [*TEXTS, ""][::16][2:]
    assert again.read_bytes() == whole.read_bytes()
    assert list(again.parent.iterdir()) == [again]


@contextlib.contextmanager
def counted(monkeypatch, stop_at=None):
    """The calls of the encoder; the one numbered ``stop_at`` fails as a disk would."""
    code, calls = registry.load("models", "sd3").code(), []
    real = code.open_encoder

    def opened(*args, **how):
        encode = real(*args, **how)

        def one(texts):
            calls.append(texts[0])
            if len(calls) == stop_at:
                raise MemoryError("stop")
            return encode(texts)

        return one

    with monkeypatch.context() as patch:
        patch.setattr(code, "open_encoder", opened)
        yield calls


def cut_short(partial, journal):
    os.truncate(partial, partial.stat().st_size - 5)


def damage_second_chunk(partial, journal):
    content = bytearray(partial.read_bytes())
    content[-1 - 40 * 128] ^= 1  # 128 bytes a row of pooled_projections, which are the last column; row 30
    partial.write_bytes(content)


def tear_journal(partial, journal):
    journal.write_bytes(journal.read_bytes()[:-4])


def empty_journal(partial, journal):
    journal.write_bytes(b"\0" * journal.stat().st_size)


def other_format(partial, journal):
    partial.write_bytes(partial.read_bytes().replace(b'"format": "2"', b'"format": "1"', 1))


def no_partial(partial, journal):
    partial.unlink()


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(cut_short, 0), (damage_second_chunk, 1), (tear_journal, 2), (empty_journal, 0), (other_format, 0),
     (no_partial, 0)],
)  # fmt: skip
def test_what_is_damaged_in_a_half_table_is_encoded_again(encode, whole, half, monkeypatch, tmp_path, damage, kept):
    path = shutil.copytree(half, tmp_path / "cache" / "prompts") / whole.name
    damage(path.with_suffix(".partial"), path.with_suffix(".journal"))

    with counted(monkeypatch) as calls:
        assert encode() == path

    assert path.read_bytes() == whole.read_bytes()
    assert calls == [*TEXTS, ""][::16][kept:]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b'\x0a\0\0\0\0\0\0\0{"a": 1}  ', (1 << 40).to_bytes(8, "little"), None]
)
def test_a_damaged_table_is_made_again_and_said(encode, whole, caplog, tmp_path, content):
    path = tmp_path / "cache" / "prompts" / whole.name
    path.parent.mkdir(parents=True)
    path.write_bytes(whole.read_bytes()[:-1] if content is None else content)

    with caplog.at_level(logging.WARNING):
        assert encode() == path

    assert path.read_bytes() == whole.read_bytes()
    assert f"{path} is no table of prompts" in caplog.text


def test_two_runs_encode_the_same_prompts_once(encode, monkeypatch, caplog):
    """The second waits, says so, and takes what the first has written."""
    inside, go_on, waited = threading.Event(), threading.Event(), threading.Event()
    code = registry.load("models", "sd3").code()
    real, opened = code.open_encoder, []

    def slow(*args, **how):
        opened.append(1)
        inside.set()
        assert go_on.wait(120)
        return real(*args, **how)

    monkeypatch.setattr(code, "open_encoder", slow)
    monkeypatch.setattr(encoding.time, "sleep", lambda seconds: waited.set() or threading.Event().wait(0.01))
    found = []
    first, second = (threading.Thread(target=lambda: found.append(encode())) for _ in range(2))

    first.start()
    assert inside.wait(120)
    second.start()
    assert waited.wait(120)
    go_on.set()
    for thread in (first, second):
        thread.join(120)

    assert found == [found[0]] * 2
    assert len(opened) == 1


def test_a_full_disk_keeps_what_is_encoded(encode, monkeypatch, tmp_path):
    real, written = os.pwrite, []

    def full(file, data, place):
        written.append(place)
        if len(written) == 6:  # the head, then two columns and a record of the journal for each chunk
            raise OSError(28, "No space left on device")
        return real(file, data, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match=rf"--cache-dir {tmp_path}.* KiB in all.*No space left.*is kept"):
            encode()
    with counted(monkeypatch) as calls:
        encode()

    assert calls == [*TEXTS, ""][16::16]


@pytest.fixture
def without_room(monkeypatch):
    real = os.statvfs

    def full(path):
        status = list(real(path))
        status[4] = 0  # f_bavail
        return os.statvfs_result(status)

    def patched():
        monkeypatch.setattr(os, "statvfs", full)

    return patched


def test_a_disk_without_room_is_refused_unless_the_table_is_there(whole, without_room, make_args, tmp_path):
    prompts = tmp_path / "cache" / "prompts"
    prompts.mkdir(parents=True)
    shutil.copy(whole, prompts)
    args = make_args("--cache-dir", str(tmp_path / "cache"))
    without_room()

    assert encoding.ensure_table(args, TEXTS, CPU) == prompts / whole.name
    with pytest.raises(ConfigError, match=r"--cache-dir .*: the encoded prompts need .* KiB, and .* are free"):
        make_args("--cache-dir", str(tmp_path / "other"))


def test_a_disk_that_has_filled_up_since_is_refused_before_encoders_are_opened(
    make_args, without_room, monkeypatch, tmp_path
):
    args = make_args("--cache-dir", str(tmp_path / "cache"))
    without_room()

    with (
        counted(monkeypatch) as calls,
        pytest.raises(ConfigError, match="its disk lacks"),
    ):
        encoding.ensure_table(args, TEXTS, CPU)

    assert calls == []


LONG = "a handwritten seven " * 30


def test_long_prompts_are_told_in_one_line_also_of_a_table_that_was_there(encode, caplog, capfd):
    texts = [*TEXTS[:5], LONG, LONG + "one"]

    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            encode(texts=texts)

        (line,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.startswith(
            "of 8 prompts, the negative one among them, text_encoder cuts 2 at 12 tokens (the longest"
        )
        assert all(f"text_encoder{number} cuts 2 at 12 tokens" in line for number in ("", "_2", "_3"))
        assert "seven" not in caplog.text + "".join(capfd.readouterr())


def test_prompts_that_fit_are_not_spoken_of(encode, caplog):
    with caplog.at_level(logging.WARNING):
        encode()

    assert caplog.text == ""
