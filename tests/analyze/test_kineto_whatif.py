"""Profiler traces replayed under changes, advice, waits, clocks, and what differs between two traces."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepcast
from stepcast.analyze.kineto.whatif import RankScript, play_together
from stepcast.cli.main import main
from tests.analyze.kineto_traces import (
    LAYERS,
    MATMUL_US,
    NORM_US,
    RANKS,
    REST_US,
    SLOW_FACTOR,
    TRANSFER_US,
    write_ranks,
)
from tests.shared import ROOT

LLAMA = ROOT / "examples" / "kineto-llama-1b.json.gz"
Event = dict[str, Any]


def span(name: str, category: str, start: float, duration: float, thread: int, number: int = 0, **more: Any) -> Event:
    process = 0 if category in ("kernel", "gpu_memcpy") else 9
    args = {**({"correlation": number} if number else {}), **more}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": process,
        "tid": thread,
        "args": args,
    }


def write_trace(
    path: Path, kernels: list[tuple[str, float]], host_us: float, rank: int = 0, offset: float = 0.0
) -> Path:
    """Write a step whose kernels of one stream the host launches *host_us* apart."""
    events, free = [], 0.0
    for number, (name, duration) in enumerate(kernels, 1):
        issued = (number - 1) * host_us
        events.append(span("cudaLaunchKernel", "cuda_runtime", issued + offset, 2.0, 1, number))
        start = max(free, issued + 5.0)
        comm = {"Collective name": "allreduce", "Group size": 2, "Process Group Ranks": "[0, 1]", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "Float", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", "Process Group Name": "1"} if "nccl" in name else {}  # fmt: skip
        events.append(span(name, "kernel", start + offset, duration, 7, number, **comm))
        free = start + duration
    info = {"rank": rank, "world_size": 2} if rank or offset else {}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
    return path


ADD, NORM, GEMM, REDUCE = "vectorized_elementwise_kernel", "layer_norm_kernel", "nvjet_gemm", "ncclDevKernel_AllReduce"


def replay(path: Path, *changes: str) -> stepcast.KinetoReplay:
    result = stepcast.replay(path, what_if=changes)
    assert isinstance(result, stepcast.KinetoReplay)
    return result


def test_known_answers(tmp_path: Path) -> None:
    busy = write_trace(tmp_path / "busy.json", [(GEMM, 100.0), (ADD, 40.0), (NORM, 60.0), (REDUCE, 80.0)], 1.0)
    assert replay(busy).step_s == pytest.approx(280e-6, rel=0.02)
    assert replay(busy, "kernel:gemm=0.5x").step_s == pytest.approx(230e-6, rel=0.02)
    assert replay(busy, "class.matmul=2x").step_s == pytest.approx(380e-6, rel=0.02)
    assert replay(busy, "collective.tp=2x").step_s == pytest.approx(240e-6, rel=0.02)
    compiled = replay(busy, "compile=elementwise")
    assert compiled.step_s == pytest.approx(240e-6 + 2.7 * 2e-6, rel=0.01)  # and the first launch of its host
    assert compiled.low_s == pytest.approx(210e-6, rel=0.03)
    late = write_trace(tmp_path / "late.json", [(GEMM, 10.0)] * 20, 50.0)
    assert replay(late).error == pytest.approx(0, abs=0.01)
    assert replay(late, "host=graphs").step_s == pytest.approx(200e-6, rel=0.05)
    unprofiled = replay(late, "host=unprofiled")
    assert (
        unprofiled.step_s == unprofiled.unprofiled_step_s == pytest.approx(replay(late).step_s - 19 * 0.9e-6, rel=1e-3)
    )
    assert replay(late, "host=0.5x").step_s == pytest.approx(0.5 * replay(late).step_s, rel=0.05)


@pytest.mark.parametrize(
    ("operators", "factors"),
    [(["eq", "all", "is_nonzero"], (2.4, 2.2)), (["to", "all", "is_nonzero"], (1.65, 1.5)), (["eq", "all"], (1, 1))],
)
def test_masks_that_only_eager_code_leaves_out(
    tmp_path: Path, operators: list[str], factors: tuple[float, float]
) -> None:
    kernels = [("sdpa_flash_fprop", 100.0), ("sdpa_flash_bprop", 200.0), ("compute_dot_do_o", 50.0)]
    path = write_trace(tmp_path / "attention.json", kernels, 1.0)
    trace = json.loads(path.read_text())
    words = [*operators, "scaled_dot_product_attention"]
    trace["traceEvents"] += [span(f"aten::{word}", "cpu_op", -50.0 + at, 0.5, 1) for at, word in enumerate(words)]
    path.write_text(json.dumps(trace))
    forward, backward = factors
    changed = replay(path, "host=graphs")
    assert changed.step_s - replay(path).step_s == pytest.approx(
        (100 * forward + 200 * backward - 300) * 1e-6, abs=6e-6
    )
    assert any(("no check of a mask" in text) == (forward == 1) for text in changed.assumptions if "masks" in text)


def test_a_real_trace_is_replayed_and_advised_on() -> None:
    assert abs(replay(LLAMA).error) < 0.03
    advice = stepcast.analyze(LLAMA)["advice"]
    assert advice[0]["what_if"] == "compile=elementwise"
    assert 0.15 < advice[0]["share"] < 0.3
    assert "of the step" in advice[0]["evidence"] or "%" in advice[0]["evidence"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--what-if", "kernel:nothing=2x"], "matches no work"),
        (["--what-if", "speed=2x"], "unknown change"),
        (["--what-if", "compile=all"], "must be elementwise"),
        (["--what-if", "rank.0=healthy"], "needs the traces of that rank and of others; given: rank 0"),
        (["--what-if", "host"], "is no change"),
        (["--gpu", "h100"], "is for Megatron traces"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(LLAMA), *words]) == 2
    assert said in capsys.readouterr().err


def test_who_waits_for_whom_and_clocks(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json", [(GEMM, 100.0), (REDUCE, 150.0)], 1.0, 0, offset=1e-9)
    write_trace(tmp_path / "rank1.json", [(GEMM, 200.0), (REDUCE, 50.0)], 1.0, 1, offset=30.0)
    facts = stepcast.analyze(tmp_path).facts()
    assert [(row["rank"], row["waits_for"]) for row in facts["waits"]] == [(0, 1)]
    assert facts["waits"][0]["wait_s"] == pytest.approx(100e-6)
    assert facts["clock_offset_s"]["1" if "1" in facts["clock_offset_s"] else 1] == pytest.approx(30e-6, abs=1e-6)
    assert any("rank 1" in row["text"] for row in facts["advice"])


def test_two_traces_differ_by_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_trace(tmp_path / "before.json", [(GEMM, 100.0), (ADD, 40.0), (NORM, 60.0)], 1.0)
    after = write_trace(tmp_path / "after.json", [(GEMM, 150.0), ("triton_poi_fused", 30.0), (NORM, 60.0)], 1.0)
    assert main(["compare", str(before), str(after), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["kernels"] if row["on"] == "gpu"}
    changes = {name: row["change"] for name, row in rows.items()}
    assert changes == {GEMM: "slower", ADD: "removed", "triton_poi_fused": "added", NORM: "same"}
    assert rows[GEMM]["difference_s"] == pytest.approx(50e-6)
    # A side without work of a GPU, as in the traces that HTA's test compares; and more names than are shown.
    host = [
        span(name, "cpu_op", 10.0 * number, 5.0, 1) for number, name in enumerate([*map(str, range(300)), "aten::add"])
    ]
    after.write_text(json.dumps({"schemaVersion": 1, "traceEvents": host}))
    assert main(["compare", str(before), str(after), "--json"]) == 0
    rows = {row["name"]: row["change"] for row in json.loads(capsys.readouterr().out)["kernels"]}
    assert (rows[GEMM], rows["aten::add"], rows["299"]) == ("removed", "added", "added")


def test_waits_for_a_slow_rank_are_not_communication_to_hide(tmp_path: Path) -> None:
    """The slow rank hides 60 of the 90 us of its transfers behind its norm."""
    write_ranks(tmp_path)
    rows = stepcast.analyze(tmp_path)["advice"]
    hidden = next(row for row in rows if row["text"].startswith("hide the tp communication"))
    assert hidden["saves_s"] == pytest.approx(LAYERS * (TRANSFER_US - SLOW_FACTOR * NORM_US) * 1e-6)
    assert rows[0]["text"].startswith("repair or replace rank 5")
    # Its norms are longer too, but behind the transfer: the others wait for its matmuls alone.
    assert rows[0]["saves_s"] == pytest.approx(LAYERS * (SLOW_FACTOR - 1) * MATMUL_US * 1e-6)


def test_ranks_wait_for_one_another_in_a_replay(tmp_path: Path) -> None:
    """The clocks of the eight ranks differ by milliseconds, and their traces do not tie kernels to launches."""
    write_ranks(tmp_path)
    slow_us = SLOW_FACTOR * MATMUL_US
    known_us = {
        (): slow_us + TRANSFER_US + REST_US,
        ("class.matmul=0.5x",): slow_us / 2 + TRANSFER_US + REST_US,
        ("rank.5=healthy",): MATMUL_US + TRANSFER_US + REST_US,
        ("rank.5=healthy", "rank.2=1.5x"): 1.5 * MATMUL_US + TRANSFER_US + REST_US,
        # The norm of the slow rank, 2 us after its matmul, is longer than half of a transfer.
        ("collective.tp=2x",): slow_us + REST_US + SLOW_FACTOR * NORM_US + REST_US,
        ("class.norm=3x",): slow_us + REST_US + 3 * SLOW_FACTOR * NORM_US + REST_US,
    }
    for changes, layer_us in known_us.items():
        result = replay(tmp_path, *changes)
        assert result.step_s == pytest.approx(LAYERS * layer_us * 1e-6, rel=0.01), changes
        assert [row["changed_s"] for row in result.ranks] == pytest.approx([result.step_s] * RANKS, rel=0.02), changes
    with pytest.raises(ValueError, match="does not tie kernels to the calls"):
        replay(tmp_path, "host=graphs")


def test_collectives_in_different_orders_do_not_block_a_replay() -> None:
    """Each rank launches the collective first that the other launches second."""
    rows = np.arange(2)
    script = RankScript(
        rank=0, steps=1, start_s=0.0, host_start_s=0.0, measured_s=3.0, duration_s=np.ones(2), stream=rows, call=rows,
        waits_for=np.full(2, -1), gap_s=np.zeros(2), meeting=rows, names=("a", "b"), can_fuse=rows < 0, groups=("", ""),
        work_s=np.ones(2), loading_s=np.zeros(2), call_s=np.zeros(2), waits=rows < 0, events=rows, stays_eager=rows < 0,
        optimizer_s=np.zeros(2), usual_call_s=0.0, gradients=0, mask="", lag_s=0.0, has_launches=True,
    )  # fmt: skip
    assert play_together([script, replace(script, rank=1, meeting=rows[::-1])]) == pytest.approx([3.0, 3.0])


def write_loading(path: Path, rank: int, loading: list[float], host_us: float = 0.0) -> None:
    """Write a rank whose steps wait for a batch and *host_us*, compute 200 us and reduce; others wait for the last."""
    trace, start = [], 0.0
    for step, own in enumerate(loading):
        reduce = {"Collective name": "allreduce", "Group size": 2, "Process Group Ranks": "[0, 1]", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "Float", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", "Process Group Name": "1"}  # fmt: skip
        trace.append(
            span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", start, own, 1)
        )
        issued, end = start + own + host_us, start + 900.0 + host_us + 300.0
        for number, (name, begin, lasts) in enumerate(
            [(GEMM, issued, 200.0), (REDUCE, issued + 200, end - issued - 200)]
        ):
            key = 1 + 2 * step + number
            trace.append(span("cudaLaunchKernel", "cuda_runtime", issued + number, 1.0, 1, key))
            trace.append(span(name, "kernel", begin, lasts, 7 + number, key, **(reduce if number else {})))
        trace.append(span("cudaDeviceSynchronize", "cuda_runtime", issued + 2, end - issued - 2, 1))
        trace.append(span(f"ProfilerStep#{step}", "user_annotation", start, end - start, 1))
        start = end
    info = {"rank": rank, "world_size": 2}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": trace}))


def test_a_late_data_loader_is_named(tmp_path: Path) -> None:
    write_loading(tmp_path / "rank0.json", 0, [50.0] * 3)
    write_loading(tmp_path / "rank1.json", 1, [900.0] * 3)
    facts = stepcast.analyze(tmp_path).facts()
    assert [row["breakdown_s"]["idle: data loading"] for row in facts["ranks"]] == pytest.approx([150e-6, 2700e-6])
    assert [(row["rank"], row["cause"]) for row in facts["stragglers"]] == [(1, "host")]
    saved = {row["text"].partition(":")[0]: row["saves_s"] for row in facts["advice"]}
    assert saved["find out what delays the CPU of rank 1"] == pytest.approx(850e-6)
    assert saved["load data ahead of the step (DataLoader workers, prefetching)"] == pytest.approx(900e-6)
    assert not any("CUDA graphs" in text for text in saved)
    assert not any("launch-bound" in text for text in facts["warnings"])
    assert not any("launch-bound" in text for text in replay(tmp_path, "collective=2x").warnings)
    assert replay(tmp_path, "rank.1=healthy").step_s == pytest.approx((50 + 200 + 100) * 1e-6)


def test_a_late_data_loader_is_no_slow_host(tmp_path: Path) -> None:
    """The host of a healed rank works as long as that of the others, which do the same besides their batches."""
    for rank, loading_us in enumerate((50.0, 900.0)):
        write_loading(tmp_path / f"rank{rank}.json", rank, [loading_us] * 3, host_us=100.0)
    late_us = 900 + 100 + 200 + 100
    for changes in ((), ("rank.0=healthy",)):
        assert replay(tmp_path, *changes).step_s == pytest.approx(late_us * 1e-6, rel=0.01)
    assert replay(tmp_path, "rank.1=healthy").step_s == pytest.approx((50 + 100 + 200 + 100) * 1e-6, rel=0.01)


def test_a_slow_step_is_named(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "steps.json", [(GEMM, 100.0), (GEMM, 100.0), (GEMM, 900.0)], 1000.0)
    trace = json.loads(path.read_text())
    trace["traceEvents"] += [
        span(f"ProfilerStep#{step}", "user_annotation", 1000.0 * step, 110.0, 1) for step in range(3)
    ]
    path.write_text(json.dumps(trace))
    assert any(text.startswith("step 3 of 3 takes 905.00 us") for text in stepcast.analyze(path)["warnings"])
