"""Rows of the serving set: what their sources mean by lengths, sizes and clients."""

import pytest

from stepcast.generation.placement import GenerationLayout
from stepcast.validate.serving import concurrency_of, engine_of, lengths_of, plan_of

ROW = {
    "silicon_data_source": "db-dump; silicon_concurrency=64",
    "backend": "trtllm",
    "model_path": "deepseek-ai/DeepSeek-R1",
    "system": "b200_sxm",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "gemm_quant_mode": "nvfp4",
    "moe_quant_mode": "nvfp4",
    "batch_size": "64",
    "tp_size": "8",
    "pp_size": "1",
    "attention_dp_size": "1",
    "moe_tp_size": "8",
    "moe_ep_size": "1",
}


def test_lengths_of_inferencex_are_means_of_a_range() -> None:
    assert lengths_of(ROW) == pytest.approx((921.6, 921.6))
    assert lengths_of({**ROW, "isl": "2048", "osl": "128"}) == (2048.0, 128.0)


def test_sizes_that_a_dump_multiplies_do_not_divide_the_clients() -> None:
    multiplied = {"tp_size": "1", "attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8", "batch_size": "1"}
    row = {**ROW, **multiplied}
    assert engine_of(row) == GenerationLayout(dp=8, ep=8)
    assert concurrency_of(row) == 64.0


def test_an_engine_is_that_of_its_own_clients() -> None:
    long = {**ROW, "isl": "8192", "tp_size": "4", "moe_tp_size": "4"}
    assert plan_of(long, 4.0).layout == GenerationLayout(tp=4)
    assert plan_of(long, 4096.0).layout == GenerationLayout(dp=4)  # whose ranks need not hold every sequence
    assert plan_of({**ROW, "tp_size": "28", "moe_tp_size": "28"}, 4.0).split  # 128 heads: GPUs of several engines


def test_waits_are_those_of_public_scripts() -> None:
    sglang = {**ROW, "backend": "sglang"}
    assert [plan_of(sglang, clients).wait_steps for clients in (8.0, 16.0)] == [5.0, 15.0]
    assert plan_of({**sglang, "system": "h200_sxm"}, 16.0).wait_steps == 0.0
    assert plan_of({**sglang, "osl": "128"}, 16.0).wait_steps == 0.0
    assert plan_of({**ROW, "tp_size": "1", "attention_dp_size": "8"}, 16.0).wait_steps == 60.0
