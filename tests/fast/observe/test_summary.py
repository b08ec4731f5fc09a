"""The summary is strict JSON, whole or absent; tables are readable wherever they go."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from miles_dmd.observe.summary import byte_size, memory_rows, table, time_rows, write_summary


def _printed(*args):
    console = Console(width=100, record=True, file=io.StringIO())
    table(*args, console=console)
    return console.export_text()


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


def test_a_table_shows_title_columns_and_cells_as_they_are():
    text = _printed("Who trains", ["group", "shape"], [("actor", "[B, C]"), ("critic", "[red]x[/red]")])

    for expected in ("Who trains", "group", "actor", "[B, C]", "[red]x[/red]"):
        assert expected in text


def test_columns_of_numbers_are_set_to_the_right_and_words_to_the_left():
    lines = _printed("", ["phase", "time"], [("rollout", "10.0 s"), ("save", "2.0 s")]).splitlines()

    rollout, save = (next(line for line in lines if line.startswith(name)) for name in ("rollout", "save"))
    assert rollout.rstrip().endswith("10.0 s")
    assert len(rollout.rstrip()) == len(save.rstrip())


def test_a_table_without_rows_is_a_table():
    assert "group" in _printed("Nothing", ["group"], [])


def test_times_have_shares_and_a_sum():
    assert time_rows({"rollout": 3.0, "other": 1.0}) == [
        ("rollout", "3.0 s", "75.0 %"),
        ("other", "1.0 s", "25.0 %"),
        ("total", "4.0 s", "100.0 %"),
    ]
    assert time_rows({"other": 0.0})[-1] == ("total", "0.0 s", "0.0 %")


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_have_binary_units(count, shown):
    assert byte_size(count) == shown


def test_memory_is_told_by_group():
    assert memory_rows({"actor": 2**20, "critic": 2**21}) == [("actor", "1.0 MiB"), ("critic", "2.0 MiB")]
