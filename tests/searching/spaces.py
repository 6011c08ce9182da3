"""Spaces small enough to simulate all of them."""

from typing import Any, NamedTuple

import numpy as np

from stepcast.hardware import Cluster, load_cluster
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Sharding
from stepcast.models.catalog import load_model
from stepcast.searching.bounds import CandidateBounds, TimeBounds, bound_memory
from stepcast.searching.space import CandidateSpace, SearchAxes, SpaceColumns, build_space


class Case(NamedTuple):
    space: CandidateSpace
    cluster: Cluster
    framework: Framework = MEGATRON_CORE


def case(model: str, cluster: str, gpus: int, global_batch: int, seq: int, **axes: Any) -> Case:
    found = load_cluster(cluster)
    space = build_space(load_model(model), SearchAxes(gpus=(gpus,), **axes), global_batch, seq, found.domain_gpus)
    return Case(space, found)


def dense(wide: bool = False) -> Case:
    few: dict[str, Any] = {"recompute": ("none", "full"), "sharding": (Sharding.ZERO_1,), "cp": (1,)}
    few = {"cp": (1, 2)} if wide else {**few, "sequence_parallel": (True,)}
    return case("llama-3.1-8b", "dgx-h100", 32, 32, 8192, pp=(1, 2, 4), vpp=(1, 2, 4), micro_batch=(1, 2), **few)


def experts(wide: bool = False) -> Case:
    few = {} if wide else {"recompute": ("none", "full"), "sequence_parallel": (True,), "tp": (1, 2)}
    return case(
        "mixtral-8x7b",
        "dgx-h100",
        32,
        32,
        4096,
        cp=(1, 2) if wide else (1,),
        ep=(1, 4, 8),
        pp=(2, 4),
        vpp=(1, 2, 4),
        micro_batch=(1, 2),
        sharding=(Sharding.ZERO_1, Sharding.FSDP) if wide else (Sharding.ZERO_1,),
        schedule=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V, ScheduleKind.DUALPIPE),
        **few,
    )


def sharded(wide: bool = False) -> Case:
    few = {} if wide else {"tp": (1, 2, 4), "cp": (1, 2)}
    return case(
        "llama-3.1-70b",
        "dgx-a100",
        64,
        128,
        8192,
        pp=(1, 2) if wide else (1,),
        vpp=(1, 2),
        micro_batch=(1, 2, 4),
        sharding=(Sharding.ZERO_2, Sharding.ZERO_3, Sharding.FSDP),
        **few,
    )


def hybrid() -> Case:
    """Blocks of four kinds: attention and state space, dense and with experts."""
    return case(
        "jamba-v0.1",
        "dgx-h100",
        32,
        32,
        4096,
        tp=(1, 2),
        cp=(1,),
        ep=(1, 8),
        pp=(2, 4),
        vpp=(1, 2, 4),
        micro_batch=(1,),
        recompute=("none", "full"),
        sharding=(Sharding.ZERO_1, Sharding.FSDP),
        sequence_parallel=(True,),
        schedule=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V),
    )


def bound_candidates(
    space: CandidateSpace, cluster: Cluster, framework: Framework, most_bytes: float = np.inf
) -> CandidateBounds:
    """The memory of all candidates (infinite: not legal), and the time of those that may fit into *most_bytes*."""
    columns = SpaceColumns(space)
    legal, memory_bytes = bound_memory(columns, cluster, framework)
    rows = np.flatnonzero(legal & (memory_bytes <= most_bytes))
    time_s, computing_s = np.full(len(space), np.inf), np.full(len(space), np.inf)
    if len(rows):
        time_s[rows], computing_s[rows] = TimeBounds(columns, cluster, framework, rows).times(rows)
    return CandidateBounds(time_s, computing_s, memory_bytes)
