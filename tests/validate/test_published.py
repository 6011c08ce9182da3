"""Published runs: what their rows mean, and how far predictions lie from them."""

import csv
from pathlib import Path
from statistics import mean, median

import pytest

from stepcast.cost.pace import misses_boundaries
from stepcast.ir.framework import Dispatcher, Execution, Kernels
from stepcast.ir.legality import is_legal
from stepcast.ir.strategy import RecomputeKind, ScheduleKind, Sharding, TrainingKind
from stepcast.ir.types import DType
from stepcast.ir.work import Matmul
from stepcast.units import GIB
from stepcast.validate.published.comparison import (
    compare_records,
    measure_published,
    measure_step_s,
    predict_step,
    records_of,
)
from stepcast.validate.published.setup import Setup, complete_heads, read_run, read_setup
from tests.shared import DATA, needs_data
from tests.validate.csv_rows import write

FILE = DATA / "published" / "training_runs.csv"
LLAMA = {
    "id": "x1",
    "model": "llama3-8b",
    "gpu": "H100-SXM-80GB",
    "num_gpus": "16.0",
    "framework": "NeMo (dgxc recipe)",
    "precision": "bf16",
    "tp": "1.0",
    "pp": "1.0",
    "cp": "2.0",
    "dp": "8.0",
    "micro_batch": "1.0",
    "global_batch": "256.0",
    "seq": "8192.0",
    "iter_time_s": "12.3",
    "status": "measured",
}


def changed(**columns: str) -> Setup:
    return read_setup({**LLAMA, **columns})


def test_a_row_becomes_a_model_a_cluster_and_a_strategy() -> None:
    setup = changed()
    assert setup.model.parameters == 8_030_261_248
    assert setup.cluster.gpu.name == "h100-sxm"
    assert setup.strategy.layout.gpus == 16
    assert setup.strategy.precision is DType.BF16
    assert setup.strategy.sharding is Sharding.ZERO_1
    assert setup.profile.name == "nemo-25.04"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("amp_bf16", DType.BF16),
        ("FP8-CS", DType.FP8),
        ("FP8-MX", DType.MXFP8),
        ("MXFP8", DType.MXFP8),
        ("fp8-rowwise", DType.BF16),
        ("NVFP4", DType.NVFP4),
        ("see release note; default current-scaling", DType.FP8),
        ("", DType.BF16),
    ],
)
def test_words_for_precision(word: str, meant: DType) -> None:
    assert changed(precision=word).strategy.precision is meant


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dist-optimizer(zero1)", Sharding.ZERO_1),
        ("fsdp-full(zero3)/DEFAULT", Sharding.FSDP),
        ("fsdp-grad_op(zero2)/DEFAULT", Sharding.ZERO_2),
        ("megatron-fsdp", Sharding.FSDP),
        ("zero3", Sharding.ZERO_3),
    ],
)
def test_words_for_sharding(word: str, meant: Sharding) -> None:
    assert changed(zero_fsdp=word).strategy.sharding is meant


def test_states_split_within_a_node() -> None:
    assert changed(zero_fsdp="zero1 within 4 GPUs").strategy.layout.shard == 4


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("none(no recompute in case name)", RecomputeKind.NONE),
        ("full(uniform)", RecomputeKind.FULL),
        ("selective(attn)", RecomputeKind.SELECTIVE),
        ("per-op SAC", RecomputeKind.SELECTIVE),
        ("", RecomputeKind.NONE),
    ],
)
def test_words_for_recomputation(word: str, meant: RecomputeKind) -> None:
    assert changed(recompute=word).strategy.recompute.kind is meant


def test_frameworks_differ_in_their_defaults() -> None:
    old = changed(framework="Megatron-LM", precision="", cp="1", dp="16")
    assert (old.strategy.precision, old.framework.flash_attention) == (DType.FP16, False)
    assert old.strategy.recompute.kind is RecomputeKind.FULL
    compiled = changed(framework="torchtitan")
    assert (compiled.framework.kernels, compiled.strategy.sharding) == (Kernels.COMPILED, Sharding.FSDP)


