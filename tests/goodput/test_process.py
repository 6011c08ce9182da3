"""The course of a run: closed form and drawing are the same process, and its limits are exact."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.goodput.plan import Stragglers
from stepcast.goodput.process import (
    RunProcess,
    Shortage,
    SimulatedRuns,
    best_interval_s,
    daly_s,
    expect_split,
    share_without_spare,
    simulate_runs,
    young_s,
)
from stepcast.units import DAY, HOUR

MONTHS = RunProcess(work_s=90 * DAY, interval_s=900, pause_s=10, lag_s=60, failures_per_s=1 / (3 * HOUR), restart_s=600)


def drawn(process: RunProcess, runs: int = 4000, seed: int = 1) -> SimulatedRuns:
    return simulate_runs(process, runs, np.random.default_rng(seed))


def test_no_failures_is_the_work_itself() -> None:
    process = RunProcess(work_s=1000 * 1.5)
    assert expect_split(process).total_s == 1500
    assert (drawn(process, 10).total_s == 1500).all()
    assert best_interval_s(process, 1.5) == math.inf


def test_without_a_checkpoint_it_is_the_textbook_formula() -> None:
    """(e^(rate x) - 1)(1 / rate + restart): all or nothing."""
    process = RunProcess(work_s=5000, failures_per_s=1 / 4000)
    assert expect_split(process).total_s == pytest.approx(math.expm1(5000 / 4000) * 4000)


def test_daly_with_restarts_that_fail_too() -> None:
    """Daly 2006, equation 13: M e^(R/M) (e^((t + d)/M) - 1) for each of the segments."""
    between_s, restart_s, interval_s, pause_s = 7200.0, 900.0, 1800.0, 120.0
    process = RunProcess(100 * interval_s, interval_s, pause_s, 0.0, 1 / between_s, restart_s)
    segment = between_s * math.exp(restart_s / between_s)
    whole = segment * math.expm1((interval_s + pause_s) / between_s)
    last = segment * math.expm1(interval_s / between_s)  # nothing is saved after the end
    assert expect_split(process).total_s == pytest.approx(99 * whole + last)


def test_drawn_runs_average_to_the_closed_form() -> None:
    """200 settings with the best interval: within one in a hundred, and within their own error."""
    chosen, outside = random.Random(3), 0
    for _ in range(200):
        between_s = 10 ** chosen.uniform(3.5, 6)
        process = RunProcess(
            work_s=between_s * chosen.uniform(5, 60),
            pause_s=chosen.uniform(0, 120),
            lag_s=chosen.choice([0.0, chosen.uniform(0, 200)]),
            failures_per_s=1 / between_s,
            restart_s=chosen.uniform(0, 900),
        )
        process = replace(process, interval_s=best_interval_s(process, chosen.uniform(1, 30)))
        found, mean_s = drawn(process, 1500), expect_split(process).total_s
        assert found.total_s.mean() == pytest.approx(mean_s, rel=0.01)
        outside += abs(found.total_s.mean() - mean_s) > 3 * found.error_s
    assert outside <= 4  # one in 370 is to be expected


def test_the_error_of_the_mean_shrinks_with_more_runs() -> None:
    few, many = drawn(MONTHS, 100), drawn(MONTHS, 6400)
    assert many.error_s == pytest.approx(few.error_s / 8, rel=0.3)


def test_parts_of_drawn_runs_sum_to_their_time() -> None:
    process = replace(MONTHS, broken_share=0.8, repair_s=DAY, spares=4)
    found = drawn(process, 500)
    parts = found.work_s + found.checkpoints_s + found.lost_s + found.restarts_s + found.waiting_s
    assert np.allclose(parts, found.total_s)
    assert found.failures.mean() == pytest.approx(expect_split(process).failures, rel=0.02)


@pytest.mark.parametrize("spares", [0, 1, 3, 8, 16])
def test_waiting_for_repair_is_erlangs_formula(spares: int) -> None:
    process = replace(MONTHS, broken_share=0.8, repair_s=DAY, spares=spares)
    found, mean = drawn(process, 1500), expect_split(process)
    assert found.waiting_s.mean() == pytest.approx(mean.waiting_s, rel=0.05, abs=600)


def test_a_long_run_waits_by_erlangs_formula_and_a_short_one_by_exact_chances() -> None:
    for spares, load, share in ((0, 3.0, 1.0), (1, 1.0, 1 / 2), (1, 0.0, 0.0), (2, 1.0, 1 / 5), (10, 5.0, 0.018385)):
        assert share_without_spare(spares, load, 1e6) == pytest.approx(share, rel=1e-4)
    # One spare is away at time t with the chance load / (1 + load) (1 - e^-(1 + load) t).
    for load, repairs in ((0.5, 0.1), (20.0, 0.3), (3.0, 5.0)):
        rate = 1 + load
        exact = load / rate * (1 + math.expm1(-rate * repairs) / (rate * repairs))
        assert share_without_spare(1, load, repairs) == pytest.approx(exact, rel=1e-5)
        exponential = load / rate * (1 - 1 / (1 + rate * repairs))
        assert share_without_spare(1, load, repairs, 1.0) == pytest.approx(exponential, rel=1e-9)


@pytest.mark.parametrize(
    ("hours", "between_h", "repair_h", "spares", "interval_s"),
    [(12, 1, 168, 2, 900), (72, 3, 168, 8, 900), (12, 0.3, 24, 2, 900), (4, 1, 168, 1, 7200), (4, 0.5, 6, 8, 7200)],
)
def test_runs_that_are_short_of_nodes_most_of_the_time(
    hours: float, between_h: float, repair_h: float, spares: int, interval_s: float
) -> None:
    """Spares are soon used up, in runs of a few hours too: the closed form was 30 to 60 % below simulated runs."""
    process = RunProcess(hours * HOUR, interval_s, 10, 30, 1 / (between_h * HOUR), 300, 1.0, repair_h * HOUR, spares)
    simulated = drawn(process, 3000)
    assert abs(simulated.total_s.mean() / expect_split(process).total_s - 1) < 0.03 + 3 * simulated.error_s / (
        simulated.total_s.mean()
    )


@pytest.mark.parametrize(
    ("shortage", "between_s"), [(Shortage.WAIT, DAY), (Shortage.SHRINK, 3 * HOUR), (Shortage.SHRINK, HOUR)]
)
@pytest.mark.parametrize("days", [0.05, 0.2])
def test_a_run_shorter_than_a_repair_begins_with_all_nodes(shortage: Shortage, between_s: float, days: float) -> None:
    """Few nodes are under repair in a run of an hour or five if a repair takes a day."""
    process = replace(MONTHS, work_s=days * DAY, failures_per_s=1 / between_s, broken_share=0.8, repair_s=DAY, spares=1)
    process = replace(process, shortage=shortage, replicas=64, nodes_per_replica=2)
    assert expect_split(process).total_s == pytest.approx(drawn(process, 2000).total_s.mean(), rel=0.04)


@pytest.mark.parametrize(("hours", "spares", "replicas"), [(240, 2, 8), (240, 8, 8), (240, 0, 4)])
def test_a_job_that_shrinks_waits_where_no_replica_is_complete(hours: float, spares: int, replicas: int) -> None:
    """With more nodes broken than the job has, those that stand still do not break (18 times too long before)."""
    process = RunProcess(hours * HOUR, 900, 10, 30, 1 / HOUR, 300, 0.8, DAY, spares, Shortage.SHRINK, replicas, 2)
    simulated = drawn(process, 400)
    assert expect_split(process).total_s == pytest.approx(simulated.total_s.mean(), rel=0.12)
    assert simulated.waiting_s.mean() > 0


def test_a_job_that_shrinks_does_not_wait() -> None:
    process = replace(MONTHS, broken_share=0.8, repair_s=DAY, spares=0, replicas=128, nodes_per_replica=16)
    waits, shrinks = expect_split(process), expect_split(replace(process, shortage=Shortage.SHRINK))
    assert shrinks.total_s < waits.total_s / 5
    found = drawn(replace(process, shortage=Shortage.SHRINK), 500)
    assert found.total_s.mean() == pytest.approx(shrinks.total_s, rel=0.01)
    parts_s = found.checkpoints_s + found.lost_s + found.restarts_s + found.waiting_s + found.shrunk_s
    assert found.work_s + parts_s == pytest.approx(found.total_s)
    assert not found.waiting_s.any()


@pytest.mark.parametrize("lag_s", [60.0, 800.0])
def test_fewer_replicas_lose_more_and_restart_more_often(lag_s: float) -> None:
    """With a quarter of the replicas away on average, the closed form is the mean of simulated runs, part by part.

    Failures come at the same rate while the work takes longer, each loses a longer interval, and every replica that
    comes back costs a restart and the work done until its checkpoint was safe.
    """
    process = replace(MONTHS, lag_s=lag_s, broken_share=0.8, repair_s=DAY / 2, spares=0, shortage=Shortage.SHRINK)
    process = replace(process, replicas=8, nodes_per_replica=2)
    mean, simulated = expect_split(process), drawn(process, 40)
    assert mean.work_s / (mean.work_s + mean.shrunk_s) < 0.8
    assert simulated.total_s.mean() == pytest.approx(mean.total_s, rel=0.01)
    for name in ("lost_s", "restarts_s", "shrunk_s", "failures"):
        assert getattr(simulated, name).mean() == pytest.approx(getattr(mean, name), rel=0.06), name


def test_the_last_attempt_begins_where_its_checkpoint_is_safe() -> None:
    """A checkpoint after 1,000 of 2,000 s is safe at 1,800 s. Failures until then lose all, and 200 s are left of which
    the first attempt may fail; each later attempt at that part takes 1,000 s: (e^0.9 - 1 + (1 - e^-0.1) e^0.5) / rate.
    """
    process = RunProcess(work_s=2000, interval_s=1000, lag_s=800, failures_per_s=1 / 2000)
    expected_s = 2000 * (math.expm1(0.9) - math.expm1(-0.1) * math.exp(0.5))
    assert expect_split(process).total_s == pytest.approx(expected_s)


def test_a_checkpoint_that_is_safe_after_the_end_is_not_written() -> None:
    """Of checkpoints at 300, 600 and 900 of 1,000 s, each safe 150 s later, the last one is of no use."""
    process = RunProcess(1000, 300, pause_s=10, lag_s=150)
    assert expect_split(process).checkpoints_s == 20
    assert expect_split(replace(process, lag_s=50)).checkpoints_s == 30


def test_replicas_lost_with_nodes() -> None:
    several = RunProcess(1.0, replicas=4, nodes_per_replica=2)
    assert [several.speed(missing) for missing in range(5)] == [1.0, 0.75, 0.75, 0.5, 0.5]
    within = RunProcess(1.0, replicas=8, nodes_per_replica=0.25)
    assert [within.speed(missing) for missing in range(4)] == [1.0, 0.5, 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(st.floats(1e3, 1e7), st.floats(0, 300), st.floats(0, 300), st.floats(0, 2000), st.floats(1e4, 1e8))
def test_the_best_interval_is_a_minimum(
    work_s: float, pause_s: float, lag_s: float, restart_s: float, between_s: float
) -> None:
    process = RunProcess(work_s, pause_s=pause_s, lag_s=lag_s, failures_per_s=1 / between_s, restart_s=restart_s)
    best_s = best_interval_s(process, 1.0)
    least_s = expect_split(replace(process, interval_s=best_s)).total_s
    assert least_s >= work_s * (1 - 1e-9)
    for factor in (0.5, 0.9, 1.1, 2.0):
        # Whole steps, none before the last is safe; how the last interval falls makes a little difference.
        other = max(1, math.ceil(lag_s), round(best_s * factor))
        try:
            assert least_s <= expect_split(replace(process, interval_s=other)).total_s * 1.02
        except ValueError:
            continue  # so rarely saved that it makes no progress


def test_no_checkpoint_begins_before_the_last_is_safe() -> None:
    process = RunProcess(1e6, pause_s=0.1, lag_s=3000, failures_per_s=1e-4, restart_s=60)
    assert best_interval_s(process, 1.0) >= 3000
    assert best_interval_s(replace(process, lag_s=0), 1.0) < 3000


def test_young_and_daly_are_near_the_best() -> None:
    process = RunProcess(1e7, pause_s=60, failures_per_s=1 / DAY, restart_s=300)
    best_s = best_interval_s(process, 1.0)
    assert young_s(60, 1 / DAY) == pytest.approx(math.sqrt(2 * 60 * DAY))
    assert best_s == pytest.approx(daly_s(60, 1 / DAY), rel=0.01)
    assert best_s == pytest.approx(young_s(60, 1 / DAY), rel=0.05)
    # Daly's equation 37 ends where a pause takes twice the time between failures.
    assert daly_s(200.0, 1 / 100) == daly_s(290.0, 1 / 100) == 100.0
    assert daly_s(199.0, 1 / 100) == pytest.approx(
        math.sqrt(2 * 199 * 100) * (1 + 0.99750 / 3 + 0.995 / 9) - 199, rel=1e-4
    )


def test_what_gets_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="makes no progress: it is interrupted every 1 s"):
        expect_split(RunProcess(1e6, 60.0, failures_per_s=1.0))
    with pytest.raises(ValueError, match="makes no progress"):
        drawn(RunProcess(1e6, 60.0, failures_per_s=1.0))
    with pytest.raises(ValueError, match="restart, work and checkpoint need 2060 s"):
        expect_split(RunProcess(1e6, 60.0, lag_s=2000.0, failures_per_s=0.01))  # no checkpoint is ever safe
    with pytest.raises(ValueError, match="too many to simulate"):
        drawn(RunProcess(1e12, 1.0, failures_per_s=1.0))


def test_the_same_seed_gives_the_same_runs() -> None:
    assert (drawn(MONTHS, 50, 7).total_s == drawn(MONTHS, 50, 7).total_s).all()
    assert (drawn(MONTHS, 50, 7).total_s != drawn(MONTHS, 50, 8).total_s).any()


def test_slow_periods_without_a_slowdown_cost_nothing() -> None:
    assert Stragglers(per_node_day=1.0, spell_s=HOUR).factor(100) == 1.0
    assert Stragglers(per_node_day=1.0, spell_s=HOUR, slowdown=0.5).factor(100) == pytest.approx(1.5, rel=0.01)
    assert Stragglers(slowdown=0.5).factor(100) == 1.0
