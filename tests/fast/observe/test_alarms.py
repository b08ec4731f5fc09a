"""Alarms on series of which the answer is known."""

import json
import math
import random

import pytest

from miles_dmd.config.args import Args
from miles_dmd.losses.dmd2 import Options
from miles_dmd.losses.dmd2.observed import ALARMS
from miles_dmd.modalities.diffusion.options import DiffusionOptions
from miles_dmd.modalities.diffusion.watched import ALARMS as GRIDS
from miles_dmd.observe.alarms import Alarms, growth, slope

THRESHOLDS = {
    "critic_lag": 3.0, "critic_loss_slope": 0.5, "saturation": 0.01, "diversity": 0.3, "rollout_drift": 0.1,
}  # fmt: skip


def rows_of(**series):
    """{"critic__loss": [1, 2]} -> rows with cycle and global_step, one a value."""
    names = {name.replace("__", "/"): values for name, values in series.items()}
    length = max(map(len, names.values()))
    return [
        {"cycle": n + 1, "global_step": n + 1, **{name: values[n] for name, values in names.items() if n < len(values)}}
        for n in range(length)
    ]


def armed(**thresholds):
    return {alarm: (THRESHOLDS | thresholds)[alarm.name] for alarm in (*ALARMS, *GRIDS)}


def checked(rows, window=4, **thresholds):
    alarms = Alarms(armed(**thresholds), window)
    return [alarms.check(row) for row in rows]


def test_growth_is_the_last_window_over_the_first():
    assert growth([1, 1, 5, 9, 4, 4], window=2) == 4
    assert growth([2, 4, 3, 3], window=2) == 1


def test_growth_waits_until_early_and_late_do_not_overlap():
    assert growth([1, 1, 9], window=2) is None
    assert growth([0, 0, 1, 1], window=2) is None  # nothing to compare with


@pytest.mark.parametrize(
    ("series", "expected"),
    [([3.0] * 10, 0), ([0.5 + n / 9 for n in range(10)], 1), ([1.5 - n / 9 for n in range(10)], -1)],
    ids=["level", "from half to one and a half of its mean", "falling"],
)
def test_slope_is_the_rise_over_the_window_as_a_share_of_the_mean(series, expected):
    assert slope(series, window=10) == pytest.approx(expected)


def test_slope_looks_at_the_window_alone():
    assert slope([100.0, 50.0, 2.0, 2.0, 2.0], window=3) == pytest.approx(0)


def test_slope_needs_a_whole_window_of_two_at_least():
    assert slope([1.0, 2.0], window=3) is None
    assert slope([1.0, 2.0], window=1) is None


def test_noise_of_a_level_loss_rings_nothing_at_the_default_window():
    """A third of the mean as standard deviation, which small batches have; 2,000 cycles."""
    noise = random.Random(0)
    rows = rows_of(critic__loss=[max(0.01, noise.gauss(1.0, 0.33)) for _ in range(2000)])

    found = checked(rows, window=Args.alarm_window)

    assert [row for row in found if row.get("alarm/critic_loss_slope")] == []


def test_loss_that_rises_by_three_quarters_within_a_window_rings():
    noise = random.Random(0)
    rows = rows_of(critic__loss=[(0.6 + 0.75 * n / 100) * max(0.01, noise.gauss(1.0, 0.2)) for n in range(100)])

    assert checked(rows, window=100)[-1]["alarm/critic_loss_slope"] == 1


def test_critic_that_falls_behind_rings_once_the_gap_has_grown():
    rows = rows_of(actor__teacher_critic_gap=[0.1] * 4 + [0.2] * 4 + [0.38] * 4)

    found = checked(rows)

    assert [row.get("alarm/critic_lag") for row in found] == [None] * 7 + [0, 0, 0, 1, 1]
    assert found[7]["critic/lag"] == pytest.approx(2)
    assert found[-1]["critic/lag"] == pytest.approx(3.8)


def test_gap_that_falls_rings_nothing():
    rows = rows_of(actor__teacher_critic_gap=[0.5 * 0.9**n for n in range(40)])

    assert all(row.get("alarm/critic_lag", 0) == 0 for row in checked(rows))


