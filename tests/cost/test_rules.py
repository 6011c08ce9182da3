"""Rules of cost by hand: each factor is where it belongs, once."""

from dataclasses import replace

import pytest
from msgspec import structs

from stepcast.cost.collectives.choose import Algorithm, candidates, collective_s, host_s, price, send_receive_price
from stepcast.cost.collectives.route import Route
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.matmul import time_product
from stepcast.cost.power import ALONE, Load, limit_power
from stepcast.cost.pricing import Pricer
from stepcast.hardware import load_cluster
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.layout import Group, Layout
from stepcast.ir.types import DType
from stepcast.ir.work import Collective, CollectiveKind, Convolution, ConvolutionPass, GroupedMatmul, Matmul

H200, FIT = load_gpu("h200"), default_fit()
EXPERTS = GroupedMatmul(8 * 4096, 4096, 4096, 8)


def test_a_grouped_product_computes_its_rows_once() -> None:
    """Eight experts of 4,096 rows take about as long as one product of 32,768 rows, not eight times as long."""
    grouped = time_product(EXPERTS, H200, FIT, ALONE)
    single = time_product(Matmul(8 * 4096, 4096, 4096), H200, FIT, ALONE)
    assert 0.9 * single < grouped < 1.6 * single


def test_each_group_has_its_own_overhead() -> None:
    free = time_product(EXPERTS, H200, structs.replace(FIT, grouped_s=0.0), ALONE)
    dear = time_product(EXPERTS, H200, structs.replace(FIT, grouped_s=1e-4), ALONE)
    assert dear - free == pytest.approx(8 * 1e-4, rel=1e-6)


def test_a_grouped_product_reads_the_weight_of_each_group() -> None:
    rows, weights = 8 * 4096 * 4096, 8 * 4096 * 4096
    assert EXPERTS.moved_bytes == 2 * (rows + weights + rows)
    assert Matmul(128, 256, 512, 3).moved_bytes == 2 * 3 * (128 * 512 + 512 * 256 + 128 * 256)


def test_attention_wants_another_energy_than_products() -> None:
    """Its factor multiplies the energy of an operation: so much more energy by another name slows it as much."""
    power = FIT.power.of(H200.architecture)
    assert power.attention != 1.0
    load = Load(1e6, 1.0)
    seconds, flops = 1.0, 0.8e15
    slow = limit_power(seconds, flops, H200, DType.BF16, FIT, load, attention=True)
    by_hand = replace(H200, power_w=H200.power_w / power.attention)
    assert slow == pytest.approx(limit_power(seconds, flops, by_hand, DType.BF16, FIT, load), rel=1e-12)
    assert slow != pytest.approx(limit_power(seconds, flops, H200, DType.BF16, FIT, load), rel=1e-3)


def test_a_message_takes_as_long_as_its_launch_on_every_rank_of_the_thread() -> None:
    route = Route(ranks=2, intra_bytes_per_s=1e12, launch_overhead_s=1e-3)
    assert send_receive_price(8, route).seconds == pytest.approx(1e-3)
    assert send_receive_price(8, replace(route, ranks_per_thread=2)).seconds == pytest.approx(2e-3)
    assert send_receive_price(1e12, route).seconds == pytest.approx(
        send_receive_price(1e12, replace(route, launch_overhead_s=0.0)).seconds
    )


def test_what_a_caller_adds_is_added_once() -> None:
    route = Route(ranks=4, intra_bytes_per_s=1e11, intra_latency_s=1e-6)
    later = replace(route, call_overhead_s=1e-3)
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL):
        assert price(kind, 2**20, later).seconds - price(kind, 2**20, route).seconds == pytest.approx(1e-3)
        assert collective_s(kind, [2.0**20], later)[0] == pytest.approx(price(kind, 2**20, later).seconds)  # type: ignore[arg-type]


def test_the_host_prepares_each_message_of_an_all_to_all() -> None:
    route = Route(ranks=8, intra_bytes_per_s=1e11, launch_overhead_s=1e-5, ranks_per_thread=3)
    each = route.tuning.message_s
    assert host_s(CollectiveKind.ALL_REDUCE, route) == pytest.approx(3e-5)
    assert host_s(CollectiveKind.ALL_TO_ALL, route) == pytest.approx(3 * (1e-5 + 16 * each))


