"""Seconds in which libraries made for it exchange tokens with their experts: DeepEP and HybridEP.

Both send a token once to each rank that holds some of its experts, and between nodes once to each such node, where
ranks forward it. DeepEP's normal kernels copy with a number of multiprocessors (SMs), half of them sending and half
receiving, so that few SMs, NVLink or the network limit an exchange, whichever takes longest. They hand tokens on in
chunks, one after another until each of them is busy (csrc/kernels/internode.cu):

    seconds = start + longest(work of SMs / SMs, bytes over NVLink, bytes over the network) + sum of the same for chunks

The low-latency kernels send once for each expert and use no SM while they wait. HybridEP copies by TMA, for which 16
SMs suffice. The constants are in data/fits/exchange.toml, each with its source (tools/fit_exchange.py).
"""

from functools import lru_cache
from typing import Literal

import numpy as np

from stepcast.cost.collectives.route import Route
from stepcast.cost.price import Number
from stepcast.hardware.catalog import convert_units, load_fit
from stepcast.ir.model_parts import Routing
from stepcast.ir.tables import Amount, convert_table
from stepcast.ir.types import dataclass
from stepcast.units import GB

Phase = Literal["dispatch", "combine"]
PHASES: tuple[Phase, ...] = ("dispatch", "combine")
DEFAULT_ARCHITECTURE = "hopper"
SHARPNESS = 6.0  # of the smooth maximum
# The fastest network on which these libraries were measured: ranks forward tokens one by one, so that what they send
# does not follow from the line rate alone. Eight nodes of B300 with 800 Gb/s exchanged no faster than those of B200.
MEASURED_BYTES_PER_S = 48.5 * GB  # of a 400 Gb/s NIC


@dataclass(frozen=True, slots=True)
class ExchangeFit:
    """Constants of one phase of an exchange on one architecture.

    *start_s*, *node_start_s* and *crossing_start_s*: latency, more of it for each doubling of the nodes (NVSHMEM's
    barriers are disseminated with a radix of two), and for the share of tokens that leave their node. *rank_start_s*,
    *expert_start_s*: latency for each rank of a node and each expert, whose counts a low-latency kernel sends and waits
    for. *element_s*: latency for each element of a token. *sm_bytes_per_s*, *copy_s*, *token_s* and *once_bytes_per_s*:
    work of one SM for the bytes of a copy, for a copy, for a token and for its bytes once. *forward_factor*: the same
    work where ranks forward between nodes, which copy a token for each node as well. *chunk_tokens*: tokens that a
    channel, which is two SMs, hands on at once. *nvlink_share* and *network_share*: of the rates of long transfers that
    NCCL reaches.
    """

    start_s: Amount
    nvlink_share: Amount
    network_share: Amount
    node_start_s: Amount = 0.0
    crossing_start_s: Amount = 0.0
    rank_start_s: Amount = 0.0
    expert_start_s: Amount = 0.0
    element_s: Amount = 0.0
    sm_bytes_per_s: Amount = 0.0  # 0: SMs do not limit it
    copy_s: Amount = 0.0
    token_s: Amount = 0.0
    once_bytes_per_s: Amount = 0.0
    forward_factor: Amount = 1.0
    chunk_tokens: Amount = 0.0


@lru_cache(maxsize=64)
def exchange_fit(library: str, phase: Phase, architecture: str = DEFAULT_ARCHITECTURE) -> ExchangeFit:
    """Return the constants of *library*; an architecture without its own has its family's, or those of the default."""
    tables = load_fit("exchange")[library]
    family = architecture.partition("-")[0]  # blackwell-ultra
    values = (tables.get(architecture) or tables.get(family) or tables[DEFAULT_ARCHITECTURE])[phase]
    return convert_table(convert_units(values), ExchangeFit)


def multiprocessors_of(library: str) -> int:
    """Return the SMs that *library* takes by default in Megatron-Core."""
    return int(load_fit("exchange")[library]["multiprocessors"])


@dataclass(frozen=True, slots=True)
class TokenCopies:
    """The copies that an exchange makes of each token: to ranks, and to other nodes than its own; and all experts."""

    to_ranks: Number
    to_nodes: Number
    experts: float = 0.0

    @classmethod
    def of(cls, routing: Routing, route: Route) -> "TokenCopies":
        remote = routing.nodes_per_token(route.nodes) * (route.nodes - 1) / route.nodes if route.nodes > 1 else 0.0
        return cls(routing.nodes_per_token(route.ranks), remote)


def exchange_s(
    library: str,
    phase: Phase,
    tokens: Number,
    width: Number,
    element_bytes: float,
    copies: TokenCopies,
    route: Route,
    sms: Number,
    architecture: str = DEFAULT_ARCHITECTURE,
) -> Number:
    """Return the seconds of one phase for *tokens* of *width* elements on each rank, by *sms* multiprocessors."""
    fit = exchange_fit(library, phase, architecture)
    token_bytes = width * element_bytes
    has_several_nodes = route.nodes > 1
    crossing = (route.nodes - 1) / route.nodes
    start_s = fit.start_s + fit.crossing_start_s * crossing + fit.element_s * width
    start_s = start_s + fit.node_start_s * (route.nodes - 1).bit_length()
    start_s = start_s + fit.rank_start_s * route.ranks_per_node + fit.expert_start_s * copies.experts
    nvlink_bytes = tokens * copies.to_ranks * token_bytes * (route.ranks_per_node - 1) / route.ranks_per_node
    stages_s = [nvlink_bytes / (fit.nvlink_share * route.intra_bytes_per_s)]
    if has_several_nodes:
        rate = min(route.exchange_bytes_per_s, MEASURED_BYTES_PER_S)
        stages_s.append(tokens * copies.to_nodes * token_bytes / (fit.network_share * rate))
    if fit.sm_bytes_per_s:
        once_s = token_bytes / fit.once_bytes_per_s if fit.once_bytes_per_s else 0.0
        copy_count = copies.to_ranks + copies.to_nodes / crossing if has_several_nodes else copies.to_ranks
        work_s = copy_count * (token_bytes / fit.sm_bytes_per_s + fit.copy_s) + fit.token_s + once_s
        stages_s.append(tokens * work_s / sms * (fit.forward_factor if has_several_nodes else 1.0))
    seconds: Number = start_s + sum(stage_s**SHARPNESS for stage_s in stages_s) ** (1.0 / SHARPNESS)
    if fit.chunk_tokens:
        chunks = fit.chunk_tokens * sms / 2.0
        seconds = seconds + chunks / (chunks + tokens) * sum(stages_s)
    return seconds


def mean_exchange_s(size_bytes: float, routing: Routing, route: Route, architecture: str) -> tuple[float, float]:
    """Return the mean seconds of dispatch and combine of *size_bytes*, what a copy for each expert would take, and of
    them those that do not depend on the bytes. A layer has both phases twice, once for values and once for gradients.
    """
    library, width = routing.library, routing.token_bytes / 2.0
    tokens = size_bytes / (routing.top_k * routing.token_bytes)
    copies, sms = TokenCopies.of(routing, route), float(multiprocessors_of(library))
    seconds = [
        [float(exchange_s(library, phase, count, width, 2.0, copies, route, sms, architecture)) for phase in PHASES]
        for count in (tokens, 0.0)
    ]
    total_s, start_s = np.mean(seconds, axis=1).tolist()
    return total_s, start_s
