"""GPU-hours and energy of a plan, by hand: pauses and spares idle, and simulated runs scale what is expected."""

from dataclasses import replace

import pytest

from stepcast.goodput.plan import NO_FAILURES, Operation, Pause, Saving, TrainingPhase, load_failures, plan
from stepcast.units import HOUR, TB

BUSY_W, IDLE_W = 10_000.0, 2_000.0
PHASE = TrainingPhase(
    steps=1_000, step_s=3.6, tokens_per_step=1e6, gpus=64, gpus_per_node=8, busy_node_w=BUSY_W, idle_node_w=IDLE_W
)
CALM = Operation(NO_FAILURES, Saving(1e9))


def test_energy_of_steps_alone() -> None:
    """8 nodes at 10 kW for an hour are 80 kWh."""
    assert plan([PHASE], CALM, runs=3).energy_mwh == pytest.approx(0.080)


def test_nodes_idle_during_pauses() -> None:
    """Ten pauses of 360 s add an hour at 2 kW each of 8 nodes: 16 kWh."""
    made = plan([PHASE], replace(CALM, pause=Pause(100, 360.0)), runs=3)
    assert made.energy_mwh == pytest.approx(0.080 + 0.016)


def test_spare_nodes_idle_all_the_time_and_are_paid() -> None:
    made = plan([PHASE], replace(CALM, spares=3), runs=3)
    assert made.energy_mwh == pytest.approx(0.080 + 3 * 2e3 * 1.0 / 1e6)
    assert made.gpu_hours == pytest.approx(64 + 3 * 8)


def test_losses_in_a_data_centre_are_added() -> None:
    assert plan([PHASE], CALM, runs=3, pue=1.5).energy_mwh == pytest.approx(1.5 * 0.080)


def test_gpu_hours_follow_the_mean_of_simulated_runs() -> None:
    """The GPUs are held as long as the runs take on average, not as long as the closed form expects."""
    phase = TrainingPhase(steps=30_000, step_s=6.0, tokens_per_step=16e6, gpus=16_384, replicas=128)
    made = plan([phase], Operation(load_failures("llama-3")[0], Saving(5 * TB)), runs=5)
    assert made.mean_s != pytest.approx(made.expected_s, rel=1e-4), "or the two could not be told apart"
    assert made.gpu_hours == pytest.approx(16_384 * made.mean_s / HOUR)


def test_a_step_of_a_phase_has_its_share_of_stragglers() -> None:
    (phase,) = plan([PHASE], CALM, runs=3).phases
    assert phase.process.work_s / phase.phase.steps == pytest.approx(3.6)
