"""A host that reads results before it issues more, and graphs that spare it the work."""

from stepcast.forecast.options import Options
from stepcast.forecast.simulate import simulate
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.work import Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload

KERNEL_S, ISSUE_S = 0.010, 0.004
COUNT = 4


def step_s(**changes: bool | int) -> float:
    """Four kernels of 10 ms, each issued in 4 ms."""
    captured = bool(changes.pop("captured", False))
    ops = tuple(Op(f"op {number}", Recorded(KERNEL_S), **changes) for number in range(COUNT))  # type: ignore[arg-type]
    layer = Layer("layer", ops, captured=captured)
    workload = Workload((Stage((Block((layer,)),)),))
    options = Options(issue_s=lambda work, backward: ISSUE_S)
    return simulate(workload, load_cluster("dgx-h100"), options).report.step_s


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) < 1e-9


def test_a_host_that_reads_nothing_runs_ahead() -> None:
    assert close(step_s(), ISSUE_S + COUNT * KERNEL_S)


def test_a_host_that_reads_every_result_waits_for_each() -> None:
    assert close(step_s(host_reads=True), COUNT * (ISSUE_S + KERNEL_S))


def test_ops_of_several_kernels_take_the_host_as_many_times() -> None:
    # 16 ms for each op: the host is the slower.
    assert close(step_s(kernels=4), COUNT * 4 * ISSUE_S + KERNEL_S)


def test_captured_layers_cost_the_host_nothing() -> None:
    assert close(step_s(captured=True, host_reads=True, kernels=4), COUNT * KERNEL_S)
