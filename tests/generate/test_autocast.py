"""torch.autocast: weights, gradients and moments in fp32, products in bf16."""

from collections import Counter
from dataclasses import replace

import pytest

import stepcast
from stepcast.cost.memory import memory
from stepcast.frameworks.catalog import load_framework
from stepcast.generate.workload import block_layers, generate
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layers.kinds import saved_halves
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Layout
from stepcast.ir.model_parts import FeedForward
from stepcast.ir.strategy import Recompute, RecomputeKind, Sharding, Strategy, StrategyError
from stepcast.ir.types import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul, Work
from stepcast.ir.workload import Phase
from stepcast.models.catalog import load_model
from tests.cli.test_main import run, run_json

LLAMA = load_model("llama-3.1-8b")
H200 = load_cluster("hgx-h200")
PLAIN = Strategy(Layout(), 1, 1, 2048)
PYTORCH = Framework(kernels=Kernels.PLAIN, execution=Execution.EAGER)
AUTOCAST = replace(PLAIN, autocast=True)
# Weights that products read: all but the embedding and the norms.
MULTIPLIED = LLAMA.parameters - 128256 * 4096 - 65 * 4096


def works(strategy: Strategy, phase: Phase, framework: Framework = PYTORCH) -> list[tuple[str, Work]]:
    layers = generate(LLAMA, strategy, framework).stages[0].body_layers()
    return [(op.name, op.work) for layer in layers for op in layer.ops(phase)]


def cast_elements(strategy: Strategy, phase: Phase, words: str, framework: Framework = PYTORCH) -> tuple[int, float]:
    """Elements that casts named so turn, and the bytes that they move."""
    found = [work for name, work in works(strategy, phase, framework) if name.endswith(words)]
    assert all(isinstance(work, Elementwise) and work.kind is ElementwiseKind.CAST for work in found)
    casts = [work for work in found if isinstance(work, Elementwise)]
    return sum(work.elements for work in casts), sum(work.read_bytes + work.write_bytes for work in casts)


def test_each_weight_is_cast_once_in_a_forward_and_its_gradient_back() -> None:
    assert cast_elements(AUTOCAST, Phase.FORWARD, "weight cast") == (MULTIPLIED, 6 * MULTIPLIED)
    back = cast_elements(AUTOCAST, Phase.WEIGHT_GRADIENT, "weight gradient cast")
    assert back == (MULTIPLIED, 6 * MULTIPLIED)
    assert cast_elements(PLAIN, Phase.FORWARD, "weight cast") == (0, 0)


def test_recomputed_layers_cast_their_weights_again() -> None:
    full = replace(AUTOCAST, recompute=Recompute(RecomputeKind.FULL))
    again = cast_elements(full, Phase.INPUT_GRADIENT, "weight cast")[0]
    # All but the head's, and the last product of each layer, which early stopping spares but not its cast.
    assert again == MULTIPLIED - 128256 * 4096


def test_norms_run_in_fp32_and_products_in_bf16() -> None:
    found = [work for phase in Phase for _, work in works(AUTOCAST, phase)]
    norms = {work.dtype for work in found if isinstance(work, Elementwise) and work.kind is ElementwiseKind.RMS_NORM}
    assert norms == {DType.FP32}
    assert {work.dtype for work in found if isinstance(work, Matmul)} == {DType.BF16}


def test_softmax_runs_in_fp32() -> None:
    unfused = replace(PYTORCH, flash_attention=False)
    softmax = {
        work.dtype
        for _, work in works(AUTOCAST, Phase.FORWARD, unfused)
        if isinstance(work, Elementwise) and work.kind is ElementwiseKind.SOFTMAX
    }
    assert softmax == {DType.FP32}
    names = Counter(name for name, _ in works(AUTOCAST, Phase.FORWARD, unfused))
    assert names["softmax cast"] == names["softmax cast back"] == 32


