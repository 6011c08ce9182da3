"""Long Chakra traces: a step of many micro-batches as stepcast writes it, and PyTorch's converted nodes."""

from pathlib import Path

from stepcast.inputs.chakra.protobuf import AttributeKind, attribute, bytes_field, delimit, number_field, varint
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind, Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.outputs.chakra import files


def workload(micro_batches: int) -> Workload:
    """A tensor-parallel transformer stage: 32 layers of four rows, a gather and a scatter in each."""

    def row(name: str, time_s: float, kind: CollectiveKind) -> Layer:
        ops = (Op("", Recorded(time_s)), Op(str(kind), Collective(kind, 268_435_456, Group.TP)))
        return Layer(name, ops, ops, (Op("", Recorded(time_s / 2)),))

    layers = (
        row("attention_column", 1.2e-3, CollectiveKind.ALL_GATHER),
        row("attention_row", 0.7e-3, CollectiveKind.REDUCE_SCATTER),
        row("mlp_column", 2.4e-3, CollectiveKind.ALL_GATHER),
        row("mlp_row", 1.1e-3, CollectiveKind.REDUCE_SCATTER),
    )
    return Workload((Stage((Block(layers, 32),)),), Layout(tp=8, dp=8), micro_batches)


def write(step: Workload) -> bytes:
    """What rank 0 runs."""
    return next(iter(files(step, "step.et")))[1]


def grow(target_bytes: int, path: Path) -> None:
    """Write a trace of about *target_bytes* at *path*."""
    one, two = (len(write(workload(micro_batches))) for micro_batches in (1, 2))
    path.write_bytes(write(workload(max(1, target_bytes // (two - one)))))


def converted_node(index: int) -> bytes:
    """A node with what mlcommons/chakra's PyTorch converter writes: shapes, and eight attributes."""
    collective = index % 20 == 0
    io = bytes_field(1, b"[[5, 6, 0, 4194304, 2, 'cuda:0']]") + bytes_field(2, b"[[2048, 2048]]")
    values = [
        attribute("rf_id", AttributeKind.INT64, index),
        attribute("fw_parent", AttributeKind.INT64, 0),
        attribute("seq_id", AttributeKind.INT64, index // 3),
        attribute("scope", AttributeKind.INT64, 7),
        attribute("tid", AttributeKind.INT64, 1),
        attribute("fw_tid", AttributeKind.INT64, 0),
        attribute("op_schema", AttributeKind.STRING, ""),
        attribute("is_cpu_op", AttributeKind.BOOL, False),
        attribute("stream", AttributeKind.INT64, 20 if collective else 7),
    ]
    if collective:
        values += [attribute("comm_type", AttributeKind.INT64, 0), attribute("comm_size", AttributeKind.INT64, 8388608)]
    name = b"ncclDevKernel_AllReduce_Sum_bf16_RING_LL" if collective else b"sm90_xmma_gemm_bf16_%d" % (index % 50)
    return delimit(
        number_field(1, index)
        + bytes_field(2, name)
        + number_field(3, 7 if collective else 4)
        + (bytes_field(5, varint(index - 1)) if index > 1 else b"")
        + number_field(7, 40 + index % 97)
        + bytes_field(8, io)
        + bytes_field(9, io)
        + b"".join(bytes_field(10, value) for value in values)
    )


def grow_converted(target_bytes: int, path: Path) -> None:
    """Write a trace of another program, of about *target_bytes*, at *path*."""
    written, index = 0, 1
    with path.open("wb") as trace:
        written += trace.write(delimit(bytes_field(2, attribute("schema", AttributeKind.STRING, "1.1.0-chakra.0.0.4"))))
        while written < target_bytes:
            written += trace.write(converted_node(index))
            index += 1
