"""The summary is strict JSON, whole or absent; tables are readable wherever they go."""

import json
import math
from pathlib import Path

import pytest

from miles_dmd.observe.summary import memory_rows, table, time_rows, write_summary


def test_the_summary_has_its_format_and_no_number_that_json_does_not_know(tmp_path):
    write_summary(
        tmp_path / "summary.json", {"loss": math.nan, "peak": [1, math.inf], "save": Path("runs/a"), "name": "größe"}
    )

    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text) == {"format": 1, "loss": None, "peak": [1, None], "save": "runs/a", "name": "größe"}
    assert text.endswith("}\n")


def test_a_summary_of_what_json_does_not_know_is_an_error_and_leaves_the_old_one(tmp_path):
    write_summary(tmp_path / "summary.json", {"steps": 1})

    with pytest.raises(TypeError):
        write_summary(tmp_path / "summary.json", {"steps": object()})

    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


def test_a_table_shows_title_columns_and_cells_as_they_are(capsys):
    table("Who trains", ["group", "shape"], [("actor", "[B, C]"), ("critic", "\x1b[2J")])

    assert capsys.readouterr().out == ("Who trains\n  group   shape\n  actor   [B, C]\n  critic  \\x1b[2J\n\n")


def test_numbers_of_the_time_table_are_set_to_the_right(capsys):
    table("", ["phase", "seconds", "share"], time_rows({"rollout": 10.0, "save": 2.0}))

    assert [line[-16:] for line in capsys.readouterr().out.splitlines()[2:5]] == [
        "10.0 s    83.3 %",
        " 2.0 s    16.7 %",
        "12.0 s   100.0 %",
    ]


def test_times_have_shares_and_a_sum():
    assert time_rows({"rollout": 3.0, "other": 1.0}) == [
        ("rollout", "3.0 s", " 75.0 %"),
        ("other", "1.0 s", " 25.0 %"),
        ("total", "4.0 s", "100.0 %"),
    ]
    assert time_rows({"other": 0.0})[-1] == ("total", "0.0 s", "  0.0 %")


def test_memory_is_told_by_group():
    assert memory_rows({"actor": 2**20, "critic": 2**21}) == [("actor", "1.0 MiB"), ("critic", "2.0 MiB")]
