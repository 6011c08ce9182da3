"""What plain PyTorch programs ask of a GPU: precision, fused operators, optimizers, and options for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'stepcast[torch]'")

from stepcast.cli.main import main  # noqa: E402
from stepcast.forecast.captured import predict_captured  # noqa: E402
from stepcast.hardware import load_cluster  # noqa: E402
from stepcast.ir.captured import Captured  # noqa: E402
from stepcast.ir.recurrent import RecurrentCells  # noqa: E402
from stepcast.ir.types import DType  # noqa: E402
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul  # noqa: E402
from stepcast.ir.workload import Op  # noqa: E402
from stepcast.pytorch.capture.build import LAUNCH_US, STEP, TIMES, HostedEvent, RecentCalls, count_calls, name_ops  # noqa: E402
from stepcast.pytorch.capture.emulation import CALLS, EmulatedGpu, define_operators  # noqa: E402
from stepcast.pytorch.capture.kernels import Works, works_of  # noqa: E402
from stepcast.pytorch.capture.program import CaptureOptions, capture  # noqa: E402
from stepcast.pytorch.capture.tracer import Event, Moment, StepTrace, TracedTensor, Tracer  # noqa: E402

WIDTH, ROWS, LAYERS = 256, 512, 3
PROGRAM = f"""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def mean(out):
    return (out[0] if isinstance(out, tuple) else out).float().mean()

class Stack(nn.Module):
    def __init__(self, autocast=False, again=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
        self.autocast, self.again = autocast, again

    def inner(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return checkpoint(self.inner, x, use_reentrant=self.again == 2) if self.again else self.inner(x)

class Residual(nn.Linear):
    def forward(self, x):
        return checkpoint(lambda x: (x + super(Residual, self).forward(x)).relu(), x, use_reentrant=False)

def residual():
    return Residual({WIDTH}, {WIDTH}), (torch.randn({ROWS}, {WIDTH}, requires_grad=True),), mean

def data():
    return (torch.randn({ROWS}, {WIDTH}),)

def plain():
    return Stack(), data(), mean

def sgd():
    return Stack(), data(), mean, lambda weights: torch.optim.SGD(weights, lr=0.1)

def momentum():
    return Stack(), data(), mean, lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)

def learnt_loss():
    model, scale = Stack(), nn.Parameter(torch.ones({WIDTH}))
    return model, data(), lambda out: (out * scale).mean(), torch.optim.SGD([*model.parameters(), scale], lr=0.1)

def fused_momentum():
    return Stack(), data(), mean, lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True)

def tf32():
    torch.set_float32_matmul_precision("high")
    return plain()

def autocast():
    return Stack(autocast=True), data(), mean

def checkpointed_autocast():
    return Stack(autocast=True, again=True), data(), mean

def checkpointed():
    return Stack(again=True), data(), mean

def reentrant():
    return Stack(again=2), (torch.randn({ROWS}, {WIDTH}, requires_grad=True),), mean

def norm():
    return nn.RMSNorm({WIDTH}), (torch.randn({ROWS}, {WIDTH}, requires_grad=True),), mean

def recurrent(kind="LSTM", **options):
    model = getattr(nn, kind)({WIDTH}, {WIDTH}, 2, batch_first=True, **options)
    return model, (torch.randn(8, 64, {WIDTH}, requires_grad=True),), mean

def gru():
    return recurrent("GRU", bidirectional=True)

class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention({WIDTH}, 4, batch_first=True)
        self.cell, self.head = nn.GRUCell({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 32)

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            x = self.attention(x, x, x, need_weights=False)[0]
        hidden = x.new_zeros(8, {WIDTH}, dtype=torch.float32)
        for step in range(3):
            hidden = self.cell(x[:, step].float(), hidden)
        return (self.head(x.float()) + self.head(hidden)[:, None]).log_softmax(-1).transpose(0, 1)

def listener():
    words = torch.ones(8, 10, dtype=torch.long)
    loss = lambda out: nn.functional.ctc_loss(out, words, torch.full((8,), 64), torch.full((8,), 10))
    return Listener(), (torch.randn(8, 64, {WIDTH}),), loss

def tiny():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(200)))
    return model, (torch.randn(4, 16),), mean
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stepcast_programs.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def captured(name: str, **asked: object) -> Captured:
    return capture(f"stepcast_programs:{name}", CaptureOptions(dtype="fp32", **asked))  # type: ignore[arg-type]


