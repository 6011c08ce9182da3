"""Profiler traces taken apart: against points of time one by one, a made-up run of eight ranks, real traces."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.analyze.kineto.analysis import KinetoAnalysis, MatchedCollectives, analyze_kineto
from stepcast.analyze.kineto.kernels import kernel_class
from stepcast.cli.main import main
from stepcast.inputs.table import read
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.views.measured import kineto_view
from stepcast.views.terminal import render_text
from tests.analyze.kineto_traces import (
    LAYERS,
    MATMUL_US,
    NORM_US,
    RANKS,
    REST_US,
    SIZE,
    SLOW_FACTOR,
    SLOW_RANK,
    STEPS,
    TRANSFER_US,
    US,
    device_timeline,
    host_ahead,
    launch_and_work,
    mark,
    write_ranks,
)
from tests.shared import ROOT

KINDS = st.sampled_from([SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.COPY])
SPANS = st.lists(st.tuples(st.integers(7, 10), KINDS, st.integers(0, 60), st.integers(1, 15)), min_size=1, max_size=40)


def near(microseconds: float) -> object:
    return pytest.approx(microseconds * US, abs=1e-12)


@given(SPANS)
@settings(deadline=None)
def test_one_rank_against_points_of_time(spans: list[tuple[int, SpanKind, int, int]]) -> None:
    """Every microsecond is looked at on its own."""
    rank = analyze_kineto(device_timeline(spans)).ranks[0]
    at: dict[SpanKind, set[int]] = {kind: set() for kind in SpanKind}
    for _, kind, start, length in spans:
        at[kind] |= set(range(start, start + length))
    compute, communication, copies = at[SpanKind.COMPUTE], at[SpanKind.COMMUNICATION], at[SpanKind.COPY]
    busy = compute | communication | copies
    window = max(busy) + 1 - min(busy)
    assert rank.window_s == near(window)
    assert rank.compute_s == near(len(compute))
    assert rank.communication_s == near(len(communication))
    assert rank.exposed_communication_s == near(len(communication - compute))
    assert rank.overlapped_communication_s == near(len(communication & compute))
    assert rank.breakdown_s["exposed copies"] == near(len(copies - compute - communication))
    assert rank.idle_s == near(window - len(busy))
    assert sum(rank.breakdown_s.values()) == near(window)
    for stream in rank.streams:
        own: dict[SpanKind, set[int]] = {kind: set() for kind in SpanKind}
        for number, kind, start, length in spans:
            if stream.name == f"stream {number}":
                own[kind] |= set(range(start, start + length))
        assert stream.busy_s == near(len(set().union(*own.values())))
        assert stream.communication_s == near(len(own[SpanKind.COMMUNICATION]))
        assert stream.exposed_communication_s == near(len(own[SpanKind.COMMUNICATION] - compute))


@given(SPANS, st.integers(0, 40), st.integers(1, 40))
@settings(deadline=None)
def test_a_marked_step_is_the_window(spans: list[tuple[int, SpanKind, int, int]], start: int, length: int) -> None:
    """Without launches work counts when it starts; the step begins once its busiest stream is free."""
    begin = start + 0.5  # between two starts, so that rounding decides nothing
    rank = analyze_kineto(device_timeline(spans, [(begin, length)])).ranks[0]
    inside = [span for span in spans if begin <= span[2] <= begin + length]
    busy = {stream: sum(lasts for other, *_, lasts in inside if other == stream) for stream, *_ in inside}
    # Of streams as busy as each other the first that was seen.
    order = list(dict.fromkeys(stream for stream, *_ in spans))
    busiest = max(order, key=lambda stream: busy.get(stream, 0))
    earlier = [at + lasts for stream, _, at, lasts in spans if stream == busiest and at < begin]
    own = [at for stream, _, at, _ in inside if stream == busiest]
    first = max(begin, min(max(earlier), min(own))) if earlier and own else begin
    last = max([begin + length, *(at + lasts for _, _, at, lasts in inside)])
    assert rank.step_s == near(last - first)
    assert rank.window_s == near(last - first)
    assert sum(rank.breakdown_s.values()) == near(last - first)


def analysed(events: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    timeline = read(path)
    assert isinstance(timeline, Timeline)
    return analyze_kineto(timeline).facts()


@pytest.mark.parametrize("backlog", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_lasts_until_the_kernels_it_launched_have_ended(steps: int, backlog: int, tmp_path: Path) -> None:
    """Eight kernels of 12 ms a step; the host needs 78.8 ms to launch them and never waits."""
    events = host_ahead(steps=steps, kernels=8, kernel_us=12_000.0, host_us=78_800.0, backlog=backlog)
    found = analysed(events, tmp_path)
    lag = 0 if backlog else 10e-6  # from the first launch to its kernel
    assert found["step_s"] == pytest.approx(96e-3 + lag / steps)
    assert found["compute_s"] == pytest.approx(96e-3)
    assert found["operations_s"]["matmul"] == pytest.approx(96e-3)
    assert found["bubble_s"] == pytest.approx(lag / steps, abs=1e-9)
    assert found["ranks"][0]["launches_per_step"] == 8
    assert found["kernels"][0]["count"] == 8 * steps


def test_what_no_marked_step_launched_is_not_counted(tmp_path: Path) -> None:
    """Kernels and copies launched before the first mark and after the last one, on a stream of their own."""
    events = host_ahead(steps=2, kernels=4, kernel_us=10_000.0, host_us=30_000.0, backlog=0)
    alone = analysed(events, tmp_path)
    last_us = max(event["ts"] + event["dur"] for event in events)
    for number, (call_us, start_us) in enumerate([(-500.0, 200.0), (last_us + 1.0, last_us + 50.0)]):
        pair = launch_and_work("Memcpy DtoH", 9, call_us, start_us, 5_000.0, 900 + number)
        pair[1]["cat"] = "gpu_memcpy"
        events += pair
        events += launch_and_work("elementwise_kernel", 11, call_us, start_us, 300.0, 950 + number)
    found = analysed(events, tmp_path)
    assert found["operations_s"] == alone["operations_s"] == {"matmul": pytest.approx(40e-3)}
    assert found["step_s"] == alone["step_s"]
    assert found["copy_s"] == 0


def test_kernels_of_graphs_belong_to_the_launch_of_their_graph(tmp_path: Path) -> None:
    events = [mark(0, 0.0, 100.0), *launch_and_work("gemm", 7, 10.0, 50.0, 40.0, 1)]
    # Of the same graph, and one whose launch the trace does not hold.
    events += [launch_and_work("gemm", 7, 10.0, at, 40.0, 1)[1] for at in (95.0, 140.0)]
    events += [launch_and_work("triton_poi_fused_add_0", 7, 20.0, 185.0, 15.0, 2)[1]]
    found = analysed(events, tmp_path)
    assert found["step_s"] == pytest.approx(200e-6)
    assert found["ranks"][0]["launches_per_step"] == 1
    assert found["ranks"][0]["breakdown_s"]["idle: host"] == pytest.approx(55e-6)
    assert found["ranks"][0]["breakdown_s"]["idle: between kernels"] == pytest.approx(10e-6)


def launched(lags: list[tuple[int, int, int]]) -> Timeline:
    """(launch, start, length) of kernels on one stream, in microseconds."""
    builder = TimelineBuilder()
    thread, stream = builder.lane(0, "cpu thread 1"), builder.lane(0, "stream 7")
    for launch, start, length in lags:
        call = builder.add("cudaLaunchKernel", thread, launch * US, 5 * US, kind=SpanKind.HOST)
        builder.flow(call, builder.add("gemm", stream, start * US, length * US))
    return builder.build(measured=True, rebase=False)


def test_idle_time_is_split_by_what_it_waited_for() -> None:
    found = analyze_kineto(
        launched(
            [
                (0, 10, 100),
                (20, 112, 50),  # queued: a rest of 2 us between kernels
                (300, 310, 40),  # launched 138 us after the GPU fell idle: the host's
                (305, 400, 30),  # queued long before, held back for 50 us
            ]
        )
    )
    idle = found.ranks[0].breakdown_s
    assert idle["idle: between kernels"] == near(2)
    assert (idle["idle: host"], idle["idle: dependency"]) == (near(148), near(50))
    assert any(warning.startswith("launch-bound") for warning in found.warnings)
    assert found.ranks[0].launches_per_step == 4


def test_a_host_far_ahead_is_not_launch_bound() -> None:
    found = analyze_kineto(launched([(at, 1000 + 100 * at, 98) for at in range(50)]))
    assert found.ranks[0].host_idle_s == 0
    assert not any(warning.startswith("launch-bound") for warning in found.warnings)
    lag_s = found.ranks[0].launch_lag_s
    assert lag_s is not None
    assert lag_s > 1000 * US


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> KinetoAnalysis:
    folder = tmp_path_factory.mktemp("ranks")
    write_ranks(folder)
    timeline = read(folder)
    assert isinstance(timeline, Timeline)
    return analyze_kineto(timeline)


def test_eight_ranks_wait_for_the_slow_one(eight: KinetoAnalysis) -> None:
    meetings = LAYERS * STEPS
    wait_us = MATMUL_US * (SLOW_FACTOR - 1)
    assert eight.matched_collectives == meetings
    assert eight.unmatched_collectives == 0
    for rank in eight.ranks:
        expected = 0.0 if rank.rank == SLOW_RANK else meetings * wait_us
        assert rank.wait_s == pytest.approx(expected * US, abs=1e-9)
        assert rank.transfer_s == pytest.approx(meetings * TRANSFER_US * US, abs=1e-9)
    (slow,) = eight.stragglers
    assert (slow.rank, slow.last, slow.meetings) == (SLOW_RANK, meetings, meetings)
    assert slow.factor == pytest.approx(SLOW_FACTOR)
    assert slow.waits_s == pytest.approx(meetings * wait_us * US)


def test_eight_ranks_overlap(eight: KinetoAnalysis) -> None:
    """The norm runs behind the all-reduce but for the rest before it; all else is exposed."""
    for rank in eight.ranks:
        slow = SLOW_FACTOR if rank.rank == SLOW_RANK else 1.0
        wait_us = MATMUL_US * (SLOW_FACTOR - slow)
        per_layer = TRANSFER_US + wait_us
        assert rank.steps == STEPS
        assert rank.communication_s == pytest.approx(STEPS * LAYERS * per_layer * US)
        assert rank.overlapped_communication_s == pytest.approx(STEPS * LAYERS * NORM_US * slow * US)
        compute, communication = rank.streams
        assert (compute.name, communication.name) == ("stream 7", "stream 20")
        assert compute.communication_s == communication.compute_s == 0
        assert communication.exposed_communication_s == pytest.approx(rank.exposed_communication_s)
        assert rank.idle_s == pytest.approx(STEPS * LAYERS * REST_US * US)
        layer_us = MATMUL_US * SLOW_FACTOR + TRANSFER_US + REST_US
        assert rank.step_s == pytest.approx(LAYERS * layer_us * US)
        assert sum(rank.breakdown_s.values()) == pytest.approx(rank.window_s)


def test_communication_of_eight_ranks_is_of_one_group(eight: KinetoAnalysis) -> None:
    group = {"total": pytest.approx(eight.communication_s), "exposed": pytest.approx(eight.exposed_comm_s)}
    assert eight.communication_by_group_s == {"tp": group}


def test_eight_ranks_reach_a_bandwidth(eight: KinetoAnalysis) -> None:
    (row,) = eight.collectives
    assert (row.kind, row.ranks, row.size_bytes, row.matched) == ("all-reduce", RANKS, 2 * SIZE, LAYERS * STEPS)
    assert row.transfer_s == pytest.approx(TRANSFER_US * US)
    bus_bytes = 2 * (RANKS - 1) / RANKS * 2 * SIZE
    assert row.busbw_bytes_per_s == pytest.approx(bus_bytes / (TRANSFER_US * US))


def test_facts_and_text_of_eight_ranks(eight: KinetoAnalysis) -> None:
    facts = eight.facts()
    wanted = {"step_s", "operations_s", "bubble_s", "exposed_comm_s", "stragglers", "critical_path", "warnings"}
    assert wanted <= set(facts)
    assert facts["critical_path"][0]["rank"] == SLOW_RANK
    slow = next(rank for rank in facts["ranks"] if rank["rank"] == SLOW_RANK)
    path_s = sum(part["seconds"] for part in facts["critical_path"])
    assert path_s == pytest.approx(slow["window_s"] / max(slow["steps"], 1))
    assert list(facts["operations_s"])[:2] == ["matmul", "communication: all-reduce"]
    assert facts["stragglers"][0]["rank"] == SLOW_RANK
    text = render_text(kineto_view(facts), 120)
    first = text.splitlines()[:5]
    assert first[0].split()[0] == "step"
    assert first[1].startswith("bottleneck  ")
    (line,) = [line for line in first if line.startswith("straggler")]
    assert f"rank {SLOW_RANK} computes 1.50x as long as the median of the others; the others wait" in line
    assert "it came last to 12 of 12" in " ".join(text.split())
    assert "communication of" in text
    short = render_text(kineto_view(facts), 120, verbose=False)
    assert "communication of" not in short
    assert short.splitlines()[:5] == first


def test_one_rank_alone_says_what_is_missing(tmp_path: Path) -> None:
    write_ranks(tmp_path)
    found = analyze_kineto(read(tmp_path / "rank3.json"))
    assert any("one rank cannot tell waiting" in warning for warning in found.warnings)
    assert found.matched_collectives == 0
    assert found.stragglers == []
    some = [str(tmp_path / f"rank{rank}.json") for rank in (0, 3, SLOW_RANK)]
    from stepcast.inputs.source import Source
    from stepcast.inputs.table import read_as_one

    found = analyze_kineto(read_as_one([Source(path) for path in some])[1])
    assert any("5 ranks are missing" in warning for warning in found.warnings)
    assert [one.rank for one in found.stragglers] == [SLOW_RANK]


def test_without_sequence_numbers_collectives_are_counted(tmp_path: Path) -> None:
    write_ranks(tmp_path)
    for path in tmp_path.iterdir():
        text = path.read_text()
        for number in range(1, LAYERS * STEPS + 1):
            text = text.replace(f', "Seq": {number}}}', "}")
        assert "Seq" not in text
        path.write_text(text)
    found = MatchedCollectives(read(tmp_path))
    assert found.matched == LAYERS * STEPS
    assert found.last == {SLOW_RANK: LAYERS * STEPS}


def test_a_real_trace_of_two_ranks_over_gloo() -> None:
    """tools/trace_gloo.py: rank 1 works on twice the samples, and rank 0 waits for it."""
    found = analyze_kineto(read(ROOT / "tests" / "data" / "kineto-gloo"))
    assert [rank.steps for rank in found.ranks] == [3, 3]
    assert any("no GPU work on ranks 0, 1" in warning for warning in found.warnings)
    assert [one.rank for one in found.stragglers] == [1]
    assert 1.3 < found.stragglers[0].factor < 2.2
    assert found.matched_collectives == 9
    first, second = (rank.wait_s for rank in found.ranks)
    assert first is not None
    assert second is not None
    assert first > 3 * second
    for rank in found.ranks:
        assert 0 < rank.exposed_communication_s < rank.communication_s < rank.window_s
        assert sum(rank.breakdown_s.values()) == pytest.approx(rank.window_s)
    assert not any("CUDA graphs" in advice.text for advice in found.advice)  # CPU operators are not launched


def test_a_real_trace_of_a_gpu() -> None:
    """One step of Llama-3.2-1B on an H200: matmuls take half, the host is far ahead."""
    found = analyze_kineto(read(ROOT / "examples" / "kineto-llama-1b.json.gz"))
    rank = found.ranks[0]
    assert sum(rank.breakdown_s.values()) == pytest.approx(rank.window_s)
    assert rank.compute_s > 0.95 * rank.window_s
    assert rank.launch_bound_share < 0.02
    assert list(found.operations_s)[:3] == ["matmul", "element-wise", "attention"]
    assert 0.45 < found.operations_s["matmul"] / sum(found.operations_s.values()) < 0.55
    assert "other" not in found.operations_s


KERNELS = {
    "matmul": [
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
        "ampere_sgemm_128x64_tn",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 10, 11, false>",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3>",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>",
        "void fbgemm_gpu::gen_ai::quantize::kernel_gemm<cutlass::gemm::kernel::GemmUniversal>",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u, 2048u>",
        "triton_tem_fused_mm_0",
        "triton_tem_fused_addmm_relu_12",
        "fused_moe_kernel",
        "_grouped_matmul_kernel",
    ],
    "attention": [
        "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "_ZN5aiter12fmha_bwd_hd128_bf16_causalE",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<128>",
        "triton_tem_fused_flex_attention_0",
        "attn_fwd",
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, transformer_engine::multi_tensor_adam::AdamFunctor>",
    ],
    "norm": [
        "void at::native::vectorized_layer_norm_kernel<c10::BFloat16>",
        "void at::native::GammaBetaBackwardCUDAKernelTemplate<float>",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel",
        "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>",
        "triton_red_fused_native_layer_norm_3",
    ],
    "softmax and loss": [
        "cunn_SoftMaxForward<4, float, float>",
        "triton_per_fused__log_softmax_nll_loss_forward_2",
        "liger_cross_entropy_kernel",
    ],
    "state-space scan": ["_chunk_scan_fwd_kernel", "_bmm_chunk_fwd_kernel", "causal_conv1d_fwd_kernel"],
    "embedding and sort": [
        "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 64ul>",
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1<float>",
        "void fbgemm_gpu::bounds_check_indices_kernel_v1<long>",
        "void fbgemm_gpu::permute_2D_lengths_kernel<int>",
        "void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy800>",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>",
        "void moe_permute_kernel<__nv_bfloat16>",
    ],
    "element-wise": [
        "void at::native::elementwise_kernel<128, 4>",
        "void fbgemm_gpu::_float_to_FP8rowwise_cuda_kernel<float>",
        "void fbgemm_gpu::quantize_float_per_row<float>",
        "triton_poi_fused_add_mul_0",
        "triton_poi_fused_addmm_gelu_0",
        "triton_poi_fused_embedding_mm_1",
        "triton_red_fused_mean_mm_mul_pow_rsqrt_4",
        "void vllm::rotary_embedding_kernel<__nv_bfloat16, true>",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>",
        "void transformer_engine::cast_transpose_kernel<float>",
    ],
    "other": ["something_nobody_has_seen", "void fbgemm_gpu::unheard_of_kernel<float>"],
}


@pytest.mark.parametrize(("label", "name"), [(label, name) for label, names in KERNELS.items() for name in names])
def test_kernel_classes(label: str, name: str) -> None:
    assert kernel_class(name) == label


def test_a_trace_without_work_is_refused() -> None:
    builder = TimelineBuilder()
    builder.add("frame", builder.lane(0, "profiler overhead"), 0.0, 1.0, kind=SpanKind.OTHER)
    with pytest.raises(ValueError, match="no work"):
        analyze_kineto(builder.build(measured=True, source="x.json"))


def test_a_truncated_trace_gives_what_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ranks(tmp_path)
    text = (tmp_path / "rank0.json").read_text()
    (tmp_path / "cut.json").write_text(text[: 2 * len(text) // 3])
    assert main(["analyze", str(tmp_path / "cut.json")]) == 0
    printed = capsys.readouterr()
    assert "matmul" in printed.out
    assert "warning:" in printed.err
