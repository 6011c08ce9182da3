"""Collectives: limits that every algorithm keeps on every route, known values, and measured ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepcast.cost.collectives.algorithms import Curve, Ramp, protocols, ring_curve, tree_curve
from stepcast.cost.collectives.choose import (
    Algorithm,
    AlgorithmError,
    candidates,
    collective_s,
    host_s,
    price,
    send_receive_price,
)
from stepcast.cost.collectives.route import Protocol, Route, library_tuning, route_of, tuning_of, uneven_warning
from stepcast.hardware import load_cluster, resolve
from stepcast.hardware.catalog import data_names
from stepcast.hardware.path import Place
from stepcast.ir.work import CollectiveKind, bus_factor
from stepcast.units import GB, GIB, MIB, US

KINDS = tuple(CollectiveKind)
LIBRARIES = [
    ("nccl", "ampere"),
    ("nccl", "hopper"),
    ("nccl", "blackwell"),
    ("nccl-2.12", "ampere"),
    ("nccl-2.27", "ampere"),
    ("rccl", "cdna3"),
]
SIZES = st.floats(1, 1e12)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Any group: within a node, one rank per node, or both; fast or slow, with or without reducing switches."""
    nodes, per_node = draw(st.integers(1, 64)), draw(st.integers(1, 16))
    rate, latency, overhead = st.floats(1e8, 1e13), st.floats(0, 1e-4), st.floats(0, 1e-4)
    share = st.floats(0.1, 1)
    return Route(
        ranks=nodes * per_node,
        nodes=nodes,
        intra_bytes_per_s=draw(rate),
        intra_latency_s=draw(latency),
        inter_bytes_per_s=draw(rate),
        inter_latency_s=draw(latency),
        memory_bytes_per_s=draw(rate),
        launch_overhead_s=draw(overhead),
        call_overhead_s=draw(overhead),
        channel_overhead_s=draw(overhead),
        exchange_share=draw(share),
        reduction_share=draw(share),
        through_share=draw(st.floats(1, 2)),
        ranks_per_thread=draw(st.integers(1, 8)),
        nvlink=draw(st.booleans()),
        in_switch_reduction=draw(st.booleans()),
        in_network_reduction=draw(st.booleans()),
        tuning=library_tuning(*draw(st.sampled_from(LIBRARIES))),
    )


def all_algorithms(kind: CollectiveKind, route: Route) -> list[Algorithm | None]:
    """Automatic choice, and every algorithm that *kind* can be forced to use on *route*."""
    known: list[Algorithm | None] = [None]
    for algorithm in Algorithm:
        try:
            candidates(kind, route, algorithm)
        except AlgorithmError:
            continue
        known.append(algorithm)
    return known


def least_sent(kind: CollectiveKind, parts: int) -> float:
    """Share of the buffer that one of *parts* (ranks or nodes) must send or receive, whatever the algorithm."""
    if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE):
        return 1.0
    return 0.0 if kind is CollectiveKind.BARRIER else (parts - 1) / parts


@settings(max_examples=50)
@given(st.sampled_from(KINDS), SIZES, routes())
def test_no_algorithm_beats_the_wires(kind: CollectiveKind, size: float, route: Route) -> None:
    """Time is at least the bytes that must pass a rank's ports, and those that must pass a node's NICs."""
    assume(route.ranks > 1)
    for algorithm in all_algorithms(kind, route):
        seconds = price(kind, size, route, algorithm).seconds
        if route.nodes == 1:
            floor = least_sent(kind, route.ranks) * size / route.intra_bytes_per_s
        else:
            # All-to-all, gather and scatter sizes are one rank's; the others' the whole group's.
            per_node = size * (route.ranks_per_node if kind is CollectiveKind.ALL_TO_ALL else 1)
            floor = least_sent(kind, route.nodes) * per_node / route.inter_bytes_per_s
        assert seconds >= floor * (1 - 1e-9)


@settings(max_examples=50)
@given(st.sampled_from(data_names("clusters")), st.sampled_from(KINDS), st.integers(2, 288), SIZES)
def test_no_cluster_passes_its_line_rates(name: str, kind: CollectiveKind, ranks: int, size: float) -> None:
    """Whatever was fitted: a GPU's port and a node's NICs carry what must pass them, at most at their line rate."""
    cluster = load_cluster(name)
    path = resolve(cluster, range(min(ranks, cluster.gpus or ranks)))
    route = route_of(path, cluster)
    assume(route.fewest_per_node == route.ranks_per_node)
    seconds = price(kind, size, route).seconds
    if path.inter is None:
        assert path.intra is not None
        assert seconds >= least_sent(kind, route.ranks) * size / path.intra.bandwidth_bytes_per_s
    else:
        nics = path.inter.bandwidth_bytes_per_s * route.ranks_per_node
        per_node = size * (route.ranks_per_node if kind is CollectiveKind.ALL_TO_ALL else 1)
        assert seconds >= least_sent(kind, route.nodes) * per_node / nics


