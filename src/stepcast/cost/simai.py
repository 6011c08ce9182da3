"""The cost of a workload as SimAI-analytical computes it, so that its users can compare and switch.

This is not our own estimate: communication overlaps nothing, latency is a table, the pipeline is a formula. It follows
aliyun/SimAI (MIT), astra-sim-alibabacloud, mode ``analytical``, and gives its totals to the microsecond. Group sizes
are divided as whole numbers and times cut to nanoseconds, as there. Where SimAI prints NaN or an empty result (no
``vpp``, values of 2^31 and more, collectives above 16 GiB) the formula's number is given.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from stepcast.hardware.catalog import load_fit
from stepcast.ir.layout import Group
from stepcast.ir.types import dataclass, require, require_counts
from stepcast.ir.work import Collective, CollectiveKind, Recorded
from stepcast.ir.workload import Layer, Op, Phase, Workload
from stepcast.units import GIB, MIB, NS, format_bytes

# Rows of the efficiency tables in data/fits/simai.toml: 16 MiB, doubling up to 16 GiB.
SIZES_BYTES: tuple[int, ...] = tuple(16 * MIB * 2**row for row in range(11))
DEFAULT_NODES = "16"  # whose column a number of nodes without one takes

Column = Sequence[float]


@lru_cache(maxsize=1)
def efficiency_tables() -> Mapping[str, Mapping[str, Column]]:
    """Return table -> nodes -> share of the bandwidth that a collective reaches, by size."""
    return load_fit("simai")


def relative_efficiency(column: Column, size_bytes: int) -> float:
    """Return the efficiency at *size_bytes* over that at 16 GiB: linear between rows, constant outside them."""
    return float(np.interp(size_bytes, SIZES_BYTES, column)) / column[-1]


# Below 1 MiB a collective takes a fixed time, by ranks; other numbers of ranks cost nothing.
SMALL_US = {2: 10, 4: 12, 8: 15, 16: 66, 32: 135, 64: 200, 128: 320}
GATHERS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
GROUPS = {"tp": Group.TP, "ep": Group.EP, "dp": Group.DP, "dp_ep": Group.EXPERT_DP}  # by SimAI's names
EMBEDDING = "embedding_layer"  # the layer that SimAI leaves out of the bubble


@dataclass(frozen=True, slots=True)
class SimaiSystem:
    """SimAI's flags. It calls its bandwidths GB/s but divides by 2^30."""

    nvlink_gib_per_s: float = 360.0  # -nv, per GPU
    nic_gib_per_s: float = 48.5  # -nic, per NIC
    gpus_per_server: int = 8  # -g_p_s
    nics_per_server: int = 8  # -n_p_s

    def __post_init__(self) -> None:
        for name in ("nvlink_gib_per_s", "nic_gib_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above zero, not {getattr(self, name)!r}")
        require_counts(self, 1, "gpus_per_server", "nics_per_server")


@dataclass(frozen=True, slots=True)
class SimaiPrice:
    """The parts of a step as SimAI reports them; communication is what remains exposed.

    ``pp_s`` is zero: SimAI divides the pipeline's messages by an overlap ratio instead of a bandwidth.
    """

    dp_s: float
    dp_ep_s: float
    tp_s: float
    ep_s: float
    bubble_s: float
    compute_s: float
    pp_s: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        communication_s = self.dp_s + self.dp_ep_s + self.tp_s + self.ep_s + self.pp_s
        return self.compute_s + communication_s + self.bubble_s


