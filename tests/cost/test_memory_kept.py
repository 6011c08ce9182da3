"""What kernels keep beyond the tensors of a layer: losses, dropout, workspaces, activations in fp8."""

from dataclasses import replace

import pytest

import stepcast
from stepcast.cost.memory import memory
from stepcast.cost.memory.piece import loss_bytes
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.framework import MEGATRON_CORE, LossKernel
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.models.catalog import load_model
from stepcast.units import MIB

MODEL = load_model("llama-3.1-8b:layers=4")
ONE = Strategy(Layout(), 1, 1, 4096)
LOGITS = 4096 * 128256


def allocated(framework=MEGATRON_CORE, gpu="h100-sxm", model=MODEL, strategy=ONE) -> float:  # type: ignore[no-untyped-def]
    return memory(model, strategy, load_gpu(gpu), framework)[-1].allocated


def test_a_loss_in_place_has_one_copy_of_the_logits_less() -> None:
    compiled = loss_bytes(MODEL, ONE, 1, replace(MEGATRON_CORE, loss=LossKernel.COMPILED))
    in_place = loss_bytes(MODEL, ONE, 1, MEGATRON_CORE)
    engine = loss_bytes(MODEL, ONE, 1, replace(MEGATRON_CORE, loss=LossKernel.ENGINE))
    assert in_place == pytest.approx(6 * LOGITS)
    assert compiled - in_place >= 4 * LOGITS
    assert engine < in_place


def test_gradients_that_wait_keep_their_logits_in_a_pipeline() -> None:
    piped = Strategy(Layout(pp=2), 1, 8, 4096)
    waits = replace(MEGATRON_CORE, deferred_gradients=3)
    more = loss_bytes(MODEL, piped, 1, waits) - loss_bytes(MODEL, piped, 1, MEGATRON_CORE)
    assert more == pytest.approx(3 * 2 * LOGITS)
    assert loss_bytes(MODEL, ONE, 1, waits) == loss_bytes(MODEL, ONE, 1, MEGATRON_CORE)


@pytest.mark.parametrize(("schedule", "waiting"), [("1f1b", 0), ("zb-h1", 7), ("zb-h2", 14)])
def test_the_last_zero_bubble_stage_keeps_logit_gradients_in_bf16(schedule: str, waiting: int) -> None:
    """Of its micro-batches (pp of ZB-H1, 2 pp - 1 of ZB-H2) one is between forward and input gradient."""
    last = stepcast.predict("llama-3.1-8b", "dgx-h100", gpus=8, pp=8, schedule=schedule).memory[-1]
    at_work, workspaces = 6 * LOGITS, 3 * 32 * MIB
    assert last.temporary == pytest.approx(at_work + waiting * 2 * LOGITS + workspaces)


def test_dropout_keeps_a_byte_for_each_element_of_both_branches() -> None:
    kept = memory(MODEL, ONE, load_gpu("h100-sxm"), replace(MEGATRON_CORE, dropout=True))[0].activations
    plain = memory(MODEL, ONE, load_gpu("h100-sxm"), MEGATRON_CORE)[0].activations
    assert kept - plain == pytest.approx(4 * 2 * 4096 * 4096)


def test_activations_kept_in_fp8_are_half_as_large() -> None:
    narrow = memory(MODEL, ONE, load_gpu("h100-sxm"), replace(MEGATRON_CORE, fp8_activations=True))[0]
    plain = memory(MODEL, ONE, load_gpu("h100-sxm"), MEGATRON_CORE)[0]
    assert plain.activations - narrow.activations == pytest.approx(4 * 4096 * 2 * 14336)


def test_transformer_engine_has_larger_workspaces_from_hopper_on() -> None:
    assert allocated() - allocated(gpu="a100-sxm-80gb") == pytest.approx((32 - 4) * MIB)