@settings(max_examples=80)
@given(st.sampled_from(KINDS), SIZES, routes())
def test_latency_is_the_floor(kind: CollectiveKind, size: float, route: Route) -> None:
    """A message crosses the network at least once when nodes differ, and a kernel must start."""
    assume(route.ranks > 1)
    hop_s = route.inter_latency_s if route.nodes > 1 else min(route.intra_latency_s, 1.0)
    launch_s = route.launch_overhead_s * route.ranks_per_thread
    for algorithm in all_algorithms(kind, route):
        seconds = price(kind, size, route, algorithm).seconds
        assert seconds >= launch_s
        assert seconds >= hop_s


@settings(max_examples=80)
@given(st.sampled_from(KINDS), SIZES, st.floats(1, 1000), routes())
def test_more_bytes_never_take_less(kind: CollectiveKind, size: float, factor: float, route: Route) -> None:
    for algorithm in all_algorithms(kind, route):
        small = price(kind, size, route, algorithm).seconds
        assert price(kind, size * factor, route, algorithm).seconds >= small * (1 - 1e-12)


@settings(max_examples=80)
@given(st.sampled_from(KINDS), SIZES, st.floats(0.01, 1), routes())
def test_less_bandwidth_is_never_faster(kind: CollectiveKind, size: float, factor: float, route: Route) -> None:
    slower = [
        replace(route, intra_bytes_per_s=route.intra_bytes_per_s * factor),
        replace(route, memory_bytes_per_s=route.memory_bytes_per_s * factor),
        replace(
            route,
            inter_bytes_per_s=route.inter_bytes_per_s * factor,
            exchange_bytes_per_s=route.exchange_bytes_per_s * factor,
        ),
    ]
    for algorithm in all_algorithms(kind, route):
        seconds = price(kind, size, route, algorithm).seconds
        assert all(price(kind, size, worse, algorithm).seconds >= seconds * (1 - 1e-12) for worse in slower)


@settings(max_examples=50)
@given(st.sampled_from(KINDS), SIZES, routes())
def test_choice_is_the_least(kind: CollectiveKind, size: float, route: Route) -> None:
    assume(route.ranks > 1)
    chosen = price(kind, size, route)
    listed = candidates(kind, route)
    known_size = 4.0 if kind is CollectiveKind.BARRIER else size
    least = min(candidate.curve.seconds(known_size) for candidate in listed)
    assert chosen.seconds == max(least, host_s(kind, route)) + route.call_overhead_s
    assert (chosen.algorithm, chosen.protocol) in {(each.algorithm, each.protocol) for each in listed}


@given(st.sampled_from(KINDS), SIZES)
def test_one_rank_costs_nothing(kind: CollectiveKind, size: float) -> None:
    route = Route(ranks=1, launch_overhead_s=1.0, channel_overhead_s=1.0, intra_latency_s=1.0)
    free = price(kind, size, route)
    assert (free.seconds, free.start_share, free.algbw_bytes_per_s, free.busbw_bytes_per_s) == (0, 0, 0, 0)
    assert collective_s(kind, np.array([size]), route)[0] == 0
    assert send_receive_price(size, route).seconds == 0


@settings(max_examples=50)
@given(st.sampled_from(KINDS), st.lists(SIZES, min_size=1, max_size=20), routes())
def test_arrays_agree_with_numbers(kind: CollectiveKind, sizes: list[float], route: Route) -> None:
    singly = [price(kind, size, route).seconds for size in sizes]
    assert collective_s(kind, np.array(sizes), route) == pytest.approx(singly, rel=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e3, 4e3, 1e6])
def test_a_phase_of_a_share_is_the_curve_of_that_share(size: float) -> None:
    curve = Curve(1e-6, 1e-9, (Ramp(2e-9, 1000.0),))
    assert curve.for_share(0.25).seconds(size) == pytest.approx(curve.seconds(0.25 * size))


