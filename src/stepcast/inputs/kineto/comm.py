"""Communication in a profiler trace: what PyTorch attaches to NCCL kernels, as Work and details.

Attribute names are those of torch/csrc/profiler/util.cpp (PyTorch 2.1 to 2.13), checked on real traces.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stepcast.inputs.kineto.process_groups import collective_named, dtype_named, group_named, parse_ranks
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer, Work

Details = tuple[tuple[str, str], ...]


class ProcessGroup(msgspec.Struct, frozen=True):
    """One entry of ``distributedInfo.pg_config``."""

    pg_name: str | int = ""
    pg_desc: str = ""
    ranks: tuple[int, ...] = ()


class CommArgs(msgspec.Struct, frozen=True):
    """``args`` of an NCCL kernel or of a CPU collective. Sizes count elements."""

    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=-1)
    out_elements: int = msgspec.field(name="Out msg nelems", default=-1)
    dtype: str = ""
    group_size: int = msgspec.field(name="Group size", default=0)
    group_name: str | int = msgspec.field(name="Process Group Name", default="")
    group_description: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: str | list[int] = msgspec.field(name="Process Group Ranks", default="")
    source_rank: int | None = msgspec.field(name="Src Rank", default=None)
    destination_rank: int | None = msgspec.field(name="Dst Rank", default=None)
    sequence: int | None = msgspec.field(name="Seq", default=None)
    in_split: str | list[int] = msgspec.field(name="In split size", default="")
    out_split: str | list[int] = msgspec.field(name="Out split size", default="")
    # Of CPU collectives (gloo), which carry no counts.
    shapes: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)


DECODER = msgspec.json.Decoder(CommArgs)


@dataclass(frozen=True)
class Communicators:
    """Whose trace it is and the process groups it names."""

    rank: int
    world_size: int = 0
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)

    def communication(self, name: str, raw_args: bytes | msgspec.Raw | None) -> tuple[Work | None, Details]:
        """What a kernel or CPU op called *name* moves; no Work where the trace does not give its size."""
        args = _decoded(raw_args)
        listed = self.groups.get(str(args.group_name)) if args.group_name != "" else None
        description = args.group_description or (listed.pg_desc if listed else "")
        ranks = parse_ranks(args.group_ranks) or (listed.ranks if listed else ())
        group = group_named(description, str(args.group_name))
        kind = collective_named(args.collective or name)
        details: list[tuple[str, str]] = [("collective", args.collective or name)]
        for key, value in (
            ("group", str(args.group_name)),
            ("description", description),
            ("ranks", ",".join(map(str, ranks))),
            ("group_size", str(args.group_size or len(ranks) or "")),
            ("dtype", args.dtype),
            ("in_elements", str(args.in_elements) if args.in_elements >= 0 else ""),
            ("out_elements", str(args.out_elements) if args.out_elements >= 0 else ""),
            ("in_split", _listed(args.in_split)),
            ("out_split", _listed(args.out_split)),
            ("sequence", "" if args.sequence is None else str(args.sequence)),
        ):
            if value:
                details.append((key, value))
        size_bytes = self._size_bytes(args, kind)
        if kind is None or size_bytes is None:
            return None, tuple(details)
        if isinstance(kind, Direction):
            return self._transfer(kind, size_bytes, args, group, ranks), tuple(details)
        return Collective(kind, size_bytes, group), tuple(details)

    def _size_bytes(self, args: CommArgs, kind: CollectiveKind | Direction | None) -> int | None:
        """Bytes of the whole buffer, which is the larger of the two sides for every kind."""
        elements = max(args.in_elements, args.out_elements)
        dtype = dtype_named(args.dtype)
        if elements < 0:
            elements, dtype = _first_input(args)
            # Gloo shows the part that one rank brings.
            if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER):
                elements *= max(1, self.world_size)
        if elements < 0 or dtype is None:
            return None
        return round(elements * dtype.bytes)

    def _transfer(
        self, direction: Direction, size_bytes: int, args: CommArgs, group: Group, ranks: tuple[int, ...]
    ) -> Transfer:
        peer = args.destination_rank if direction is Direction.SEND else args.source_rank
        offset = 1 if direction is Direction.SEND else -1
        if peer is not None and peer != self.rank:
            offset = peer - self.rank
            if peer in ranks and self.rank in ranks:
                offset = ranks.index(peer) - ranks.index(self.rank)
        return Transfer(direction, size_bytes, group, offset)


def _decoded(raw_args: bytes | msgspec.Raw | None) -> CommArgs:
    if not raw_args:
        return CommArgs()
    try:
        return DECODER.decode(raw_args)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return CommArgs()


def _first_input(args: CommArgs) -> tuple[int, DType | None]:
    """Elements and type of the first input tensor; -1 where the trace has no shapes."""
    match args.shapes, args.types:
        case [[*lengths], *_], [str(name), *_] if all(type(length) is int for length in lengths):
            return math.prod(lengths), dtype_named(name)
    return -1, None


def _listed(split: str | list[int]) -> str:
    text = split if isinstance(split, str) else str(split)
    return "" if text == "[]" else text
