"""Metrics are on disk as soon as a cycle is committed, and survive kills, resumes and newer versions."""

import json
import logging
import math
import resource
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from miles_dmd.errors import FormatError
from miles_dmd.observe.metrics import FORMAT, KIND, MetricsWriter, flatten, read_metrics

HEADER = json.dumps({"format": FORMAT, "kind": KIND}) + "\n"
GROUPS = {"student": "actor", "fake_score": "critic"}


def _written(tmp_path, *rows):
    path = tmp_path / "run" / "metrics.jsonl"
    _write(path, *rows)
    return path


def _write(path, *rows):
    with closing(MetricsWriter(path)) as writer:
        for row in rows:
            writer.write(row)


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [{"cycle": 1, "global_step": 0, "critic/loss": 0.25}, {"cycle": 2, "global_step": 1, "actor/loss": 1e-7}]

    assert read_metrics(_written(tmp_path, *rows)) == rows


def test_the_first_line_names_format_and_kind_and_each_line_is_strict_json(tmp_path):
    path = _written(tmp_path, {"cycle": 1, "actor/loss": math.nan, "actor/grad_norm": math.inf})

    def refuse(constant):
        raise AssertionError(constant)

    first, row = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert first == {"format": 1, "kind": "miles_dmd.metrics"}
    assert row == {"cycle": 1, "actor/loss": None, "actor/grad_norm": None}


def test_a_number_that_is_not_finite_comes_back_as_nan(tmp_path):
    (row,) = read_metrics(_written(tmp_path, {"cycle": 1, "actor/loss": -math.inf}))

    assert math.isnan(row["actor/loss"])


def test_numbers_of_other_libraries_are_written_as_plain_ones(tmp_path):
    numpy = pytest.importorskip("numpy")

    (row,) = read_metrics(_written(tmp_path, {"cycle": 1, "a/b": numpy.float32(0.5), "a/c": numpy.int64(3)}))

    assert row == {"cycle": 1, "a/b": 0.5, "a/c": 3}


@pytest.mark.parametrize("cycle", [None, 1.0, True, "1"])
def test_a_row_without_its_cycle_is_refused(tmp_path, cycle):
    with pytest.raises(ValueError, match="cycle"):
        _written(tmp_path, {"cycle": cycle})


def test_a_killed_run_leaves_every_row_that_it_wrote(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys; from miles_dmd.observe.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1])\n"
        "for cycle in range(1, 4): writer.write({'cycle': cycle})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -signal.SIGKILL
    assert [row["cycle"] for row in read_metrics(path)] == [1, 2, 3]


def test_a_torn_last_line_is_left_out_and_reported(tmp_path, caplog):
    path = _written(tmp_path, {"cycle": 1}, {"cycle": 2})
    path.write_bytes(path.read_bytes()[:-4])

    with caplog.at_level(logging.WARNING):
        rows = read_metrics(path)

    assert rows == [{"cycle": 1}]
    assert "torn" in caplog.text


def test_a_file_with_a_torn_last_line_is_continued_cleanly(tmp_path):
    path = _written(tmp_path, {"cycle": 1}, {"cycle": 2})
    path.write_bytes(path.read_bytes()[:-4])

    _write(path, {"cycle": 2, "actor/loss": 1.0})

    assert read_metrics(path) == [{"cycle": 1}, {"cycle": 2, "actor/loss": 1.0}]


@pytest.mark.parametrize("content", ["", HEADER[:9]])
def test_a_file_that_was_killed_before_its_header_gets_one(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)

    _write(path, {"cycle": 1})

    assert path.read_text() == HEADER + '{"cycle": 1}\n'


def test_a_resumed_run_supersedes_the_cycles_after_its_checkpoint(tmp_path):
    path = _written(tmp_path, *({"cycle": cycle, "a/b": 0} for cycle in range(1, 6)))

    _write(path, {"cycle": 3, "a/b": 1})

    assert read_metrics(path) == [{"cycle": 1, "a/b": 0}, {"cycle": 2, "a/b": 0}, {"cycle": 3, "a/b": 1}]


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (HEADER.replace("1", "2"), "format 2"),
        ('{"kind": "other", "format": 1}\n', "not a metrics file"),
        ('{"cycle": 1}\n', "not a metrics file"),
        ("", "not a metrics file"),
        ("[1]\n", "line 1"),
        (HEADER + "{broken\n" + '{"cycle": 2}\n', "line 2"),
    ],
)
def test_a_file_of_another_kind_or_format_or_a_broken_line_is_refused_in_one_line(tmp_path, content, fragment):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)

    with pytest.raises(FormatError, match=fragment) as refusal:
        read_metrics(path)

    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_another_kind_of_file_is_not_appended_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(HEADER.replace("1", "2"))

    with pytest.raises(FormatError, match="format 2"):
        MetricsWriter(path)

    assert path.read_text() == HEADER.replace("1", "2")