def test_nothing_to_send_costs_nothing() -> None:
    route = Route(ranks=8, intra_bytes_per_s=1e11, intra_latency_s=1e-6, launch_overhead_s=1e-6)
    assert price(CollectiveKind.ALL_REDUCE, 0, route).seconds == 0
    assert price(CollectiveKind.BARRIER, 0, route).seconds > 0
    assert list(collective_s(CollectiveKind.ALL_REDUCE, np.array([0.0, 1.0]), route) > 0) == [False, True]


def test_ring_by_hand() -> None:
    """Four ranks, Simple: six hops of 1 + 2.8 us, 30 us once, 3/2 of the buffer over the link, no overheads."""
    route = Route(ranks=4, intra_bytes_per_s=100 * GB, intra_latency_s=1 * US)
    seconds = ring_curve(CollectiveKind.ALL_REDUCE, route, Protocol.SIMPLE).seconds(400e6)
    assert seconds == pytest.approx(30 * US + 6 * 3.8 * US + 1.5 * 400e6 / 100e9)
    gathered = ring_curve(CollectiveKind.ALL_GATHER, route, Protocol.SIMPLE).seconds(400e6)
    assert gathered == pytest.approx(30 * US + 3 * 3.8 * US + 0.75 * 400e6 / 100e9)


def test_ring_and_tree_cross_where_they_should() -> None:
    """16 nodes of one rank, LL, while the tree's pipeline fills: 2 x 15 hops against 2 x 4, and 30/16 against 4 bytes.

    Equal where 22 hops less the 0.2 us that a tree starts later = S (4/0.92 - 30/16) / rate.
    """
    latency_s, wire = 3 * US, 25 * GB
    route = Route(ranks=16, nodes=16, inter_bytes_per_s=wire, inter_latency_s=latency_s)
    crossing = (22 * latency_s - 0.2 * US) * (wire / 2) / (4 / 0.92 - 30 / 16)
    assert crossing < 4 * 2 * 72000
    ring = ring_curve(CollectiveKind.ALL_REDUCE, route, Protocol.LL)
    tree = tree_curve(CollectiveKind.ALL_REDUCE, route, Protocol.LL)
    assert ring.seconds(crossing) == pytest.approx(tree.seconds(crossing), rel=1e-9)
    assert ring.seconds(crossing / 2) > tree.seconds(crossing / 2)
    assert ring.seconds(crossing * 2) < tree.seconds(crossing * 2)


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    cluster = load_cluster("azure-nd-a100-v4")
    route = route_of(resolve(cluster, range(64)), cluster)
    small = price(CollectiveKind.ALL_REDUCE, 1024, route)
    large = price(CollectiveKind.ALL_REDUCE, 16 * GIB, route)
    assert (small.algorithm, small.protocol) == (Algorithm.TREE, Protocol.LL)
    assert (large.algorithm, large.protocol) == (Algorithm.RING, Protocol.SIMPLE)


def test_nvlink_sharp_of_eight_h100() -> None:
    """NCCL's author states 480 GB/s of bus bandwidth, and 370 for other collectives (nccl-tests issue 212)."""
    cluster = load_cluster("dgx-h100")
    route = route_of(resolve(cluster, range(8)), cluster)
    reduced = price(CollectiveKind.ALL_REDUCE, 8 * GIB, route)
    assert reduced.algorithm is Algorithm.NVLS
    assert reduced.busbw_bytes_per_s == pytest.approx(480 * GB, rel=0.05)
    gathered = price(CollectiveKind.ALL_GATHER, 8 * GIB, route)
    assert gathered.busbw_bytes_per_s == pytest.approx(370 * GB, rel=0.05)
    assert price(CollectiveKind.ALL_REDUCE, 8 * GIB, route, Algorithm.RING).busbw_bytes_per_s == pytest.approx(
        370 * GB, rel=0.05
    )


def test_nvlink_sharp_between_nodes_climbs_a_tree() -> None:
    """3.45 us for each rank of the node, and 10 us with the network's own at every level, up and down. Four nodes
    have two levels, sixteen have four; an empty buffer pays nothing else.
    """
    fast = Route(ranks=32, nodes=4, inter_latency_s=5 * US, in_switch_reduction=True)
    for nodes, levels in ((4, 2), (16, 4)):
        route = replace(fast, ranks=8 * nodes, nodes=nodes, ranks_per_node=8, fewest_per_node=8)
        found = price(CollectiveKind.ALL_REDUCE, 1, route, Algorithm.NVLS_TREE).seconds
        assert found == pytest.approx((8 * 3.45 + 2 * levels * (10 + 5)) * US, rel=1e-4)


