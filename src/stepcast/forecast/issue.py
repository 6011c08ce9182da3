"""How long the host takes to issue each work, by the modules that a framework is written in."""

from collections.abc import Callable
from functools import partial

from stepcast.cost.dispatch import EXPERT_ISSUE_S, MODULE_ISSUE_S, PART_ISSUE_S, SCALED_ISSUE_S
from stepcast.cost.fits import default_dispatch
from stepcast.ir.framework import Framework, Kernels, Modules
from stepcast.ir.work import Collective, CollectiveKind, Communication, GroupedMatmul, HostUpdate, Matmul, Work


def issue_s_of(framework: Framework) -> Callable[[Work, bool], float]:
    """Of a work, and whether it is of the backward."""
    if framework.modules is Modules.TRANSFORMERS:
        return partial(_written_issue_s, "compiled" if framework.kernels is Kernels.COMPILED else "dispatch")
    if framework.listed_gathers:
        return _listed_issue_s
    return _engine_issue_s if framework.kernels is Kernels.FUSED else _eager_issue_s


def _listed_issue_s(work: Work, backward: bool) -> float:
    """Modules of Megatron-LM, whose weights are gathered part by part."""
    if isinstance(work, Collective) and work.kind is CollectiveKind.ALL_GATHER:
        return PART_ISSUE_S
    return _engine_issue_s(work, backward)


def _written_issue_s(kind: str, work: Work, backward: bool) -> float:
    """Modules of which every kernel is counted; all experts are one product."""
    dispatch = default_dispatch("transformers", kind)
    if isinstance(work, HostUpdate | Communication):
        return dispatch.backward_heavy_s if backward else dispatch.heavy_s
    return dispatch.issue_s(work, backward)


def _engine_issue_s(work: Work, backward: bool) -> float:
    """Transformer Engine's modules, which take longer over products, most over those of scaled formats."""
    issue_s = _eager_issue_s(work, backward)
    if isinstance(work, Matmul | GroupedMatmul):
        issue_s += MODULE_ISSUE_S + (SCALED_ISSUE_S if work.dtype.scaled else 0.0)
    return issue_s


def _eager_issue_s(work: Work, backward: bool) -> float:
    """What eager PyTorch takes on the host; a collective is issued like a heavy kernel."""
    dispatch = default_dispatch()
    if isinstance(work, GroupedMatmul):
        return dispatch.issue_s(work, backward) + work.groups * EXPERT_ISSUE_S
    if isinstance(work, HostUpdate | Communication):
        return dispatch.backward_heavy_s if backward else dispatch.heavy_s
    return dispatch.issue_s(work, backward)
