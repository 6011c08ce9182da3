"""Two kinds of GPUs in one cluster: stages on either, layers split to balance."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepcast.cli.main import main
from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import CatalogError
from stepcast.ir.framework import MEGATRON_CORE
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Sharding
from stepcast.ir.types import FactDict
from stepcast.models.catalog import load_model
from stepcast.questions.choices import build_question
from stepcast.questions.search import SearchQuestion, search_facts, settle_search
from stepcast.searching.mixed import balance_layers, join_gpu_kinds, search_mixed
from stepcast.searching.result import SearchResult
from stepcast.searching.space import SearchAxes, SpacePart, build_space

BOTH = 'base = "dgx-h100"\nnodes = 2\n[other]\ncluster = "dgx-a100"\nnodes = 2\n'


def cluster(tmp_path: Path, text: str = BOTH) -> Cluster:
    path = tmp_path / "both.toml"
    path.write_text(text)
    return load_cluster(str(path))


def searched(both: Cluster, top: int = 3, objective: str = "step") -> SearchResult:
    axes = SearchAxes(
        gpus=(32,), tp=(1, 2), cp=(1,), pp=(1, 2, 4), vpp=(1,), micro_batch=(1,), recompute=("none",),
        schedule=(ScheduleKind.ONE_F_ONE_B,), sharding=(Sharding.ZERO_1,), sequence_parallel=(False,),
    )  # fmt: skip
    space = build_space(load_model("llama-3.1-8b"), axes, 64, 4096, both.domain_gpus)
    return search_mixed([SpacePart(space, MEGATRON_CORE, np.arange(len(space)))], both, top, objective)


def test_faster_stages_get_more_layers(tmp_path: Path) -> None:
    both = cluster(tmp_path)
    result = searched(both, top=100)
    model = load_model("llama-3.1-8b")
    assert result.counts.complete
    for each in result.best:
        layers = dict(zip([gpu.name for gpu in each.kinds], each.strategy.stage_layers, strict=True))
        assert layers["h100-sxm"] > layers["a100-sxm-80gb"]
        assert len(each.kinds) == each.strategy.layout.pp
        assert each.bound_s <= each.step_s
        stages = memory(model, each.strategy, both.gpu)
        assert all(stage.total <= both.gpu.memory_bytes for stage in stages)
    # Faster than the slow kind alone, slower than as many of the fast one.
    best = result.best[0]
    even = replace(best.strategy, stage_layers=())
    fast_s, slow_s = (predict(model, load_cluster(name), even).step_s for name in ("dgx-h100", "dgx-a100"))
    assert fast_s < best.step_s < slow_s


def test_the_best_is_that_of_all(tmp_path: Path) -> None:
    both = cluster(tmp_path)
    assert searched(both, top=2).best == searched(both, top=100).best[:2]


def test_links_are_the_slower_ones_and_gpus_are_all(tmp_path: Path) -> None:
    both = cluster(tmp_path)
    assert both.gpus == 16
    assert both.other is not None
    one = join_gpu_kinds(both)
    assert one.gpus == 32
    assert one.node.nic == load_cluster("dgx-a100").node.nic
    assert one.gpu == both.gpu
    few = join_gpu_kinds(cluster(tmp_path, BOTH.replace("dgx-a100", "aws-p4d")))
    assert few.node.nics == load_cluster("aws-p4d").node.nics < both.node.nics
    assert join_gpu_kinds(load_cluster("dgx-h100")) == load_cluster("dgx-h100")


def test_the_order_of_the_kinds_makes_no_difference(tmp_path: Path) -> None:
    turned = 'base = "dgx-a100"\nnodes = 2\n[other]\ncluster = "dgx-h100"\nnodes = 2\n'
    both, turned_both = cluster(tmp_path), cluster(tmp_path, turned)
    (best, *_), (same, *_) = searched(both).best, searched(turned_both).best
    assert (best.step_s, best.strategy, best.kinds) == (same.step_s, same.strategy, same.kinds)


def test_one_kind_in_two_halves_is_that_kind(tmp_path: Path) -> None:
    halves = cluster(tmp_path, BOTH.replace("a100", "h100"))
    alone = load_cluster("dgx-h100", ["nodes=4"])
    assert replace(join_gpu_kinds(halves), name=alone.name, description=alone.description) == alone
    result = searched(halves, top=100)
    assert len({each.strategy for each in result.best}) == len(result.best)  # no order is tried twice
    best = result.best[0]
    assert best.step_s == predict(load_model("llama-3.1-8b"), alone, best.strategy).step_s
    # The head, about two layers, is on the last stage.
    assert best.strategy.stage_layers[0] > best.strategy.stage_layers[-1]


def test_nodes_of_different_sizes_share_the_worst_of_both(tmp_path: Path) -> None:
    """Four GPUs with two NICs and slow links: the joined nodes have four, no reducing switch and half a NIC each."""
    (tmp_path / "small.toml").write_text(
        'base = "dgx-h100"\n[node]\ngpus = 6\nnics = 3\n'
        '[node.fabric]\nlink.bandwidth = "100 GB/s"\nin_switch_reduction = false\n'
    )
    text = 'base = "dgx-h100"\nnodes = 3\n[network]\nleaf_nodes = 4\n[other]\ncluster = "small.toml"\nnodes = 2\n'
    one = join_gpu_kinds(cluster(tmp_path, text))
    assert (one.gpus, one.node.gpus, one.node.nics, one.topology.leaf_nodes) == (36, 2, 1, 16)
    assert one.node.fabric.link.bandwidth_bytes_per_s == 100e9
    assert not one.node.fabric.in_switch_reduction


def test_a_search_of_the_first_kind_has_its_rates_and_one_of_both_the_mean_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster(tmp_path, BOTH.replace("dgx-a100", "aws-p4d"))  # GPUs of 40 GB
    degrees = {"tp": (2,), "cp": (1,), "pp": (2,), "vpp": (1,), "micro_batch": (1,)}
    asked = {"model": "llama-3.1-8b", "global_batch": 64, "top": 1, "workers": 1, **degrees}

    def best_row(place: str, **changed: object) -> FactDict:
        settled = settle_search(build_question(SearchQuestion, {**asked, "cluster": place, **changed}))
        row: FactDict = search_facts(settled, settled.answer())["rows"][0]
        return row

    first, alone = (best_row(place, gpus=(16,)) for place in (str(tmp_path / "both.toml"), "dgx-h100"))
    assert {**first, "command": ""} == {**alone, "command": ""}
    mixed = best_row(str(tmp_path / "both.toml"))  # without --gpus: of both kinds
    assert mixed["gpus"] == 32
    assert alone["mfu"] - 0.15 < mixed["mfu"] < alone["mfu"]
    assert 0 < mixed["free_bytes"] < 40e9
    words = [
        "search",
        "llama-3.1-8b",
        "--global-batch",
        "64",
        "--gpus",
        "32",
        *["--tp", "2", "--cp", "1", "--pp", "2", "--vpp", "1"],
    ]
    words += ["--micro-batch", "1", "--workers", "1", "--cluster", f"{tmp_path / 'both.toml'},dgx-h100"]
    assert main([*words, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["rows"][0]
    assert {name: compared[name] for name in ("step_s", "mfu", "free_bytes")} == pytest.approx(
        {name: mixed[name] for name in ("step_s", "mfu", "free_bytes")}
    )
    assert main([*words[:-1], str(tmp_path / "both.toml"), "--emit", "megatron"]) == 2
    assert "no configuration of a tool places stages on two kinds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "takes", "chunks", "split"),
    [
        (32, (1.0, 1.0), 1, (16, 16)),
        (32, (3.0, 1.0), 1, (8, 24)),
        (32, (1.0, 3.0), 2, (12, 4, 12, 4)),
        (5, (1.0, 1.0, 1.0), 1, (2, 2, 1)),
    ],
)
def test_layers_are_split_by_speed(layers: int, takes: tuple[float, ...], chunks: int, split: tuple[int, ...]) -> None:
    assert balance_layers(layers, takes, chunks) == split


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "dgx-h100"\nnodes = 2\n[other]\ncluster = "dgx-a100"\n', "other.nodes: is missing"),
        ('base = "dgx-h100"\nnodes = 2\n[other]\nnodes = 2\n', "other.cluster: is missing"),
        ('base = "dgx-h100"\n[other]\ncluster = "dgx-a100"\nnodes = 2\n', "nodes of both kinds must be given"),
        ('base = "dgx-h100"\nnodes = 2\n[other]\ncluster = "dgx-a101"\nnodes = 2\n', "unknown cluster 'dgx-a101'"),
        ('base = "dgx-h100"\nnodes = 2\n[other]\ncluster = "l40s-node"\nnodes = 1\n', "need NICs of both"),
        (
            'base = "dgx-h100"\nnodes = 2\n[other]\ncluster = "dgx-a100"\nnodes = 0\n',
            r"both.toml:5: other.nodes: must be at",
        ),
    ],
)
def test_mistakes_in_descriptions_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        cluster(tmp_path, text)


def test_other_objectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="searched for step, throughput, cost, not for energy"):
        searched(cluster(tmp_path), objective="energy")
