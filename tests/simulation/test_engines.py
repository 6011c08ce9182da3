"""Both engines against a slow event simulator, and what must hold of any run."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepcast
from stepcast.forecast.prediction import PreparedStep
from stepcast.ir.arrays import FloatArray
from stepcast.ir.layout import Group
from stepcast.simulation import kernels, seconds
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.program import Program, Times, _find_levels_together
from stepcast.simulation.step import HEALTHY, Conditions
from stepcast.simulation.timeline import critical_path
from stepcast.simulation.unfolded import simulate_unfolded
from tests.simulation.reference import Plan, Task, event_simulation, random_plan, seconds_of, waits

plans = st.randoms(use_true_random=False).map(random_plan)
CLOSE = 1e-12


def task_list(plan: Plan) -> list[Task]:
    """The tasks in the order in which the program numbers them."""
    return [
        (call, op) for call in plan.in_program_order() for op in range(len(plan.pieces[plan.calls[call].piece].ops))
    ]


def own_durations(plan: Plan) -> dict[Task, float]:
    return {(call, op): seconds_of(plan.pieces[plan.calls[call].piece].ops[op]) for call, op in task_list(plan)}


def assert_same(times: Times, spans: dict[Task, tuple[float, float]], tasks: list[Task]) -> None:
    expected = np.array([spans[task] for task in tasks]).reshape(-1, 2)
    scale = max(expected.max(initial=0.0), 1.0)
    np.testing.assert_allclose(times.start_s, expected[:, 0], rtol=0, atol=CLOSE * scale)
    np.testing.assert_allclose(times.end_s, expected[:, 1], rtol=0, atol=CLOSE * scale)


def set_thresholds(patch: pytest.MonkeyPatch, threshold: int) -> None:
    """Compile kernels after *threshold* calls, as if none were known."""
    for name in ("WORTH_OPENING", "WORTH_LOADING", "WORTH_COMPILING"):
        patch.setattr(kernels, name, threshold)
    patch.setattr(kernels, "_loaded", {})
    patch.setattr(kernels, "_looked", {})


@settings(max_examples=75, deadline=None)
@given(plans)
def test_folded_agrees_with_the_event_simulator(plan: Plan) -> None:
    run = simulate(plan.program())
    spans = event_simulation(plan, own_durations(plan))
    assert_same(task_times(run), spans, task_list(plan))
    assert run.makespan_s == pytest.approx(max((end for _, end in spans.values()), default=0.0), rel=CLOSE)


@settings(max_examples=50, deadline=None)
@given(plans)
def test_compiled_kernels_and_numpy_agree_bit_for_bit(plan: Plan) -> None:
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    runs = []
    for threshold in (0, 2**60):
        with pytest.MonkeyPatch.context() as patch:
            set_thresholds(patch, threshold)
            runs.append(simulate(plan.program()))
    assert runs[0].makespan_s == runs[1].makespan_s
    assert np.array_equal(runs[0].left_s, runs[1].left_s)
    assert np.array_equal(runs[0].maps, runs[1].maps)
    assert np.array_equal(runs[0].entry_s, runs[1].entry_s)


@settings(max_examples=50, deadline=None)
@given(plans)
def test_levels_of_all_ranks_together_are_those_of_one_call_after_the_other(plan: Plan) -> None:
    table = plan.program().table
    if table.calls:
        assert np.array_equal(_find_levels_together(table.rank_start, table.source_call), table.levels)


def test_a_kernel_that_another_process_compiled_is_found_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    limits = {
        "WORTH_OPENING": 0,
        "WORTH_LOADING": 0,
        "WORTH_COMPILING": 2**60,
        "_loaded": {},
        "_looked": {},
        "_calls": [0],
    }
    for name, value in limits.items():
        monkeypatch.setattr(kernels, name, value)
    assert kernels.find_kernel(kernels.find_levels, 1) is None
    kernels._compile(kernels.find_levels)
    assert kernels.find_kernel(kernels.find_levels, 2) is not None


@settings(max_examples=50, deadline=None)
@given(plans, st.integers(0, 2**32))
def test_unfolded_agrees_with_the_event_simulator_under_jitter(plan: Plan, seed: int) -> None:
    tasks = task_list(plan)
    duration_s = np.random.default_rng(seed).exponential(size=len(tasks))
    times = simulate_unfolded(plan.program(), duration_s, compiled=False)
    assert_same(times, event_simulation(plan, dict(zip(tasks, duration_s.tolist(), strict=True))), tasks)


@settings(max_examples=50, deadline=None)
@given(plans, st.integers(0, 2**32))
def test_compiled_and_python_agree_bit_for_bit(plan: Plan, seed: int) -> None:
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    program = plan.program()
    for duration_s in (None, np.random.default_rng(seed).exponential(size=program.tasks)):
        compiled = simulate_unfolded(program, duration_s, compiled=True)
        plain = simulate_unfolded(program, duration_s, compiled=False)
        assert compiled.start_s.tobytes() == plain.start_s.tobytes()
        assert compiled.end_s.tobytes() == plain.end_s.tobytes()


@settings(max_examples=50, deadline=None)
@given(plans)
def test_both_engines_agree(plan: Plan) -> None:
    program = plan.program()
    folded, unfolded = task_times(simulate(program)), simulate_unfolded(program, compiled=False)
    scale = max(unfolded.makespan_s, 1.0)
    np.testing.assert_allclose(folded.start_s, unfolded.start_s, rtol=0, atol=CLOSE * scale)
    np.testing.assert_allclose(folded.end_s, unfolded.end_s, rtol=0, atol=CLOSE * scale)
    assert simulate_unfolded(program, program.task_durations_s(), compiled=False).end_s.tobytes() == (
        unfolded.end_s.tobytes()
    )


@settings(max_examples=50, deadline=None)
@given(plans)
def test_lanes_do_not_overlap_and_waits_are_kept(plan: Plan) -> None:
    times = task_times(simulate(plan.program()))
    slack = CLOSE * max(times.makespan_s, 1.0)
    at = {task: index for index, task in enumerate(task_list(plan))}
    needs, lanes = waits(plan)
    for task, needed in needs.items():
        for other in needed:
            assert times.start_s[at[task]] >= times.end_s[at[other]] - slack
    for tasks in lanes.values():
        for one, two in pairwise(tasks):
            assert times.start_s[at[two]] >= times.end_s[at[one]] - slack


def end_of(program: Program, duration_s: FloatArray) -> FloatArray:
    return simulate_unfolded(program, duration_s, compiled=False).end_s


@settings(max_examples=50, deadline=None)
@given(plans, st.randoms(use_true_random=False))
def test_a_longer_task_never_ends_anything_earlier(plan: Plan, rng: random.Random) -> None:
    program = plan.program()
    duration_s = program.task_durations_s()
    if not duration_s.size:
        return
    longer = duration_s.copy()
    longer[rng.randrange(len(longer))] += rng.random()
    assert (end_of(program, longer) >= end_of(program, duration_s)).all()


@settings(max_examples=50, deadline=None)
@given(plans)
def test_the_same_program_gives_the_same_bits(plan: Plan) -> None:
    one, two = (simulate(plan.program()) for _ in range(2))
    assert one.makespan_s == two.makespan_s
    assert one.entry_s.tobytes() == two.entry_s.tobytes()
    assert task_times(one).end_s.tobytes() == task_times(two).end_s.tobytes()


@settings(max_examples=50, deadline=None)
@given(plans)
def test_the_critical_path_sums_to_the_makespan(plan: Plan) -> None:
    program = plan.program()
    for times in (simulate_unfolded(program, compiled=False), task_times(simulate(program))):
        path = critical_path(program, times)
        assert path.duration_s.sum() == pytest.approx(times.makespan_s, rel=CLOSE, abs=1e-15)
        np.testing.assert_allclose(path.start_s[1:], path.end_s[:-1], rtol=0, atol=CLOSE * max(times.makespan_s, 1))
        if len(path):
            assert path.end_s[-1] == times.makespan_s


@settings(max_examples=50, deadline=None)
@given(plans)
def test_lane_totals_are_those_of_the_tasks(plan: Plan) -> None:
    program = plan.program()
    busy = np.zeros((program.ranks, len(program.lanes)))
    for (call, op), duration_s in own_durations(plan).items():
        lane = plan.pieces[plan.calls[call].piece].ops[op].lane
        if lane >= 0:
            busy[plan.calls[call].rank, lane] += duration_s
    np.testing.assert_allclose(program.lane_busy_s(), busy, rtol=1e-12, atol=1e-12)
    assert (program.lane_busy_s() <= simulate(program).makespan_s * (1 + CLOSE) + 1e-12).all()


SLOW = Conditions({1: 1.25}, {Group.DP: 1.5})
STEPS: tuple[tuple[dict[str, Any], Conditions], ...] = (
    ({"model": "llama-3.1-8b", "gpus": 64, "tp": 4, "pp": 4}, HEALTHY),
    ({"model": "llama-3.1-8b", "gpus": 64, "tp": 4, "pp": 4, "schedule": "zb-h1"}, SLOW),
    (
        {"model": "llama-3.1-8b", "gpus": 32, "tp": 2, "pp": 4, "vpp": 2, "sharding": "fsdp", "recompute": "full"},
        HEALTHY,
    ),
    ({"model": "mixtral-8x7b", "gpus": 32, "ep": 8, "pp": 2, "framework": "megatron-core-eager"}, SLOW),
    ({"model": "llama-3.1-8b", "gpus": 16, "framework": "torchtitan"}, HEALTHY),
    ({"model": "deepseek-v3", "gpus": 128, "ep": 16, "pp": 8, "schedule": "dualpipe"}, HEALTHY),
)


@pytest.mark.parametrize(("question", "conditions"), STEPS)
def test_the_seconds_of_ops_are_the_same_compiled_and_spread(question: dict[str, Any], conditions: Conditions) -> None:
    """With what computing loses to communication, the time of hosts, slow stages and slow groups."""
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    source = stepcast.predict(cluster="dgx-h100", **question).source
    assert isinstance(source, PreparedStep)
    step = replace(source, conditions=conditions).step
    runs = []
    for threshold in (0, 2**60):
        with pytest.MonkeyPatch.context() as patch:
            set_thresholds(patch, threshold)
            runs.append(simulate(step.program, step.seconds))
    with pytest.MonkeyPatch.context() as patch:
        set_thresholds(patch, 0)
        runs.append(simulate(step.program, runs[0].seconds))
    for run in runs[1:]:
        assert run.makespan_s == runs[0].makespan_s > 0
        assert np.array_equal(run.maps, runs[0].maps)


def test_records_of_pieces_stay_with_those_who_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there are so many that they are made anew."""
    program = stepcast.predict(model="llama-3.1-8b", cluster="dgx-h100", gpus=64, tp=4, pp=4).step.program
    chains, table = [segment.chain for segment in program.segments], seconds.PieceTable()
    found = [(chains, *table.find(chains)), (chains[:2], *table.find(chains[:2]))]
    monkeypatch.setattr(seconds, "MOST_RECORDED", 0)
    found.append((chains[::-1], *table.find(chains[::-1])))
    assert found[2][1] is not found[0][1]
    for own, records, places in found:
        for chain, begins in zip(own, places, strict=True):
            for piece, begin in zip(chain.pieces, begins, strict=True):
                record = seconds.encode_piece(piece, True)
                assert records[begin : begin + len(record)].tolist() == record
