"""Exchanges of experts: what an all-to-all reaches, and tokens that cross the network once for each node."""

from dataclasses import replace

import pytest

from stepcast.cost.pricing import Pricer, forwarding_route
from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster
from stepcast.hardware.cluster import Communication
from stepcast.ir.framework import Dispatcher, Framework
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.models.catalog import load_model

BIG = 512 * 2**20


def exchange_s(cluster: str, ep: int, once_per_node: int | None = None) -> float:
    pricer = Pricer(load_cluster(cluster), Layout(ep=ep, dp=ep, expert_tp=1), once_per_node=once_per_node)
    return pricer.seconds(Collective(CollectiveKind.ALL_TO_ALL, BIG, Group.EP))


def test_eight_b200_reach_what_simumax_measured() -> None:
    """All-to-all at 0.597 of 900 GB/s (configs/system/b200_bf16_ceperm.json)."""
    assert exchange_s("dgx-b200", 8) == pytest.approx(BIG * 7 / 8 / (0.597 * 900e9), rel=0.08)


def test_a_share_lies_within_the_link() -> None:
    for share in (0.0, 1.01):
        with pytest.raises(ValueError, match="exchange_share must lie above 0"):
            Communication(1e-6, exchange_share=share)


def test_a_token_crosses_the_network_once_for_each_node() -> None:
    nodes, experts = 8, 8
    pricer = Pricer(load_cluster("dgx-h100"), Layout(ep=64, dp=64, expert_tp=1))
    route = pricer.route(Group.EP)
    assert route.nodes == nodes
    # Two tokens in three thousand have all experts on one node; the others' lie on 5.25 of 8.
    met = nodes * (1 - (1 - 1 / nodes) ** experts)
    forwarding = forwarding_route(route, experts)
    assert forwarding.exchange_bytes_per_s / route.exchange_bytes_per_s == pytest.approx(experts / met)
    assert forwarding_route(replace(route, nodes=1, ranks_per_node=64), experts).nodes == 1
    assert exchange_s("dgx-h100", 64, experts) == pytest.approx(
        exchange_s("dgx-h100", 64) * met / experts, rel=0.02
    )


def test_one_expert_or_one_node_leaves_nothing_to_save() -> None:
    assert exchange_s("dgx-h100", 64, 1) == pytest.approx(exchange_s("dgx-h100", 64))
    assert exchange_s("dgx-h100", 8, 8) == exchange_s("dgx-h100", 8)


def test_a_strategy_forwards_its_tokens() -> None:
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("dgx-h100")
    strategy = Strategy(Layout(ep=16, dp=16, expert_tp=1), 1, 32, 4096)
    steps = [
        predict(model, cluster, strategy, Framework(dispatcher=dispatcher)).report
        for dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.FORWARDING)
    ]
    assert steps[1].breakdown_s["ep"] < 0.4 * steps[0].breakdown_s["ep"]
    # What of the gradients is reduced beside computing moves a little.
    assert steps[1].breakdown_s["compute"] == pytest.approx(steps[0].breakdown_s["compute"], rel=5e-3)