@pytest.mark.parametrize(("value", "alarm"), [(0.004, 0), (0.02, 1)])
def test_saturation_rings_above_its_share(value, alarm):
    assert checked([{"samples/saturation": value}])[0]["alarm/saturation"] == alarm


@pytest.mark.parametrize(("value", "alarm"), [(1.2, 0), (0.31, 0), (0.29, 1)])
def test_diversity_rings_below_its_share(value, alarm):
    assert checked([{"samples/diversity": value}])[0]["alarm/diversity"] == alarm


@pytest.mark.parametrize(("drift", "alarm"), [(1e-6, 0), (0.3, 1)])
def test_drift_is_measured_in_standard_deviations_of_the_samples(drift, alarm):
    found = checked([{"actor/rollout_drift": drift, "actor/generated_std": 2.0}])[0]

    assert found["actor/relative_rollout_drift"] == drift / 2
    assert found["alarm/rollout_drift"] == alarm


def test_cycle_without_the_number_has_no_alarm():
    """Warm-up cycles have no student phase, and most cycles no grid."""
    assert checked([{"samples/diversity": 0.1}, {"cycle": 2}])[1] == {}


def test_threshold_of_zero_switches_an_alarm_off():
    assert checked([{"samples/diversity": 0.1, "samples/saturation": 1.0}], diversity=0) == [
        {"samples/saturation": 1.0, "alarm/saturation": 1.0}
    ]


def test_numbers_that_are_not_finite_count_for_nothing():
    rows = rows_of(actor__teacher_critic_gap=[1.0, math.nan, 1.0, math.inf, 1.0, 1.0, 1.0])

    assert checked(rows, window=2)[-1]["critic/lag"] == 1


def test_alarm_is_logged_when_it_begins_with_number_flag_and_cure(caplog):
    alarms = Alarms(armed(), 4)

    for value in (0.5, 0.2, 0.1):
        alarms.check({"global_step": 7, "samples/diversity": value})

    (message,) = caplog.messages
    assert "alarm diversity after step 7: samples/diversity is 0.2, below --alarm-diversity 0.3" in message
    assert "guidance" in message


def test_alarm_rings_until_its_number_recovers():
    alarms = Alarms(armed(), 4)

    alarms.check({"samples/diversity": 0.1})
    alarms.check({"cycle": 2})
    still = alarms.ringing
    alarms.check({"samples/diversity": 0.9})

    assert still == {"diversity"}
    assert alarms.ringing == frozenset()


@pytest.mark.parametrize("k", range(13))
@pytest.mark.parametrize("window", [1, 2, 4])
def test_resumed_run_goes_on_with_its_windows(k, window):
    whole, first, resumed = (Alarms(armed(), size) for size in (window, 4, window))
    series = {
        "actor__teacher_critic_gap": [0.1] * 4 + [0.2] * 4 + [0.4] * 4,
        "critic__loss": [1 / n for n in range(1, 13)],
    }
    rows = rows_of(**series)
    found = [whole.check(row) for row in rows]
    for row in rows[:k]:
        first.check(row)

    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert [resumed.check(row) for row in rows[k:]] == found[k:]
    if k < 12:
        assert resumed.ringing == whole.ringing


def test_resumed_alarm_that_rings_is_not_logged_again(caplog):
    first, resumed = Alarms(armed(), 4), Alarms(armed(), 4)
    first.check({"samples/diversity": 0.1})
    resumed.load_state_dict(first.state_dict())

    resumed.check({"samples/diversity": 0.1})

    assert resumed.ringing == {"diversity"}
    assert len(caplog.messages) == 1


def test_alarm_that_is_switched_off_rings_no_more():
    first, resumed = Alarms(armed(), 4), Alarms(armed(diversity=0), 4)
    first.check({"samples/diversity": 0.1})

    resumed.load_state_dict(first.state_dict())

    assert resumed.ringing == frozenset()


def test_every_alarm_has_its_flag():
    for alarms, arguments in ((ALARMS, Options), (GRIDS, DiffusionOptions)):
        for alarm in alarms:
            assert getattr(arguments, alarm.option) == THRESHOLDS[alarm.name]
