"""Messages over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from typing import Any

from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import grid_of
from stepcast.ir.work import Collective, CollectiveKind

C = CollectiveKind


class NoExchange:
    """One rank of a larger job by itself: its messages go nowhere and are priced instead."""

    def collective(self, work: Collective) -> Any:
        return None

    def receive(self, stage: int, size_bytes: int, backward: bool) -> None:
        return None

    def send(self, stage: int, size_bytes: int, backward: bool) -> None:
        return None

    def finish(self) -> None:
        return None


class Distributed:
    """Groups as the layout has them, buffers of the stated sizes."""

    def __init__(self, torch: Any, layout: Layout, rank: int, device: str, groups: frozenset[Group]) -> None:
        self._torch, self._layout, self._rank, self._device = torch, layout, rank, device
        self._dist = torch.distributed
        self._groups = {family: self._made(family) for family in sorted(groups)}
        # A pair of stages talks both ways at once: each way has a communicator of its own.
        self._ways = [self._made(Group.PP) for _ in range(2)] if layout.pp > 1 else []
        self._buffers: dict[tuple[str, int], Any] = {}
        self._sent: list[Any] = []

    def _made(self, family: Group) -> tuple[Any, tuple[int, ...]]:
        """Every rank makes all groups of a family, in the same order, and keeps its own."""
        grid, mine = grid_of(self._layout), None
        members: tuple[int, ...] = (self._rank,)
        for ranks in sorted({grid.group(str(family), rank) for rank in range(self._layout.gpus)}):
            made = self._dist.new_group(list(ranks))
            if self._rank in ranks:
                mine, members = made, ranks
        return mine, members

    def _buffer(self, name: str, size_bytes: int) -> Any:
        key = (name, size_bytes)
        if key not in self._buffers:
            count = max(1, size_bytes // 4)
            self._buffers[key] = self._torch.zeros(count, dtype=self._torch.float32, device=self._device)
        return self._buffers[key]

    def collective(self, work: Collective) -> Any:
        group, members = self._groups[work.group]
        if len(members) == 1:
            return None
        handle = None
        for _ in range(work.times):
            handle = self._one(work.kind, work.size_bytes, group, members)
        return handle

    def _one(self, kind: CollectiveKind, size_bytes: int, group: Any, members: tuple[int, ...]) -> Any:
        dist, ways = self._dist, len(members)
        whole = self._buffer("whole", -(-size_bytes // (4 * ways)) * 4 * ways)
        share = self._buffer("share", max(4, whole.numel() * 4 // ways))
        options = {"group": group, "async_op": True}
        match kind:
            case C.ALL_REDUCE:
                return dist.all_reduce(whole, **options)
            case C.ALL_GATHER:
                return dist.all_gather_into_tensor(whole, share, **options)
            case C.REDUCE_SCATTER:
                return dist.reduce_scatter_tensor(share, whole, **options)
            case C.ALL_TO_ALL:
                return dist.all_to_all_single(self._buffer("exchanged", whole.numel() * 4), whole, **options)
            case C.BROADCAST:
                return dist.broadcast(whole, members[0], **options)
            case C.REDUCE:
                return dist.reduce(whole, members[0], **options)
            case C.GATHER:
                parts = list(whole.chunk(ways)) if self._rank == members[0] else None
                return dist.gather(share, parts, dst=members[0], **options)
            case C.SCATTER:
                parts = list(whole.chunk(ways)) if self._rank == members[0] else None
                return dist.scatter(share, parts, src=members[0], **options)
            case C.BARRIER:
                return dist.barrier(**options)

    def _peer(self, stage: int) -> int:
        per_stage = self._layout.gpus // self._layout.pp
        return stage * per_stage + self._rank % per_stage

    def receive(self, stage: int, size_bytes: int, backward: bool) -> None:
        buffer = self._buffer(f"received {backward}", size_bytes)
        self._dist.recv(buffer, self._peer(stage), group=self._ways[backward][0])

    def send(self, stage: int, size_bytes: int, backward: bool) -> None:
        buffer = self._buffer(f"sent {backward}", size_bytes)
        self._sent.append(self._dist.isend(buffer, self._peer(stage), group=self._ways[backward][0]))

    def finish(self) -> None:
        for handle in self._sent:
            handle.wait()
        self._sent.clear()
