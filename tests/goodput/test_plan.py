"""Plans through the library: phases, operation, money, energy."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepcast
from stepcast.goodput.plan import (
    NO_FAILURES,
    Failures,
    Operation,
    Pause,
    Saving,
    Stragglers,
    TrainingPhase,
    idle_node_watts,
    load_failures,
    node_watts,
    plan,
    plan_alternatives,
    steps_within,
)
from stepcast.hardware.catalog import data_names
from stepcast.units import DAY, HOUR, TB

PHASE = TrainingPhase(steps=100_000, step_s=6.0, tokens_per_step=16e6, gpus=16_384, replicas=128)
OPERATION = Operation(load_failures("llama-3")[0], Saving(5 * TB))


def test_no_failures_is_exactly_steps_times_step() -> None:
    made = plan([PHASE], Operation(NO_FAILURES, Saving(5 * TB)), runs=3)
    assert made.mean_s == PHASE.steps * PHASE.step_s
    assert made.goodput == 1
    assert made.gpu_hours == pytest.approx(16_384 * 600_000 / HOUR)


def test_infinite_bandwidth_leaves_the_planning_pause() -> None:
    saving = Saving(5 * TB, math.inf, math.inf, copy_bytes_per_s=math.inf, planning_s=0.0)
    made = plan([PHASE], replace(OPERATION, saving=saving), runs=200)
    assert made.split_s["checkpoints"] == 0
    # A step at most is lost each time: half of one on average.
    assert made.split_s["lost_work"] == pytest.approx(made.facts()["interruptions"] * 3.0, rel=0.1)


def test_one_gpu_has_no_links() -> None:
    alone = TrainingPhase(1000, 1.0, 4096, 1, gpus_per_node=1)
    made = plan([alone], Operation(Failures(gpu_s=1e5, link_s=1.0), Saving(1e9)), runs=50)
    assert made.phases[0].process.failures_per_s == pytest.approx(1e-5)


@pytest.mark.parametrize("step_s", [0.25, 6.0])
def test_as_many_steps_as_fit_into_the_time(step_s: float) -> None:
    phase = TrainingPhase(1, step_s, 4096, 8)
    assert steps_within(phase, Operation(), 600.0) == 600.0 / step_s


def test_split_sums_to_the_mean() -> None:
    operation = replace(OPERATION, pause=Pause(1000, 300.0), stragglers=Stragglers(0.01, 1800.0, 0.2), spares=20)
    made = plan([PHASE, replace(PHASE, gpus=8192)], operation, price_per_gpu_hour=2.0, runs=200)
    assert sum(made.split_s.values()) == pytest.approx(made.mean_s)
    assert all(seconds >= 0 for seconds in made.split_s.values())
    assert made.facts()["cost"] == pytest.approx(2.0 * made.gpu_hours)
    assert made.split_s["pauses"] == pytest.approx(2 * 100 * 300.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20_000), st.floats(0.01, 100), st.integers(1, 10**6), st.floats(1e7, 1e13))
def test_never_faster_than_the_steps(gpus: int, step_s: float, steps: int, gpu_s: float) -> None:
    try:
        made = plan([TrainingPhase(steps, step_s, 1e6, gpus)], Operation(Failures(gpu_s=gpu_s), Saving(1e12)), runs=5)
    except ValueError as refused:
        if "makes no progress" in str(refused) or "too many to simulate" in str(refused):
            return
        raise
    assert made.mean_s >= steps * step_s * (1 - 1e-12)
    assert 0 < made.goodput <= 1 + 1e-12
    assert math.isfinite(made.gpu_hours)


def test_more_spares_and_the_best_interval_are_best() -> None:
    operation = replace(OPERATION, spares=4)
    rows = plan_alternatives([PHASE], operation, spares=(0, 4, 16))
    best = {row["spares"]: row["goodput"] for row in rows if row["times_best"] == 1}
    assert best[0] < best[4] < best[16]
    for row in rows:
        assert row["goodput"] <= best[row["spares"]] + 1e-12


def test_llama_3_is_interrupted_as_often_as_it_was() -> None:
    """419 times in 54 days on 16,384 GPUs."""
    failures, _ = load_failures("llama-3")
    assert failures.per_s(16_384, 2048, 16_384) * 54 * DAY == pytest.approx(419, rel=0.005)


def test_meta_research_cluster_projection() -> None:
    """RSC-1's rate puts 16,384 GPUs at 1.8 hours between failures, as its authors project."""
    failures, _ = load_failures("meta-rsc-1")
    assert 1 / failures.per_s(16_384, 2048, 16_384) == pytest.approx(1.8 * HOUR, rel=0.02)


