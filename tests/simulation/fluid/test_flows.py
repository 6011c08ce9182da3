"""Flows on links: known answers, and what must hold of all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.flows import FlowSet, Links, Repeating, join_flows
from stepcast.simulation.fluid.engine import Precision, find_classes, merge_entries, transfers
from stepcast.simulation.fluid.observed import bin_rates
from stepcast.simulation.seconds import in_ticks
from tests.simulation.fluid.networks import flows_of, links_of, networks, rates
from tests.simulation.fluid.reference import ends, filled


def test_three_flows_share_two_links_as_the_textbook_says() -> None:
    """Bertsekas and Gallager's example: the short link first, then what is left of the other."""
    links = links_of(10.0, 4.0)
    flows = flows_of({0: 1.0}, {0: 1.0, 1: 1.0}, {1: 1.0})
    assert rates(links, flows, compiled=False).tolist() == pytest.approx([8.0, 2.0, 2.0])


def test_weights_share_a_link_in_proportion() -> None:
    flows = flows_of({0: 1.0}, {0: 1.0}, weight=[1.0, 3.0])
    assert rates(links_of(8.0), flows, compiled=False).tolist() == pytest.approx([2.0, 6.0])


def test_what_one_cannot_take_the_others_get() -> None:
    flows = flows_of({0: 1.0}, {0: 1.0}, {0: 1.0})
    alone_s = np.array([1.0, 1 / 9, 1 / 9])
    assert rates(links_of(9.0), flows, alone_s, compiled=False).tolist() == pytest.approx([1.0, 4.0, 4.0])


def test_a_flow_that_is_alone_ends_after_its_price_to_the_bit() -> None:
    alone_s = in_ticks(np.array([0.1 + 0.2, 1 / 3]))
    flows = flows_of({0: 3.0, 1: 1.0}, {0: 3.0, 1: 1.0})
    start_s = in_ticks(np.array([0.0, 0.7]))
    found = transfers(links_of(3.0 / alone_s[0], 5.0), flows, start_s, alone_s, compiled=False)
    assert (found.end_s == start_s + alone_s).all()


@given(networks())
@settings(max_examples=60, deadline=None)
def test_both_ways_to_run_it_agree_with_filling_everything_anew(case) -> None:  # type: ignore[no-untyped-def]
    links, flows, start_s, alone_s = case
    found = transfers(links, flows, start_s, alone_s, compiled=False)
    np.testing.assert_allclose(found.end_s, ends(links, flows, start_s, alone_s), rtol=1e-9)
    shares = rates(links, flows, alone_s, compiled=False)
    expected = filled(links, flows, alone_s, list(range(len(flows))))
    np.testing.assert_allclose(shares, [expected[flow] for flow in range(len(flows))], rtol=1e-9)


@given(networks())
@settings(max_examples=60, deadline=None)
def test_no_link_carries_more_than_it_can_and_every_byte_arrives(case) -> None:  # type: ignore[no-untyped-def]
    links, flows, start_s, alone_s = case
    found = transfers(links, flows, start_s, alone_s, record=True, compiled=False)
    first = {}
    for at in range(len(flows)):
        first[at] = flows.bytes_on[flows.first[at] : flows.first[at + 1]].max() / flows.weight[at]
    share = found.level / np.array([first[at] for at in found.flow.tolist()])
    moved = np.bincount(found.flow, share * (found.to_s - found.from_s), len(flows))
    np.testing.assert_allclose(moved, 1.0, rtol=1e-9)
    edges = np.unique(np.concatenate([found.from_s, found.to_s]))
    for middle in (edges[1:] + edges[:-1]) / 2:
        during = (found.from_s <= middle) & (middle < found.to_s)
        used = np.zeros(len(links))
        for flow, rate in zip(found.flow[during].tolist(), share[during].tolist(), strict=True):
            own = slice(flows.first[flow], flows.first[flow + 1])
            np.add.at(used, flows.link[own], flows.bytes_on[own] * rate)
        assert (used <= links.capacity_bytes_per_s * (1 + 1e-8)).all()


@given(networks())
@settings(max_examples=60, deadline=None)
def test_nothing_is_faster_than_alone_and_the_same_input_gives_the_same_bits(case) -> None:  # type: ignore[no-untyped-def]
    links, flows, start_s, alone_s = case
    first, second = (transfers(links, flows, start_s, alone_s, compiled=False) for _ in range(2))
    assert (first.end_s >= start_s + alone_s * (1 - 1e-9)).all()
    assert first.end_s.tobytes() == second.end_s.tobytes()


@given(networks(), st.floats(1.0, 4.0))
@settings(max_examples=40, deadline=None)
def test_a_network_that_is_faster_throughout_ends_sooner_throughout(case, factor: float) -> None:  # type: ignore[no-untyped-def]
    """Of a single link that is faster that does not hold, for others may then be in the way earlier."""
    links, flows, _, alone_s = case
    faster = Links(links.tiers, links.tier, links.capacity_bytes_per_s * factor)
    zero = np.zeros(len(flows))
    slow = transfers(links, flows, zero, alone_s, compiled=False)
    fast = transfers(faster, flows, zero, alone_s / factor, compiled=False)
    np.testing.assert_allclose(fast.end_s * factor, slow.end_s, rtol=1e-9)