def ops_of(found: Captured, kind: type) -> list[Op]:
    layers = [layer for block in found.stage.body for layer in block.layers for _ in range(block.repeat)]
    return [op for layer in layers for op in layer.all_ops if isinstance(op.work, kind)]


def test_weights_of_a_learnt_loss_are_parameters() -> None:
    """The optimizer has them, not the model; their storage is a block of 1 KiB."""
    plain, learnt = captured("sgd"), captured("learnt_loss")
    assert learnt.parameters - plain.parameters == WIDTH
    assert learnt.memory.parameters - plain.memory.parameters == 4 * WIDTH
    assert learnt.memory.all_gradients - plain.memory.all_gradients == 4 * WIDTH


def test_the_first_capture_of_a_process_is_like_the_next(tmp_path: Path) -> None:
    """Autograd numbers its nodes from zero in a new process, and the first operator with a gradient has one too."""
    (tmp_path / "fresh.py").write_text(
        """
import torch
from stepcast.outputs.plain import write_captured
from stepcast.pytorch.capture.program import CaptureOptions, capture

def build():
    return torch.nn.Linear(8, 8), (torch.randn(4, 8),), lambda out: out.mean()

if __name__ == "__main__":
    first, second = (write_captured(capture("fresh:build", CaptureOptions(dtype="fp32"))) for _ in range(2))
    assert first == second
"""
    )
    subprocess.run([sys.executable, "-W", "ignore", "fresh.py"], cwd=tmp_path, check=True)


def product_formats(found: Captured) -> set[DType]:
    return {op.work.dtype for op in ops_of(found, Matmul)}  # type: ignore[union-attr]


def test_fp32_products_run_as_tf32_where_the_program_says_so() -> None:
    before = torch.get_float32_matmul_precision()
    plain, rounded = captured("plain"), captured("tf32")
    assert product_formats(plain) == {DType.FP32}
    assert product_formats(rounded) == {DType.TF32}
    assert (plain.precision, rounded.precision) == (DType.FP32, DType.TF32)
    assert product_formats(captured("plain", tf32=True)) == {DType.TF32}
    assert torch.get_float32_matmul_precision() == before


def test_the_newer_switch_is_read_too() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert product_formats(captured("plain")) == {DType.TF32}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("name", ["autocast", "checkpointed_autocast"])
def test_autocast_inside_the_program(name: str) -> None:
    """Products run in bf16, those that a checkpoint computes again too, and weights stay in fp32."""
    found = captured(name)
    assert product_formats(found) == {DType.BF16}
    assert found.memory.parameters == LAYERS * WIDTH * WIDTH * 4
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("name", ["square", "pow", "exp", "relu", "softmax", "sum", "mean", "norm", "matmul", "add"])
def test_functions_run_in_the_format_that_autocast_chooses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own dispatcher decides for tensors that pretend to be on a GPU, also inside composite functions."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    arguments = {"pow": (2,), "softmax": (-1,)}.get(name, ())
    others = 1 if name in ("matmul", "add") else 0
    formats = []
    for device, mode in (("cuda", FakeTensorMode()), ("meta", EmulatedGpu())):
        with mode, torch.autocast("cuda", torch.bfloat16):
            tensors = [torch.empty(4, 4, dtype=torch.bfloat16, device=device) for _ in range(1 + others)]
            formats.append(getattr(torch, name)(*tensors, *arguments).dtype)
    assert formats[0] == formats[1]


