"""What a row of the h200 operator files ran, and the time the model gives it."""

from collections.abc import Mapping

from stepcast.cost.compute import ALONE, compute_price
from stepcast.cost.compute_fit import ComputeFit
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul

K = ElementwiseKind
STREAMS = {
    "add": (K.ADD, 2, 1),
    "gelu": (K.GELU, 1, 1),
    "dropout": (K.DROPOUT, 1, 1),
    "layernorm": (K.LAYER_NORM, 1, 1),
    "rmsnorm": (K.RMS_NORM, 1, 1),
    "softmax": (K.SOFTMAX, 1, 1),
    "embedding": (K.EMBEDDING, 1, 1),
    "adamw_fused": (K.OPTIMIZER, 4, 3),
}


def operators(row: Mapping[str, str]) -> tuple[Compute, ...]:
    """The kernels of one measured call; ValueError for an operator that is not known."""
    op, dtype = row["op"], DType(row["dtype"])
    match op:
        case "linear" | "bmm":
            return (Matmul(_int(row, "M"), _int(row, "N"), _int(row, "K"), _int(row, "B"), dtype),)
        case "grouped_linear":
            groups = _int(row, "B")
            return (GroupedMatmul(_int(row, "M") * groups, _int(row, "N"), _int(row, "K"), groups, dtype),)
        case "sdpa_fwd" | "sdpa_bwd":
            return (_attention(row, dtype, backward=op == "sdpa_bwd"),)
    rows, columns = (_int(row, "rows"), _int(row, "cols")) if row["cols"] else (1, _int(row, "numel"))
    match op:
        case "silu_mul":
            return _stream(K.SILU, rows, columns, 1, 1, dtype), _stream(K.MUL, rows, columns, 2, 1, dtype)
        case "cast_fp32":
            return (_cast(rows, columns, dtype.bytes, 4.0, dtype),)
        case "quantize_fp8":
            return (_cast(rows, columns, 2 * dtype.bytes, 1.0, DType.FP8),)
        case "cross_entropy":
            raised = _cast(rows, columns, dtype.bytes, 4.0, dtype)
            return raised, _stream(K.CROSS_ENTROPY, rows, columns, 3, 1, DType.FP32)
    if op not in STREAMS:
        raise ValueError(f"unknown operator {op!r}")
    kind, reads, writes = STREAMS[op]
    return (_stream(kind, rows, columns, reads, writes, dtype),)


def operator_s(row: Mapping[str, str], gpu: Gpu, fit: ComputeFit) -> float:
    """Seconds of the measured call.

    A second kernel queues behind the first; a lone backward waits for the autograd engine.
    """
    works = operators(row)
    prices = [compute_price(work, gpu, fit, ALONE).seconds for work in works]
    hidden_s = gpu.launch_overhead_s + fit.stream("add").latency_s - fit.step_launch_s
    seconds = sum(prices) - hidden_s * (len(works) - 1)
    if row["op"] == "sdpa_bwd":
        return float((seconds**4 + fit.backward_call_s**4) ** 0.25)
    return seconds


def _int(row: Mapping[str, str], name: str) -> int:
    return round(float(row[name] or 1))


def _attention(row: Mapping[str, str], dtype: DType, backward: bool) -> Attention:
    seq, dim = _int(row, "S"), _int(row, "D")
    heads, kv_heads = _int(row, "heads"), _int(row, "kv")
    return Attention(_int(row, "B"), seq, seq, heads, kv_heads, dim, dim, True, backward, dtype)


def _stream(
    kind: ElementwiseKind, rows: int, columns: int, reads: int, writes: int, dtype: DType
) -> Elementwise:
    size = rows * columns * dtype.bytes
    return Elementwise(kind, rows, columns, reads * size, writes * size, False, dtype)


def _cast(rows: int, columns: int, read_bytes: float, write_bytes: float, dtype: DType) -> Elementwise:
    elements = rows * columns
    return Elementwise(
        K.CAST, rows, columns, read_bytes * elements, write_bytes * elements, False, dtype
    )  # fmt: skip
