"""The simai engine gives SimAI-analytical's totals, and a number or a clear error where SimAI fails."""

from dataclasses import replace

import pytest

from stepcast.cost.simai import (
    SIZES_BYTES,
    SimaiPrice,
    SimaiSystem,
    efficiency_tables,
    relative_efficiency,
    simai_price,
)
from stepcast.inputs.table import read
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind, Matmul, Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.units import GIB, MIB, US
from tests.shared import DATA, ROOT, needs_data

GPT = ROOT / "examples" / "simai-gpt-13b.txt"
LLAMA = ROOT / "examples" / "simai-llama-405b.txt"
MOE = DATA / "simai" / "moe_9216gpus.txt"
# DP, DP_EP, TP, EP, bubble, compute, total in us, from SimAI-analytical with 360 and 48.5 GB/s, 8 GPUs, 8 NICs.
REFERENCE = [
    (GPT, 512, (109168, 0, 124302, 0, 940909, 951592, 2125971)),
    (LLAMA, 1024, (322654, 0, 290054, 0, 6946315, 7213232, 14772256)),
    pytest.param(MOE, 9216, (40332, 1067010, 326686, 1222811, 345984, 4542795, 7545619), marks=needs_data("simai")),
]


def parts_us(price: SimaiPrice) -> tuple[float, ...]:
    parts = (price.dp_s, price.dp_ep_s, price.tp_s, price.ep_s, price.bubble_s, price.compute_s, price.total_s)
    return tuple(part / US for part in parts)


def one_layer(kind: CollectiveKind, size_bytes: int, group: Group, layout: Layout, compute_s: float = 0.0) -> Workload:
    """A layer of one computation and one collective, in the column that the group belongs to."""
    ops = (Op("", Recorded(compute_s)), Op("comm", Collective(kind, size_bytes, group)))
    outer = group in (Group.DP, Group.EXPERT_DP)
    layer = Layer("layer", weight_gradient=ops) if outer else Layer("layer", forward=ops)
    return Workload((Stage((Block((layer,)),)),), layout)


@pytest.mark.parametrize(("path", "gpus", "expected_us"), REFERENCE, ids=["gpt", "llama", "moe"])
def test_totals_are_simais(path: str, gpus: int, expected_us: tuple[int, ...]) -> None:
    price = simai_price(read(path), gpus)
    assert parts_us(price) == pytest.approx(expected_us, abs=2)
    assert price.pp_s == 0


def test_ignored_broadcast_is_reported() -> None:
    assert "broadcast costs nothing" in simai_price(read(GPT), 512).warnings[0]


@needs_data("simai")
def test_overlap_hides_its_group_alone() -> None:
    workload = read(MOE)
    plain = simai_price(workload, 9216)
    hidden = simai_price(workload, 9216, overlap={"tp": 1.0, "ep": 0.5})
    assert hidden.tp_s == 0
    assert hidden.ep_s == pytest.approx(plain.ep_s / 2)
    assert (hidden.dp_s, hidden.dp_ep_s, hidden.bubble_s) == (plain.dp_s, plain.dp_ep_s, plain.bubble_s)
    assert hidden.total_s == pytest.approx(plain.total_s - plain.tp_s - plain.ep_s / 2)


def test_gpus_of_the_file_are_the_default() -> None:
    assert simai_price(read(GPT)) == simai_price(read(GPT), 512)


@pytest.mark.parametrize(("ranks", "expected_us"), [(2, 10), (4, 12), (8, 15), (16, 66), (128, 320)])
def test_small_sizes_are_fixed(ranks: int, expected_us: int) -> None:
    workload = one_layer(CollectiveKind.ALL_REDUCE, MIB - 1, Group.DP, Layout(dp=ranks))
    assert simai_price(workload).dp_s / US == pytest.approx(expected_us)


def test_small_size_of_an_unknown_group_is_reported() -> None:
    price = simai_price(one_layer(CollectiveKind.ALL_REDUCE, 4096, Group.DP, Layout(dp=256)))
    assert price.dp_s == 0
    assert "256 ranks" in price.warnings[0]


def test_ring_formula_within_a_server() -> None:
    """8 GPUs over NVLink at 360: 2 x 1 GiB x 7/8 / 360; no efficiency for an all-reduce."""
    price = simai_price(one_layer(CollectiveKind.ALL_REDUCE, GIB, Group.TP, Layout(tp=8)))
    assert price.tp_s == pytest.approx(2 * 7 / 8 / 360, abs=1e-9)


def test_data_parallel_ranks_share_the_nics() -> None:
    """Eight NICs for eight tensor-parallel ranks: one each, and none of the group's peers on the server."""
    layout = Layout(tp=8, dp=4)
    price = simai_price(one_layer(CollectiveKind.ALL_GATHER, GIB, Group.DP, layout))
    assert price.dp_s == pytest.approx(3 / 4 / 48.5, abs=1e-9)


def test_above_16_gib_is_a_number() -> None:
    price = simai_price(one_layer(CollectiveKind.ALL_GATHER, 64 * GIB, Group.TP, Layout(tp=8)))
    assert price.tp_s == pytest.approx(64 * 7 / 8 / 360, rel=1e-6)


def test_bubble_of_a_pipeline() -> None:
    workload = one_layer(CollectiveKind.ALL_GATHER, 0, Group.TP, Layout(pp=4, vpp=2), compute_s=1.0)
    assert simai_price(replace(workload, micro_batches=3)).bubble_s == pytest.approx(3 * 3 / (3 * 2))


def test_too_few_nics_is_an_error() -> None:
    workload = one_layer(CollectiveKind.ALL_GATHER, GIB, Group.DP, Layout(tp=8, dp=4))
    with pytest.raises(ValueError, match="none is left"):
        simai_price(workload, system=SimaiSystem(nics_per_server=4))


def test_too_few_gpus_is_an_error() -> None:
    workload = one_layer(CollectiveKind.ALL_GATHER, GIB, Group.DP, Layout(tp=8, pp=2))
    with pytest.raises(ValueError, match="fewer than tp x pp"):
        simai_price(workload, 8)


def test_work_without_a_time_is_an_error() -> None:
    stage = Stage((Block((Layer("layer", (Op("product", Matmul(8, 8, 8)),)),)),))
    with pytest.raises(ValueError, match="recorded times"):
        simai_price(Workload((stage,)))


def test_group_that_simai_lacks_is_an_error() -> None:
    workload = one_layer(CollectiveKind.ALL_GATHER, GIB, Group.CP, Layout(cp=2))
    with pytest.raises(ValueError, match="no group cp"):
        simai_price(workload)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_overlap_outside_its_range_is_an_error(ratio: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        simai_price(one_layer(CollectiveKind.ALL_GATHER, GIB, Group.TP, Layout(tp=2)), overlap={"tp": ratio})


def test_efficiency_is_linear_between_rows_and_flat_outside() -> None:
    column = efficiency_tables()["network"]["1"]
    assert relative_efficiency(column, 1) == relative_efficiency(column, SIZES_BYTES[0]) == 0.45 / 0.81
    assert relative_efficiency(column, 24 * MIB) == pytest.approx(0.5 / 0.81)
    assert relative_efficiency(column, SIZES_BYTES[-1]) == relative_efficiency(column, 10**12) == 1.0
    assert relative_efficiency((1.0,) * len(SIZES_BYTES), MIB) == 1.0
