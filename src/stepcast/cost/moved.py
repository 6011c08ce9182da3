"""Bytes that one kernel must move through memory."""

from stepcast.cost.attention import attention_bytes
from stepcast.cost.matmul import matmul_bytes
from stepcast.ir.work import Attention, Elementwise, GroupedMatmul, Matmul


def moved_bytes(work: Matmul | GroupedMatmul | Attention | Elementwise) -> float:
    """Operands and result, each once."""
    match work:
        case Matmul():
            return float(matmul_bytes(work.m, work.n, work.k, work.batch, work.dtype.bytes))
        case GroupedMatmul():
            return float(matmul_bytes(work.m / work.groups, work.n, work.k, work.groups, work.dtype.bytes))
        case Attention():
            sizes = (work.batch, work.query_len, work.key_len, work.heads, work.kv_heads)
            wide = (work.head_dim, work.value_dim)
            return float(attention_bytes(*sizes, *wide, work.backward, work.dtype.bytes))
    return work.read_bytes + work.write_bytes