@given(networks())
@settings(max_examples=40, deadline=None)
def test_flows_that_are_alike_get_the_same(case) -> None:  # type: ignore[no-untyped-def]
    links, flows, _, _ = case
    begins = np.zeros(len(flows), np.int64)
    found = find_classes(links, flows, begins)
    shares = rates(links, flows, compiled=False)
    busiest = [flows.bytes_on[flows.first[at] : flows.first[at + 1]].max() for at in range(len(flows))]
    for group in range(int(found.flow.max()) + 1):
        mine = shares[found.flow == group] * np.array(busiest)[found.flow == group]
        np.testing.assert_allclose(mine, mine[0], rtol=1e-9)
    # And what classes put on links is what their flows do.
    flow, link, bytes_on = merge_entries(found, flows)
    count = np.bincount(found.link)
    carried = np.bincount(link, bytes_on * count[link], len(count))
    total = np.bincount(found.link, flows.on_links(len(links)), len(count))
    np.testing.assert_allclose(carried, total, rtol=1e-12)
    assert len(set(zip(flow.tolist(), link.tolist(), strict=True))) == len(flow)


def crossing(count: int, hosts: int) -> tuple[Links, FlowSet]:
    """Messages of all sizes between hosts under leaves of 16 whose ways up carry a quarter."""
    draw = np.random.default_rng(1)
    source = draw.integers(0, hosts, count)
    target = (source + draw.integers(1, hosts, count)) % hosts
    size = draw.integers(10**6, 10**8, count).astype(np.float64)
    leaves = hosts // 16
    capacity = np.repeat([50e9, 16 * 50e9 / 4], [2 * hosts, 2 * leaves])
    path = np.stack([source, hosts + target, 2 * hosts + source // 16, 2 * hosts + leaves + target // 16], 1)
    flows = FlowSet.of(np.arange(count + 1) * 4, path.ravel(), np.repeat(size, 4))
    return links_of(*capacity.tolist()), flows


def test_without_patience_ends_are_near_and_it_is_told() -> None:
    """Where changes below 0.1 % are not followed, 5,000 flows end within 0.2 % and on average 0.02 %."""
    links, flows = crossing(500, 128)
    exact = transfers(links, flows, compiled=False)
    near = transfers(links, flows, compiled=False, precision=Precision(near=1e-3, patience=0))
    assert exact.exact
    assert not near.exact
    assert near.near_from_s == 0.0
    assert near.visited < exact.visited
    error = np.abs(near.end_s / exact.end_s - 1)
    assert 0 < error.max() < 3e-3
    assert error.mean() < 3e-4
    late = transfers(links, flows, compiled=False, precision=Precision(patience=exact.visited // 2))
    assert 0 < late.near_from_s < exact.end_s.max()
    before = exact.end_s < late.near_from_s
    np.testing.assert_allclose(late.end_s[before], exact.end_s[before], rtol=1e-9)


def test_many_flows_end_the_same_in_whatever_order_they_are_told() -> None:
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    links, flows = crossing(1_000, 512)
    order = np.random.default_rng(3).permutation(len(flows))
    found = transfers(links, flows, compiled=True)
    mixed = transfers(links, flows.select(order), compiled=True)
    np.testing.assert_allclose(mixed.end_s, found.end_s[order], rtol=2e-3)


def test_a_ring_of_nodes_is_one_class() -> None:
    links = links_of(*[2.0] * 8)
    flows = flows_of(*[{at: 3.0, (at + 1) % 8: 1.0} for at in range(8)])
    found = find_classes(links, flows, np.zeros(8, np.int64))
    assert set(found.flow) == {0}
    assert set(found.link) == {0}
    slow = Links(links.tiers, links.tier, np.where(np.arange(8) == 3, 1.0, 2.0))
    assert len(set(find_classes(slow, flows, np.zeros(8, np.int64)).flow)) == 8


def test_spans_fill_the_bins_they_touch() -> None:
    edges_s = np.linspace(0.0, 4.0, 5)
    found = bin_rates(np.array([0, 0, 1]), np.array([0.5, 3.0, 1.0]), np.array([3.5, 9.0, 1.5]), np.ones(3), 2, edges_s)
    assert found.tolist() == [[0.5, 1.0, 1.0, 1.5], [0.0, 0.5, 0.0, 0.0]]


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="link 1 has no bandwidth above zero"):
        links_of(1.0, 0.0)
    with pytest.raises(ValueError, match="first must rise"):
        FlowSet.of(np.array([0, 2]), np.array([0]), np.array([1.0]))
    with pytest.raises(ValueError, match="columns of other lengths"):
        FlowSet(np.array([0, 1]), np.array([0]), np.array([1.0]), np.ones(2), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="weights"):
        flows_of({0: 1.0}, weight=[0.0])
    with pytest.raises(ValueError, match="must be finite"):
        Repeating("other", flows_of({0: 1.0}), 0.0, 1.0)


def test_sets_are_joined_and_scaled() -> None:
    both = join_flows([flows_of({0: 1.0, 2: 3.0}), flows_of({1: 5.0}).times(2.0)])
    assert both.first.tolist() == [0, 2, 3]
    assert both.link.tolist() == [0, 2, 1]
    assert both.on_links(3).tolist() == [1.0, 10.0, 3.0]
    assert both.times(np.array([1.0, 0.5])).bytes_on.tolist() == [1.0, 3.0, 5.0]
