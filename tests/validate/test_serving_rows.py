"""Rows of the serving set: what their sources mean by sizes and clients."""

from stepcast.generation.engine import GenerationLayout
from stepcast.validate.generation import concurrency_of, engine_of, plan_of

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


def test_sizes_that_a_dump_multiplies_do_not_divide_the_clients() -> None:
    multiplied = {"tp_size": "1", "attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8", "batch_size": "1"}
    row = {**ROW, **multiplied}
    assert engine_of(row) == GenerationLayout(dp=8, ep=8)
    assert concurrency_of(row) == 64.0


def test_an_engine_is_that_of_its_own_clients() -> None:
    long = {**ROW, "isl": "8192", "tp_size": "4", "moe_tp_size": "4"}
    assert plan_of(long, 4.0)[0] == GenerationLayout(tp=4)
    assert plan_of(long, 4096.0)[0] == GenerationLayout(dp=4)  # whose ranks need not hold every sequence
    assert plan_of({**ROW, "tp_size": "28", "moe_tp_size": "28"}, 4.0)[1]  # 128 heads: GPUs of several engines
