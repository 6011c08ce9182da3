"""Operators on an H200 as they were measured one by one: their times, and the memory of cuDNN's transforms."""

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'stepcast[torch]'")

from stepcast.forecast.predict import compute_pricer  # noqa: E402
from stepcast.hardware import load_cluster  # noqa: E402
from stepcast.ir.framework import MEGATRON_CORE  # noqa: E402
from stepcast.ir.work import Compute  # noqa: E402
from stepcast.ir.workload import Stage, Workload  # noqa: E402
from stepcast.pytorch.capture.emulation import CALLS, EmulatedGpu, take_host_work  # noqa: E402
from stepcast.pytorch.capture.kernels import works_of  # noqa: E402
from stepcast.pytorch.capture.program import _answer_as_gpu  # noqa: E402
from stepcast.pytorch.capture.tracer import Event, Moment, Tracer, _transform_bytes  # noqa: E402

FOLDER = Path(__file__).parents[2] / "src" / "stepcast" / "data" / "captured"
Cases = dict[str, dict[str, float]]  # microseconds forward and backward


@pytest.fixture(scope="module")
def cases() -> Cases:
    """Return the cases that say how to run them: an expression, its operands and their format."""
    found: Cases = defaultdict(dict)
    with (FOLDER / "single_operators.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if " | " in row["operator"]:
                name, _, phase = row["operator"].rpartition(" ")
                found[name][phase] = float(row["us"])
    return found


def make_operand(text: str, dtype: object, is_last: bool) -> Any:
    """Return an operand without data; "4096<1000" is 4,096 ids below 1,000."""
    sizes, _, ids_below = text.partition("<")
    shape = tuple(map(int, sizes.split("x")))
    if ids_below:
        return torch.empty(shape, device="meta", dtype=torch.int64)
    layout = torch.channels_last if is_last and len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, device="meta", dtype=dtype).contiguous(memory_format=layout).requires_grad_()


def trace_case(name: str) -> tuple[list[Event], list[Event]]:
    """Return the events of a case, forward and backward."""
    expression, operands, form = name.split(" | ")
    dtype = torch.bfloat16 if form.startswith("bf16") else torch.float32
    pairs = (each.partition("=") for each in operands.split(";"))
    made = {own: make_operand(text, dtype, "last" in form) for own, _, text in pairs}
    tracer, events = Tracer({}), list[Event]()
    for tensor in made.values():
        tracer.add_tensor(tensor, "activations")
    with _answer_as_gpu(), tracer, EmulatedGpu():
        result = eval(expression, {"torch": torch, "F": torch.nn.functional, **made})
        events, tracer.moment = tracer.trace.events[:], Moment.BACKWARD
        wanted = tuple(tensor for tensor in made.values() if tensor.requires_grad)
        torch.autograd.graph._engine_run_backward(
            (result,), (torch.ones_like(result),), False, False, wanted, allow_unreachable=True, accumulate_grad=False
        )
    return events, tracer.trace.events[len(events) :]


def list_errors(cases: Cases, names: list[str]) -> Iterator[float]:
    empty = Workload((Stage(()),), name="single", source="captured")
    price = compute_pricer(empty, load_cluster("hgx-h200"), None, MEGATRON_CORE.attention, False)
    for name in names:
        for phase, events in zip("fb", trace_case(name), strict=True):
            if measured_us := cases[name].get(phase):
                works = [work for event in events for work in works_of(event) if isinstance(work, Compute)]
                yield 1e6 * sum(price(work).seconds for work in works) / measured_us - 1.0


def test_one_of_eight_operators_is_close(cases: Cases) -> None:
    errors = [abs(error) for error in list_errors(cases, list(cases)[::8])]
    assert len(errors) > 80
    assert median(errors) < 0.2


@pytest.mark.parametrize(
    ("expression", "most"),
    [
        ("F.embedding(i, t)", 0.2),
        ("t.index_select(0, i)", 0.2),
        ("F.grid_sample", 0.2),
        ("stride=2, padding=2, groups=240", 0.2),
        ("F.group_norm", 0.35),
        ("mode='trilinear'", 0.2),
    ],
)
def test_rows_of_tables_and_points_of_grids(cases: Cases, expression: str, most: float) -> None:
    names = [name for name in cases if expression in name and "nearest" not in name]
    assert median(abs(error) for error in list_errors(cases, names[::2])) < most


def test_cudnn_transforms_where_it_was_seen_to() -> None:
    right, shapes = 0, 0
    with (FOLDER / "transforms.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            dims, samples, channels, outputs, side, taps, stride, dilation = map(int, list(row.values())[:8])
            data = torch.empty(samples, channels, *(side,) * dims, device="meta")
            weight = torch.empty(outputs, channels, *(taps,) * dims, device="meta")
            args = (data, data, weight, None, [stride] * dims, [0], [dilation] * dims, False, [0], 1, [True, True])
            predicted, measured = _transform_bytes(args), int(row["weight_bytes"])
            operands = 4 * (data.numel() + data.numel() // channels * outputs + weight.numel())
            is_transformed = measured > 4 * operands + 2**21
            right += bool(predicted) == is_transformed and (not predicted or abs(measured / predicted - 1) < 0.1)
            shapes += 1
    assert right / shapes > 0.9


def test_gradients_without_backward_take_time() -> None:
    x = torch.ones(3, requires_grad=True)
    take_host_work()
    with _answer_as_gpu():
        torch.autograd.grad((x * x).sum(), x)
    assert take_host_work()[0] == pytest.approx(CALLS["grad"])
