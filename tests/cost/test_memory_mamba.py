"""What Mamba blocks keep: measured bytes, parts, recomputation, splitting."""

from dataclasses import replace

import pytest

from stepcast.cost.memory import memory
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.framework import Framework, Kernels, SelectiveRule
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layers.mamba import fused_scan_saved, saved_scan, scan_transient
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Layout
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.strategy import Recompute, RecomputeKind, Strategy
from stepcast.models.catalog import load_model
from tests.cost.mamba_rows import Case, cases

MODEL = load_model("nemotron-h-8b")
PLAIN = Strategy(Layout(), 1, 8, 8192)
MAMBA = LayerParts(Mixer.MAMBA, FeedForward.NONE)


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case.sizes.values())))
def test_bytes_are_those_pytorch_allocates(case: Case) -> None:
    scan = case.scan(backward=True)
    tokens = scan.batch * scan.seq
    given = (2 * scan.inputs + 2 * scan.shared + tokens * scan.heads) * 2.0  # the call's own input
    saved = sum(tensor.size_bytes for tensor in fused_scan_saved(scan, 2.0, 2.0))
    assert saved - given == pytest.approx(case.saved_bytes, rel=1e-3)
    if scan.chunks * scan.heads > 132:  # else heads are summed in several parts, to fill the GPU
        assert scan_transient(scan, 2.0) == pytest.approx(case.peak_bytes, rel=0.04)


def test_a_block_keeps_its_parts() -> None:
    """Nemotron-H 8B: 8,192 tokens, hidden 4,096, inner 8,192, 8 groups of state 128, 128 heads."""
    tokens, hidden, inner = 8192, 4096, 8192
    projected = 2 * inner + 2 * 8 * 128 + 128
    wanted = tokens * (2 * hidden + projected + 3 * inner) * 2 + tokens * 8 * 4
    assert count_saved(MODEL, PLAIN, MAMBA).saved == wanted
    assert count_saved(MODEL, PLAIN, MAMBA).input == tokens * hidden * 2


def test_full_recomputation_keeps_the_input_and_selective_everything() -> None:
    kept = count_saved(MODEL, PLAIN, MAMBA)
    selective = replace(PLAIN, recompute=Recompute(RecomputeKind.SELECTIVE))
    assert count_saved(MODEL, selective, MAMBA).saved == kept.saved
    assert kept.after(is_recomputed=True) == kept.input < kept.saved / 10


def test_selective_recomputation_by_the_compiler_keeps_it_too() -> None:
    compiled = Framework(kernels=Kernels.COMPILED, selective=SelectiveRule.ALTERNATE_MATMULS)
    selective = replace(PLAIN, recompute=Recompute(RecomputeKind.SELECTIVE))
    assert count_saved(MODEL, selective, MAMBA, compiled) == count_saved(MODEL, PLAIN, MAMBA, compiled)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_tensor_parallelism_splits_all_but_the_outside(ways: int) -> None:
    whole, split = count_saved(MODEL, PLAIN, MAMBA), replace(PLAIN, layout=Layout(tp=ways))
    outside = 2 * 8192 * 4096 * 2
    assert (count_saved(MODEL, split, MAMBA).saved - outside) * ways == whole.saved - outside
    assert count_saved(MODEL, replace(split, sequence_parallel=True), MAMBA).saved * ways == whole.saved


def test_context_parallelism_repeats_groups_it_cannot_split() -> None:
    scan = saved_scan(Sizes(MODEL, replace(PLAIN, layout=Layout(cp=16))))
    assert (scan.seq, scan.heads, scan.groups) == (8192, 8, 1)


def test_an_expert_hybrid_fits_where_it_was_trained() -> None:
    """Nemotron 3 Nano ran on eight GB300 with micro-batches of four (Megatron-Bridge performance summary)."""
    strategy = Strategy(Layout(ep=8, dp=8, expert_tp=1), 4, 512, 8192)
    stage = memory(load_model("nemotron-3-nano-30b-a3b"), strategy, load_gpu("gb300"))[0]
    assert stage.fits
    assert stage.activations > 0
    assert sum(stage.parts.values()) == pytest.approx(stage.total)
