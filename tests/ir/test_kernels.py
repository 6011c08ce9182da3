"""The lists of kernels in data/kernels.txt are well formed, also where no model here meets a condition."""

import re

import pytest

from stepcast.ir.layers import kernels, lists
from stepcast.ir.layers.kernels import list_kernels
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import ElementwiseKind, Matmul
from stepcast.models.catalog import catalogue_model

LISTS = {name: kernels._read_list(name) for name in lists._split_lists(kernels.FILE)}
SIZES = Sizes(catalogue_model("llama-3.1-8b"), Strategy(Layout(), 1, 1, 1024))


@pytest.mark.parametrize("name", LISTS)
def test_list_is_well_formed(name: str) -> None:
    for line in LISTS[name]:
        if not line.kind:
            assert line.name in LISTS
            continue
        named = line.kind in (*ElementwiseKind, "matmul") or re.fullmatch("[a-z_]+", line.kind)
        assert named, line
        assert len(line.reads) == 3 or line.kind != "matmul", line


def test_kernels_of_a_list() -> None:
    ops = list_kernels("int8 product", SIZES, 8, 16, DType.BF16, "up", outputs=32)
    assert [op.name.removeprefix("up").strip() for op in ops][:4] == [
        "cast input",
        "find outliers",
        "quantise input",
        "",
    ]
    assert ops[1].host_reads
    assert ops[3].work == Matmul(8, 32, 16, 1, DType.INT8)
    assert [op.name for op in list_kernels("gelu-new", SIZES, 8, 16, DType.BF16)] == [
        f"activation {at}" for at in range(8)
    ]