@pytest.mark.parametrize(
    ("framework", "gpu", "profile", "dispatcher", "execution"),
    [
        ("another", "H100", "generic", Dispatcher.DEEPEP, Execution.EAGER),
        ("another", "GB200", "generic", Dispatcher.HYBRIDEP, Execution.PARTIAL_GRAPHS),
        ("another (DeepEP)", "GB200", "generic", Dispatcher.DEEPEP, Execution.PARTIAL_GRAPHS),
        ("another", "A100", "generic", Dispatcher.ALL_TO_ALL, Execution.EAGER),
        ("NeMo AutoModel", "H100", "nemo-automodel", Dispatcher.DEEPEP, Execution.EAGER),
    ],
)
def test_software_without_a_profile_runs_as_usual_on_its_gpus(
    framework: str, gpu: str, profile: str, dispatcher: Dispatcher, execution: Execution
) -> None:
    moe = {"model": "qwen3-30b-a3b", "ep": "8", "cp": "1", "dp": "16", "framework": framework, "gpu": gpu}
    setup = changed(**moe)
    found = (setup.profile.name, setup.framework.dispatcher, setup.framework.execution)
    assert found == (profile, dispatcher, execution)


def test_chunks_of_embedding_and_loss_may_hold_no_layer() -> None:
    """Llama 3 405B has 126 layers in 16 x 8 chunks: one each, but for the first and the last."""
    strategy = changed(model="llama3-405b", num_gpus="256", tp="8", pp="16", vpp="8", cp="1", dp="2").strategy
    assert strategy.layout.vpp == 8
    assert strategy.stage_layers == (0, *(1,) * 126, 0)


def test_pipelines_interleave_where_chunks_are_given() -> None:
    strategy = changed(pp="4", vpp="4", cp="1", dp="4").strategy
    assert strategy.schedule is ScheduleKind.INTERLEAVED
    assert changed(pp="4", cp="1", dp="4").strategy.schedule is ScheduleKind.ONE_F_ONE_B


def test_fine_tuning_of_adapters_is_named_by_the_table() -> None:
    strategy = changed(table="26.06 NeMo Container / LoRA Performance").strategy
    assert strategy.training is TrainingKind.LORA


def test_only_recent_mxfp8_recipes_overlap_experts() -> None:
    moe = {"model": "qwen3-30b-a3b", "gpu": "GB200", "ep": "8", "cp": "1", "dp": "16", "precision": "MXFP8"}
    moe["framework"] = "Megatron-Bridge (NeMo container)"
    new = changed(table="26.06.01 NeMo Container / Pre-Training Performance", **moe)
    old = changed(table="26.04 NeMo Container / Pre-Training Performance", **moe)
    assert (new.strategy.overlap.experts, old.strategy.overlap.experts) == (True, False)


@pytest.mark.parametrize(
    ("network", "nics", "gbit"),
    [
        ("1600 Gbps RoCE node-node", 8, 200),
        ("Jean Zay: NVLink + 4 Omni-Path links/node", 4, 100),
        ("150 GB/s intra (config), 800 Gbps inter-node (config)", 4, 200),
        ("NVLink + 4x100Gb RoCE/node", 4, 100),
        ("NVLink + 400Gb/s RDMA per GPU", 8, 400),
        ("", 8, 400),
    ],
)
def test_networks(network: str, nics: int, gbit: int) -> None:
    node = changed(network=network).cluster.node
    assert node.nic is not None
    assert node.nics == nics
    assert node.nic.bandwidth_bytes_per_s * 8 / 1e9 == pytest.approx(gbit)


def test_omni_path_reaches_what_was_measured_of_it() -> None:
    """All-reduce of 32 A100 on Jean Zay: 40.5 Gb/s through one link of 100 Gb/s."""
    setup = read_setup(BLOOM)
    nic = setup.cluster.node.nic
    assert nic is not None
    assert nic.efficiency * nic.bandwidth_bytes_per_s * 8 / 1e9 == pytest.approx(40.5)
    assert "node.nic.transport=omni-path" in setup.command


def test_limited_cards_are_described_by_their_name() -> None:
    gpu = changed(gpu="H100-SXM 96GB HBM2e 500W").cluster.gpu
    assert (gpu.power_w, gpu.memory_bytes) == (500, 96e9)


