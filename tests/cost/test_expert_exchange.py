"""Exchanges of experts: what an all-to-all reaches, and tokens that cross the network once for each node."""

import json
import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import mean

import pytest

from stepcast.cost.collectives.route import route_of
from stepcast.cost.exchange import Phase, TokenCopies
from stepcast.cost.exchange import exchange_s as exchange_s_of
from stepcast.cost.memory import memory
from stepcast.cost.pricing import Pricer, forwarding_route
from stepcast.forecast.predict import predict
from stepcast.generate.workload import generate
from stepcast.hardware import resolve
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import Dispatcher, Framework
from stepcast.ir.layout import Group, Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.models.catalog import load_model

BIG = 512 * 2**20


def exchange_s(cluster: str, ep: int, once_per_node: Routing | None = None) -> float:
    pricer = Pricer(load_cluster(cluster), Layout(ep=ep, dp=ep, expert_tp=1), once_per_node=once_per_node)
    return pricer.seconds(Collective(CollectiveKind.ALL_TO_ALL, BIG, Group.EP))


def test_eight_b200_reach_what_simumax_measured() -> None:
    """All-to-all at 0.597 of 900 GB/s (configs/system/b200_bf16_ceperm.json)."""
    assert exchange_s("dgx-b200", 8) == pytest.approx(BIG * 7 / 8 / (0.597 * 900e9), rel=0.08)


def test_a_share_is_within_the_link() -> None:
    for share in (0.0, 1.01):
        with pytest.raises(ValueError, match=r"communication\.exchange_share: must be at "):
            load_cluster("dgx-h100", [f"communication.exchange_share={share}"])


def test_a_token_crosses_the_network_once_for_each_node() -> None:
    nodes, experts = 8, 8
    pricer = Pricer(load_cluster("dgx-h100"), Layout(ep=64, dp=64, expert_tp=1))
    route = pricer.route(Group.EP)
    assert route.nodes == nodes
    # A node is missed if all experts are among the 224 of the others.
    met = nodes * (1 - math.comb(224, experts) / math.comb(256, experts))
    routing = Routing(experts, 256)
    forwarding = forwarding_route(route, routing)
    assert forwarding.exchange_bytes_per_s / route.exchange_bytes_per_s == pytest.approx(experts / met)
    assert forwarding_route(replace(route, nodes=1, ranks_per_node=64), routing).nodes == 1
    assert exchange_s("dgx-h100", 64, routing) == pytest.approx(exchange_s("dgx-h100", 64) * met / experts, rel=0.1)


def received_gb_per_s(library: str, phase: Phase, element_bytes: float, sms: float) -> float:
    """Return what each of 8 B200 receives of 4,096 tokens of 7,168 elements, 8 of 64 experts each."""
    cluster = load_cluster("dgx-b200")
    route = route_of(resolve(cluster, range(8)), cluster)
    copies = TokenCopies.of(Routing(8, 64), route)
    seconds = exchange_s_of(library, phase, 4096.0, 7168.0, element_bytes, copies, route, sms, "blackwell")
    return float(4096 * 7168 * element_bytes * copies.to_ranks / seconds / 1e9)


@pytest.mark.parametrize(
    ("phase", "element_bytes", "sms", "published"),
    [
        ("dispatch", 1 + 4 / 128, 16, 246),
        ("dispatch", 1 + 4 / 128, 24, 349),
        ("combine", 2, 16, 302),
        ("combine", 2, 24, 420),
    ],
)
def test_deepep_reaches_what_its_authors_measured(
    phase: Phase, element_bytes: float, sms: float, published: float
) -> None:
    """DeepEP's docs/README_Hybrid-EP.md, which the constants were not fitted to."""
    assert received_gb_per_s("deepep", phase, element_bytes, sms) == pytest.approx(published, rel=0.12)


def test_hybridep_needs_fewer_multiprocessors() -> None:
    """The same table: 536 GB/s by calls of 16 SMs, 735 by the kernels alone, where DeepEP reaches 348."""
    assert 536 < received_gb_per_s("hybridep", "dispatch", 2, 16) < 735
    assert received_gb_per_s("deepep", "dispatch", 2, 16) == pytest.approx(348, rel=0.15)


def test_one_expert_leaves_nothing_to_save_but_several_on_a_rank_do() -> None:
    one, eight = (exchange_s("dgx-h100", 8, Routing(count, 64, token_bytes=14336)) for count in (1, 8))
    assert eight < 0.9 * one


