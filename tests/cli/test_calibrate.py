"""The verb ``calibrate`` on measured operators, profiler traces and Megatron traces."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepcast.calibrate.megatron import LinkPoint, fit_link
from stepcast.cli.main import main
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import ALONE
from stepcast.hardware import load_gpu
from stepcast.inputs.kineto import ops as kineto_ops
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Matmul
from tests.shared import DATA, ROOT, needs_data

ATEN = kineto_ops.OPERATORS
TRACE = ROOT / "examples" / "kineto-llama-1b.json.gz"
OPERATORS = ROOT / "examples" / "operators-h200.csv"
RANK = ROOT / "examples" / "megatron-rank7.txt"
RUNS = DATA / "megatron-traces"
# Shapes of one number format, from microseconds to tens of milliseconds.
SIZES = [(m, n, k) for m in (128, 1024, 8192, 16384) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096))]


def calibrate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["calibrate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["calibrate", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stepcast: ")
    assert error.count("\n") == 1
    return error


def table(rows: list[str], separator: str = ",") -> str:
    return "\n".join([row.replace(",", separator) for row in ["op,dtype,M,N,K,numel,ms", *rows]]) + "\n"


def slower_matmuls(factor: float) -> list[str]:
    """Rows of a GPU whose every matmul takes *factor* times what an H200's does."""
    gpu, fit = load_gpu("h200"), default_fit()
    return [
        f"linear,bf16,{m},{n},{k},,{1e3 * factor * compute_price(Matmul(m, n, k), gpu, fit, ALONE).seconds:.6g}"
        for m, n, k in SIZES
    ]


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_slower_gpu_is_found_and_used(separator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, written = tmp_path / "mine.csv", tmp_path / "c.toml"
    path.write_text(table(slower_matmuls(1.3), separator))
    found = calibrate(capsys, str(path), "--gpu", "h200", "-o", str(written))
    (entry,) = found["classes"].values()
    assert entry["factor"] == pytest.approx(1.3, rel=0.01)
    assert entry["before"] == pytest.approx(1 - 1 / 1.3, abs=0.001)
    assert max(entry["after"], entry["left_out"]) < 0.01
    # ``op`` takes the file, without being told the GPU.
    words = ["op", "matmul", "--m", "2048", "--n", "4096", "--k", "4096", "--json"]
    assert main([*words, "--gpu", "h200"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--calibration", str(written)]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["source"] == "calibrated"
    assert own["time_s"] == pytest.approx(1.3 * plain["time_s"], rel=0.02)
    assert main(["show", str(written)]) == 0
    assert "matmul.bf16" in capsys.readouterr().out


def test_what_points_cannot_tell_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        table([*slower_matmuls(1.2)[:3], "add,bf16,,,,1000000,0.01", "mystery,bf16,,,,5,0.1", "add,bf8,,,,5,0.1"])
    )
    found = calibrate(capsys, str(path), "--gpu", "h200")
    assert found["classes"]["stream.add"]["left_out"] is None
    assert found["classes"]["stream.add"]["unidentified"] == ["slope", "least_s"]
    said = " ".join(found["warnings"])
    for words in (
        "stream.add: one size gives a factor",
        "slope not identified for matmul.bf16",
        "operator 'mystery' is not known",
        "number format 'bf8' is not known",
    ):
        assert words in said


def test_a_correction_that_does_not_help_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times that scatter around the prices: no constant brings points left out closer."""
    gpu, fit = load_gpu("h200"), default_fit()
    rows = [
        f"linear,bf16,{m},{n},{k},,"
        f"{1e3 * (0.7, 1.4)[place % 2] * compute_price(Matmul(m, n, k), gpu, fit, ALONE).seconds:.6g}"
        for place, (m, n, k) in enumerate(SIZES)
    ]
    path, written = tmp_path / "noise.csv", tmp_path / "c.toml"
    path.write_text(table(rows))
    found = calibrate(capsys, str(path), "--gpu", "h200", "-o", str(written))
    assert found["classes"]["matmul.bf16"]["used"] is False
    assert found["before"] == found["after"] == found["left_out"]
    assert "not corrected" in " ".join(found["warnings"])
    assert "class" not in tomllib.loads(written.read_text())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (table(["linear,bf16,1,2"]), ":2: has 4 columns; expected 7"),
        (table(["add,bf16,,,,5,fast"]), ":2: ms is 'fast'; expected a number"),
        (table(["add,bf16,,,,5,0"]), ":2: ms is 0"),
        (table(["add,bf16,,,,5,1", "linear,bf16,8,8,,,1"]), ":3: linear without K"),
        (table(["add,bf16,,,,-5,1"]), ":2: numel is -5"),
        (table([]), ":1: table has a header but no rows"),
        (table(["mystery,bf16,,,,5,1"]), "no operator of a known kind"),
    ],
)
def test_mistakes_in_a_table(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert f"{path}" in (error := one_line(capsys, str(path), "--gpu", "h200"))
    assert said in error


def test_mistakes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "say which one with --gpu" in one_line(capsys, str(OPERATORS))
    assert "unknown" in one_line(capsys, str(OPERATORS), "--gpu", "h2000").lower()
    assert "--gpu or --cluster" in one_line(capsys, str(RANK))
    assert "runs of one kind at a time" in one_line(capsys, str(OPERATORS), str(RANK), "--gpu", "h200")
    assert "needs runs of one of" in one_line(capsys, str(ROOT / "examples" / "simai-gpt-13b.txt"))


def test_a_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(OPERATORS)]) == 0
    assert "measured operator times" in capsys.readouterr().out


def test_the_shipped_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "c.toml"
    found = calibrate(capsys, str(TRACE), "-o", str(written))
    assert found["gpu"] == "h200"
    matmul = found["classes"]["matmul.bf16"]
    assert matmul["points"] == 13
    assert matmul["before"] > 0.10
    assert matmul["left_out"] < 0.05
    assert matmul["least_s"] == 0
    assert {"attention.forward", "attention.backward", "stream.rms-norm"} <= set(found["classes"])
    points = tomllib.loads(written.read_text())["points"]
    assert points["matmul.bf16 16384x128256x2048"] == pytest.approx(0.0108855, rel=0.001)
    words = "--model llama-3.2-1b --cluster hgx-h200 --gpus 1 --global-batch 4 --micro-batch 4 --seq 4096"
    assert main(["predict", *words.split(), "--calibration", str(written), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0.1


def event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    where = 7 if category == "kernel" else 1
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0, "tid": where, "ts": start, "dur": duration, "args": args
    }  # fmt: skip


def operator(number: int, name: str, shapes: list[list[int]], types: str, values: list[str]) -> dict[str, Any]:
    args = {"External id": number, "Input Dims": shapes, "Input type": [types] * len(shapes), "Concrete Inputs": values}
    return event("cpu_op", name, 10.0 * number, 5.0, **args)


def trace(tmp_path: Path, events: list[dict[str, Any]], **head: Any) -> str:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}))
    return str(path)


def test_a_trace_of_another_gpu_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    found = calibrate(capsys, str(TRACE), "--gpu", "a100-sxm-80gb")
    assert "was measured on h200, and is compared with estimates of a100-sxm-80gb" in found["warnings"][0]


def test_kernels_are_tied_to_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the operator's number, or the launch's; several kernels of one call are one time."""
    flash = [[2, 1024, 16, 64], [2, 1024, 4, 64], [2, 1024, 4, 64], *[[]] * 7]
    flags = ["", "", "", "", "", "1024", "1024", "0.", "True", "False"]
    events = [
        operator(1, "aten::mm", [[512, 256], [256, 1024]], "c10::Half", ["", ""]),
        operator(2, "aten::bmm", [[4, 64, 32], [4, 32, 16]], "float", ["", ""]),
        operator(3, "aten::_flash_attention_forward", flash, "c10::BFloat16", flags),
        operator(4, "aten::mm", [[512, 256]], "c10::Half", [""]),
        event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=77, **{"External id": 2}),
        event("kernel", "hgemm", 100, 30, **{"External id": 1}),
        event("kernel", "splitKreduce", 131, 10, **{"External id": 1}),
        event("kernel", "cutlass_tensorop_s1688", 150, 20, correlation=77),
        event("kernel", "flash_fwd_kernel", 180, 90, **{"External id": 3}),
        event("kernel", "hgemm", 300, 30, **{"External id": 4}),
        event("kernel", "ncclDevKernel_AllReduce", 400, 500, **{"External id": 9}),
    ]
    written = tmp_path / "c.toml"
    found = calibrate(capsys, trace(tmp_path, events), "--gpu", "a100-sxm-80gb", "-o", str(written))
    pause_s = default_fit().step_launch_s
    points = tomllib.loads(written.read_text())["points"]
    assert points == {
        "matmul.fp16 512x1024x256": pytest.approx(40e-6 + pause_s, rel=1e-5),
        "bmm.tf32 64x16x32 batch 4": pytest.approx(20e-6 + pause_s, rel=1e-5),
        "attention.forward 2x1024 heads 16/4x64": pytest.approx(90e-6 + pause_s, rel=1e-5),
    }
    assert "1 rows left out: aten::mm with inputs that are not understood" in " ".join(found["warnings"])


def test_traces_that_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = event("kernel", "hgemm", 100, 30, **{"External id": 1})
    bare = event("cpu_op", "aten::mm", 1, 5, **{"External id": 1})
    assert "record_shapes=True" in one_line(capsys, trace(tmp_path, [bare, kernel]), "--gpu", "h200")
    assert "no GPU kernels" in one_line(capsys, trace(tmp_path, [bare]), "--gpu", "h200")
    known = operator(1, "aten::mm", [[8, 8], [8, 8]], "float", ["", ""])
    odd = trace(tmp_path, [known, kernel], deviceProperties=[{"name": "Quantum 9000"}])
    assert "Quantum 9000 is not in the catalogue" in one_line(capsys, odd)


def test_causal_flags_and_layouts_are_those_of_pytorch() -> None:
    values = [""] * 16
    values[14] = "True"
    shapes = [[2, 16, 1024, 64], [2, 16, 1024, 64], [2, 4, 512, 64], [2, 4, 512, 32], *[[]] * 12]
    work = ATEN["aten::_cudnn_attention_backward"](shapes, DType.BF16, values)
    assert work == Attention(2, 1024, 512, 16, 4, 64, 32, True, True, DType.BF16)
    values[11] = "False"
    swapped = [[2, 1024, 16, 64], [2, 1024, 16, 64], [2, 512, 4, 64], [2, 512, 4, 32], *[[]] * 12]
    work = ATEN["aten::_flash_attention_backward"](swapped, DType.BF16, values)
    assert work == Attention(2, 1024, 512, 16, 4, 64, 32, False, True, DType.BF16)


def test_latency_and_bandwidth_of_transfers() -> None:
    sizes = (2**14, 2**20, 2**26)
    points = [LinkPoint("tp", "all-reduce", 2, size, 20e-6 + size / 100e9) for size in sizes]
    fitted = fit_link(points)
    assert fitted.latency_s == pytest.approx(20e-6, rel=1e-6)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(100e9, rel=1e-6)
    assert fitted.error < 1e-9
    one = fit_link(points[-1:])
    assert one.latency_s is None
    assert one.bandwidth_bytes_per_s == pytest.approx(2**26 / points[-1].seconds)


def test_one_rank_alone_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "c.toml"
    found = calibrate(capsys, str(RANK), "--gpu", "a800-sxm-80gb", "-o", str(written))
    said = " ".join(found["warnings"])
    assert "one rank cannot separate a slow GPU from slow work" in said
    assert "cannot split latency from bandwidth" in said
    assert "one micro-batch per step" in said
    assert found["left_out"] is None
    assert "fp32 matmuls run as tf32: they are faster than the fp32 peak allows" in found["assumptions"]
    assert main(["show", str(written)]) == 0
    assert "backward_factor_tf32" in capsys.readouterr().out


@needs_data("megatron-traces")
def test_whole_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("20250320141611", "20250320144110", "20250321130317")
    written = tmp_path / "c.toml"
    runs = [str(RUNS / name) for name in names]
    found = calibrate(capsys, *runs, "--cluster", "a800-node", "-o", str(written))
    constants = {name: one["value"] for name, one in found["constants"].items()}
    assert found["points"] == 12
    assert found["left_out"] < 0.03
    assert constants["compute_factor_fp16"] == pytest.approx(1.0, abs=0.05)
    assert constants["backward_factor_fp16"] == pytest.approx(2.0, abs=0.1)
    # The 40 MiB all-reduces take 0.35 ms: 120 GB/s, latency included.
    assert 118e9 < constants["tp_bandwidth_bytes_per_s"] < 135e9
    assert 0.5 < constants["tp_link_efficiency"] < 0.9
    assert any(text.startswith("pp: one message size (40.00 MiB)") for text in found["warnings"])
    words = "--cluster a800-node --gpus 4 --tp 2 --pp 2 --global-batch 1 --micro-batch 1 --seq 4096"
    extra = ["--model", "llama-2-13b", "--precision", "fp16", "--calibration", str(written), "--json"]
    assert main(["predict", *words.split(), *extra]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["sources"]["matmul"] == "calibrated"
    assert predicted["step_s"] == pytest.approx(0.9317, rel=0.05), "the first of these runs"


@needs_data("megatron-traces")
def test_slow_ranks_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = calibrate(capsys, str(RUNS / "20240923205004"), "--gpu", "a800-sxm-80gb")
    assert any("rank 7 is 2.26 times as slow and left out" in text for text in found["warnings"])
    last = [one for one in found["stages"] if one["stage"] == 3 and one["phase"] == "forward"]
    assert last[0]["measured_s"] == pytest.approx(0.2497, rel=0.01), "rank 6 alone"


def test_a_trace_that_lacks_its_passes_gives_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank7.txt"
    kept = [line for line in RANK.read_text().splitlines() if "backward_step" not in line]
    path.write_text("\n".join(kept) + "\n")
    found = calibrate(capsys, str(path), "--gpu", "a800-sxm-80gb")
    assert found["classes"] == {}
    assert found["points"] == 0
    assert "no rank that is not slow has both a forward and a backward" in " ".join(found["warnings"])
    assert found["constants"]["tp_bandwidth_bytes_per_s"]["value"] == pytest.approx(123e9, rel=0.01)


def test_another_model_than_the_traced_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    error = one_line(capsys, str(RANK), "--gpu", "a800-sxm-80gb", "--model", "llama-2-7b")
    assert "was traced with hidden 5120, but llama-2-7b has 4096" in error
