"""What the nodes of a Chakra trace say of their work: Chakra's own attributes, and ours beside them."""

from functools import lru_cache

from stepcast.inputs.chakra.plan import DURATION_S, TYPE_OF_COLLECTIVE, WORK, work_text
from stepcast.inputs.chakra.protobuf import Kind, attribute
from stepcast.ir.layout import Layout
from stepcast.ir.recurrent import DeltaRule, SelectiveScan
from stepcast.ir.scan import Scan
from stepcast.ir.work import (
    GATHERS,
    Attention,
    Collective,
    Elementwise,
    GroupedMatmul,
    Matmul,
    Recorded,
    Transfer,
    Work,
)


def work_attributes(work: Work, layout: Layout) -> list[bytes]:
    """Chakra's attributes of a node, and ours where they cannot say it exactly."""
    match work:
        case Recorded():
            return [attribute(DURATION_S, Kind.DOUBLE, work.duration_s)]
        case Collective():
            size_bytes = work.total_bytes
            if work.kind in GATHERS:
                # Chakra counts what a rank brings (ASTRA-sim, Ring.cc), stepcast the whole buffer.
                size_bytes = -(-size_bytes // layout.size(work.group))
            kind = attribute("comm_type", Kind.INT64, TYPE_OF_COLLECTIVE[work.kind])
            return [kind, message_size(size_bytes), attribute(WORK, Kind.STRING, work_text(work))]
        case Transfer():
            return [message_size(work.size_bytes), attribute(WORK, Kind.STRING, work_text(work))]
    flops, touched_bytes = _amounts(work)
    return [
        attribute("num_ops", Kind.INT64, flops),
        attribute("tensor_size", Kind.UINT64, touched_bytes),
        attribute(WORK, Kind.STRING, work_text(work)),
    ]


def message_size(size_bytes: int) -> bytes:
    return attribute("comm_size", Kind.INT64, size_bytes)


@lru_cache(maxsize=4096)
def _amounts(
    work: Matmul | GroupedMatmul | Attention | Scan | DeltaRule | SelectiveScan | Elementwise,
) -> tuple[int, int]:
    """FLOPs and bytes that an op must at least move, for other programs' rooflines."""
    size = work.dtype.bytes
    match work:
        case Matmul():
            touched = work.batch * (work.m * work.k + work.k * work.n + work.m * work.n) * size
            return round(work.flops), round(touched)
        case GroupedMatmul():
            touched = (work.m * work.k + work.groups * work.k * work.n + work.m * work.n) * size
            return round(work.flops), round(touched)
        case Attention():
            query = work.batch * work.query_len * work.heads * (work.head_dim + work.value_dim)
            key = work.batch * work.key_len * work.kv_heads * (work.head_dim + work.value_dim)
            return round(work.flops), round((query + key) * size * (2 if work.backward else 1))
        case Scan():
            # Input, gate and output, B and C; backward the gradients of all and the forward's result.
            touched = (3 * work.inputs + 2 * work.shared) * size
            return round(work.flops), round(touched * (2 if work.backward else 1))
        case DeltaRule():
            touched = (2 * work.keys + 2 * work.inputs) * size
            return round(work.flops), round(touched * (2 if work.backward else 1))
        case SelectiveScan():
            touched = (4 * work.inputs + 2 * work.shared) * size
            return round(work.flops), round(touched * (2 if work.backward else 1))
        case Elementwise():
            return work.elements, round(work.read_bytes + work.write_bytes)
