"""Stop steps of rollouts: in range, by the policy's law, and the same on every machine."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.errors import PlanError
from miles_dmd.sampling.stopping import stop_steps

POLICIES = ["uniform", "stratified", "cycle"]
UNIFORM, STRATIFIED = (0, 0, 0, 2, 3, 1, 1, 3), (1, 3, 2, 3, 2, 0, 0, 1)


@given(
    policy=st.sampled_from(POLICIES),
    n=st.integers(0, 40),
    steps=st.integers(1, 8),
    seed=st.integers(0, 2**63),
    first=st.integers(0, 99),
)
def test_every_sample_stops_at_a_step_of_the_grid(policy, n, steps, seed, first):
    stops = stop_steps(policy, n, steps, seed=seed, first=first)

    assert len(stops) == n
    assert all(0 <= stop < steps for stop in stops)
    assert stops == stop_steps(policy, n, steps, seed=seed, first=first)


@given(n=st.integers(1, 40), steps=st.integers(1, 8), seed=st.integers(0, 2**63))
def test_stratified_stops_are_even_over_the_batch(n, steps, seed):
    times = Counter(stop_steps("stratified", n, steps, seed=seed))

    assert max(times.values()) - min(times[step] for step in range(steps)) <= 1


@pytest.mark.parametrize("policy", ["uniform", "stratified"])
def test_a_drawn_step_occurs_equally_often_at_every_place_over_many_seeds(policy):
    times = Counter(
        (place, stop) for seed in range(2000) for place, stop in enumerate(stop_steps(policy, 3, 4, seed=seed))
    )

    assert all(400 < times[place, stop] < 600 for place in range(3) for stop in range(4))  # 500 +- 5 sigma


def test_uniform_stops_are_independent_of_how_a_batch_is_cut():
    whole = stop_steps("uniform", 12, 4, seed=5, first=100)

    assert whole == stop_steps("uniform", 5, 4, seed=5, first=100) + stop_steps("uniform", 7, 4, seed=5, first=105)


def test_a_cycle_goes_on_from_batch_to_batch():
    assert stop_steps("cycle", 5, 4, seed=0) + stop_steps("cycle", 3, 4, seed=9, first=5) == (0, 1, 2, 3, 0, 1, 2, 3)


def test_draws_are_the_same_on_every_machine():
    assert stop_steps("uniform", 8, 4, seed=1) == UNIFORM
    assert stop_steps("stratified", 8, 4, seed=1) == STRATIFIED


@pytest.mark.parametrize("policy", ["random", "", None, ["uniform"]])
def test_an_unknown_policy_is_refused_with_the_list(policy):
    with pytest.raises(PlanError, match="--stop-step-policy must be one of uniform, stratified, cycle"):
        stop_steps(policy, 4, 4, seed=0)


@pytest.mark.parametrize(
    ("n", "steps", "first", "name"),
    [(4, 0, 0, "num_steps"), (-1, 4, 0, "num_samples"), (4, 4, 1.0, "first"), (True, 4, 0, "num")],
)
def test_counts_of_a_rollout_are_whole_numbers(n, steps, first, name):
    with pytest.raises(PlanError, match=name):
        stop_steps("uniform", n, steps, seed=0, first=first)
