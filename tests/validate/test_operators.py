"""The operators set: rows of public tables are read and compared, or refused with a reason."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from stepcast.inputs.operator_tables import read_operator_table
from stepcast.inputs.source import FormatError
from stepcast.validate.operators import measure_operators
from tests.shared import DATA, needs_data

GEMM = "system,device,framework,version,kernel_source,dtype,m,n,k,latency_ms\n"
ROW = "b200_sxm,NVIDIA B200,TRTLLM,1.3,torch_flow,{},8192,16384,4096,{}\n"


def test_rows_are_compared_or_refused(tmp_path: Path) -> None:
    text = GEMM + ROW.format("bfloat16", 0.66) + ROW.format("fp6", 0.5) + ROW.format("bfloat16", 0)
    (tmp_path / "gemm.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "odd.csv").write_text("m,latency_ms\n1,2\n")
    measurements = measure_operators(str(tmp_path))
    assert len(measurements.columns) == 1
    assert measurements.columns.row(0).tags["table"] == "gemm"
    assert abs(measurements.columns.error[0]) < 0.15
    assert sum(measurements.skipped.values()) == 3
    assert any("unknown format 'fp6'" in reason for reason in measurements.skipped)


@pytest.mark.parametrize(
    "row", ["b200_sxm,NVIDIA B200,TRTLLM,1.3,torch_flow,bfloat16,8192,x,4096,0.6\n",
            "b200_sxm,NVIDIA B200,TRTLLM,1.3,torch_flow,bfloat16,8192,0,4096,0.6\n",
            "b999,NVIDIA B999,TRTLLM,1.3,torch_flow,bfloat16,8192,16,4096,0.6\n"],
)  # fmt: skip
def test_damaged_rows_are_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "gemm.csv").write_text(GEMM + row)
    measurements = measure_operators(str(tmp_path))
    assert not len(measurements.columns)
    assert sum(measurements.skipped.values()) == 1


def test_a_cut_off_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "gemm.csv").write_text(GEMM + "b200_sxm,NVIDIA\n")
    with pytest.raises(FormatError, match="has 2 columns; expected 10"):
        read_operator_table(str(tmp_path / "gemm.csv"))


@needs_data("operators")
def test_errors_of_the_shared_half() -> None:
    tables = [str(DATA / "operators" / f"{name}.csv.gz") for name in ("gemm", "quantize_matrix")]
    measurements = measure_operators(*tables)
    columns, error = measurements.columns, np.abs(measurements.columns.error)
    large = (columns.tags["table"] == "gemm") & (columns.tags["size"] == "sides from 1024")
    for gpu in ("a100-sxm-80gb", "h100-sxm", "h200", "b200", "b300", "gb200", "gb300", "l40s", "rtx-pro-6000"):
        bf16 = large & (columns.tags["gpu"] == gpu) & (columns.tags["dtype"] == "bf16")
        assert np.median(error[bf16]) < 0.08, gpu
    assert np.median(error[columns.tags["table"] == "quantize_matrix"]) < 0.06
    assert not measurements.skipped
