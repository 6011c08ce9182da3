"""The kernels of plain PyTorch, against those that its profiler recorded for a step of Llama-3.2-1B."""

import gzip
import json
from dataclasses import replace

import pytest

from stepcast.generate.workload import generate
from stepcast.ir.framework import Execution, Framework, Kernels, Optimizer
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import Objective, Recompute, RecomputeKind, Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, Matmul
from stepcast.ir.workload import Op, Phase
from stepcast.models.catalog import load_model
from tests.cli.test_main import EXAMPLES

K = ElementwiseKind
BF16 = DType.BF16
PLAIN = Strategy(Layout(), 4, 4, 4096)
PYTORCH = Framework(
    gradient_dtype=BF16,
    optimizer=Optimizer(moment_dtype=BF16, master_weights=False, clips=False),
    kernels=Kernels.PLAIN,
    execution=Execution.EAGER,
)
LLAMA, GPT = load_model("llama-3.2-1b"), load_model("gpt2-xl")


def ops(model: Model, strategy: Strategy, *phases: Phase, framework: Framework = PYTORCH) -> list[Op]:
    layers = generate(model, strategy, framework).stages[0].body_layers()
    return [op for layer in layers for phase in phases or Phase for op in layer.ops(phase)]


def recorded(words: str) -> int:
    """Kernels of the recorded step whose names hold *words*."""
    with gzip.open(EXAMPLES / "kineto-llama-1b.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "kernel"]
    return sum(words in name for name in names)


def elementwise(kind: ElementwiseKind, backward: bool = False) -> int:
    works = [op.work for op in ops(LLAMA, PLAIN)]
    return sum(
        isinstance(work, Elementwise) and (work.kind, work.backward, work.dtype) == (kind, backward, BF16)
        for work in works
    )


@pytest.mark.parametrize(
    ("words", "kind", "backward"),
    [
        ("FillFunctor<c10::BFloat16>", K.FILL, False),
        ("vectorized_layer_norm_kernel", K.RMS_NORM, False),
        ("layer_norm_grad_input", K.RMS_NORM, True),
        ("GammaBetaBackward", K.OTHER, True),
    ],
)
def test_as_many_kernels_as_were_recorded(words: str, kind: ElementwiseKind, backward: bool) -> None:
    assert elementwise(kind, backward) == recorded(words) > 0


def test_as_many_products_and_negations_as_were_recorded() -> None:
    found = ops(LLAMA, PLAIN)
    assert sum(isinstance(op.work, Matmul) for op in found) == recorded("nvjet") == 3 * (16 * 4 + 1)
    assert sum(isinstance(op.work, Attention) for op in found) == recorded("cudnn_generated") == 2 * 16
    assert sum(op.name.endswith("negate") for op in found) == recorded("neg_kernel") == 4 * 16


def test_checkpoints_stop_before_the_last_product_and_keep_the_host() -> None:
    full = replace(PLAIN, recompute=Recompute(RecomputeKind.FULL))
    forward = ops(LLAMA, PLAIN, Phase.FORWARD)
    again = [op for op in ops(LLAMA, full) if op.name.startswith("recompute ")]
    ends = 5  # lookup, last norm, logits, cast and cross entropy
    assert len(again) == len(forward) - ends - 2 * LLAMA.layers
    assert not any(op.name == "recompute down" for op in again)
    entered = [op for op in ops(LLAMA, full, Phase.FORWARD) if op.kernels > 1]
    assert [op.name for op in entered] == ["norm"] * LLAMA.layers
    fused = replace(PYTORCH, kernels=Kernels.FUSED)
    assert any(op.name == "recompute down" for op in ops(LLAMA, full, framework=fused))


def test_tied_gradients_are_added() -> None:
    names = [op.name for op in ops(LLAMA, PLAIN)]
    assert names.count("tied gradients") == 1
    assert "tied gradients" not in [op.name for op in ops(replace(LLAMA, tied=False), PLAIN)]
    apart = replace(PLAIN, layout=Layout(pp=2))  # each stage has one of them
    assert "tied gradients" not in [op.name for op in ops(LLAMA, apart)]
    assert "tied gradients" not in [op.name for op in ops(LLAMA, replace(PLAIN, objective=Objective.REWARD))]


def test_vectors_are_accumulated_by_kernels() -> None:
    twice = replace(PLAIN, global_batch=8)
    strategies = (replace(each, seq=1024) for each in (PLAIN, twice))
    once, more = (sum(op.kernels for op in ops(GPT, each)) for each in strategies)
    # Four matrices with biases and two norms of two vectors in each layer; the last norm; the head.
    assert more - once == GPT.layers * (4 + 4 + 4) + 2 + 1