def test_tensor_parallel_all_reduce_of_an_a800_node() -> None:
    """Seed 002: 83,886,080 bytes over two ranks take 0.68 ms."""
    cluster = load_cluster("a800-node")
    route = route_of(resolve(cluster, range(2)), cluster)
    assert price(CollectiveKind.ALL_REDUCE, 83_886_080, route).seconds == pytest.approx(0.68e-3, rel=0.15)


@pytest.mark.parametrize(("cluster", "least"), [("dgx-h100", 5), ("dgx-b200", 6)])
def test_the_switch_adds_from_so_many_ranks_on(cluster: str, least: int) -> None:
    """NCCL 2.27 took NVLS from 5 H200 and from 6 B200 on (stas00/ml-engineering)."""
    described = load_cluster(cluster)
    for ranks in range(2, 9):
        route = route_of(resolve(described, range(ranks)), described)
        chosen = price(CollectiveKind.ALL_REDUCE, GIB, route).algorithm
        assert chosen is (Algorithm.NVLS if ranks >= least else Algorithm.RING)


def test_ampere_has_no_reducing_switch() -> None:
    """Whatever its description says: the library has no such kernel for it."""
    cluster = load_cluster("dgx-a100", ["node.fabric.in_switch_reduction=true"])
    route = route_of(resolve(cluster, range(8)), cluster)
    assert price(CollectiveKind.ALL_REDUCE, GIB, route).algorithm is Algorithm.RING


def test_a_host_starts_its_kernels_one_after_another() -> None:
    """Small ones wait for the last; a large one hides all starts but its own."""
    route = Route(ranks=8, intra_bytes_per_s=100 * GB, launch_overhead_s=5 * US)
    shared = replace(route, ranks_per_thread=8)
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL):
        assert price(kind, 8, shared).seconds == host_s(kind, shared)
        assert price(kind, GIB, shared).seconds == price(kind, GIB, route).seconds
    assert host_s(CollectiveKind.ALL_REDUCE, shared) == pytest.approx(40 * US)
    # An all-to-all is sixteen messages, each of 0.41 us.
    assert host_s(CollectiveKind.ALL_TO_ALL, shared) == pytest.approx(8 * (5 + 16 * 0.41) * US)


def test_out_of_place_copies_what_a_rank_keeps() -> None:
    route = Route(ranks=4, intra_bytes_per_s=100 * GB, memory_bytes_per_s=1000 * GB)
    copy_s = 2 * GIB / 4 / (1000 * GB)
    for kind, copied in ((CollectiveKind.ALL_GATHER, copy_s), (CollectiveKind.ALL_REDUCE, 0.0)):
        inside, outside = (price(kind, GIB, route, in_place=place).seconds for place in (True, False))
        assert outside - inside == pytest.approx(copied)
        arrays = [collective_s(kind, np.array([GIB]), route, in_place=place)[0] for place in (True, False)]
        assert arrays == pytest.approx([inside, outside])
        assert collective_s(kind, np.array([GIB]), route)[0] == pytest.approx(inside)  # in place if nothing is said


def test_a_ring_through_a_mesh_has_an_edge_more() -> None:
    """8 MI300X reach 316 GB/s in their mesh, 16 of two nodes 357 (hisohara/ai-scripts)."""
    cluster = load_cluster("mi300x-node")
    rates = []
    for ranks in (8, 16):
        route = route_of(resolve(cluster, range(ranks)), cluster)
        rates.append(price(CollectiveKind.ALL_REDUCE, 16 * GIB, route).busbw_bytes_per_s)
    assert rates == pytest.approx([316 * GB, 357 * GB], rel=0.03)


