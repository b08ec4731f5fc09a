"""Names of the numbers that a run will write, known before it starts; a real run shows that it writes those."""

import re
from pathlib import Path

import pytest

from miles_dmd.errors import ConfigError
from miles_dmd.preflight.metric_names import metric_names


@pytest.mark.parametrize(
    ("metric", "near"),
    [
        ("samples/diversty", "samples/diversity"),
        ("actor/normaliser", "actor/normalizer"),
        ("critic/loss.2", "critic/loss"),  # two fake-score steps a cycle: .0 and .1
        ("critic/normalizer", "actor/normalizer"),
        ("alarm/diversity", "samples/diversity"),  # switched off
    ],
)
def test_number_that_no_cycle_has_is_refused_with_the_nearest(resolved, metric, near):
    flags = ("--sample-prompts", "1", "--alarm-diversity", "0", "--keep-best", f"max:{metric}")

    with pytest.raises(ConfigError, match=re.escape(f"--keep-best max:{metric}: no cycle of this run has")) as refusal:
        resolved(*flags)

    assert f"(did you mean {near}" in str(refusal.value)


@pytest.mark.parametrize("metric", ["critic/loss.1", "critic/lag", "actor/ema_decay", "alarm/rollout_drift", "seconds"])
def test_number_that_a_cycle_has_is_taken(resolved, metric):
    assert resolved("--keep-best", f"min:{metric}").args.keep_best == f"min:{metric}"


def test_names_follow_from_the_flags(resolved):
    assert "critic/loss.4" in metric_names(resolved("--fake-update-ratio", "5"))
    assert "critic/loss.0" not in metric_names(resolved("--fake-update-ratio", "1"))
    assert "critic/lag" not in metric_names(resolved("--alarm-critic-lag", "0"))


def test_every_name_is_on_the_page_of_metrics(resolved):
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    names = {re.sub(r"\.\d+$", "", name) for name in metric_names(resolved("--sample-prompts", "1"))}

    assert sorted(name for name in names if f"`{name}`" not in page) == []
