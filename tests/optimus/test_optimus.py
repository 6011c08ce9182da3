"""OptimusPrime runs: plans, the simulated step, its explanation, and what a fit can tell."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.inputs.table import read
from stepcast.ir.layout import Layout
from stepcast.ir.measured import RunLog
from stepcast.models.catalog import load_model
from stepcast.optimus.analysis import analyze_optimus
from stepcast.optimus.calibration import FITTED, Observation, fit, observe_run, shuffled_length
from stepcast.optimus.step import (
    PARTS,
    Constants,
    Machine,
    OptimusPlan,
    efficiency_of,
    matmul_s,
    module_weights,
    plan,
    plan_of_log,
    predict_step,
    slowest_of,
    stage_work,
    step_s,
)
from stepcast.views.measured import optimus_view
from stepcast.views.terminal import render_text
from tests.shared import ROOT

MODEL = load_model("llama-3.2-1b")
LAYER_WEIGHTS = sum(module_weights(MODEL).values())
LENGTHS = (88, 109, 109, 120, 124, 116, 108, 95, 122, 122, 121, 121, 108, 94, 120, 120, 104, 106, 101, 117, 102)
MACHINE = Machine(
    matrix_flops=37.4e12,
    memory_bytes_per_s=696e9,
    launch_s=4e-6,
    all_reduce_s=lambda ranks, size: 3e-5 + 2 * (len(ranks) - 1) / len(ranks) * size / 20e9,
    hop_bytes_per_s=lambda one, other: 20e9,
)
CONSTANTS = Constants(matmul_efficiency=0.5, backward_factor=1.5, message_s=1.5e-4, host_op_s=4e-6, fixed_s=0.15)


def made(tp: int, pp: int, micro_batch: int, dp: int = 1, sequence: float = 110.0) -> OptimusPlan:
    return plan(MODEL, Layout(tp=tp, dp=dp, pp=pp), micro_batch, 32 // micro_batch // dp, sequence)


@pytest.fixture(scope="module")
def log() -> RunLog:
    found = read(ROOT / "examples" / "optimus-llama-1b.txt")
    assert isinstance(found, RunLog)
    return found


def test_stages_are_cut_where_the_log_says(log: RunLog) -> None:
    printed = plan_of_log(log, MODEL, LENGTHS)
    assert printed.stages == made(1, 8, 1).stages
    assert [stage.layers for stage in printed.stages] == [1.875, *[2.0] * 6, 2.125]
    assert printed.inside
    assert printed.sequence == 116
    assert [stage.layers for stage in made(2, 4, 1).stages] == [4, 5, 5, 2]
    assert [stage.layers for stage in made(4, 2, 1).stages] == [9, 7]
    for one in (printed, made(2, 4, 1), made(8, 1, 1)):
        assert sum(stage.weights for stage in one.stages) == 16 * LAYER_WEIGHTS
        norms = (2 * MODEL.layers + 1) * MODEL.hidden
        assert 16 * LAYER_WEIGHTS + one.head_weights + norms == MODEL.parameters


def test_message_counts() -> None:
    """49 forward and 35 backward per hop with PP 8, as counted in the program's source."""
    inside, at_end = made(1, 8, 1), made(2, 4, 1)
    assert [inside.forward_messages(hop) for hop in range(3)] == [32, 49, 49]
    assert inside.backward_messages() == 35
    assert [at_end.forward_messages(hop) for hop in range(3)] == [27, 39, 39]
    assert at_end.backward_messages() == 30


def test_a_plan_of_another_model_is_refused(log: RunLog) -> None:
    with pytest.raises(ValueError, match="parameters"):
        plan_of_log(log, load_model("llama-3.2-3b"), LENGTHS)
    with pytest.raises(ValueError, match="sequence length"):
        plan_of_log(log, MODEL, ())
    with pytest.raises(ValueError, match="is no module"):
        plan(MODEL, Layout(pp=2), 1, 1, 100.0, ("nowhere", "lm_head"))


@given(st.sampled_from([(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2)]), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=15)
def test_every_stage_explains_the_whole_step(layout: tuple[int, int, int], micro_batch: int) -> None:
    tp, pp, dp = layout
    one = made(tp, pp, micro_batch, dp)
    predicted = predict_step(one, MACHINE, CONSTANTS)
    assert predicted.step_s == pytest.approx(step_s(one, MACHINE, CONSTANTS))
    assert len(predicted.stages) == pp
    for stage in predicted.stages:
        assert set(stage.parts_s) == set(PARTS)
        assert min(stage.parts_s.values()) >= 0
        assert sum(stage.parts_s.values()) == pytest.approx(predicted.step_s, rel=1e-9)
        assert (stage.parts_s["tensor"] > 0) == (tp > 1)
        assert (stage.parts_s["messages"] > 0) == (pp > 1)
        assert stage.parts_s["fixed"] == pytest.approx(CONSTANTS.fixed_s)