def test_a_phases_metrics_carry_the_name_of_its_group():
    assert flatten({"student": ({"loss": 0.5, "lr": 1e-5},)}, GROUPS) == {"actor/loss": 0.5, "actor/lr": 1e-5}


def test_repeats_are_averaged_and_kept():
    flat = flatten({"fake_score": ({"loss": 1.0}, {"loss": 2.0}, {"loss": 6.0})}, GROUPS)

    assert flat == {"critic/loss": 3.0, "critic/loss.0": 1.0, "critic/loss.1": 2.0, "critic/loss.2": 6.0}


def test_times_and_counts_add_up_peaks_are_maxima_and_of_rates_the_last_counts():
    one = {"seconds": 1.0, "nonfinite": 1, "weight": 8, "peak_memory_mib": 5.0, "lr": 2e-5, "ema_decay": 0.5}
    two = {"seconds": 2.0, "nonfinite": 2, "weight": 8, "peak_memory_mib": 4.0, "lr": 1e-5, "ema_decay": 0.9}

    flat = flatten({"fake_score": (one, two)}, GROUPS)

    assert flat == {
        "critic/seconds": 3.0,
        "critic/nonfinite": 3,
        "critic/weight": 16,
        "critic/peak_memory_mib": 5.0,
        "critic/lr": 1e-5,
        "critic/ema_decay": 0.9,
    }


def test_a_name_with_a_slash_is_taken_as_it_is():
    assert flatten({"student": ({"critic/score_norm": 2.0},)}, GROUPS) == {"critic/score_norm": 2.0}


def test_a_phase_of_an_unknown_kind_is_an_error():
    with pytest.raises(KeyError, match="other"):
        flatten({"other": ({"loss": 1.0},)}, GROUPS)


@pytest.mark.parametrize("room", range(0, 200, 7))
def test_row_of_which_a_full_disk_took_a_part_is_whole_in_the_end(tmp_path, room):
    """The system writes what has room, and says how much that was."""
    path = tmp_path / "metrics.jsonl"
    writer, unlimited = MetricsWriter(path), resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, unlimited))
    try:
        for cycle in range(1, 5):
            writer.write({"cycle": cycle, "critic/loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    writer.close()

    assert [row["cycle"] for row in read_metrics(path)] == [1, 2, 3, 4]


def test_killed_at_every_instant_of_a_resume_the_rows_are_those_of_before_or_after(tmp_path):
    """A process that dies between two calls of the system, whichever they are."""
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    before, after = [1, 2, 3, 4, 5], [1, 2, 3]
    assert {tuple(map(int, line.split())) for line in done.stdout.splitlines()} == {
        tuple(before), tuple(after[:2]), tuple(after)
    }  # fmt: skip


KILLED = """
import os, signal, sys
from pathlib import Path
from miles_dmd.observe.metrics import MetricsWriter, read_metrics

PATH = Path(sys.argv[1]) / "metrics.jsonl"
writer = MetricsWriter(PATH)
for cycle in (1, 2, 3, 4, 5):
    writer.write({"cycle": cycle})
whole = PATH.read_bytes()

def die_at(number, truncate=os.truncate):
    def count(*ignored):
        nonlocal number
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    def counted(*words):
        truncate(*words)
        count()
    os.truncate = counted

instants = survived = 0
while not survived:
    instants += 1
    PATH.write_bytes(whole)
    if not (pid := os.fork()):
        die_at(instants)
        MetricsWriter(PATH).write({"cycle": 3})
        os._exit(0)
    survived = os.waitpid(pid, 0)[1] == 0
    print(*(int(row["cycle"]) for row in read_metrics(PATH)))
"""
