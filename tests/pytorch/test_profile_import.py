"""``profile --import``: a calibration from products that others measured."""

from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.hardware import load_gpu
from stepcast.pytorch.profile import import_tables

HEADER = "system,device,framework,version,kernel_source,dtype,m,n,k,latency_ms\n"


def _row(system: str, dtype: str, m: int, ms: float) -> str:
    return f"{system},NVIDIA,TRTLLM,1.3,torch_flow,{dtype},{m},8192,8192,{ms}\n"


def _table(folder: Path, systems: tuple[str, ...] = ("h200_sxm",)) -> str:
    rows = [_row(system, "bfloat16", 1024 * size, 0.18 * size) for system in systems for size in (1, 2, 4, 8)]
    rows += [_row("h200_sxm", "fp8", 8192, 0.95), _row("h200_sxm", "int4_wo", 8192, 1.9)]
    path = folder / "gemm_perf.csv"
    path.write_text(HEADER + "".join(rows))
    return str(path)


def test_products_become_points(tmp_path: Path) -> None:
    points = import_tables([_table(tmp_path)], None)
    assert points.gpu.name == "h200"
    assert points.seconds["matmul.bf16 8192x8192x8192"] == pytest.approx(1.44e-3)
    assert points.seconds["matmul.fp8 8192x8192x8192"] < 0.93e-3  # without the quantisation of its input
    assert sum(points.skipped.values()) == 1


def test_several_gpus_need_a_name(tmp_path: Path) -> None:
    path = _table(tmp_path, ("h200_sxm", "b200_sxm"))
    with pytest.raises(ValueError, match="name one GPU with --gpu"):
        import_tables([path], None)
    assert import_tables([path], load_gpu("b200")).gpu.name == "b200"


def test_the_calibration_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "gpu.toml")
    assert main(["profile", "--import", _table(tmp_path), "-o", output]) == 0
    assert "matmul.bf16" in capsys.readouterr().out
    assert main(["op", "matmul", "--m", "8192", "--n", "8192", "--k", "8192", "--calibration", output]) == 0
    assert "calibrated" in capsys.readouterr().out
    assert main(["profile", "--import", _table(tmp_path), "--quick", "-o", output]) == 2


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"system": ["h200_sxm"], "dtype": ["bfloat16"], "m": [8192], "n": [8192], "k": [8192], "latency_ms": [1.44]}
    parquet.write_table(arrow.table(rows), tmp_path / "gemm_perf.parquet")
    assert len(import_tables([str(tmp_path)], None).cases) == 1