def test_blank_heads_are_those_of_like_runs() -> None:
    like = {**LLAMA, "source": "s", "hidden": "14400", "heads": "96"}
    blank = {**like, "heads": ""}
    other = {**blank, "hidden": "8192"}
    found = list(complete_heads([like, like, {**like, "heads": "32"}, blank, other]))
    assert [record["heads"] for record in found[3:]] == ["96", ""]


def test_time_from_tokens_or_operations_where_it_is_not_stated() -> None:
    assert measure_step_s(changed()) == 12.3
    tokens = changed(iter_time_s="", tokens_per_s_per_gpu="10000")
    assert measure_step_s(tokens) == pytest.approx(256 * 8192 / 160000)
    model = changed(iter_time_s="", tflops_per_gpu="500", tflops_kind="model")
    hardware = changed(iter_time_s="", tflops_per_gpu="500", tflops_kind="hardware(4x fwd)")
    assert measure_step_s(hardware) == pytest.approx(measure_step_s(model) * 4 / 3)
    with pytest.raises(ValueError, match="published"):
        measure_step_s(changed(iter_time_s=""))


def test_a_batch_that_micro_batches_do_not_divide_is_scaled() -> None:
    whole, odd = changed(micro_batch="4"), changed(micro_batch="4", global_batch="272")
    assert odd.strategy.global_batch == 256
    assert predict_step(odd)[0] == pytest.approx(predict_step(whole)[0] * 272 / 256)


def test_an_older_attention_kernel_is_slower() -> None:
    new, old = changed(cp="1", dp="16"), changed(cp="1", dp="16", framework="llm-foundry/Composer FSDP")
    assert predict_step(old)[0] > predict_step(new)[0]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"gpu": "TPU v4"}, "TPU v4"),
        ({"num_gpus": ""}, "num_gpus is not published"),
        ({"tp": "", "dp": ""}, "tp, dp are not published"),
        ({"num_gpus": "15"}, "number of GPUs"),
        ({"precision": "int3"}, "int3"),
        ({"tp": "2.5"}, "whole number"),
        ({"iter_time_s": "fast"}, "not a number"),
    ],
)
def test_rows_that_cannot_be_compared_say_why(columns: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_setup({**LLAMA, **columns})


BLOOM = {
    "id": "x2",
    "model": "bloom-tuning-182B",
    "layers": "78.0",
    "hidden": "13824.0",
    "heads": "64.0",
    "ffn": "55296.0",
    "vocab": "250880.0",
    "seq": "2048.0",
    "gpu": "A100-SXM-80GB",
    "num_gpus": "384.0",
    "network": "Jean Zay: NVLink + 4 Omni-Path links/node",
    "framework": "Megatron-DeepSpeed",
    "precision": "bf16",
    "zero_fsdp": "zero1",
    "tp": "8.0",
    "pp": "6.0",
    "dp": "8.0",
    "micro_batch": "4.0",
    "global_batch": "2048.0",
    "iter_time_s": "121.28",
    "status": "measured",
}


def test_frameworks_of_2021_overlap_and_fuse_less() -> None:
    bloom = read_setup(BLOOM)
    assert bloom.framework.dropout
    assert bloom.framework.boundary_scattered
    assert not bloom.framework.fused_accumulation
    assert not bloom.strategy.overlap.tensor_gradients
    # Who speaks of sequence parallelism ran a later release.
    later = read_setup({**BLOOM, "sp": "0.0"})
    assert later.framework.fused_accumulation
    assert later.strategy.overlap.tensor_gradients
    assert not changed().framework.dropout


def test_heads_that_miss_boundaries_leave_the_tensor_cores() -> None:
    """The chronicles of BLOOM measured 121.28 s with 64 heads of 216, 162.72 s with 128 of 108."""
    usual, narrow = (predict_step(read_setup({**BLOOM, "heads": heads}))[0] for heads in ("64.0", "128.0"))
    assert 25 < narrow - usual < 50
    assert misses_boundaries(Matmul(2048, 2048, 108, 64, DType.BF16))
    assert not misses_boundaries(Matmul(2048, 2048, 216, 32, DType.BF16))


def test_a_run_keeps_blanks_apart_from_numbers() -> None:
    run = read_run({**LLAMA, "vpp": "", "etp": "nan", "sp": "0.0"})
    assert (run.vpp, run.expert_tp, run.sequence_parallel) == (None, None, False)


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "other_name.csv",
        {**LLAMA, "peak_mem_gib": "70"},
        {**LLAMA, "id": "x2", "model": "no-such-model"},
        {**LLAMA, "id": "x3", "status": "OOM", "iter_time_s": "", "micro_batch": "32"},
    )
    compared = compare_records(records_of(str(path)))
    found, skipped = compared.rows, compared.skipped
    assert [row.name.split()[0] for row in found] == ["x1"]
    assert found[0].tags["precision"] == "bf16"
    assert sum(skipped.values()) == 2
    memories = compare_records(records_of(str(path))).memory_rows
    assert [row.out_of_memory for row in memories] == [False, True]
    assert memories[0].measured_bytes == 70 * GIB
    assert not memories[1].fits
    figures = measure_published(str(tmp_path)).figures
    assert figures["out of memory, predicted not to fit"] == 1.0
    assert "peak memory: mean_abs_error" in figures