def test_an_all_gather_brings_all_tokens_to_all_ranks() -> None:
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("dgx-h100")
    strategy = Strategy(Layout(ep=8, dp=8, expert_tp=1), 1, 16, 4096)
    gathers = Framework(dispatcher=Dispatcher.ALL_GATHER)
    ops = [
        op
        for block in generate(model, strategy, gathers).stages[0].body
        for each in block.layers
        for op in each.all_ops
    ]
    works = {
        op.work.kind: op.work.size_bytes for op in ops if isinstance(op.work, Collective) and "choice" not in op.name
    }
    assert works[CollectiveKind.ALL_GATHER] == works[CollectiveKind.REDUCE_SCATTER] == 8 * 4096 * 2048 * 2
    assert CollectiveKind.ALL_TO_ALL not in works
    steps = [predict(model, cluster, strategy, Framework(dispatcher=kind)).report for kind in Dispatcher]
    assert all(step.breakdown_s["ep"] > 0 for step in steps)


@pytest.mark.parametrize(("tp", "ratio"), [(1, 1.0), (4, 1 / 8)])
def test_tokens_that_are_gathered_for_split_experts_are_sent_once(tp: int, ratio: float) -> None:
    """An all-to-all sends a copy of a token to each of its 8 experts; one rank gathers and saves nothing."""
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("dgx-h100")
    strategy = Strategy(Layout(tp=tp, dp=2), 1, 16, 4096, sequence_parallel=tp > 1)
    sizes, memories = [], []
    for dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.ALL_GATHER):
        forecast = predict(model, cluster, strategy, Framework(dispatcher=dispatcher))
        layers = [layer for block in forecast.workload.stages[0].body for layer in block.layers]
        works = [op.work for layer in layers for op in layer.all_ops if "expert-tp" in op.name]
        sizes.append(sum(work.size_bytes for work in works if isinstance(work, Collective)))
        memories.append(memory(model, strategy, cluster.gpu, Framework(dispatcher=dispatcher))[0].activations)
    assert sizes[1] == ratio * sizes[0]
    assert (memories[1] == memories[0]) == (tp == 1)


def test_an_overlapped_exchange_costs_computation() -> None:
    """With the same exchange hidden, computing takes longer, but the step is shorter."""
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("dgx-h100")
    strategy = Strategy(Layout(ep=8, dp=8, expert_tp=1), 1, 64, 4096)
    hidden = replace(strategy, overlap=replace(strategy.overlap, experts=True))
    plain, paired = (
        predict(model, cluster, each, Framework(dispatcher=Dispatcher.DEEPEP)).report for each in (strategy, hidden)
    )
    assert paired.step_s < plain.step_s
    assert paired.breakdown_s["compute"] > 1.02 * plain.breakdown_s["compute"]


def test_a_strategy_forwards_its_tokens() -> None:
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("dgx-h100")
    strategy = Strategy(Layout(ep=16, dp=16, expert_tp=1), 1, 32, 4096)
    steps = [
        predict(model, cluster, strategy, Framework(dispatcher=dispatcher)).report
        for dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.DEEPEP)
    ]
    assert steps[1].breakdown_s["ep"] < 0.6 * steps[0].breakdown_s["ep"]
    # Tokens are copied into the order of their experts once, after they arrived.
    assert 0.9 < steps[1].breakdown_s["compute"] / steps[0].breakdown_s["compute"] < 1.0


