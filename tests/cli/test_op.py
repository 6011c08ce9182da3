"""The verb ``op``."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.hardware import load_gpu
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from tests.cli.test_main import run
from tests.shared import ROOT

MATMUL = ["op", "matmul", "--m", "4096", "--n", "12288", "--k", "4096", "--gpu", "h200"]
ATTENTION = [
    "op",
    "attention",
    "--batch",
    "2",
    "--seq",
    "4096",
    "--heads",
    "32",
    "--kv-heads",
    "8",
    "--head-dim",
    "128",
    "--gpu",
    "h200",
]


def result(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_what_the_contract_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, *MATMUL, "--dtype", "bf16")
    price = compute_price(Matmul(4096, 12288, 4096), load_gpu("h200"), default_fit())
    assert found["time_s"] == price.seconds
    assert (found["bound"], found["source"]) == ("compute", "fitted")
    assert found["efficiency"] == price.efficiency
    assert found["flops_per_s"] == pytest.approx(2 * 4096 * 12288 * 4096 / price.seconds)
    assert found["uncertainty"]["low_s"] < found["time_s"] < found["uncertainty"]["high_s"]


@pytest.mark.parametrize(
    ("words", "work"),
    [
        (["bmm", "--batch", "32", "--m", "512", "--n", "512", "--k", "128"], Matmul(512, 512, 128, 32)),
        (["grouped", "--groups", "8", "--m", "4096", "--n", "512", "--k", "128"], GroupedMatmul(4096, 512, 128, 8)),
        (["attention", "--seq", "512", "--heads", "8", "--head-dim", "64", "--backward"], Attention(1, 512, 512, 8, 8, 64, 64, True, True)),
        (["attention", "--seq", "8k", "--heads", "8", "--head-dim", "64"], Attention(1, 8192, 8192, 8, 8, 64, 64)),
        (["attention", "--seq", "512", "--keys", "2048", "--heads", "8", "--head-dim", "64", "--no-causal"], Attention(1, 512, 2048, 8, 8, 64, 64, False)),
        (["add", "--rows", "512", "--columns", "1024"], Elementwise(ElementwiseKind.ADD, 512, 1024, 2**21, 2**20)),
        (["softmax", "--rows", "512", "--columns", "1024", "--backward"], Elementwise(ElementwiseKind.SOFTMAX, 512, 1024, 2**21, 2**20, True)),
        (["cast", "--rows", "512", "--columns", "1024"], Elementwise(ElementwiseKind.CAST, 512, 1024, 2**20, 2**21)),
    ],
)  # fmt: skip
def test_every_kind_is_the_operator_it_says(
    words: list[str], work: Matmul | GroupedMatmul | Attention | Elementwise, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(capsys, "op", *words, "--gpu", "h200")
    assert found["time_s"] == compute_price(work, load_gpu("h200"), default_fit()).seconds


def test_a_cast_into_fp8_looks_for_the_largest_first(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--rows", "8192", "--columns", "8192", "--gpu", "h200"]
    wide, fp8 = (result(capsys, "op", "cast", *shape, "--to", to) for to in ("fp32", "fp8"))
    assert wide["bytes"] == 8192 * 8192 * 6
    assert fp8["bytes"] == 8192 * 8192 * 5
    assert fp8["time_s"] > wide["time_s"]


def test_a_sweep_doubles_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    rows = result(capsys, *MATMUL, "--sweep")["rows"]
    assert [row["size"]["m"] for row in rows] == [4096, 8192, 16384, 32768, 65536]
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    lengths = [row["size"]["seq"] for row in result(capsys, *ATTENTION, "--sweep")["rows"]]
    assert lengths == [4096, 8192, 16384, 32768, 65536]
    assert main(["op", "rms-norm", "--columns", "4096", "--gpu", "h200", "--sweep"]) == 0
    assert "65,536" in capsys.readouterr().out


def test_busy_gpus_are_slower(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["op", "matmul", "--m", "8192", "--n", "8192", "--k", "8192", "--gpu", "h200"]
    assert result(capsys, *large, "--busy")["time_s"] > result(capsys, *large)["time_s"]


def test_text_names_bound_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MATMUL) == 0
    text = capsys.readouterr().out
    for word in ("compute", "TFLOP/s", "fitted", "m 4,096, n 12,288, k 4,096"):
        assert word in text


def test_a_calibration_changes_the_price_and_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('gpu = "h200"\n[class."matmul.bf16"]\nfactor = 2.0\n')
    plain = result(capsys, *MATMUL)
    own = result(capsys, *MATMUL[:-2], "--calibration", str(mine))
    assert own["gpu"] == "h200"
    assert own["source"] == "calibrated"
    assert own["time_s"] == pytest.approx(2 * plain["time_s"])


def test_the_shipped_calibration_is_close_to_the_fit(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "calibrations" / "h200.toml")
    plain, own = result(capsys, *ATTENTION), result(capsys, *ATTENTION, "--calibration", example)
    assert own["source"] == "calibrated"
    assert own["time_s"] == pytest.approx(plain["time_s"], rel=0.1)


def test_a_calibration_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "calibrations" / "h200.toml")
    found = result(capsys, "show", example)
    assert (found["format"], found["gpu"]) == ("calibration", "h200")
    assert found["classes"]["matmul.bf16"]["factor"] == pytest.approx(0.938115)
    assert main(["show", example]) == 0
    assert "attention.backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["matmul", "--m", "1", "--n", "1", "--k", "1"], "--gpu"),
        (["matmul", "--m", "1", "--gpu", "h200"], "matmul needs --n and --k"),
        (["rms-norm", "--rows", "4", "--gpu", "h200"], "needs --columns"),
        (["matmul", "--m", "0", "--n", "1", "--k", "1", "--gpu", "h200"], "--m: expected a whole number"),
        (["attention", "--seq", "8", "--heads", "7", "--kv-heads", "3", "--head-dim", "64", "--gpu", "h200"], "--kv-heads 3 does not divide --heads 7"),
        (["matmul", "--m", "1", "--n", "1", "--k", "1", "--gpu", "h2000"], "unknown gpu"),
        (["matmul", "--m", "1", "--n", "1", "--k", "1", "--gpu", "h200", "--backward"], "two matmuls"),
        (["add", "--rows", "1", "--columns", "1", "--gpu", "h200", "--to", "fp8"], "for cast only"),
        ([], "name a KIND, or use --table"),
        (["add", "--rows", "1", "--columns", "1", "--gpu", "h200", "-o", "rows.csv"], "-o needs --table"),
        (["--table", "tables", "--gpu", "h200"], "--gpu: has no effect with --table"),
        (["matmul", "--m", "100000", "--n", "1", "--k", "1", "--gpu", "h200", "--sweep"], "at most"),
        (["matmul", "--m", "1", "--n", "1", "--k", "1", "--gpu", "b200", "--calibration", str(ROOT / "examples" / "calibrations" / "h200.toml")], "measured on h200"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, "op", *words)
    assert status == 2
    assert message in error
    assert error.startswith("stepcast: ")
    assert error.count("\n") == 1


def test_rows_of_a_table_are_compared_with_their_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, rows = tmp_path / "gemm_perf.csv", tmp_path / "rows.csv"
    table.write_text("system,device,gemm_dtype,m,n,k,latency_ms\nh200_sxm,NVIDIA H200,bfloat16,4096,4096,4096,0.2\n")
    found = result(capsys, "op", "--table", str(table), "-o", str(rows))["sets"]["operators"]
    assert found["rows"] == 1
    assert rows.read_text().splitlines()[1].startswith('operators,"gemm bf16 on h200, row 0",gemm,h200,bf16,')
