"""Alarms and the best student in a whole run, in one process."""

import json

import pytest

from miles_dmd.modalities.diffusion.distillation import read_distillation
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.preflight.metric_names import metric_names
from miles_dmd.run import main


def test_alarm_ends_a_run_cleanly_if_asked(flags, tmp_path, capsys):
    """The gap between teacher and fake score never shrinks to a ten-thousandth, so the first that can be told rings."""
    asked = ("--on-alarm", "stop", "--alarm-window", "1", "--alarm-critic-lag", "1e-4", "--num-rollout", "9")

    status = main(flags("--local", *asked, "--save", str(tmp_path)))

    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert status == 0
    assert [row.get("alarm/critic_lag") for row in rows] == [None, None, 1]
    assert rows[-1]["alarm/rollout_drift"] == 0
    assert "Stopped after 2 student steps by --on-alarm stop: critic_lag" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["alarms"] == ["critic_lag"]
    assert read_distillation(tmp_path / "student").policy_version == 2
    assert (tmp_path / "checkpoints" / "cycle_000003" / "manifest.json").is_file()


def test_grids_tell_diversity_and_the_best_student_stays_beside_the_last(flags, tmp_path):
    asked = ("--sample-prompts", "2", "--sample-interval", "1", "--keep-best", "max:samples/diversity")

    status = main(flags("--local", *asked, "--save", str(tmp_path)))

    rows = read_metrics(tmp_path / "metrics.jsonl")
    diversity = {row["global_step"]: row["samples/diversity"] for row in rows}
    kept = json.loads((tmp_path / "student_best" / "best.json").read_text())
    assert status == 0
    assert 0.5 < diversity[0] < 0.9, "few steps without guidance lie closer together than what the teacher draws"
    assert diversity[2] == pytest.approx(diversity[0], rel=0.1)
    assert diversity[2] != diversity[0]
    assert (tmp_path / "samples" / "teacher.png").is_file()
    assert all(row["samples/saturation"] < 0.01 for row in rows)
    best = max((1, 2), key=lambda step: diversity[step])
    assert kept == {"metric": "samples/diversity", "value": diversity[best], "global_step": best}
    assert read_distillation(tmp_path / "student_best").policy_version == best
    assert read_distillation(tmp_path / "student").policy_version == 2


def test_names_that_keep_best_takes_are_those_that_a_run_writes(flags, resolved, tmp_path):
    asked = ("--sample-prompts", "1", "--sample-interval", "1", "--alarm-window", "1", "--num-rollout", "3")

    main(flags("--local", *asked, "--save", str(tmp_path)))

    written = {name for row in read_metrics(tmp_path / "metrics.jsonl") for name in row}
    # a slope needs a window of two
    assert metric_names(resolved("--local", *asked)) - written == {"critic/loss_slope", "alarm/critic_loss_slope"}
    assert written <= metric_names(resolved("--local", *asked))


def test_number_that_takes_longer_than_an_interval_is_no_end_of_the_run(flags, tmp_path, caplog):
    """critic/lag is told from the second cycle with a student step on, and judged after the first."""
    asked = ("--sample-interval", "1", "--alarm-window", "1", "--keep-best", "min:critic/lag")

    status = main(flags("--local", *asked, "--save", str(tmp_path)))

    assert status == 0
    assert "--keep-best min:critic/lag: no such number up to step 1; nothing to judge" in caplog.messages
    assert json.loads((tmp_path / "student_best" / "best.json").read_text())["global_step"] == 2