def test_hooks_of_checkpoints_keep_the_host_busy() -> None:
    """Entering a checkpoint, running it again, and saving and returning the input and the weight of each layer."""
    calls = CALLS["checkpoint"] + CALLS["recompute"] + 2 * LAYERS * (CALLS["hook"] + CALLS["unhook"])
    plain, again = (ops_of(captured(name), Matmul) for name in ("plain", "checkpointed"))
    recomputed = len(again) - len(plain)
    assert recomputed in (LAYERS - 1, LAYERS)  # it stops early, once everything is back
    issued = sum(op.kernels for op in again) - sum(op.kernels for op in plain)
    assert issued == pytest.approx(calls + 2.6 * recomputed, abs=8)
    compiled = ops_of(captured("checkpointed", compiled=True), Matmul)
    assert sum(op.kernels for op in compiled) < len(compiled)


def test_sums_of_a_forward_that_runs_again_are_not_sums_of_gradients() -> None:
    """Autograd adds gradients in place; a residual connection leaves its input as it is."""
    names = [op.name for op in ops_of(captured("residual"), Elementwise)]
    assert len([name for name in names if name.startswith("add")]) >= 2


def test_reentrant_checkpoints_keep_the_host_busy_without_hooks() -> None:
    again, plain = (ops_of(captured(name), Matmul) for name in ("reentrant", "plain"))
    issued = sum(op.kernels for op in again) - sum(op.kernels for op in plain)
    assert len(again) == len(plain) + LAYERS + 1  # and the gradient of the input
    assert issued == pytest.approx(CALLS["checkpoint"] + CALLS["recompute"] + 2.6 * (LAYERS + 1), abs=8)


@pytest.mark.parametrize("name", ["_Holder", "_recomputation_hook", "detach_variable"])
def test_a_release_without_a_name_of_checkpoints_gives_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils.checkpoint, name)
    found = captured("plain")
    (warning,) = found.workload.warnings
    assert f"has no torch.utils.checkpoint.{name}" in warning


def test_a_norm_is_one_kernel_forward() -> None:
    found = captured("norm")
    norms = [op.work for op in ops_of(found, Elementwise) if op.work.kind is ElementwiseKind.RMS_NORM]  # type: ignore[union-attr]
    size = ROWS * WIDTH * 4
    weight = WIDTH * 4
    forward, backward = norms
    assert forward.read_bytes + forward.write_bytes == pytest.approx(2 * size + weight, rel=0.01)  # type: ignore[union-attr]
    assert backward.read_bytes + backward.write_bytes == 3 * size  # type: ignore[union-attr]
    assert found.ops < 15


@pytest.mark.parametrize(("name", "gates", "ways"), [("recurrent", 4, 1), ("gru", 3, 2)])
def test_recurrent_networks_are_one_call_of_cudnn(name: str, gates: int, ways: int) -> None:
    """Cells of two layers both ways, in parts, and for each layer a product forward and three backward."""
    found = captured(name)
    cells = [op.work for op in ops_of(found, RecurrentCells)]
    assert sum(work.steps for work in cells if isinstance(work, RecurrentCells)) == 64 * 2 * 2 * ways
    assert all((work.batch, work.gates) == (8, gates) for work in cells)  # type: ignore[union-attr]
    assert len(ops_of(found, Matmul)) == 4 * 2 * ways
    rows, wide = 64 * 8, gates * WIDTH
    inputs = [WIDTH, ways * WIDTH]
    expected = sum(3 * 2 * rows * wide * width + 2 * rows * wide * WIDTH * 3 for width in inputs) * ways
    assert found.flops() == expected
    weights = sum(wide * (width + WIDTH) + 2 * wide for width in inputs) * ways
    assert found.parameters == weights
    assert found.memory.all_gradients == pytest.approx(4 * weights, rel=0.1)


def test_attention_cells_and_sequence_losses_run_as_on_a_gpu() -> None:
    """One product makes queries, keys and values; a cell is two products and a kernel; CTC goes step by step."""
    found = captured("listener")
    names = [layer.op_name(op) for block in found.stage.body for layer in block.layers for op in layer.forward]
    assert sum("thnn_fused_gru_cell" in name for name in names) == 3
    products = [op.work for op in ops_of(found, Matmul)]
    assert sorted(work.n for work in products if work.dtype is DType.BF16)[-1] == 3 * WIDTH  # type: ignore[union-attr]
    losses = [op.work for op in ops_of(found, Elementwise) if op.work.kind is ElementwiseKind.SEQUENCE_LOSS]  # type: ignore[union-attr]
    assert [work.rows for work in losses] == [64, 64]  # type: ignore[union-attr]