def test_peaks_whose_overheads_were_fitted_stand_apart(tmp_path: Path) -> None:
    """Those of Megatron-DeepSpeed were learnt from BLOOM's runs, which are no test of them."""
    path = write(tmp_path / "runs.csv", {**LLAMA, "peak_mem_gib": "70"}, {**BLOOM, "peak_mem_gib": "56"})
    assert [row.fitted for row in compare_records(records_of(str(path))).memory_rows] == [False, True]
    found = measure_published(str(path))
    part = "peak memory, {}: mean_abs_error"
    fitted, other = (found.figures[part.format(what)] for what in ("overhead fitted to such rows", "nothing fitted"))
    assert found.figures["peak memory: mean_abs_error"] == pytest.approx((fitted + other) / 2)
    assert "peak memory: of 2 rows 1 have overheads that were fitted to such rows" in found.notes


def test_several_folders_are_taken_together(tmp_path: Path) -> None:
    write(tmp_path / "training_runs.csv", LLAMA)
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "training_runs.csv", {**LLAMA, "id": "x2"})
    found = compare_records(records_of(str(tmp_path), str(tmp_path / "more"))).rows
    assert [row.name.split()[0] for row in found] == ["x1", "x2"]


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training_runs\.csv"):
        measure_published(str(tmp_path))
    write(tmp_path / "training_runs.csv", {"a": "1"})
    with pytest.raises(ValueError, match="columns"):
        measure_published(str(tmp_path))


@needs_data("published")
def test_nearly_every_published_row_has_a_setup() -> None:
    with FILE.open(newline="") as lines:
        records = list(csv.DictReader(lines))
    setups = 0
    for record in complete_heads(records):
        try:
            read_setup(record)
        except ValueError:
            continue
        setups += 1
    assert setups > 0.95 * len(records)


@needs_data("published")
def test_errors_of_some_published_runs() -> None:
    """One row in twelve: fast enough for every day, and it fails when predictions get much worse."""
    with FILE.open(newline="") as lines:
        records = list(complete_heads(list(csv.DictReader(lines))))
    errors = []
    for record in records[::12]:
        try:
            setup = read_setup(record)
            errors.append(predict_step(setup)[0] / measure_step_s(setup) - 1)
        except ValueError:
            continue
    assert len(errors) > 40
    assert mean(abs(error) for error in errors) < 0.12
    assert median(abs(error) for error in errors) < 0.09


@needs_data("published")
def test_errors_of_recipes_with_experts() -> None:
    """DeepSeek-V3 and Kimi K2 of Megatron-Bridge, with what their recipes set."""
    with FILE.open(newline="") as lines:
        records = list(complete_heads(list(csv.DictReader(lines))))
    errors = []
    for record in records:
        bridge = (record["framework"] or "").startswith("Megatron-Bridge")
        if bridge and (record["model"] or "").startswith(("deepseek-v3", "kimi-k2")):
            setup = read_setup(record)
            if is_legal(setup.model, setup.strategy):
                errors.append(predict_step(setup)[0] / measure_step_s(setup) - 1)
    assert len(errors) == 21
    assert mean(abs(error) for error in errors) < 0.08
    assert abs(mean(errors)) < 0.06
