"""A run beside other jobs on the same network."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepcast.cli.main import main
from stepcast.forecast.background import Neighbour, background_traffic
from stepcast.forecast.options import Engine, Options
from stepcast.forecast.predict import predict
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.graph import network_of
from stepcast.ir.flows import FlowSpread, Pattern
from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.models.catalog import load_model

LEAVES = ["network.kind=fat-tree", "network.leaf_nodes=2", "network.oversubscription=4"]
MODEL = load_model("llama-2-7b")


def cluster(*sets: str) -> Cluster:
    return load_cluster("dgx-h100", [*LEAVES, *sets])


def run(where: Cluster, dp: int, options: Options) -> Prediction:
    strategy = Strategy(Layout(tp=8, dp=dp), micro_batch=1, global_batch=4 * dp, seq=2048)
    return predict(MODEL, where, strategy, Framework(), options)


def fluid(where: Cluster, dp: int, *others: Pattern | Neighbour) -> float:
    options = Options(engine=Engine.FLUID)
    if others:
        repeating, nodes = background_traffic(where, 8 * dp, others)
        options = replace(options, others=repeating, network_nodes=nodes)
    return run(where, dp, options).step_s


def pattern(nodes: tuple[int, ...], size_bytes: float = 1e9, spread: FlowSpread = FlowSpread.RING) -> Pattern:
    return Pattern("others", nodes, spread, size_bytes, 1e-3)


def test_patterns_send_what_they_say() -> None:
    where = cluster()
    for spread, sent in ((FlowSpread.RING, 4), (FlowSpread.EXCHANGE, 4), (FlowSpread.INCAST, 3)):
        (again,), nodes = background_traffic(where, 8, [pattern((1, 2, 3, 4), 8e8, spread)])
        network = network_of(where, nodes)
        load = again.flows.on_links(len(network.links))
        up = network["nic up"]
        assert load[up.start : up.start + up.size].sum() == pytest.approx(sent * 8 * 8e8)
        assert again.period_s == 1e-3
        assert nodes == 5


def test_others_slow_a_run_down_where_they_meet_it() -> None:
    where = cluster()
    alone = fluid(where, 4)
    far = fluid(where, 4, pattern((4, 6)))
    assert far == alone  # other leaves, and the spines have room
    # Nodes that send through the leaves of the run.
    near = fluid(where, 4, pattern((0, 2)))
    assert near > 1.05 * alone


def test_a_training_job_beside_another_slows_it_down() -> None:
    where = cluster("network.leaf_nodes=8", "network.oversubscription=16")
    alone = fluid(where, 4)  # under one leaf
    assert fluid(where, 4, Neighbour("other", tuple(range(4, 12)), run(where, 8, Options()))) == alone
    own = fluid(cluster("network.leaf_nodes=3", "network.oversubscription=16"), 4)
    beside_it = fluid(
        cluster("network.leaf_nodes=3", "network.oversubscription=16"),
        4,
        Neighbour("other", (4, 5, 6, 7), run(cluster("network.leaf_nodes=3"), 4, Options())),
    )
    assert beside_it > own


def test_a_jobs_traffic_is_that_of_its_step() -> None:
    where = cluster()
    other = run(where, 4, Options())
    repeating, nodes = background_traffic(where, 32, [Neighbour("other", (4, 5, 6, 7), other)])
    network = network_of(where, nodes)
    load = sum((each.flows.on_links(len(network.links)) for each in repeating), np.zeros(len(network.links)))
    up = network["nic up"]
    sent = load[up.start : up.start + up.size].reshape(nodes, 8)
    assert (sent[:4] == 0).all()
    assert (sent[4:] > 0).all()
    # Gradients of an eighth of the weights, 4 bytes each, twice round a ring of 4.
    assert sent[4, 0] == pytest.approx(2 * 3 / 4 * 4 * MODEL.parameters / 8, rel=0.01)
    assert all(each.period_s == other.step_s for each in repeating)


@pytest.mark.parametrize(
    ("nodes", "message"), [((3, 4), "node 3 is the run's own, which has the first 4"), ((4, 99), "node 99 is not in")]
)
def test_nodes_have_one_job(nodes: tuple[int, ...], message: str) -> None:
    where = cluster("nodes=16")
    with pytest.raises(ValueError, match=message):
        background_traffic(where, 32, [Neighbour("other", nodes, run(where, 2, Options()))])


ASKED = ["predict", "--model", "llama-2-7b", "--cluster", "dgx-h100", "--gpus", "32", "--tp", "8"]
SETS = [f"--set={each}" for each in ("network.kind=fat-tree", "network.leaf_nodes=3")]
JOB = """
[[job]]
name = "another"
nodes = "4-7"
predict = { model = "llama-2-7b", tp = 8, global_batch = 16 }
"""


def told(capsys: pytest.CaptureFixture[str], *words: str) -> float:
    thin = "--set=network.oversubscription=8"
    assert main([*ASKED, *SETS, thin, "--global-batch", "16", "--engine", "fluid", "--json", *words]) == 0
    step_s: float = json.loads(capsys.readouterr().out)["step_s"]
    return step_s


def test_the_command_line_runs_a_step_beside_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert told(capsys, "--background", str(tmp_path / "job.toml")) > 1.1 * told(capsys)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (JOB, [], "only --engine fluid shares links with other jobs"),
        (JOB.replace("4-7", "3-6"), ["--engine", "fluid"], "another: node 3 is the run's own"),
        (JOB.replace("tp = 8", "tp = 7"), ["--engine", "fluid"], "job.toml: another: "),
        (JOB.replace("llama", "lama"), ["--engine", "fluid"], "job.toml: another: "),
        (JOB.replace("tp = 8", "tp = 8, cluster = 'dgx-a100'"), ["--engine", "fluid"], "runs on another cluster"),
    ],
)
def test_wrong_jobs_are_told_in_one_line(
    text: str, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(text)
    assert main([*ASKED, *SETS, "--background", str(tmp_path / "job.toml"), *more]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
