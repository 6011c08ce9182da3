"""Steps whose communication shares the network: as the fast engine says where nothing is shared, and what
sharing does where something is.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from stepcast.forecast.options import Engine, Options
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import simulate
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import data_names
from stepcast.inputs.table import read
from stepcast.ir.flows import FlowSet, Repeating
from stepcast.ir.workload import Workload
from stepcast.simulation.messages import Send
from tests.shared import ROOT

LLAMA = ROOT / "examples" / "simai-llama-405b.txt"
GPT_13B = ROOT / "examples" / "simai-gpt-13b.txt"
GPT2 = ROOT / "examples" / "optable-gpt2-large.tsv"
SHORT = ["network.kind=fat-tree", "network.leaf_nodes=4", "network.oversubscription=4"]


def fluid(workload: Workload, cluster: Cluster, **options: object) -> Prediction:
    return simulate(workload, cluster, Options(engine=Engine.FLUID, **options))  # type: ignore[arg-type]


def same(one: Prediction, other: Prediction) -> None:
    """Bit for bit, and in its breakdown."""
    assert one.step_s == other.step_s
    assert (one.times.start_s == other.times.start_s).all()
    assert (one.times.end_s == other.times.end_s).all()
    assert one.report.breakdown_s == pytest.approx(other.report.breakdown_s, rel=1e-9, abs=1e-9)
    assert (one.report.low_s, one.report.high_s) == (other.report.low_s, other.report.high_s)


def has_shared_nics(cluster: Cluster) -> bool:
    gpus = min(32, cluster.gpus or 32)
    return gpus > cluster.domain_gpus and cluster.node.nics < cluster.node.gpus


@pytest.mark.parametrize("name", [name for name in data_names("clusters") if not has_shared_nics(load_cluster(name))])
def test_where_nothing_is_shared_it_is_the_fast_engine_bit_for_bit(name: str) -> None:
    """Data parallelism alone, on every cluster whose GPUs have a NIC each or more."""
    cluster, workload = load_cluster(name), read(GPT2)
    gpus = min(32, cluster.gpus or 32)
    same(fluid(workload, cluster, gpus=gpus), simulate(workload, cluster, Options(gpus=gpus)))


@pytest.mark.parametrize("send", list(Send))
@pytest.mark.parametrize("path", [LLAMA, GPT_13B], ids=lambda path: path.stem)
def test_pipelines_that_share_nothing_are_the_same_too(path, send: Send) -> None:  # type: ignore[no-untyped-def]
    workload, cluster = read(path), load_cluster("dgx-h100")
    if send is Send.BLOCKING and workload.layout.vpp > 1:
        workload = replace(workload, layout=replace(workload.layout, vpp=1))
    same(fluid(workload, cluster, send=send), simulate(workload, cluster, Options(send=send)))


def test_messages_between_stages_take_so_many_times_as_long_as_the_network_is_short() -> None:
    """4:1 and 8:1 at the leaves, and stages of 8 nodes under leaves of 4: every message leaves its leaf."""
    workload = read(LLAMA)
    slowest = {}
    for factor in (2, 4, 8):
        cluster = load_cluster("dgx-h100", [*SHORT[:2], f"network.oversubscription={factor}"])
        shared = fluid(workload, cluster).fluid
        assert shared is not None
        found = [each for each in shared.observed.operations if each.who.name == "pp"]
        slowest[factor] = min(each.slowdown for each in found)
    # A message takes some time that is not the wire's, which sharing does not make longer.
    assert 3.5 < slowest[4] <= 4.6
    assert slowest[8] / slowest[4] == pytest.approx(2.0, rel=0.05)
    assert slowest[4] / slowest[2] == pytest.approx(2.0, rel=0.05)


def test_it_is_about_what_the_fast_engine_charges_for_a_short_network() -> None:
    """The fast one takes all groups to send at once; on these that is nearly so."""
    workload, cluster = read(LLAMA), load_cluster("dgx-h100", SHORT)
    assert fluid(workload, cluster).step_s == pytest.approx(simulate(workload, cluster).step_s, rel=0.01)


@pytest.mark.parametrize("send", list(Send))
def test_nothing_is_faster_than_alone_and_no_link_carries_more_than_it_can(send: Send) -> None:
    workload, cluster = read(LLAMA), load_cluster("dgx-h100", SHORT)
    prediction = fluid(workload, cluster, send=send)
    assert prediction.fluid is not None
    shared = prediction.fluid
    took_s = prediction.times.end_s - prediction.times.start_s
    assert (took_s >= shared.run.shared.duration_s - 1e-12).all()
    assert prediction.step_s > prediction.run.makespan_s
    assert shared.observed.share_in.max() <= 1 + 1e-8
    assert sum(prediction.report.breakdown_s.values()) == pytest.approx(prediction.step_s, rel=1e-12)


def test_every_byte_is_seen_on_the_links() -> None:
    """What NICs carried in the step is what all its operations put on them."""
    prediction = fluid(read(LLAMA), load_cluster("dgx-h100", SHORT))
    assert prediction.fluid is not None
    shared = prediction.fluid
    told, traffic = shared.observed, shared.run.shared.traffic
    runs = np.bincount(shared.run.shared.flows_of + 1, minlength=len(traffic.sets) + 1)[1:]
    sent = sum(flows.on_links(len(traffic.links)) * count for flows, count in zip(traffic.sets, runs, strict=True))
    np.testing.assert_allclose(told.link_bytes, sent, rtol=1e-6, atol=1.0)
    hot = told.hottest(3)
    assert hot[0].share >= hot[1].share >= hot[2].share > 0
    assert sum(hot[0].users.values()) == pytest.approx(hot[0].carried_bytes, rel=1e-9)
    assert set(hot[0].users) == {"pp", "dp"}
    assert hot[0].full_s > 0
    assert told.tier_busiest.shape == told.tier_share.shape == (len(traffic.links.tiers), told.bins)
    assert (told.tier_share <= told.tier_busiest + 1e-12).all()
    assert told.facts()["tiers"][0]["tier"] == traffic.links.tiers[0]


def test_the_same_input_gives_the_same_bits_compiled_or_not() -> None:
    pytest.importorskip("numba", reason="needs the extra compiled: pip install 'stepcast[compiled]'")
    from stepcast.forecast.fluid import run_fluid

    cluster = load_cluster("dgx-h100", [*SHORT, "network.routing=ecmp"])
    prediction = fluid(read(LLAMA), cluster)
    ends = [
        run_fluid(prediction.step, prediction.pricer, cluster, compiled=compiled).run.times.end_s.tobytes()
        for compiled in (False, True, True)
    ]
    assert ends[0] == ends[1] == ends[2] == prediction.times.end_s.tobytes()


def test_more_bandwidth_is_not_slower() -> None:
    steps_s = [
        fluid(read(LLAMA), load_cluster("dgx-h100", [*SHORT, f"node.nic.bandwidth={rate} Gb/s"])).step_s
        for rate in (100, 200, 400, 800)
    ]
    assert steps_s == sorted(steps_s, reverse=True)


def test_others_on_the_network_slow_a_step_and_come_again() -> None:
    workload, cluster = read(LLAMA), load_cluster("dgx-h100", SHORT)
    alone = fluid(workload, cluster)
    assert alone.fluid is not None
    shared = alone.fluid
    links = shared.run.shared.traffic.links
    up = np.flatnonzero(links.tier == links.tiers.index("leaf to spine"))
    rate = links.capacity_bytes_per_s[up]
    flows = FlowSet.of(np.arange(len(up) + 1), up, rate * 0.2)
    beside = fluid(workload, cluster, others=(Repeating("backup", flows, 0.2, 1.0, 0.5),))
    assert alone.step_s < beside.step_s < 1.5 * alone.step_s
    assert beside.fluid is not None
    used = {name for hot in beside.fluid.observed.hottest(5) for name in hot.users}
    assert "backup" in used


def test_a_prediction_travels_with_what_was_found() -> None:
    prediction = fluid(read(LLAMA), load_cluster("dgx-h100", SHORT))
    again = pickle.loads(pickle.dumps(prediction))
    assert again.step_s == prediction.step_s
    assert again.report == prediction.report
    assert (again.times.end_s == prediction.times.end_s).all()


def test_the_report_says_who_was_slowed() -> None:
    report = fluid(read(LLAMA), load_cluster("dgx-h100", SHORT)).report
    assert any(text.startswith("engine fluid") and "pp up to" in text for text in report.assumptions)
    assert report.run["engine"] == "fluid"
    usual = simulate(read(LLAMA), load_cluster("dgx-h100")).report
    assert "engine" not in usual.run
