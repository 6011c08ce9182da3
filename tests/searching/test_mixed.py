"""Two kinds of GPUs in one cluster: stages on either, layers split to balance."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import CatalogError
from stepcast.ir.framework import MEGATRON_CORE
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Sharding
from stepcast.models.catalog import load_model
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
        layers = dict(zip(each.kinds, each.strategy.stage_layers, strict=True))
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
    ],
)
def test_mistakes_in_descriptions_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        cluster(tmp_path, text)


def test_other_objectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="searched for step, throughput, cost, not for energy"):
        searched(cluster(tmp_path), objective="energy")