@dataclass(frozen=True, slots=True)
class _Job:
    """A workload's degrees of parallelism on a number of GPUs."""

    system: SimaiSystem
    tp: int
    ep: int
    dp: int

    def ranks(self, group: Group) -> int:
        return {Group.TP: self.tp, Group.EP: self.ep, Group.DP: self.dp, Group.EXPERT_DP: self.dp // self.ep}[group]

    def servers(self, group: Group) -> tuple[int, int, int]:
        """Return the servers a group spans, its GPUs on each and the NICs it has there."""
        gpus, nics, n = self.system.gpus_per_server, self.system.nics_per_server, self.ranks(group)
        match group:
            case Group.TP:
                return (1, n, nics) if n <= gpus else (n // gpus, gpus, nics)
            case Group.EP if self.tp * n <= gpus:
                return 1, gpus // self.tp, nics
            case Group.EP:
                return self.tp * n // gpus, max(gpus // self.tp, 1), nics // min(gpus, self.tp)
            case _:
                group_stride = self.tp if group is Group.DP else self.tp * self.ep
                return (n, gpus // group_stride, nics // group_stride) if group_stride <= gpus else (n, 1, nics // gpus)


def simai_price(
    workload: Workload,
    gpus: int | None = None,
    system: SimaiSystem = SimaiSystem(),  # noqa: B008 - frozen
    overlap: Mapping[str, float] | None = None,
) -> SimaiPrice:
    """Price *workload* on *gpus* GPUs (those it names, if None) as SimAI-analytical does.

    *overlap* is the share of each group's communication that is hidden: 0 none, 1 all of it.
    """
    layout, hidden = workload.layout, dict.fromkeys(GROUPS, 0.0) | dict(overlap or {})
    for name, share in hidden.items():
        require(0 <= share <= 1, f"overlap {name} must lie between 0 and 1, not {share!r}")
    require(workload.uniform, "the simai engine prices one stage for all; this workload has several")
    gpus = layout.gpus if gpus is None else gpus
    dp = gpus // (layout.tp * layout.pp)
    require(dp >= 1, f"{gpus} GPUs are fewer than tp x pp = {layout.tp} x {layout.pp}")
    job = _Job(system, layout.tp, layout.ep, dp)
    # Nanoseconds, whole numbers until the end.
    communication_ns: Counter[Group] = Counter()
    compute_ns, bubble_ns, odd = 0, 0, Counter[str]()
    # SimAI prices the lines of the file: a micro-batch counts as often as it is written.
    written = int(workload.note("simai.written_micro_batches") or workload.micro_batches)
    for layer, count in workload.stages[0].counted_layers(written):
        ops = [(phase, op) for phase in Phase for op in layer.ops(phase)]
        for phase, op in ops:
            if isinstance(op.work, Recorded):
                spent = round(op.work.duration_s / NS) * count
                compute_ns += spent
            else:
                collective = _require_collective(op, layer)
                spent, oddity = _collective_ns(collective, job)
                spent *= count
                communication_ns[collective.group] += spent
                if oddity:
                    odd[oddity] += count
            # The communication of weight gradients is outside the bubble.
            if layer.name != EMBEDDING and (isinstance(op.work, Recorded) or phase is not Phase.WEIGHT_GRADIENT):
                bubble_ns += spent
    bubbles = Fraction(layout.pp - 1, workload.micro_batches * layout.vpp)
    return SimaiPrice(
        **{f"{name}_s": communication_ns[group] * NS * (1 - hidden[name]) for name, group in GROUPS.items()},
        bubble_s=float(bubble_ns * bubbles) * NS,
        compute_s=compute_ns * NS,
        warnings=tuple(f"{text} ({count} times)" for text, count in odd.items()),
    )


def _require_collective(op: Op, layer: Layer) -> Collective:
    if not isinstance(op.work, Collective):
        work = type(op.work).__name__
        raise ValueError(f"{layer.op_name(op)}: the simai engine needs recorded times, and cannot price {work}")
    require(op.work.group in GROUPS.values(), f"{layer.op_name(op)}: SimAI has no group {op.work.group}")
    require(op.work.times <= 1, f"{layer.op_name(op)}: SimAI knows single collectives, not {op.work.times} in a row")
    return op.work


def _collective_ns(collective: Collective, job: _Job) -> tuple[int, str]:
    """Return the nanoseconds, and a note on them."""
    n, size = job.ranks(collective.group), collective.size_bytes
    if collective.kind not in (*GATHERS, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL):
        return 0, f"{collective.kind} costs nothing in SimAI"
    if size <= 1:
        return 0, ""
    if size < MIB:
        odd = "" if n in (1, *SMALL_US) else f"SimAI has no time for less than 1 MiB over {n} ranks: 0"
        return SMALL_US.get(n, 0) * 1000, odd
    if n <= 1:
        return 0, ""
    rate = _rate_gib_per_s(collective, job)
    if rate <= 0:
        raise ValueError(
            f"{collective.kind} of {format_bytes(size)} over {collective.group}: of "
            f"{job.system.nics_per_server} NICs per server none is left for each group of {n} ranks, "
            "so SimAI's bandwidth is zero"
        )
    turns = 2 if collective.kind is CollectiveKind.ALL_REDUCE else 1
    return int(turns * (size / GIB / rate * (n - 1) / n / NS)), ""


def _rate_gib_per_s(collective: Collective, job: _Job) -> float:
    """Return bandwidth times efficiency."""
    servers, gpus, nics = job.servers(collective.group)
    nvlink, network = job.system.nvlink_gib_per_s, job.system.nic_gib_per_s * nics
    size = collective.size_bytes
    if collective.kind is CollectiveKind.ALL_TO_ALL:
        spread, full = job.tp * job.ranks(collective.group), job.system.gpus_per_server
        nodes: int | str = 1 if spread <= full else "servers" if job.tp >= full else spread // full
        efficiency = _efficiency("all_to_all", nodes, size)
        if servers == 1:
            return nvlink * efficiency
        return network / gpus * (servers * gpus - 1) / ((servers - 1) * gpus) * efficiency
    rate, over_nvlink = nvlink, False
    if servers > 1 and gpus == 1:
        rate = network
    elif servers > 1:
        # With NICs faster than NVLink only (g-1)/g of the data crosses NVLink.
        node_rate = nvlink * gpus / (gpus - 1) if network > nvlink else nvlink
        rate, over_nvlink = min(node_rate, network), node_rate < network
    if collective.group is not Group.TP or collective.kind not in GATHERS:
        return rate
    nodes = 1 if job.tp < job.system.gpus_per_server else job.tp // job.system.gpus_per_server
    return rate * _efficiency("nvlink" if over_nvlink else "network", nodes, size)


def _efficiency(table: str, nodes: int | str, size_bytes: int) -> float:
    columns = efficiency_tables()[table]
    return relative_efficiency(columns.get(str(nodes), columns[DEFAULT_NODES]), size_bytes)
