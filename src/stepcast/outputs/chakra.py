"""Chakra execution traces (protobuf, schema 0.0.4) from a Workload, a file per rank as ASTRA-sim reads them.

PREFIX.0.et, PREFIX.1.et ... hold what each rank runs, in the order of the pipeline's schedule and with the
messages between stages; PREFIX.comm_group.json lists the ranks of each communicator that they name.
"""

from collections.abc import Iterator, Mapping

import msgspec

from stepcast.inputs.chakra.protobuf import AttributeKind, attribute, bytes_field, delimited
from stepcast.inputs.chakra.reader import prefix_of
from stepcast.inputs.chakra.record import encode_workload, write_head
from stepcast.ir.group import Group
from stepcast.ir.limits import CHAKRA_SET, NODES
from stepcast.ir.ranks import grid_of, members, neighbour
from stepcast.ir.work import COMPUTING, Collective, Direction, Recorded, Transfer
from stepcast.ir.workload import Layer, Workload
from stepcast.outputs.chakra_nodes import ATTRIBUTE_FIELD, NodeExchange, SharedNode, StageNodes
from stepcast.simulation.schedules import schedule_for
from stepcast.units import format_bytes


def files(workload: Workload, output: str) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file of the set, named after *output* without its .et."""
    ranks = workload.layout.gpus
    if output == "-" and ranks > 1:
        raise ValueError(f"chakra is a file for each of {ranks} ranks; give a name to write them to")
    prefix, packed = prefix_of(output), ".gz" if output.endswith(".gz") else ""
    _check_nodes(workload)
    communicators = _Communicators(workload)
    answered = any(
        isinstance(op.work, Transfer) and op.work.direction is Direction.RECEIVE
        for layer in _layers(workload)
        for op in layer.all_ops
    )
    schedule = schedule_for(workload.layout, workload.micro_batches, workload.manner.schedule or None)
    record = encode_workload(workload)
    per_stage = ranks // workload.layout.pp
    for coordinate in range(workload.layout.pp):
        stage = StageNodes(workload, schedule, coordinate, answered)
        parts = _joined(stage.nodes())
        _check_size(len(record) + sum(len(fixed) for fixed, _ in parts), ranks)
        for rank in range(coordinate * per_stage, (coordinate + 1) * per_stage):
            content = b"".join(
                fixed if exchange is None else delimited(fixed + communicators.fields(exchange, rank))
                for fixed, exchange in parts
            )
            name = "-" if output == "-" else f"{prefix}.{rank}.et{packed}"
            yield name, write_head(record, rank, content) + content
    if groups := communicators.listed():
        yield f"{prefix}.comm_group.json", groups


def _check_size(file_bytes: int, ranks: int) -> None:
    if file_bytes * ranks > CHAKRA_SET.most:
        raise ValueError(
            f"{ranks:,} ranks need a file of {format_bytes(file_bytes)} each; {CHAKRA_SET.said}: "
            "write one with fewer replicas or micro-batches"
        )


def _check_nodes(workload: Workload) -> None:
    """They are written out, layer by layer and micro-batch by micro-batch."""
    found = sum(
        len(layer.all_ops) * times
        for stage in workload.stages
        for layer, times in stage.counted_layers(workload.micro_batches)
    )
    NODES.check(found * (workload.layout.pp if workload.uniform else 1))


def _joined(nodes: Iterator[SharedNode]) -> list[tuple[bytes, NodeExchange | None]]:
    """Nodes that are the same on every rank in one piece, as they stand in a file."""
    parts: list[tuple[bytes, NodeExchange | None]] = []
    same = bytearray()
    for node in nodes:
        if node.exchange is None:
            same += delimited(node.message)
            continue
        parts += [(bytes(same), None), (node.message, node.exchange)]
        same = bytearray()
    return [*parts, (bytes(same), None)]


class _Communicators:
    """The sets of ranks that communicate, numbered from 1: ASTRA-sim takes 0 and none for all ranks."""

    def __init__(self, workload: Workload) -> None:
        self._layout = workload.layout
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[tuple[NodeExchange, int], bytes] = {}
        used = {op.work.group for layer in _layers(workload) for op in layer.all_ops if isinstance(op.work, Collective)}
        for family in Group:
            if family in used and workload.layout.size(family) > 1:
                for ranks in grid_of(workload.layout).groups(family):
                    if 1 < len(ranks) < workload.layout.gpus:
                        self._numbers.setdefault(ranks, len(self._numbers) + 1)

    def listed(self) -> bytes:
        """What ASTRA-sim takes as --comm-group-configuration; nothing where all ranks are one group."""
        groups: Mapping[str, tuple[int, ...]] = {str(n): ranks for ranks, n in self._numbers.items()}
        return msgspec.json.encode(groups) + b"\n" if groups else b""

    def fields(self, exchange: NodeExchange, rank: int) -> bytes:
        """What a communicating node says on *rank* alone."""
        key = (exchange, rank)
        if key not in self._known:
            self._known[key] = b"".join(bytes_field(ATTRIBUTE_FIELD, each) for each in self._attributes(exchange, rank))
        return self._known[key]

    def _attributes(self, exchange: NodeExchange, rank: int) -> list[bytes]:
        if exchange.offset is None:
            number = self._numbers.get(members(rank, exchange.group, self._layout))
            return [attribute("pg_name", AttributeKind.STRING, str(number))] if number else []
        peer = neighbour(rank, exchange.offset, self._layout, exchange.group)
        source, target = (peer, rank) if exchange.receives else (rank, peer)
        return [attribute("comm_src", AttributeKind.INT32, source), attribute("comm_dst", AttributeKind.INT32, target)]


def losses(workload: Workload) -> tuple[str, ...]:
    """Name what of *workload* the trace does not hold, or holds where only stepcast reads it."""
    lost = ["phases, layers and repeats: other programs see the nodes written out"]
    works = {type(op.work) for layer in _layers(workload) for op in layer.all_ops}
    if works & COMPUTING - {Recorded}:
        lost.append("shapes: other programs see FLOPs and bytes (num_ops, tensor_size)")
    if works & {Recorded}:
        lost.append("times below a microsecond: duration_micros is whole; stepcast.workload is exact")
    if works & {Collective}:
        lost.append("kinds of groups: other programs see the ranks of each")
    if workload.layout.pp > 1 and workload.boundary_bytes is None:
        lost.append("that messages between stages have no stated size: they are written as large as activations")
    if any(layer.process_s for layer in _layers(workload)):
        lost.append("process times, layout, notes: other programs do not read them")
    if workload.warnings:
        lost.append("warnings: dropped")
    return tuple(lost)


def _layers(workload: Workload) -> Iterator[Layer]:
    for stage in workload.stages:
        yield from stage.prologue
        for block in stage.body:
            yield from block.layers
        yield from (variation.layer for variation in stage.variations)
        yield from stage.epilogue