def test_gradients_of_attention_in_fp32_and_of_norms_as_on_a_gpu() -> None:
    """An H200 allocated 705,331,200 bytes for 2,688 x 16 heads of 41 tokens; copied rows have contiguous gradients."""
    query = torch.empty(2688, 16, 41, 8, device="meta")
    define_operators()
    *gradients, sums = torch.ops.stepcast.attention_backward(*[query] * 4, None, query, query, False, True)
    assert sums.nbytes == 705_331_200
    assert {gradient.transpose(1, 2).is_contiguous() for gradient in gradients} == {True}
    with Tracer({}):
        data = torch.empty(2, 8, 50, device="meta", requires_grad=True)
        found = torch.nn.functional.layer_norm(data.transpose(1, 2), (8,))
        (gradient,) = torch.autograd.grad(found, data, torch.empty(2, 8, 50, device="meta").transpose(1, 2))
    assert gradient.transpose(1, 2).is_contiguous()


def test_recurrent_step_as_measured() -> None:
    """The host launches 128 cells (64 steps each way) one after another: 16 and 20 us on an H200."""
    step_s = predict_captured(captured("recurrent"), load_cluster("generic:gpu=h200")).step_s
    assert 2 * 64 * (15.5e-6 + 19.5e-6) < step_s < 2 * 64 * 60e-6


@pytest.mark.parametrize(("name", "reads", "writes"), [("sgd", 2, 1), ("momentum", 5, 3), ("fused_momentum", 3, 2)])
def test_what_updates_read_and_write(name: str, reads: int, writes: int) -> None:
    """Plain: weight and gradient in, weight out. With momentum that is scaled, added to and then read; in one
    kernel each is read and written once, and the gradient read.
    """
    works = [op.work for op in captured(name).stage.epilogue[0].forward if isinstance(op.work, Elementwise)]
    size = LAYERS * WIDTH * WIDTH * 4
    moved = sum(work.read_bytes for work in works), sum(work.write_bytes for work in works)
    assert moved == pytest.approx((reads * size, writes * size))


def test_updates_take_as_long_as_measured() -> None:
    """Of 134 million weights in fp32: 0.42 ms plain and 1.17 with momentum on an H200."""
    for name, measured_s in (("sgd", 0.4245e-3), ("momentum", 1.1666e-3)):
        found = captured(name)
        prediction = predict_captured(found, load_cluster("generic:gpu=h200"))
        works = [op.work for op in found.stage.epilogue[0].forward if isinstance(op.work, Elementwise)]
        times = 134_250_496 / (LAYERS * WIDTH * WIDTH)
        larger = Elementwise(
            works[0].kind,
            1,
            round(sum(work.columns for work in works) * times),
            sum(work.read_bytes for work in works) * times,
            sum(work.write_bytes for work in works) * times,
            dtype=works[0].dtype,
        )
        assert prediction.pricer.compute(larger).seconds == pytest.approx(measured_s, rel=0.1)