def test_memory_of_fp32_states_and_bf16_copies() -> None:
    found = memory(LLAMA, AUTOCAST, H200.gpu, PYTORCH)[0]
    assert (found.parameters, found.gradients) == (4 * LLAMA.parameters, 4 * LLAMA.parameters)
    assert found.optimizer == 8 * LLAMA.parameters
    # With much to keep, the fullest moment is before the backward, when the casts are there.
    full, stored = (
        memory(LLAMA, replace(each, micro_batch=16, global_batch=16), H200.gpu, PYTORCH)[0].activations
        for each in (AUTOCAST, PLAIN)
    )
    stream = 2 * 16 * 2048 * 4096 * (2 * 32 + 2)  # twice as wide before each norm, and around the last
    assert full - stored == 2 * MULTIPLIED + stream


def test_a_compiler_casts_weights_alone() -> None:
    compiled = replace(PYTORCH, kernels=Kernels.COMPILED)
    assert cast_elements(AUTOCAST, Phase.FORWARD, "weight cast", compiled)[0] == MULTIPLIED
    assert cast_elements(AUTOCAST, Phase.FORWARD, "norm cast", compiled) == (0, 0)


def test_autocast_is_slower_than_stored_bf16_and_faster_than_fp32() -> None:
    times = [
        stepcast.predict(LLAMA, H200, each, PYTORCH).report.step_s
        for each in (PLAIN, AUTOCAST, replace(PLAIN, precision=DType.TF32))
    ]
    assert times == sorted(times)


def test_fsdp_gathers_fp32_weights() -> None:
    layout = replace(AUTOCAST, layout=Layout(dp=8), global_batch=8, sharding=Sharding.FSDP)
    stored = replace(layout, autocast=False)
    sizes = [
        sum(getattr(work, "size_bytes", 0) for name, work in works(each, Phase.FORWARD) if "all-gather" in name)
        for each in (layout, stored)
    ]
    assert sizes[0] == 2 * sizes[1] > 0


def test_the_command_line_says_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("predict", "--model", "llama-3.1-8b", "--cluster", "hgx-h200", "--gpus", "8", "--seq", "2048")
    plain = ("--kernels", "plain", "--execution", "eager")
    found = run_json(capsys, *base, *plain, "--precision", "autocast-bf16")
    stored = run_json(capsys, *base, *plain)
    assert found["step_s"] > stored["step_s"]
    assert found["memory_bytes"]["parameters"] == 2 * stored["memory_bytes"]["parameters"]
    code, _, error = run(capsys, *base, "--precision", "autocast-bf16")
    assert code == 2
    assert "plain or compiled kernels" in error


def test_what_autocast_cannot_be() -> None:
    with pytest.raises(StrategyError, match="autocast goes with precision bf16 or fp16"):
        replace(AUTOCAST, precision=DType.FP8)
    with pytest.raises(StrategyError, match="gradients in fp32"):
        generate(LLAMA, AUTOCAST, replace(PYTORCH, gradient_dtype=DType.BF16))


@pytest.mark.parametrize(
    ("name", "mixer", "products"),
    [("llama-3.1-8b", "attention", 3), ("deepseek-v3", "attention", 2), ("mamba2-2.7b", "mamba", 1)],
)
def test_each_product_that_reads_a_norm_has_a_cast_of_its_own(name: str, mixer: str, products: int) -> None:
    """Latent attention has two products after its norm, one into each low rank, and a Mamba block one."""
    model, transformers = load_model(name), load_framework("transformers")
    block = replace(model.blocks[-1], feed_forward=FeedForward.NONE)
    layers = block_layers(model, AUTOCAST, transformers, block, False)
    names = [op.name for layer in layers if layer.name == f"{mixer} norm" for op in layer.forward]
    assert sum(name.startswith("norm cast") for name in names) == products
    (saved,) = (half[0] for half in saved_halves(Sizes(model, AUTOCAST, transformers), block))
    output = next(tensor for tensor in saved if tensor.name == "norm output")
    assert output.size_bytes == products * AUTOCAST.tokens * model.hidden * DType.BF16.bytes
