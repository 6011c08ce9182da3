"""Output of NCCL's Inspector: a JSON object for each collective (NVIDIA/nccl, ext-profiler/inspector)."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import GPUS
from stepcast.ir.measured import CollectiveLog, LoggedCollective
from stepcast.units import GB, US

KINDS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Reduce": "reduce", "AlltoAll": "all_to_all", "SendRecv": "send_recv",
    "Send": "send", "Recv": "recv",
}  # fmt: skip


def looks_like(head: str) -> bool:
    return '"coll_perf"' in head and '"header"' in head


def read_run(sources: Sequence[Source]) -> CollectiveLog:
    calls: list[LoggedCollective] = []
    sizes: dict[str, int] = {}
    seen: dict[str, set[int]] = {}
    warnings = []
    for source in sources:
        damaged = 0
        for event in _events(source):
            if event is None:
                damaged += 1
                continue
            header, found = event.get("header"), event.get("coll_perf")
            if not isinstance(header, dict) or not isinstance(found, dict):
                continue
            group, rank = str(header.get("id", "")), header.get("rank", 0)
            if not isinstance(rank, int):
                raise FormatError("a header has no rank", source.path)
            sizes[group] = _size(header.get("n_ranks"), source.path)
            seen.setdefault(group, set()).add(rank)
            calls.append(_call(found, group, rank, len(calls)))
        if damaged:
            warnings.append(f"{source.path}: {damaged} lines are no JSON and were left out")
    if not calls:
        raise FormatError("holds no collective of the NCCL Inspector", sources[0].path)
    members = {group: tuple(range(size)) for group, size in sizes.items() if size}
    ranks = tuple(sorted({call.rank for call in calls}))
    return CollectiveLog(tuple(calls), ranks, members, sources[0].path, "NCCL Inspector", tuple(warnings))


def _size(found: Any, path: str) -> int:
    """Ranks of a communicator; 0 where the header does not say."""
    if found is None:
        return 0
    if not isinstance(found, int) or found < 0:
        raise FormatError(f"n_ranks {found!r} is no number of ranks", path)
    GPUS.check(found)
    return found


def _events(source: Source) -> Iterator[dict[str, Any] | None]:
    for line in source.each_line(errors="replace"):
        text = line.strip().rstrip(",")
        if not text or text in "[]":
            continue
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError:
            yield None
            continue
        yield found if isinstance(found, dict) else None


def _call(found: dict[str, Any], group: str, rank: int, number: int) -> LoggedCollective:
    took, rate = found.get("coll_exec_time_us"), found.get("coll_busbw_gbs")
    turn, size, kind = found.get("coll_sn"), found.get("coll_msg_size_bytes"), str(found.get("coll", ""))
    return LoggedCollective(
        rank=rank,
        group=group,
        turn=turn if isinstance(turn, int) else number,
        kind=KINDS.get(kind, kind.lower()),
        size_bytes=int(size) if isinstance(size, int | float) and size >= 0 else 0,
        seconds=took * US if isinstance(took, int | float) and took >= 0 else None,
        bus_bytes_per_s=rate * GB if isinstance(rate, int | float) and rate >= 0 else None,
    )