def chosen_by_best(order: tuple[int, ...], groups: int, top_groups: int, top_k: int) -> list[int]:
    """Return the experts of a token that ranks them in *order*: groups by their best expert, then experts."""
    size = len(order) // groups
    best = list(dict.fromkeys(expert // size for expert in order))[:top_groups]
    return [expert for expert in order if expert // size in best][:top_k]


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_nodes_of_a_token_by_trying_every_order_of_experts(nodes: int, top_k: int) -> None:
    count, groups, top_groups = 8, 4, 2
    expected = mean(
        len({expert * nodes // count for expert in chosen_by_best(order, groups, top_groups, top_k)})
        for order in permutations(range(count))
    )
    assert Routing(top_k, count, groups, top_groups).nodes_per_token(nodes) == pytest.approx(expected)


def test_deepseek_v3_sends_a_token_to_at_most_four_nodes() -> None:
    """With a group of 32 experts on each of 8 nodes (DeepSeek-V3, section 2.1.2): 3.98 instead of 5.29."""
    experts = load_model("deepseek-v3").experts
    assert experts is not None
    assert (experts.groups, experts.top_groups) == (8, 4)
    assert experts.routing.nodes_per_token(8) == pytest.approx(3.983, abs=1e-3)
    assert replace(experts.routing, groups=1, top_groups=1).nodes_per_token(8) == pytest.approx(5.295, abs=1e-3)


@pytest.mark.parametrize("dispatcher", list(Dispatcher))
def test_a_group_limit_shortens_forwarded_exchanges_only(dispatcher: Dispatcher) -> None:
    """Of a plain all-to-all, 7 in 8 copies leave the node with or without the limit: all experts are equal."""
    model, cluster = load_model("deepseek-v3").with_layers(4), load_cluster("dgx-h100")
    assert model.experts is not None
    unlimited = replace(model, experts=replace(model.experts, groups=1, top_groups=1))
    strategy = Strategy(Layout(ep=64, dp=64, expert_tp=1), 1, 64, 4096)
    limited, free = (
        predict(each, cluster, strategy, Framework(dispatcher=dispatcher)).report for each in (model, unlimited)
    )
    forwards = dispatcher.sends_once
    ratio = 3.983 / 5.295 if forwards else 1.0
    assert limited.breakdown_s["ep"] == pytest.approx(free.breakdown_s["ep"] * ratio, rel=0.06)
    notes = [text for text in limited.assumptions if "expert groups" in text]
    assert notes == forwards * [
        "routing is limited to 4 of 8 expert groups, 1 group per node: a token is sent to 3.98 of 8 nodes on average"
    ]


def test_groups_that_do_not_align_with_nodes_are_reported() -> None:
    model, cluster = load_model("deepseek-v2").with_layers(2), load_cluster("dgx-h100")
    strategy = Strategy(Layout(ep=40, dp=40, expert_tp=1), 1, 40, 4096)
    report = predict(model, cluster, strategy, Framework(dispatcher=Dispatcher.DEEPEP)).report
    assert any("do not align with 5 nodes" in text for text in report.assumptions)


def test_a_config_states_the_group_limit(tmp_path: Path) -> None:
    table = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 256,
        "n_group": 4,
        "topk_group": 2,
    }
    path = tmp_path / "config.json"
    for changes, expected in (
        ({}, (4, 2)),
        ({"n_group": None, "topk_group": None}, (8, 4)),  # DeepseekV3Config's defaults
        ({"model_type": "kimi_k2", "n_group": None, "topk_group": None}, (1, 1)),
        ({"model_type": "deepseek_v2", "topk_method": "greedy"}, (1, 1)),
    ):
        path.write_text(json.dumps(table | changes))
        experts = load_model(str(path)).experts
        assert experts is not None
        assert (experts.groups, experts.top_groups) == expected


def test_no_network_beyond_the_measured_ones_is_taken_as_faster() -> None:
    """Libraries were measured on 400 Gb/s for each GPU; NICs of 800 are taken to exchange as fast between nodes."""
    routing = Routing(8, 256, token_bytes=14336)
    slow, fast = (exchange_s(name, 64, routing) for name in ("dgx-b200", "dgx-b300"))
    assert fast == pytest.approx(slow, rel=0.02)


def test_the_bound_of_an_exchange_sends_a_token_to_each_rank_and_node_once() -> None:
    """A token with 8 of 256 experts on 32 ranks of 4 nodes is sent to 3.6 nodes, not eight times: ideal links are that
    much faster, and no real exchange is faster than they are.
    """
    routing, cluster = Routing(8, 256, token_bytes=14336), load_cluster("dgx-h100")
    layout, work = Layout(ep=32, dp=32), Collective(CollectiveKind.ALL_TO_ALL, 8 * 4096 * 14336, Group.EP)
    plain = route_of(resolve(cluster, tuple(range(32))), cluster)
    once = forwarding_route(plain, routing)
    assert once.inter_bytes_per_s / plain.inter_bytes_per_s == pytest.approx(8 / routing.nodes_per_token(4))
    assert once.intra_bytes_per_s / plain.intra_bytes_per_s == pytest.approx(8 / routing.nodes_per_token(32))
    ideal, real = (
        Pricer(cluster, layout, once_per_node=routing, ideal=is_ideal).seconds(work) for is_ideal in (True, False)
    )
    rate = min(once.intra_bytes_per_s, once.inter_bytes_per_s)
    assert ideal == pytest.approx(31 / 32 * work.size_bytes / rate, rel=1e-9)
    assert ideal < real
    assert Pricer(cluster, layout, once_per_node=routing).seconds(replace(work, size_bytes=0)) == 0.0