def test_the_interval_of_a_host_bound_step_holds_what_hosts_differ_by() -> None:
    report = predict_captured(captured("tiny"), load_cluster("generic:gpu=h200")).report
    assert report.breakdown_s["other"] > 0.8 * report.step_s
    assert report.low_s < 0.85 * report.step_s
    assert report.high_s > 1.19 * report.step_s


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("plain", "--checkpoint"),
        ("plain", "--attention=eager"),
        ("plain", "--batch=4"),
        ("plain", "--seq=64"),
        ("sgd", "--optimizer=sgd"),
        ("sgd", "--no-fused-optimizer"),
    ],
)
def test_options_without_effect_are_refused(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", f"stepcast_programs:{name}", option]) == 2
    assert f"{option.split('=')[0]} has no effect" in capsys.readouterr().err


def test_options_with_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer of a program that brings none; its batch is that of its inputs."""
    words = ["capture", "stepcast_programs:plain", "--dtype", "fp32", "--json"]
    states = []
    for more in ([], ["--optimizer", "sgd"]):
        assert main([*words, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["batch"] == found["tokens"] == ROWS
        states.append(found["memory_bytes"]["optimizer"])
    assert states[0] > 0 == states[1]


def test_the_host_s_time_in_views_is_not_lost() -> None:
    """Views before and after a kernel count with it; those of a module without kernels with the next one's."""
    view = HostedEvent("view", (), calls=0.3)
    kernel = HostedEvent("add", (Elementwise(ElementwiseKind.ADD, 1, 1, 4.0, 4.0),), calls=1.4)
    (op,), left = name_ops([view, kernel, view], 0.3)
    assert (op.kernels, left) == (2.3, 0.0)
    ops, left = name_ops([view, view], 0.3)
    assert not ops
    assert left == pytest.approx(0.9)


def test_a_call_takes_longer_the_more_others_ran_since_its_last() -> None:
    recent = RecentCalls()
    recent.time_us("forward", "add")
    repeated = recent.time_us("forward", "add")
    for name in ("mul", "sum", "exp"):
        recent.time_us("forward", name)
    later, (among_us, repeated_us) = recent.time_us("forward", "add"), TIMES["forward"]["add"]
    assert repeated == pytest.approx(repeated_us)
    assert repeated_us < later < among_us
    unknown = recent.time_us("forward", "an operator that was not measured")
    assert repeated_us < unknown <= TIMES["forward"]["kernel"][0]


def test_the_cpu_s_time_counts_modules_nodes_and_code_around_operators() -> None:
    add = Event("add", (), (), (), Moment.FORWARD, "", False, nodes=1)
    trace = StepTrace(events=[add, add._replace(moment=Moment.BACKWARD, nodes=0)])
    works: dict[int, Works] = {0: (), 1: ()}
    plain = count_calls(trace, works)
    first, second = trace.events
    trace.events = [first._replace(called=("module",)), second._replace(begins_backward=True, updated=10)]
    counted = count_calls(trace, works)
    assert counted[0] > plain[0]
    around_us = STEP["backward"] + STEP["update"] + 10 * STEP["updated"]
    assert LAUNCH_US * (counted[1] - plain[1]) == pytest.approx(around_us, abs=2.0)
    trace.gradients = {0: 0, 1: 1}
    assert LAUNCH_US * (count_calls(trace, works)[1] - counted[1]) == pytest.approx(2 * STEP["accumulated"])


def test_few_ids_of_an_embedding_are_not_sorted() -> None:
    def kernels(ids: int) -> int:
        gradient, rows = TracedTensor((ids, 16), (16, 1), "fp32", 0), TracedTensor((ids,), (1,), "int64", 1)
        table = TracedTensor((5000, 16), (16, 1), "fp32", 2)
        name = "embedding_dense_backward"
        return len(works_of(Event(name, (gradient, rows), (table,), (), Moment.BACKWARD, "", False)))

    assert kernels(3072) == 2
    assert kernels(4096) > 12


def test_operands_without_a_contiguous_side_are_copied_for_cublas() -> None:
    """As in ``einsum("bix,iox->box", ...)``, whose batch is the last dimension in memory."""

    def kinds(stride: tuple[int, int, int]) -> list[str]:
        left = TracedTensor((144, 4, 32), stride, "fp32", 0)
        right, out = (
            TracedTensor((144, 32, 32), (1024, 32, 1), "fp32", 1),
            TracedTensor((144, 4, 32), (128, 32, 1), "fp32", 2),
        )
        event = Event("bmm", (left, right), (out,), (), Moment.FORWARD, "", recomputed=False)
        return [type(work).__name__ for work in works_of(event)]

    assert kinds((128, 32, 1)) == kinds((128, 1, 4)) == ["Matmul"]
    assert kinds((1, 4608, 144)) == ["Elementwise", "Matmul"]


def test_the_gradient_of_a_cumulative_product_is_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cumulative.py").write_text(
        "import torch\n"
        "def product():\n"
        "    model = torch.nn.Linear(64, 64)\n"
        "    return model, torch.empty(8, 64), lambda out: out.sigmoid().cumprod(-1).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert capture("cumulative:product", CaptureOptions()).ops < 40