def test_products_of_a_batch_are_priced_together() -> None:
    one = compute_price(Matmul(2048, 2048, 2048), H200, FIT, ALONE).seconds
    eight = compute_price(Matmul(2048, 2048, 2048, 8), H200, FIT, ALONE).seconds
    assert 4 * one < eight < 9 * one


def test_a_slower_gpu_is_less_efficient() -> None:
    price = compute_price(Matmul(4096, 4096, 4096), load_gpu("h100-sxm"), default_fit())
    slow = price.times(2.0)
    assert (slow.seconds, slow.efficiency) == (2 * price.seconds, price.efficiency / 2)
    assert (slow.low_s, slow.high_s) == (2 * price.low_s, 2 * price.high_s)


def test_ideal_collectives_move_what_must_cross_a_link_at_its_rate() -> None:
    """An all-reduce of n ranks moves 2 (n - 1) / n of its buffer over each link, without latency."""
    pricer = Pricer(load_cluster("dgx-h100"), Layout(tp=8), ideal=True)
    rate = pricer.route(Group.TP).intra_bytes_per_s
    for size in (2**20, 2**30):
        seconds = pricer.seconds(Collective(CollectiveKind.ALL_REDUCE, size, Group.TP))
        assert seconds == pytest.approx(1.75 * size / rate, rel=1e-12)


def test_swapped_operands_slow_tf32_products_on_hopper_alone() -> None:
    for name, is_slower in (("h200", True), ("a100-sxm-80gb", False)):
        plain, swapped = (
            compute_price(Matmul(4096, 4096, 4096, 1, DType.TF32, swapped), load_gpu(name), FIT).seconds
            for swapped in (0, 2)
        )
        assert (swapped > 1.05 * plain) == is_slower
        assert swapped >= plain


def test_switches_reduce_within_a_node_that_has_several_ranks() -> None:
    route = Route(
        ranks=4, intra_bytes_per_s=4e11, nodes=4, inter_bytes_per_s=5e10, ranks_per_node=1, in_switch_reduction=True
    )
    for each, has_tree in ((1, False), (2, True)):
        own = replace(route, ranks=4 * each, ranks_per_node=each, fewest_per_node=each)
        algorithms = {choice.algorithm for choice in candidates(CollectiveKind.ALL_REDUCE, own)}
        assert (Algorithm.NVLS_TREE in algorithms) == has_tree


def test_convolutions_cost_what_their_format_and_channels_cost() -> None:
    """In half precision they take less time than in fp32; groups divide the products of a convolution."""
    for of in ConvolutionPass:
        full = Convolution(2**20, 2**20, 512, 512, 9, of=of, channels_last=True)
        half_s, wide_s, grouped_s = (
            compute_price(work, H200, FIT).seconds
            for work in (full, replace(full, dtype=DType.FP32), replace(full, groups=4))
        )
        assert half_s < 0.6 * wide_s
        assert 0.2 * half_s < grouped_s < 0.6 * half_s
        assert half_s > full.flops / H200.matrix_peak_flops(DType.BF16)


def test_depthwise_convolutions_take_the_time_of_the_positions_that_they_compute() -> None:
    """With a stride of 2 by 2 the gradient of the data has four positions for each that the forward has."""
    for of, outputs in (
        (ConvolutionPass.FORWARD, 2**22),
        (ConvolutionPass.WEIGHT, 2**22),
        (ConvolutionPass.DATA, 2**24),
    ):
        work = Convolution(2**24, 2**22, 256, 256, 9, groups=256, of=of, channels_last=True)
        seconds = compute_price(work, H200, FIT).seconds
        fit = FIT.depthwise[f"last.{of}"]
        clocks = outputs * 256 * (fit.element_clocks + 9 * fit.tap_clocks)
        assert seconds == pytest.approx(clocks / (H200.sms * H200.clock_hz), rel=0.01)