@pytest.mark.parametrize("name", data_names("clusters"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_cluster_has_a_price(name: str, kind: CollectiveKind) -> None:
    cluster = load_cluster(name)
    ranks = min(16, cluster.gpus or 16)
    route = route_of(resolve(cluster, range(ranks)), cluster)
    seconds = price(kind, 64 * MIB, route).seconds
    assert 0 < seconds < 1
    assert math.isfinite(seconds)


def test_pcie_knows_no_ll128() -> None:
    route = Route(ranks=4, intra_bytes_per_s=20 * GB, nvlink=False)
    assert Protocol.LL128 not in protocols(route)
    assert Protocol.LL128 not in {each.protocol for each in candidates(CollectiveKind.ALL_REDUCE, route)}


def test_hierarchical_all_to_all_wins_with_small_messages() -> None:
    """256 ranks on 32 nodes: 32 batches of messages pairwise, 4 and 1 in stages; large buffers the other way."""
    route = Route(
        ranks=256,
        nodes=32,
        intra_bytes_per_s=200 * GB,
        intra_latency_s=1 * US,
        inter_bytes_per_s=200 * GB,
        inter_latency_s=5 * US,
    )

    def seconds(size: float, algorithm: Algorithm) -> float:
        return price(CollectiveKind.ALL_TO_ALL, size, route, algorithm).seconds

    assert seconds(64 * 1024, Algorithm.HIERARCHICAL) < seconds(64 * 1024, Algorithm.PAIRWISE)
    assert seconds(GIB, Algorithm.HIERARCHICAL) > seconds(GIB, Algorithm.PAIRWISE)
    assert price(CollectiveKind.ALL_TO_ALL, 64 * 1024, route).algorithm is Algorithm.PAIRWISE
    assert candidates(CollectiveKind.ALL_TO_ALL, route) == candidates(CollectiveKind.ALL_TO_ALL, route, None, 1.0)
    for ranks, nodes, is_staged in ((4, 2, True), (6, 3, True), (8, 1, False), (8, 8, False)):
        route = replace(route, ranks=ranks, nodes=nodes, ranks_per_node=ranks // nodes, fewest_per_node=ranks // nodes)
        differ = seconds(MIB, Algorithm.HIERARCHICAL) != seconds(MIB, Algorithm.PAIRWISE)
        assert differ is is_staged, (ranks, nodes)


def test_uneven_all_to_all_waits_for_the_busiest() -> None:
    route = Route(ranks=4, intra_bytes_per_s=1 * GB)
    skewed = price(CollectiveKind.ALL_TO_ALL, 4e9, route, imbalance=4.0).seconds
    assert skewed == pytest.approx(12e9 / (1 * GB), rel=0.05)
    with pytest.raises(ValueError, match="at least 1"):
        price(CollectiveKind.ALL_TO_ALL, 1e6, route, imbalance=0.5)


def test_uneven_nodes_leave_over_the_narrowest() -> None:
    cluster = load_cluster("dgx-a100")
    uneven = route_of(resolve(cluster, [0, 1, 2, 3, 8]), cluster)
    assert (uneven.ranks_per_node, uneven.fewest_per_node) == (4, 1)
    assert price(CollectiveKind.ALL_REDUCE, GIB, uneven).seconds > GIB / (25 * GB)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (CollectiveKind.ALL_REDUCE, 1.75),
        (CollectiveKind.ALL_GATHER, 0.875),
        (CollectiveKind.ALL_TO_ALL, 0.875),
        (CollectiveKind.GATHER, 0.875),
        (CollectiveKind.SCATTER, 0.875),
        (CollectiveKind.BROADCAST, 1.0),
        (CollectiveKind.REDUCE, 1.0),
    ],
)
def test_bus_bandwidth_factors(kind: CollectiveKind, factor: float) -> None:
    assert bus_factor(kind, 8) == factor


def test_impossible_algorithm_names_the_possible_ones() -> None:
    with pytest.raises(AlgorithmError, match="cannot use nvls, only ring, hierarchical, tree"):
        price(CollectiveKind.ALL_REDUCE, 1.0, Route(ranks=8, intra_bytes_per_s=1e9), Algorithm.NVLS)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 0},
        {"nodes": 9},
        {"intra_bytes_per_s": 0.0},
        {"inter_bytes_per_s": float("nan")},
        {"intra_latency_s": -1.0},
        {"launch_overhead_s": float("inf")},
    ],
)
def test_bad_route_is_an_error(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be spread"):
        Route(**({"ranks": 8} | change))  # type: ignore[arg-type]


def test_an_unknown_library_is_named() -> None:
    with pytest.raises(ValueError, match="library must be one of nccl"):
        tuning_of(load_cluster("dgx-h100", ["communication.library=gloo"]))


@pytest.mark.parametrize(("place", "advised"), [(Place.PACKED, True), (Place.EVEN, False)])
def test_ranks_that_fill_racks_unevenly_are_told_how_to_spread(place: Place, advised: bool) -> None:
    cluster = load_cluster("gb200-nvl72")
    route = Route(ranks=74, nodes=2, ranks_per_node=72, fewest_per_node=2)
    (warning,) = uneven_warning("dp", route, cluster, place)
    assert ("use --place even" in warning) is advised
    assert "74 ranks is spread over 2 racks, 72 on the fullest and 2 on the emptiest" in warning