def test_one_micro_batch_passes_through_the_stages_one_after_the_other() -> None:
    """By hand: with one micro-batch nothing overlaps but launching and computing."""
    one = made(2, 4, 32, sequence=1000.0)
    free = replace(CONSTANTS, host_op_s=1e-12)
    works = [stage_work(one, stage, MACHINE, free) for stage in one.stages]
    passes_s = sum(sum(work.device_s.values()) for stage in works for work in (*stage["F"], *stage["B first"]))
    update_s = sum(sum(work.device_s.values()) for work in works[0]["end"])
    count = 5 + sum(one.forward_messages(hop) + one.backward_messages() for hop in range(3))
    moved_s = 4 * one.boundary_elements() * (3 + 2 + 3) / 20e9
    expected_s = free.fixed_s + passes_s + update_s + count * free.message_s + moved_s
    assert step_s(one, MACHINE, free) == pytest.approx(expected_s, rel=1e-6)


def test_gradients_are_reduced_in_the_last_backward_alone() -> None:
    """However many micro-batches come before it: DistributedDataParallel runs those under no_sync."""
    free = replace(CONSTANTS, host_op_s=1e-12)
    extra_s = []
    for micro_batches in (1, 2, 16):
        alone, shared = (plan(MODEL, Layout(dp=dp), 1, micro_batches, 110.0) for dp in (1, 4))
        extra_s.append(step_s(shared, MACHINE, free) - step_s(alone, MACHINE, free))
    moved_s = 1.5 * 4 * (16 * LAYER_WEIGHTS + 2 * alone.head_weights) / 20e9
    assert 0.7 * moved_s < extra_s[0] < 1.2 * moved_s
    assert extra_s[0] == pytest.approx(extra_s[1], rel=0.1), "adding to a gradient hides a little of it"
    assert extra_s[1] == pytest.approx(extra_s[2], rel=1e-6)


def test_reduced_gradients_are_copied_to_buckets_and_back() -> None:
    free, fast = replace(CONSTANTS, host_op_s=1e-12), replace(MACHINE, all_reduce_s=lambda ranks, size: 0.0)
    alone, shared = (plan(MODEL, Layout(dp=dp), 1, 4, 110.0) for dp in (1, 2))
    copied_s = MACHINE.move_s(4 * (16 * LAYER_WEIGHTS + 2 * alone.head_weights))
    extra_s = step_s(shared, fast, free) - step_s(alone, fast, free)
    assert extra_s == pytest.approx(copied_s, rel=1e-6)
    explained = predict_step(shared, fast, free).stages[0].parts_s
    assert explained["data"] == pytest.approx(copied_s, rel=1e-6)


def test_ranks_that_reduce_gradients_are_a_tensor_group_apart() -> None:
    asked = set()

    def all_reduce_s(ranks: range, size_bytes: float) -> float:
        asked.add(ranks)
        return 1e-4

    step_s(made(2, 1, 4, dp=4), replace(MACHINE, all_reduce_s=all_reduce_s), CONSTANTS)
    assert asked == {range(2), range(0, 8, 2)}


def test_shuffled_steps_are_longer_than_those_in_order() -> None:
    """Rows in order share texts, so that as many drawn at random have more of them to be longest."""
    usual = sum(LENGTHS) / len(LENGTHS)
    assert shuffled_length(LENGTHS, 32, 32.0, 32) > shuffled_length(LENGTHS, 32, 4.0, 32) > usual
    assert shuffled_length(LENGTHS, 32, 1.0, 32) == round(usual)
    assert shuffled_length(LENGTHS, 32, 1.0, 128) > shuffled_length(LENGTHS, 32, 1.0, 64) > usual
    assert shuffled_length((50.0, 50.0), 32, 4.0, 4096) == 50.0


@given(st.sampled_from(FITTED), st.floats(1.05, 3.0), st.sampled_from([(1, 8, 1), (2, 4, 4), (4, 2, 8)]))
@settings(deadline=None, max_examples=20)
def test_a_larger_constant_never_makes_a_step_shorter(name: str, factor: float, shape: tuple[int, int, int]) -> None:
    tp, pp, micro_batch = shape
    one = made(tp, pp, micro_batch)
    larger = replace(CONSTANTS, **{name: getattr(CONSTANTS, name) * factor})
    assert step_s(one, MACHINE, larger) >= step_s(one, MACHINE, CONSTANTS) - 1e-12