@pytest.mark.parametrize("name", data_names("failures"))
def test_every_profile_names_its_sources(name: str) -> None:
    failures, _ = load_failures(name)
    assert failures.description
    assert failures.per_s(8, 1, 8) > 0
    assert "between" in failures.sources


def test_a_users_profile(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('[between]\ngpu = "60_000 h"\n[repair]\nshare = 0.5\ntakes = "8 h"\n[restart]\ndetect = "30 s"\n')
    failures, restart = load_failures(str(file))
    assert failures.gpu_s == 60_000 * HOUR
    assert failures.repair_s == 8 * HOUR
    assert restart.detect_s == 30
    file.write_text('[between]\ngpus = "60_000 h"\n')
    with pytest.raises(ValueError, match=r"ours.toml:2: between.gpus: unknown key; did you mean between.gpu"):
        load_failures(str(file))


def test_power_follows_what_the_step_does() -> None:
    """An H200 draws 653 W of 700 while it computes and 121 W while it waits; a third is assumed while it exchanges."""
    computing = node_watts(700, 8, 1000, {"compute": 1.0})
    mixed = node_watts(700, 8, 1000, {"compute": 0.5, "dp": 0.3, "bubble": 0.2})
    assert computing == pytest.approx(1000 + 8 * 653, rel=0.01)
    assert mixed == pytest.approx(1000 + 8 * (0.5 * 653 + 0.3 * 0.33 * 700 + 0.2 * 121), rel=0.01)
    assert idle_node_watts(700, 8, 1000) == pytest.approx(1000 + 8 * 121, rel=0.01)


def test_each_gpu_copies_its_share_of_a_checkpoint_and_every_restart_reads_it() -> None:
    """16,384 GPUs copy 5 TB at 25 GB/s each in 12 ms; 2,048 nodes write or read it at 1 GB/s each in 2.44 s."""
    copied_s, written_s = 5e12 / 16_384 / 25e9, 5e12 / 2048 / 1e9
    behind, halted = (
        plan([PHASE], replace(OPERATION, saving=Saving(5 * TB, background=background)), runs=1).phases[0]
        for background in (True, False)
    )
    assert behind.process.pause_s == pytest.approx(6.3 + copied_s)
    assert halted.process.pause_s == pytest.approx(6.3 + written_s)
    assert behind.process.restart_s == pytest.approx(15 * 60 + written_s)
    assert behind.facts()["checkpoint_write_s"] == pytest.approx(written_s)
    assert halted.facts()["checkpoint_write_s"] == pytest.approx(6.3 + written_s)  # no step runs meanwhile


def test_a_stated_interval_is_whole_steps_and_no_shorter_than_a_write() -> None:
    """One node writes 100 GB in 100 s: a checkpoint wanted every 20 s comes after 17 steps of 6 s."""
    phase, saving = TrainingPhase(1000, 6.0, 4096, 8), Saving(100e9)
    made = plan([phase], Operation(Failures(gpu_s=1e7), saving, interval_s=20.0), runs=1)
    assert made.phases[0].process.interval_s == 17 * 6.0


def test_a_phase_without_checkpoints_counts_in_every_alternative() -> None:
    for row in plan_alternatives([PHASE, PHASE], Operation(NO_FAILURES, Saving(5 * TB)), ()):
        assert (row["goodput"], row["days"]) == (1.0, 2 * 600_000 / DAY)


def test_a_plan_that_does_not_fit_says_so() -> None:
    small, large = (
        stepcast.plan(name, cluster="dgx-a100", gpus=8, tokens="1B", global_batch=8, failures="none", allow_oom=True)
        for name in ("qwen2.5-0.5b", "llama-3.1-70b")
    )
    assert (small.fits, large.fits) == (True, False)
