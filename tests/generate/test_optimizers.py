"""Optimizers as a choice: their states in memory, and what their updates read, write and multiply."""

from dataclasses import replace
from typing import NamedTuple

import pytest

import stepcast
from stepcast.cost.memory import StageMemory, memory
from stepcast.frameworks.catalog import load_profile
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Framework, Optimizer, OptimizerKind, parse_optimizer
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import ScheduleKind, Sharding, Strategy, StrategyError, TrainingKind
from stepcast.ir.work import Collective, Elementwise, Matmul
from stepcast.ir.workload import Layer
from stepcast.models.catalog import load_model
from stepcast.questions import question as options
from tests.cli.test_main import run, run_json

LLAMA = load_model("llama-3.1-8b")
H100 = load_cluster("dgx-h100")
ONE = Strategy(Layout(), 1, 1, 2048)
# Of Llama 3.1 8B: matrices inside its layers, and embedding and head.
INSIDE = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
ENDS = 2 * 128256 * 4096
PRODUCTS = {(4096, 4096): 2, (1024, 4096): 2, (4096, 14336): 3}


class Setup(NamedTuple):
    strategy: Strategy
    framework: Framework

    def memory(self, model: Model = LLAMA) -> StageMemory:
        return memory(model, self.strategy, H100.gpu, self.framework)[0]

    def report(self) -> StepReport:
        return stepcast.predict(LLAMA, H100, self.strategy, self.framework).report

    def optimizer(self) -> Layer:
        epilogue = generate(LLAMA, self.strategy, self.framework).stages[0].epilogue
        (layer,) = (layer for layer in epilogue if layer.name == "optimizer")
        return layer


def under(
    text: str, strategy: Strategy = ONE, master_weights: bool = True, fused: bool = True, clips: bool = True
) -> Setup:
    optimizer = parse_optimizer(text, master_weights, clips)
    return Setup(strategy, Framework(optimizer=replace(optimizer, fused=fused)))


def updates(setup: Setup) -> list[Elementwise]:
    """The memory-bound kernels of the update."""
    layer = setup.optimizer()
    return [op.work for op in layer.forward if "update" in op.name and isinstance(op.work, Elementwise)]


@pytest.mark.parametrize(
    ("text", "master", "expected"),
    [
        ("adamw", True, 12),
        ("adamw", False, 8),
        ("adamw:bf16", False, 4),
        ("adamw:8bit", True, 4 + 2 * (1 + 4 / 256)),
        ("sgd", True, 4),
        ("sgd-momentum", True, 8),
        ("sgd-momentum:bf16", False, 2),
    ],
)
def test_bytes_of_states_for_each_parameter(text: str, master: bool, expected: float) -> None:
    found = under(text, master_weights=master).memory().optimizer
    assert found == pytest.approx(expected * LLAMA.parameters)


def test_muon_keeps_one_moment_of_the_matrices_inside_layers() -> None:
    found = under("muon", master_weights=False).memory().optimizer
    assert found == 4 * (2 * LLAMA.parameters - INSIDE)


def test_adafactor_keeps_sums_of_rows_and_columns() -> None:
    found = under("adafactor", master_weights=False).memory().optimizer
    sums = 32 * sum(count * sum(shape) for shape, count in PRODUCTS.items()) + 2 * (128256 + 4096)
    assert found == 4 * (sums + LLAMA.parameters - INSIDE - ENDS)


@pytest.mark.parametrize(
    ("text", "master", "fused", "expected"),
    [
        # bf16 weights, fp32 gradients: gradient, weights in and out, moments in and out; the bf16 copy out.
        ("adamw", True, True, 4 + 2 * 4 + 4 * 4 + 2),
        ("adamw:bf16", False, True, 4 + 2 * 2 + 4 * 2),
        ("adamw:8bit", True, True, 4 + 2 * 4 + 4 * (1 + 4 / 256) + 2),
        ("sgd", True, True, 4 + 2 * 4 + 2),
        ("sgd-momentum", True, True, 4 + 2 * 4 + 2 * 4 + 2),
        ("adamw", True, False, 2 * 4 + 4 * 4 + 8 * 4 + 6 * 4 + 2),
        ("adafactor", True, True, 3 * 4 + 3 * 4 + 11 * 4 + 2),
    ],
)
def test_bytes_of_an_update(text: str, master: bool, fused: bool, expected: float) -> None:
    (work,) = updates(under(text, master_weights=master, fused=fused))
    assert (work.read_bytes + work.write_bytes) / work.elements == pytest.approx(expected)


def orthogonal(setup: Setup) -> float:
    """FLOPs of Muon's products."""
    return sum(op.work.flops for op in setup.optimizer().forward if isinstance(op.work, Matmul))


def expected_flops(ways: int = 1) -> float:
    """Five times X X^T, its square and their product with X, along the shorter side m of m x n."""
    return sum(32 / ways * count * 5 * (4 * m * m * n + 2 * m**3) for (m, n), count in PRODUCTS.items())


def test_muon_multiplies_each_matrix_five_times_over() -> None:
    assert orthogonal(under("muon")) == pytest.approx(expected_flops())
    own, rest = updates(under("muon"))
    assert (own.elements, rest.elements) == (INSIDE, LLAMA.parameters - INSIDE)