def test_efficiency_is_read_back() -> None:
    for tokens in (64.0, 110.0, 3520.0):
        seconds = matmul_s(1e8, tokens, MACHINE, 0.47)
        assert efficiency_of(seconds, 1e8, tokens, MACHINE) == pytest.approx(0.47)
    assert efficiency_of(1e-9, 1e8, 100.0, MACHINE) is None


def test_collectives_wait_for_the_slowest_host() -> None:
    assert slowest_of(1) == 1.0
    assert 1.0 < slowest_of(2) < slowest_of(4) < slowest_of(8) < 1.4


def observations(shapes: list[tuple[int, int, int]]) -> list[Observation]:
    plans = [made(*shape) for shape in shapes]
    return [Observation(one, step_s(one, MACHINE, CONSTANTS), CONSTANTS.matmul_efficiency) for one in plans]


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    shapes = [(1, 8, 1), (1, 8, 4), (2, 4, 1), (2, 4, 8), (2, 4, 32), (4, 2, 2), (4, 2, 16)]
    fitted = fit(observations(shapes), MACHINE)
    assert fitted.mean_abs_error < 0.002
    for name in FITTED:
        assert getattr(fitted.constants, name) == pytest.approx(getattr(CONSTANTS, name), rel=0.1), name
    assert not any("not identified" in warning for warning in fitted.warnings)


def test_one_run_cannot_tell_the_constants_apart(log: RunLog) -> None:
    fitted = fit([observe_run(log, MACHINE, LENGTHS, MODEL)], MACHINE)
    assert abs(fitted.errors[0]) < 0.01, "one run can always be explained"
    assert fitted.warnings[0].startswith("1 run cannot split message latency from fixed step overhead")
    assert any("host time per operator is not identified" in warning for warning in fitted.warnings)
    with pytest.raises(ValueError, match="no runs"):
        fit([], MACHINE)


def test_the_explanation_sums_to_the_measured_step(log: RunLog) -> None:
    found = analyze_optimus(log, plan_of_log(log, MODEL, LENGTHS), MACHINE, CONSTANTS)
    facts = found.facts()
    assert facts["step_s"] == pytest.approx(1.61334, abs=1e-5)
    assert sum(facts["breakdown_s"].values()) == pytest.approx(facts["step_s"], abs=1e-12)
    wanted = {"compute", "unhooked", "accumulation", "messages", "optimizer", "fixed", "host", "bubble", "unexplained"}
    assert wanted <= set(facts["breakdown_s"])
    medians_ms = [1e3 * row["forward_s"] for row in facts["stages"]]
    assert medians_ms == pytest.approx([2.261, 2.748, 2.538, 2.511, 2.415, 2.420, 2.391, 6.853], abs=5e-4)
    assert 1e3 * facts["operations_s"]["lm_head"] == pytest.approx(4.174, abs=5e-4)
    assert facts["messages"] == {"forward_per_hop": [32, *[49] * 6], "backward_per_hop": 35}
    assert facts["stragglers"] == []
    text = render_text(optimus_view(facts), 100)
    assert "49 forward and 35 backward" in text
    assert "not explained by the model" in text


def test_a_slow_stage_is_named(log: RunLog) -> None:
    times = log.layer_times
    slow = times.total_s.copy()
    slow[times.stage_of == 3] *= 1.6
    found = analyze_optimus(
        replace(log, layer_times=replace(times, total_s=slow)), plan_of_log(log, MODEL, LENGTHS), MACHINE, CONSTANTS
    )
    assert [(slow.stage, slow.rank) for slow in found.stragglers] == [(3, 3)]
    assert found.stragglers[0].factor == pytest.approx(1.6, rel=0.1)


def test_a_launch_bound_run_says_so(log: RunLog) -> None:
    slow_host = replace(CONSTANTS, host_op_s=1e-4)
    found = analyze_optimus(log, plan_of_log(log, MODEL, LENGTHS), MACHINE, slow_host)
    assert any(warning.startswith("launch-bound") for warning in found.warnings)


def test_an_estimated_length_is_told(log: RunLog) -> None:
    shared = replace(log, layout=replace(log.layout, dp=2))
    found = analyze_optimus(shared, plan_of_log(shared, MODEL, LENGTHS), MACHINE, CONSTANTS)
    assert any("116 tokens are expected, not measured" in warning for warning in found.warnings)


def test_a_log_without_batches_is_refused(log: RunLog) -> None:
    silent = replace(log, batches=())
    with pytest.raises(ValueError, match="no batch"):
        plan_of_log(silent, MODEL, LENGTHS)
    with pytest.raises(ValueError, match="no batch"):
        analyze_optimus(silent, plan_of_log(log, MODEL, LENGTHS), MACHINE, CONSTANTS)