def test_ranks_that_split_states_share_muons_matrices() -> None:
    eight = replace(ONE, layout=Layout(dp=8), global_batch=8)
    assert orthogonal(under("muon", eight)) == pytest.approx(expected_flops())
    split = under("muon", replace(eight, sharding=Sharding.ZERO_1))
    assert orthogonal(split) == pytest.approx(expected_flops(8))
    fsdp = under("muon", replace(eight, sharding=Sharding.FSDP))
    assert orthogonal(fsdp) == pytest.approx(expected_flops(8))
    ops = fsdp.optimizer().forward
    exchanged = [op.work for op in ops if isinstance(op.work, Collective) and "exchange" in op.name]
    assert sum(work.size_bytes for work in exchanged) == 2 * 2 * INSIDE / 8


def test_tensor_ranks_make_their_own_parts_orthogonal() -> None:
    split = under("muon", replace(ONE, layout=Layout(tp=8)))
    parts = {(512, 4096): 2, (128, 4096): 2, (1792, 4096): 3}
    flops = 32 * sum(count * 5 * (4 * m * m * n + 2 * m**3) for (m, n), count in parts.items())
    assert orthogonal(split) == pytest.approx(flops)


def test_matrices_of_experts_are_those_of_the_rank() -> None:
    mixtral = load_model("mixtral-8x7b")
    strategy = replace(ONE, layout=Layout(ep=8, dp=8), global_batch=8)
    whole = under("adamw", strategy, master_weights=False).memory(mixtral)
    half = under("muon", strategy, master_weights=False).memory(mixtral)
    ends = 8 * (2 * 32000 * 4096 + 65 * 4096)
    assert half.optimizer == pytest.approx((whole.optimizer + ends) / 2)


def test_less_to_read_takes_less_time() -> None:
    times = [
        under(text).report().breakdown_s["optimizer"] for text in ("sgd", "adamw:bf16", "adamw", "adafactor", "muon")
    ]
    assert times == sorted(set(times))


def test_moments_of_eight_bits_take_less_memory_and_more_time() -> None:
    """Quantising each moment again limits bitsandbytes' kernel, not the bytes that it moves."""
    assert under("adamw:8bit").report().breakdown_s["optimizer"] > under("adamw").report().breakdown_s["optimizer"]


def test_clipping_reads_the_gradients_once_more() -> None:
    assert under("adamw", clips=False).report().step_s < under("adamw").report().step_s


def test_the_command_line_names_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(options.OPTIMIZERS) == {str(kind) for kind in OptimizerKind}
    base = ("predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "8")
    usual = run_json(capsys, *base)
    lean = run_json(capsys, *base, "--optimizer", "adamw:bf16", "--no-master-weights", "--no-clipping")
    assert lean["memory_bytes"]["optimizer"] == pytest.approx(usual["memory_bytes"]["optimizer"] / 3)
    assert lean["breakdown_s"]["optimizer"] < usual["breakdown_s"]["optimizer"]
    code, _, error = run(capsys, *base, "--optimizer", "lion")
    assert (code, error.count("\n")) == (2, 1)
    assert "expected adamw, sgd" in error
    code, _, error = run(capsys, *base, "--optimizer", "muon:8bit")
    assert code == 2
    assert "expected fp32, bf16" in error
    code, _, error = run(capsys, *base, "--optimizer", "sgd:bf16")
    assert code == 2
    assert "give sgd alone" in error
    code, _, error = run(capsys, *base, "--precision", "fp32", "--no-master-weights")
    assert code == 2
    assert "--no-master-weights has no effect" in error


def test_optimizers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="muon keeps no moments in int8"):
        Optimizer(OptimizerKind.MUON, parse_optimizer("adamw:8bit").moment_dtype)
    with pytest.raises(StrategyError, match="adapters are not trained by muon"):
        under("muon", replace(ONE, training=TrainingKind.LORA, lora_rank=8)).report()


@pytest.mark.parametrize("lora_rank", [0, 16])
def test_stages_update_the_tensors_of_their_own_layers(lora_rank: int) -> None:
    """A transformers layer of Llama has 9 weights, and 7 linear layers with two adapters each; clipping visits each
    tensor once more.
    """
    tensors = 14 if lora_rank else 9
    training = TrainingKind.LORA if lora_rank else TrainingKind.FULL
    for layout in (Layout(), Layout(pp=2), Layout(pp=4), Layout(pp=8), Layout(pp=4, vpp=2)):
        schedule = ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B
        strategy = Strategy(layout, 1, 8, 2048, schedule=schedule, training=training, lora_rank=lora_rank)
        stages = generate(LLAMA, strategy, load_profile("trainer").framework).stages
        counted = [
            op.kernels for stage in stages for layer in stage.epilogue for op in layer.forward if op.name == "update"
        ]
        assert counted == [2 * tensors * LLAMA.layers // (layout.pp * layout.vpp)] * (layout.pp * layout.vpp)


def test_stages_visit_their_own_layers() -> None:
    """Trainer visits the modules of a rank to clip their gradients, and those of the embedding's stage before it."""

    def kernels(pp: int, name: str) -> list[float]:
        stages = generate(LLAMA, Strategy(Layout(pp=pp), 1, 8, 2048), load_profile("trainer").framework).stages
        layers = (layer for stage in stages for layer in (*stage.body_layers(), *stage.epilogue))
        return [op.kernels for layer in layers for op in layer.forward if op.name == name]

    whole, halves = kernels(1, "visits"), kernels(2, "visits")
    layer = (whole[0] - halves[0]) / (LLAMA.layers // 2)
    assert halves[0] == halves[1] < whole[0]
    (start,), (half,) = kernels(1, "positions and masks"), kernels(2, "positions and masks")
    assert start - half == 2 * layer * LLAMA.layers // 2 > 0
